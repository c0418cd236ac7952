"""Wiring: what each command does with a recipe, from the first check to the closing words."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from rich.console import Console

from keel.configs.load import load_config
from keel.configs.schema import ConfigError, JudgeConfig
from keel.rewards.judge.file import judge_answers, read_answers
from keel.rollout.judge.server import JudgeServer
from keel.trainer import loop
from keel.trainer.cluster.nodes import hardware_said, seating, start_ray
from keel.trainer.evaluate import evaluate, filter_prompts
from keel.trainer.prepare import prepare
from keel.trainer.run.alarms import Alarms
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.interrupt import Interrupt
from keel.trainer.run.journal import Journal
from keel.trainer.run.saved import TokenFile, TokenTexts
from keel.trainer.run.view import View, open_view
from keel.trainer.run.words import closing_words
from keel.trainer.system import System, running

FAILED, INTERRUPTED = 1, 130


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
        if reached >= steps:
            folder.export(system.learner.export)
        print(closing_words(folder, task.config, reached, recipe, overrides))


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
            stack.callback(ray.shutdown)
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
}


def run(command: str, *arguments: Any) -> int:
    """Run a command; errors that a user can act on end in one message, not in a traceback."""
    try:
        COMMANDS[command](*arguments)
    except ConfigError as error:
        print(f"keel {command}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"keel {command}: stopped at once; what was saved before is there", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError, RayError) as error:
        if os.environ.get("KEEL_TRACEBACK"):
            raise
        print(f"keel {command}: {error}\n(KEEL_TRACEBACK=1 shows where)", file=sys.stderr)
        return FAILED
    return 0


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
        if config.rollout.sleep:
            system.wake()

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
        parts = loop.Parts(
            prompts=dataset.train,
            rollouts=system,
            rewards=system.scorer,
            learner=learner,
            journal=journal,
            heldout=dataset.heldout,
            save=save,
            stop=stack.enter_context(Interrupt(view.say)),
        )
        return loop.train(parts, config, start=start)
