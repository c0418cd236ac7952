"""`keel train`, `sft` and `pretrain`: run a recipe. `keel check`: validate it without running
it."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from keel.commands.evaluate import extract_answer
from keel.configs.load import load_config
from keel.configs.paths import unwritable
from keel.configs.schema import ConfigError
from keel.model.ray_timeouts import RayLost, Unanswered, lost_reason
from keel.rl.types import ScoredGroup
from keel.trainer import loop
from keel.trainer.launch import Runtime, SftRuntime, launch, launch_sft
from keel.trainer.nonfinite import SHOWN_FINDINGS
from keel.trainer.placement.nodes import planned_hardware
from keel.trainer.prepare import Task, prepare
from keel.trainer.run.bad_batches import save_batch
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.progress import waiting
from keel.trainer.run.restarts import CollectiveTimeout, WorkerLost
from keel.trainer.run.signals import FIRST, NOTHING_YET, Interrupt
from keel.trainer.run.trajectory_files import TokenFile, TokenTexts
from keel.trainer.run.view import View
from keel.trainer.session import open_journal, restore_data, run_with_restarts, save_checkpoint
from keel.trainer.sft import fit

_LOST = (WorkerLost, CollectiveTimeout, RayLost, RayError, Unanswered)
"""Errors after which the learner can no longer save a checkpoint."""

_PREEMPTED = "{signal}: stopping after this step, with a checkpoint"
_AfterStep = Callable[[int, Mapping[str, float]], bool]
"""Called with each recorded step and its metrics. If it returns True, the run saves a checkpoint
and ends."""


def train(
    recipe: str,
    overrides: Sequence[str],
    *,
    after_step: _AfterStep = lambda step, numbers: False,
    resume_command: str = "",
) -> None:
    """Run the training that the recipe describes, or resume it. Messages say to resume it with
    `resume_command`, or with the same command by default."""
    with waiting("checking the recipe and its prompts"):
        task = prepare(recipe, overrides)
    run_with_restarts(
        ["train", recipe, *overrides],
        task,
        lambda folder, layouts: launch(task, folder.rewards, layouts=layouts),
        partial(run_loop, after_step=after_step),
        resume_command=resume_command,
    )


def run_loop(
    runtime: Runtime,
    folder: RunFolder,
    view: View,
    start: int,
    *,
    after_step: _AfterStep = lambda step, numbers: False,
) -> int:
    """Run `keel.trainer.loop.train` on the started actors and return the last completed step."""
    config, dataset, learner = runtime.task.config, runtime.task.dataset, runtime.learner
    failures: list[Exception] = []
    ended = False

    def should_stop() -> bool:
        return interrupt() or bool(journal.ends) or ended or bool(failures)

    def end_after(step: int, numbers: Mapping[str, float]) -> None:
        nonlocal ended
        ended = after_step(step, numbers) or ended

    def handle_failure(error: Exception) -> bool:
        """Record the error and end the run with a checkpoint. Returns False, without recording it,
        if the learner was lost and can no longer save one."""
        if isinstance(error, _LOST) or lost_reason():
            return False
        failures.append(error)
        journal.note("end", str(error))
        return True

    def save(step: int, position: Mapping[str, Any]) -> bool:
        written = save_checkpoint(
            folder, config, learner, step, position, stop=should_stop, say=view.say
        )
        continues = step < config.run.steps and (not written or not should_stop())
        if config.rollout.time_share and continues:
            runtime.wake()
        return written

    with ExitStack() as stack:
        texts = TokenTexts(runtime.task.tokenizer)
        tokens = TokenFile(config.run, texts, lambda: learner.token_numbers, extract_answer)
        journal = open_journal(stack, folder, view, runtime, start=start, tokens=tokens)
        journal.on_record = end_after
        runtime.pool.say = partial(journal.say, "engine")
        runtime.nodes.say = partial(journal.say, "node")
        runtime.scorer.report_to(view.say)
        heldout = dataset.heldout if config.run.eval_every >= 0 else {}

        def first_message() -> str:
            return FIRST if start > 0 or journal.evaluated(0) or not heldout else NOTHING_YET

        interrupt = stack.enter_context(
            Interrupt(view.say, first_message, grace_s=config.run.grace_s)
        )
        parts = loop.Parts(
            prompts=dataset.train,
            rollouts=runtime,
            rewards=runtime.scorer,
            learner=learner,
            push=runtime.weights.push,
            journal=journal,
            heldout=heldout,
            save=save,
            should_stop=should_stop,
            dump_bad_batch=partial(_dump_bad_batch, folder.path, view.say),
            should_abort=runtime.with_watchdog(interrupt.should_abort),
            should_skip_evaluation=interrupt,
            decoding_steps=lambda: runtime.pool.steps,
            handle_failure=handle_failure,
        )
        reached = loop.train(parts, config, start=start)
    if journal.ends:
        raise RuntimeError(
            f"{journal.ends}. The run ended with a checkpoint of step {reached}. Change the "
            "threshold to resume from there; earlier checkpoints are in its folder"
        )
    return reached


def _dump_bad_batch(
    folder: Path,
    say: Callable[[str], None],
    step: int,
    groups: Sequence[ScoredGroup],
    findings: Sequence[str],
) -> None:
    """Save the batch of a step with a non-finite gradient, so that `keel replay` can repeat the
    step. A full disk or a lost node does not end the run."""
    for line in findings[:SHOWN_FINDINGS]:
        say(f"step {step}: no finite gradient: {line}")
    try:
        path = save_batch(folder, step, groups, findings)
    except (OSError, LookupError) as error:
        say(f"warning: step {step}: its batch could not be saved in {folder} ({error})")
        return
    replay = shlex.join(["keel", "replay", str(folder), str(step)])
    say(f"step {step}: its batch is saved as {path}; {replay} trains on it again")


def train_supervised(command: str, recipe: str, overrides: Sequence[str]) -> None:
    """Train on the recipe's conversations (`keel sft`) or on its texts only (`keel pretrain`), or
    resume the run."""
    with waiting("checking the recipe and its data"):
        task = prepare(recipe, overrides, supervised=True)
    run_with_restarts(
        [command, recipe, *overrides],
        task,
        lambda _, layouts: launch_sft(task, layouts=layouts),
        _run_sft_loop,
    )


def _run_sft_loop(runtime: SftRuntime, folder: RunFolder, view: View, start: int) -> int:
    task, learner, batches = runtime.task, runtime.learner, runtime.task.batches
    assert batches is not None, "not a supervised task"
    with ExitStack() as stack:
        journal = open_journal(stack, folder, view, runtime, start=start)
        interrupt = stack.enter_context(
            Interrupt(view.say, preempted_first=_PREEMPTED, grace_s=task.config.run.grace_s)
        )
        save = partial(save_checkpoint, folder, task.config, learner, stop=interrupt, say=view.say)
        return fit(
            task.config,
            batches=batches,
            learner=learner,
            journal=journal,
            save=save,
            should_stop=interrupt,
            say=view.say,
            should_abort=interrupt.should_abort,
            start=start,
        )


def check(recipe: str, overrides: Sequence[str]) -> int:
    """Validate a recipe for RL or supervised training and print the plan without starting
    anything. Returns exit status 1 if a reward function fails on a sample completion."""
    config = load_config(recipe, overrides)
    check_task = partial(prepare, recipe, overrides, hardware=planned_hardware)
    tasks: list[Task] = []
    with waiting("checking the recipe and its prompts"):
        if config.sft.sources:
            tasks.append(check_task(supervised=True))
        if config.data.sources:
            tasks.append(check_task())
    for i, task in enumerate(tasks):
        if len(tasks) > 1:
            print(f"{chr(10) if i else ''}keel {task.command}")
        print(task.text(placed=True))
    warnings = _check_writable(tasks[0])
    folder = _run_folder(tasks)
    if status := folder.status():
        print(f"{folder.path} {status}")
    for line in (*warnings, *folder.warnings()):
        print(f"{'warning':<12} {line}")
    failed = [line for task in tasks for line in task.failed]
    for line in failed:
        print(f"keel check: {line}", file=sys.stderr)
    return 1 if failed else 0


def _check_writable(task: Task) -> list[str]:
    path = task.config.run.folder
    if not (why := unwritable(path)):
        return []
    if task.hardware.found:
        raise ConfigError(f"run.dir = {path}: cannot be written ({why}); choose another folder")
    return [f"run.dir = {path}: cannot be written here ({why}); the run needs it on its machine"]


def _run_folder(tasks: Sequence[Task]) -> RunFolder:
    """Return the run folder of the first task in `tasks` that can resume it. If none can, raise the
    ConfigError from the first task."""
    errors: list[ConfigError] = []
    for task in tasks:
        folder = RunFolder(task.config, task.tokenizer_digest)
        try:
            folder.check()
            restore_data(folder, task.restore)
            return folder
        except ConfigError as error:
            errors.append(error)
    raise errors[0]
