"""Wiring: what each command does with a recipe, from the first check to the closing words."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray.exceptions import RayError
from rich.console import Console

from keel.configs.load import load_config
from keel.configs.schema import ConfigError, JudgeConfig
from keel.rewards.judge.file import judge_answers, read_answers
from keel.rl.types import ScoredGroup
from keel.rollout.judge.server import JudgeServer
from keel.trainer import loop
from keel.trainer.cluster.nodes import end_ray, hardware_said, seating, start_ray
from keel.trainer.evaluate import evaluate, filter_prompts
from keel.trainer.prepare import prepare
from keel.trainer.replay import replay
from keel.trainer.run.alarms import Alarms
from keel.trainer.run.batches import keep_batch
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.interrupt import PREEMPTED, Interrupt, preempted, tell
from keel.trainer.run.journal import Journal
from keel.trainer.run.saved import TokenFile, TokenTexts
from keel.trainer.run.view import View, open_view
from keel.trainer.run.words import closing_words
from keel.trainer.system import System, running

FAILED, INTERRUPTED = 1, 130
SAID = 3
"""Findings about a step that are said."""
KEPT = "what was saved is there, and the same command goes on"


def train(recipe: str, overrides: Sequence[str]) -> None:
    """`keel train`: run the recipe, or go on with it."""
    task = prepare(recipe, overrides)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(task.config))
        if folder.set_aside:
            print(
                f"{folder.path} holds a run that left no checkpoint to resume from. What it wrote "
                f"is kept in {folder.set_aside}; this run starts over. run.checkpoint_every=N "
                "saves a checkpoint every N steps"
            )
        for line in folder.words():
            print(f"warning: {line}")
        state, steps = folder.state(), task.config.run.steps
        start = state.step if state else 0
        if start >= steps and folder.model.exists():
            folder.check_model()
            print(f"{folder.path} has done its {start} steps. Raise run.steps to go on.")
            return
        if state:
            task.dataset.train.restore(state.cursor)
        print(task.text(), flush=True)
        system = stack.enter_context(running(task, print, folder.rewards))
        if state and folder.latest:
            system.learner.load(folder.latest)
        reached = start
        if start < steps:
            folder.begin(start)
            with open_view(str(folder.path), steps) as view:
                reached = run_loop(system, folder, view, start=start)
        if reached >= steps and not preempted():
            folder.export(system.learner.export)
        tell(closing_words(folder, task.config, reached, recipe, overrides))


def check(recipe: str, overrides: Sequence[str]) -> None:
    """`keel check`: validate everything that can be without starting anything."""
    task = prepare(recipe, overrides, hardware=hardware_said)
    folder = RunFolder(task.config)
    folder.check()
    print(task.text(seats=seating(task.config, task.hardware) if task.gpu else ()))
    for line in folder.words():
        print(f"{'warning':<12} {line}")


def judge(options: argparse.Namespace) -> None:
    """`keel judge`: score a file of answers, so that a rubric can be tried before a run."""
    settings = load_config(options.recipe).rewards.judge if options.recipe else JudgeConfig()
    given = ("base_url", "model", "api_key_env", "samples", "serve")
    changes = {name: getattr(options, name) for name in given}
    settings = replace(settings, **{k: v for k, v in changes.items() if v is not None})
    if not settings.model:
        raise ConfigError(
            "no judge: give --base-url or --serve, and --model, or a --recipe that has "
            "rewards.judge"
        )
    path = Path(options.file)
    out = Path(options.out) if options.out else path.with_name(f"{path.name}.judged.jsonl")
    try:
        items = read_answers(path, Path(options.rubric) if options.rubric else None)
        if out.resolve() == path.resolve():
            raise ValueError(f"--out {out}: would overwrite the answers")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with ExitStack() as stack:
        server = None
        if settings.serve:
            gpu = torch.cuda.is_available()
            settings.check_used(judged=True, gpu=gpu)
            start_ray()
            stack.callback(end_ray)
            server = JudgeServer(settings, gpu=gpu)
            stack.callback(server.stop)
            print(f"starting the judge {settings.model}", flush=True)
        failed = judge_answers(items, settings, out, Console(), server=server)
    if failed:
        raise RuntimeError(f"{failed} of {len(items)} answers could not be judged")


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "check": check,
    "eval": evaluate,
    "filter": filter_prompts,
    "judge": judge,
    "replay": replay,
}


def run(command: str, *arguments: Any) -> int:
    """Run a command; errors that a user can act on end in one message, not in a traceback."""

    def said(text: object, status: int) -> int:
        tell(f"keel {command}: {text}", sys.stderr)
        return status

    try:
        COMMANDS[command](*arguments)
    except ConfigError as error:
        return said(error, error.exit_status)
    except KeyboardInterrupt:
        if not preempted():
            return said("stopped at once; what was saved before is there", INTERRUPTED)
    except (ValueError, RuntimeError, OSError, RayError) as error:
        if os.environ.get("KEEL_TRACEBACK"):
            raise
        return said(f"{error}\n(KEEL_TRACEBACK=1 shows where)", FAILED)
    return said(f"stopped by {signal}; {KEPT}", PREEMPTED) if (signal := preempted()) else 0


def run_loop(system: System, folder: RunFolder, view: View, *, start: int) -> int:
    """The loop of `keel.trainer.loop` on the real parts; returns the last step done."""
    config, dataset, learner = system.task.config, system.task.dataset, system.learner

    def save(step: int, cursor: Mapping[str, Any]) -> None:
        state = State(
            step=step,
            version=learner.version,
            cursor=cursor,
            config=config_digest(config),
        )
        folder.save(state, learner.save)
        if config.rollout.sleep and not interrupt.hurry():
            system.wake()

    def keep(step: int, groups: Sequence[ScoredGroup], findings: Sequence[str]) -> None:
        path = keep_batch(folder.path, step, groups, findings)
        for line in findings[:SAID]:
            view.say(f"step {step}: no finite gradient: {line}")
        again = shlex.join(["keel", "replay", str(folder.path), str(step)])
        view.say(f"step {step}: its batch is kept as {path}; {again} trains on it again")

    with ExitStack() as stack:
        journal = Journal(
            folder.path,
            view,
            trajectories=config.run.save_trajectories,
            tokens=TokenFile(
                config.run, TokenTexts(system.task.tokenizer), lambda: system.learner.tokens
            ),
            alarms=Alarms(config.alarms),
            resumed_at=start,
        )
        stack.callback(journal.close)
        system.pool.say = partial(journal.say, "engine")
        if system.agents is not None:
            system.agents.say = view.say
        system.scorer.tell(view.say)
        interrupt = stack.enter_context(Interrupt(view.say, grace_s=config.run.grace_s))
        parts = loop.Parts(
            prompts=dataset.train,
            rollouts=system,
            rewards=system.scorer,
            learner=learner,
            journal=journal,
            heldout=dataset.heldout,
            save=save,
            stop=interrupt,
            keep=keep,
            hurry=interrupt.hurry,
        )
        return loop.train(parts, config, start=start)
