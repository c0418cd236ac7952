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

from keel.commands.evaluate import answer_of, evaluate, filter_prompts
from keel.commands.replay import replay
from keel.configs.load import load_config
from keel.configs.paths import unwritable
from keel.configs.schema import ConfigError, JudgeConfig, RunConfig
from keel.model.ray_timeouts import RayLost, Unanswered, lost_reason
from keel.rewards.judge.file import judge_answers, read_answers
from keel.rl.types import ScoredGroup
from keel.rollout.judge.server import JudgeServer
from keel.trainer import loop
from keel.trainer.launch import System, fetch, running
from keel.trainer.nonfinite import SAID
from keel.trainer.placement.cached_choice import save_choice
from keel.trainer.placement.elastic import ElasticLayouts, elastic_layouts
from keel.trainer.placement.nodes import planned_hardware, seat_lines, start_ray, stop_ray
from keel.trainer.placement.oom_recovery import RetryOnOom
from keel.trainer.placement.ray_internals import exit_now
from keel.trainer.placement.watchdog import start_watchdog
from keel.trainer.prepare import Task, prepare
from keel.trainer.run import checkpoint
from keel.trainer.run.batches import save_batch
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.progress import waiting
from keel.trainer.run.prompt_audit import PromptAudit
from keel.trainer.run.restarts import CollectiveTimeout, WorkerLost
from keel.trainer.run.session import open_journal, restore_data, run_with_restarts, save_checkpoint
from keel.trainer.run.signals import FIRST, NOTHING_YET, PREEMPTED, Interrupt, preempted, print_line
from keel.trainer.run.trackers.sender import has_abandoned_threads
from keel.trainer.run.trajectory_files import TokenFile, TokenTexts
from keel.trainer.run.view import View
from keel.trainer.sft.wiring import (
    SftTask,
    prepare_pretraining,
    prepare_sft,
    run_lessons,
    teaching,
)

FAILED, INTERRUPTED = 1, 130
SAME = "what was saved is there, and the same command goes on"


def train(
    recipe: str,
    overrides: Sequence[str],
    *,
    drive: Callable[[System, RunFolder, View, int], int] | None = None,
    again: str = "",
) -> None:
    """`keel train`: run the recipe, or go on with it. drive: `run_loop`, or something around it.
    again: how to go on, where it is not by this command."""
    with waiting("checking the recipe and its prompts", f"prompts of {recipe}"):
        task = prepare(recipe, overrides)
    laid_out = layouts_of(task)
    run_with_restarts(
        ["train", recipe, *overrides],
        task.config,
        text=task.text(),
        restore=task.dataset.train.restore,
        position=task.dataset.train.state,
        launch=lambda folder: running(task, print, folder.rewards, layouts=laid_out),
        on_out_of_memory=laid_out.lowering.after,
        drive=drive or run_loop,
        resume_command=again,
        tokenizer=task.tokenizer_digest,
        on_open=partial(save_choice, values=task.choice.values, now=task.hardware.signature),
    )


def sft(recipe: str, overrides: Sequence[str]) -> None:
    """`keel sft`: learn from the recipe's conversations, or go on with it."""
    _learn("sft", prepare_sft, recipe, overrides)


def pretrain(recipe: str, overrides: Sequence[str]) -> None:
    """`keel pretrain`: learn from the recipe's text, or go on with it."""
    _learn("pretrain", prepare_pretraining, recipe, overrides)


def _learn(
    command: str,
    prepared: Callable[[str, Sequence[str]], SftTask],
    recipe: str,
    overrides: Sequence[str],
) -> None:
    with waiting("checking the recipe and what it teaches", f"{command}: lessons of {recipe}"):
        task = prepared(recipe, overrides)
    laid_out = layouts_of(task)
    run_with_restarts(
        [command, recipe, *overrides],
        task.config,
        text=task.text(),
        restore=task.batches.restore,
        position=task.batches.position,
        launch=lambda _: teaching(task, print, layouts=laid_out),
        on_out_of_memory=laid_out.lowering.after,
        drive=run_lessons,
        tokenizer=task.tokenizer,
        on_open=partial(save_choice, values=task.choice.values, now=task.hardware.signature),
    )


def layouts_of(task: Task | SftTask) -> ElasticLayouts:
    return elastic_layouts(
        task.config,
        Path(task.config.run.dir).expanduser(),
        facts=task.facts,
        hardware=task.hardware,
        chosen=task.choice.values,
    )


def check(recipe: str, overrides: Sequence[str]) -> int:
    """`keel check`: validate all that can be validated without starting anything, for `keel train`
    and for `keel sft` or `keel pretrain`. Returns the exit status: 1 if a reward function fails on
    a sample completion."""
    config = load_config(recipe, overrides)
    tasks: list[Task | SftTask] = []
    with waiting("checking the recipe and its prompts", f"prompts of {recipe}"):
        if config.sft.sources:
            tasks.append(prepare_sft(recipe, overrides, hardware=planned_hardware))
        if config.data.sources:
            tasks.append(prepare(recipe, overrides, hardware=planned_hardware))
    said = ""
    for task in tasks:
        if len(tasks) > 1:
            print(f"{said}keel {task.command if isinstance(task, SftTask) else 'train'}")
        print(task.text(seats=seat_lines(task.config, task.hardware) if task.gpu else ()))
        said = "\n"
    elsewhere = check_place(tasks)
    # The folder is one run's: of whichever of the two is there.
    folder = folder_of(tasks)
    if status := folder.status():
        print(f"{folder.path} {status}")
    for line in (*elsewhere, *folder.warnings()):
        print(f"{'warning':<12} {line}")
    failed = [line for task in tasks if isinstance(task, Task) for line in task.failed]
    for line in failed:
        print(f"keel check: {line}", file=sys.stderr)
    return FAILED if failed else 0


def check_place(tasks: Sequence[Task | SftTask]) -> list[str]:
    """Raises ConfigError where the run folder could not be written; on another machine than the
    one that is planned for, it is a warning."""
    path = Path(tasks[0].config.run.dir).expanduser()
    if not (why := unwritable(path)):
        return []
    if tasks[0].hardware.found:
        raise ConfigError(f"run.dir = {path}: cannot be written ({why}); choose another folder")
    return [f"run.dir = {path}: cannot be written here ({why}); the run needs it where it is"]


def folder_of(tasks: Sequence[Task | SftTask]) -> RunFolder:
    """The run folder, checked for the first of `tasks` that may continue what it holds. Raises
    ConfigError of the first where none may."""
    refused: ConfigError | None = None
    for task in tasks:
        digest = task.tokenizer if isinstance(task, SftTask) else task.tokenizer_digest
        folder = RunFolder(task.config, digest)
        try:
            folder.check()
            stream = task.batches if isinstance(task, SftTask) else task.dataset.train
            restore_data(folder, stream.restore)
            return folder
        except ConfigError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def judge(options: argparse.Namespace) -> None:
    """`keel judge`: score a file of answers, so that a rubric can be tried before a run."""
    recipe = load_config(options.recipe) if options.recipe else None
    settings = recipe.rewards.judge if recipe else JudgeConfig()
    hang_timeout_s = (recipe.run if recipe else RunConfig()).hang_timeout_s
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
            fetch(settings.model)
            start_ray()
            stack.callback(stop_ray)
            stack.enter_context(start_watchdog(print, hang_timeout_s))
            server = JudgeServer(settings, gpu=gpu)
            stack.callback(server.stop)
        failed = judge_answers(
            items,
            settings,
            out,
            Console(),
            server=server,
            show=partial(waiting, unit="answers"),
        )
    if failed:
        raise RuntimeError(f"{failed} of {len(items)} answers could not be judged")


COMMANDS: dict[str, Callable[..., int | None]] = {
    "train": train,
    "sft": sft,
    "pretrain": pretrain,
    "check": check,
    "eval": evaluate,
    "filter": filter_prompts,
    "judge": judge,
    "replay": replay,
}


def run(command: str, *arguments: Any) -> int:
    """Run a command and return its exit status; errors that a user can act on end in one message,
    not in a traceback."""

    def ended(status: int) -> int:
        if lost_reason() or has_abandoned_threads():  # their threads would block exit
            exit_now(status)
        return status

    def said(text: object, status: int) -> int:
        print_line(f"keel {command}: {text}", sys.stderr)
        return ended(status)

    try:
        status = COMMANDS[command](*arguments) or 0
    except ConfigError as error:
        return said(error, error.exit_status)
    except KeyboardInterrupt:
        if not preempted():
            return said(f"stopped at once; {kept(command, *arguments)}", INTERRUPTED)
        status = 0
    except (ValueError, RuntimeError, OSError, RayError) as error:
        if os.environ.get("KEEL_TRACEBACK"):
            raise
        notes = getattr(error, "__notes__", [])
        text = "\n".join([str(error), *notes, "(KEEL_TRACEBACK=1 shows where)"])
        # What takes the machine away takes other processes of the run first.
        if preempted() and isinstance(error, WorkerLost | RayLost | RayError | TimeoutError):
            return said(f"stopped by {preempted()}; {SAME}. Lost meanwhile: {text}", PREEMPTED)
        return said(text, FAILED)
    if signal := preempted():
        return said(f"stopped by {signal}; {SAME}", PREEMPTED)
    return ended(status)


def kept(command: str, *arguments: Any) -> str:
    """What a command that was interrupted leaves behind."""
    if command not in ("train", "sft", "pretrain"):
        return "what was finished is kept"
    recipe, overrides, *_ = arguments
    folder = Path(load_config(recipe, overrides).run.dir).expanduser()
    if newest := checkpoint.latest(folder / "checkpoints"):
        return f"rerun the same command to resume from {newest.name}"
    return "nothing was saved yet, so the same command starts over"


def keep_skipped(
    run: Path,
    say: Callable[[str], None],
    step: int,
    groups: Sequence[ScoredGroup],
    findings: Sequence[str],
) -> None:
    """Keep the batch of a step without a finite gradient, and say why; a full disk ends no run."""
    for line in findings[:SAID]:
        say(f"step {step}: no finite gradient: {line}")
    try:
        path = save_batch(run, step, groups, findings)
    except OSError as error:
        say(f"warning: step {step}: its batch could not be kept in {run} ({error})")
        return
    again = shlex.join(["keel", "replay", str(run), str(step)])
    say(f"step {step}: its batch is kept as {path}; {again} trains on it again")


def run_loop(
    system: System,
    folder: RunFolder,
    view: View,
    start: int,
    *,
    enough: Callable[[], bool] = lambda: False,
) -> int:
    """The loop of `keel.trainer.loop` on the real parts; returns the last step done. enough: ends
    it after a step, with a checkpoint."""
    config, dataset, learner = system.task.config, system.task.dataset, system.learner
    ends: list[Exception] = []

    def stop() -> bool:
        return interrupt() or bool(journal.ends) or enough() or bool(ends)

    def whole(error: Exception) -> bool:
        if (
            isinstance(error, WorkerLost | CollectiveTimeout | RayLost | RayError | Unanswered)
            or lost_reason()
        ):
            return False
        ends.append(error)
        journal.note("end", str(error))
        return True

    def save(step: int, cursor: Mapping[str, Any]) -> bool:
        failed = save_checkpoint(folder, config, learner, step, cursor, stop=stop, say=view.say)
        if config.rollout.time_share and step < config.run.steps and (failed or not stop()):
            system.wake()  # the run goes on
        return failed

    with ExitStack() as stack:
        journal = open_journal(
            stack,
            folder,
            view,
            config,
            start=start,
            tokenizer=system.task.tokenizer_digest,
            tokens=TokenFile(
                config.run,
                TokenTexts(system.task.tokenizer),
                lambda: system.learner.tokens,
                answer_of,
            ),
        )
        system.pool.say = partial(journal.say, "engine")
        if system.watch is not None:
            system.watch.say = partial(journal.say, "frozen")
        if system.agents is not None:
            system.agents.say = view.say
        system.scorer.tell(view.say)

        def first() -> str:
            """Message at Ctrl-C. Before the first step there is only an evaluation to give up."""
            return FIRST if start > 0 or journal.evaluated(0) or not heldout else NOTHING_YET

        heldout = dataset.heldout if config.run.eval_every >= 0 else {}
        interrupt = stack.enter_context(Interrupt(view.say, first, grace_s=config.run.grace_s))
        trained: loop.Learner = learner
        if (lowering := system.lowering) is not None:
            say = partial(journal.say, "out of memory")
            trained = RetryOnOom(learner=learner, lowering=lowering, say=say)
        audit = PromptAudit(dataset.train, partial(journal.say, "ledger"), since=start)
        parts = loop.Parts(
            prompts=dataset.train,
            rollouts=system,
            rewards=system.scorer,
            learner=trained,
            push=system.weights.push,
            journal=journal,
            heldout=heldout,
            save=save,
            stop=stop,
            keep=partial(keep_skipped, folder.path, view.say),
            account=audit.check,
            hurry=system.attended(interrupt.should_abort),
            leave=interrupt,
            decoded=lambda: system.pool.steps,
            whole=whole,
        )
        reached = loop.train(parts, config, start=start)
        journal.note("ledger", audit.summary())
    if journal.ends:
        raise RuntimeError(
            f"{journal.ends}. The run has ended with a checkpoint of step {reached}, and goes on "
            "from there with another threshold; earlier ones are in its folder"
        )
    return reached
