"""Wiring: what each command does with a recipe, from the first check to the closing words."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from keel.trainer.prepare import Task, prepare
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.interrupt import Interrupt
from keel.trainer.run.session import conduct, open_journal, save_checkpoint
from keel.trainer.run.view import View
from keel.trainer.supervise import SftTask, prepare_sft, run_lessons, teaching
from keel.trainer.system import System, running

FAILED, INTERRUPTED = 1, 130


def train(recipe: str, overrides: Sequence[str]) -> None:
    """`keel train`: run the recipe, or go on with it."""
    task = prepare(recipe, overrides)
    conduct(
        ["train", recipe, *overrides],
        task.config,
        text=task.text(),
        restore=task.dataset.train.restore,
        started=lambda folder: running(task, print, folder.rewards),
        drive=run_loop,
    )


def sft(recipe: str, overrides: Sequence[str]) -> None:
    """`keel sft`: learn from the recipe's conversations, or go on with it."""
    task = prepare_sft(recipe, overrides)
    conduct(
        ["sft", recipe, *overrides],
        task.config,
        text=task.text(),
        restore=task.batches.restore,
        started=lambda _: teaching(task, print),
        drive=run_lessons,
    )


def check(recipe: str, overrides: Sequence[str]) -> None:
    """`keel check`: validate everything that can be without starting anything: what `keel sft`
    would do with the recipe, and `keel train`."""
    config = load_config(recipe, overrides)
    tasks: list[Task | SftTask] = []
    if config.sft.sources:
        tasks.append(prepare_sft(recipe, overrides, hardware=hardware_said))
    if config.data.sources:
        tasks.append(prepare(recipe, overrides, hardware=hardware_said))
    said = ""
    for task in tasks:
        if len(tasks) > 1:
            print(f"{said}keel {'sft' if isinstance(task, SftTask) else 'train'}")
        print(task.text(seats=seating(task.config, task.hardware) if task.gpu else ()))
        said = "\n"
    # The folder is one run's: of whichever of the two is there.
    folder = folder_of(tasks)
    for line in folder.words():
        print(f"{'warning':<12} {line}")


def folder_of(tasks: Sequence[Task | SftTask]) -> RunFolder:
    """The run folder, checked for the first of `tasks` that may continue what it holds. Raises
    ConfigError of the first where none may."""
    refused: ConfigError | None = None
    for task in tasks:
        folder = RunFolder(task.config)
        try:
            folder.check()
            return folder
        except ConfigError as error:
            refused = refused or error
    assert refused is not None
    raise refused


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
    "sft": sft,
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


def run_loop(system: System, folder: RunFolder, view: View, start: int) -> int:
    """The loop of `keel.trainer.loop` on the real parts; returns the last step done."""
    config, dataset, learner = system.task.config, system.task.dataset, system.learner

    def save(step: int, cursor: Mapping[str, Any]) -> None:
        save_checkpoint(folder, config, learner, step, cursor)
        if config.rollout.sleep:
            system.wake()

    with ExitStack() as stack:
        journal = open_journal(
            stack, folder, view, config, start=start, tokenizer=system.task.tokenizer
        )
        system.pool.say = view.say
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
