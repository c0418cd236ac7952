"""Run training from start to end: open the run folder, train with restarts, export the model and
print a summary."""

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any, TypeVar

from ray.exceptions import RayError

from keel.configs.schema import Config, ConfigError
from keel.model.ray_timeouts import RayLost, is_loss, lost_reason
from keel.rl.metrics import MEASURES
from keel.rl.supervisor import RestartLimit
from keel.trainer.launch import Runtime, SftRuntime
from keel.trainer.placement.elastic import ElasticLayouts
from keel.trainer.placement.layouts import save_choice
from keel.trainer.placement.step_time import token_flops
from keel.trainer.prepare import Task
from keel.trainer.run.checkpoint import SaveError, State, config_digest
from keel.trainer.run.errors import RESUME_HINT, OutOfMemory, WorkerLost
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import CostRates, Journal, note
from keel.trainer.run.manifest import check_exported
from keel.trainer.run.progress import waiting
from keel.trainer.run.signals import preemption_signal, print_line, stop_requested
from keel.trainer.run.trackers import check_trackers, open_trackers
from keel.trainer.run.trajectory_files import TokenFile
from keel.trainer.run.view import View, open_view

S = TypeVar("S")


class Restarts:
    """Limits how many times engines and trainer can be restarted."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._restarts = limit, RestartLimit(limit, clock=clock)
        self.started = False
        """True once training has begun. A run that fails earlier is not restarted."""

    def count(self, error: WorkerLost) -> None:
        """Count a restart. Raises WorkerLost if the limit is exceeded or training hasn't begun
        yet."""
        if not self.started:
            raise error
        if times := self._restarts.count():
            raise WorkerLost(
                f"{error}\nThe run failed {times}, and run.max_restarts = {self._limit}. "
                f"{RESUME_HINT.capitalize()}"
            ) from error


def run_with_restarts(
    command: Sequence[str],
    task: Task,
    launch: Callable[[RunFolder, ElasticLayouts], AbstractContextManager[S]],
    drive: Callable[[S, RunFolder, View, int], int],
    *,
    resume_command: str = "",
) -> None:
    """Start or resume the run of a task. If a process is lost, restart it with a layout that fits
    the cluster's remaining resources.

    `launch` starts the actors, and `drive` runs the training loop and returns the last completed
    step. Messages tell the user to resume with `resume_command`, or with `command` by default.
    """
    config, choice = task.config, task.choice
    layouts = ElasticLayouts(
        config,
        facts=task.facts,
        hardware=task.hardware,
        chosen=choice.values,
    )
    check_trackers(config.run.trackers)  # for runs started from Python
    with ExitStack() as stack:
        with waiting("verifying the newest checkpoint"):
            folder = stack.enter_context(RunFolder(config, task.tokenizer_digest))
        if folder.set_aside:
            print(
                f"{folder.path} holds a run without a checkpoint. Its files were moved to "
                f"{folder.set_aside}, and this run starts over"
            )
        for line in folder.warnings():
            print(f"warning: {line}")
        state, steps = folder.state(), config.run.steps
        start = state.step if state else 0
        folder.check_heldout(start)
        if start >= steps and folder.model.exists():
            remedy = "move that folder away and start the run again to rewrite it"
            check_exported(folder.model, remedy)
            knob = "sft.epochs" if _counts_epochs(command, config) else "run.steps"
            print(f"{folder.path}: all {start} steps are done. Raise {knob} to continue")
            return
        initial_position = task.position()
        restore_data(folder, task.restore)
        save_choice(folder.path, choice.values, task.hardware.signature)
        print(task.text() + f"\nresumes after step {start}" * (start > 0), flush=True)
        restarts = Restarts(config.run.max_restarts)
        while True:
            try:
                with launch(folder, layouts) as system:
                    reached = _attempt(system, folder, config, restarts, drive)
                break
            except (WorkerLost, RayError) as raised:
                reason = str(_count_restart(raised, restarts))
                if isinstance(raised, OutOfMemory):
                    reason = layouts.oom_recovery.reduce_memory(raised)
                state = folder.state()
                task.restore(state.cursor if state else initial_position)
                start = state.step if state else 0
                origin = f"step {start}" if state else "the beginning, since it has no checkpoint"
                line = f"{reason}\nThe run restarts from {origin}"
                note(folder.path, start, "restart", line)
                print_line(f"warning: {line}")
        print_line(
            _closing_summary(folder, config, reached, command, resume_command=resume_command)
        )


def restore_data(folder: RunFolder, restore: Callable[[Mapping[str, Any]], object]) -> None:
    """Restore the data position from the newest checkpoint. Raises ConfigError if the data has
    changed."""
    if (state := folder.state()) is None:
        return
    try:
        restore(state.cursor)
    except ValueError as error:
        raise ConfigError(f"run.dir = {folder.path}: step {state.step}: {error}") from error


def _attempt(
    system: Any,
    folder: RunFolder,
    config: Config,
    restarts: Restarts,
    drive: Callable[[Any, RunFolder, View, int], int],
) -> int:
    state, steps = folder.state(), config.run.steps
    start = reached = state.step if state else 0
    if state and folder.latest:
        with waiting(f"loading {folder.latest.name}"):
            system.learner.load(folder.latest)
    restarts.started = True
    if start < steps or folder.needs_evaluation(steps):
        folder.begin(start)
        with open_view(str(folder.path), steps) as view:
            reached = drive(system, folder, view, start)
    if reached >= steps and not preemption_signal():
        with waiting("exporting the model"):
            folder.export(system.learner.export)
    return reached


def _count_restart(raised: WorkerLost | RayError, restarts: Restarts) -> WorkerLost:
    if lost_reason():
        raise RayLost(lost_reason()) from raised
    if isinstance(raised, WorkerLost):
        error = raised
    elif is_loss(raised):  # such as weights that were lost with the rank that held them
        reason = str(raised).strip().partition("\n")[0]
        error = WorkerLost(f"a process or node died, and its data with it: {reason}")
        error.__cause__ = raised
    else:
        raise raised
    if preemption_signal() or stop_requested():
        raise error
    restarts.count(error)
    return error


def open_journal(
    stack: ExitStack,
    folder: RunFolder,
    view: View,
    runtime: Runtime | SftRuntime,
    *,
    start: int,
    tokens: TokenFile | None = None,
) -> Journal:
    """Open the journal of a run after step `start`, and send it the messages of the trainer ranks
    and the watchdog."""
    task, config = runtime.task, runtime.task.config
    journal = Journal(
        folder.path,
        view,
        trajectories=config.run.save_trajectories,
        save_all=config.run.save_all_trajectories,
        tokenizer=task.tokenizer_digest,
        tokens=tokens,
        alarms=config.alarms,
        resumed_at=start,
        costs=CostRates(runtime.gpus, *token_flops(config, task.facts)),
    )
    stack.callback(journal.close)
    open_trackers(stack, journal, folder.path, config)
    runtime.learner.say = journal.say
    runtime.watchdog.say = partial(journal.say, "frozen")
    return journal


def save_checkpoint(
    folder: RunFolder,
    config: Config,
    learner: Any,
    step: int,
    position: Mapping[str, Any],
    *,
    stop: Callable[[], bool],
    say: Callable[[str], object],
) -> bool:
    """Save a checkpoint. If writing fails, return False, or raise `SaveError` if no later
    checkpoint is due."""
    state = State(
        step=step,
        version=learner.version,
        cursor=position,
        config=config_digest(config),
        model=folder.base,
        tokenizer=folder.tokenizer,
    )
    try:
        folder.save(state, learner.save, say)
    except SaveError as error:
        if step >= config.run.steps or stop():
            raise
        say(f"warning: {error}\nThe run continues and saves again at the next checkpoint")
        return False
    return True


def _closing_summary(
    folder: RunFolder,
    config: Config,
    reached: int,
    command: Sequence[str],
    *,
    resume_command: str,
) -> str:
    path, steps, lines = folder.path, config.run.steps, [""]
    evaluations = folder.evaluations()
    for name, points in evaluations.items():
        held_out, _, metric = name.rpartition("/")
        # A set that gives only partial credit has no passes, so its score is shown.
        solved = any(value for _, value in evaluations.get(f"{held_out}/pass@1", []))
        partial = metric == "score" and not solved and any(value for _, value in points)
        if not name.endswith(MEASURES) and not partial:
            continue
        (first, before), (last, after) = points[0], points[-1]
        change = f", {after:.3f} at step {last} ({after - before:+.3f})" if last > first else ""
        lines.append(f"held-out {name}: {before:.3f} at step {first}{change}")
    program = "keel" if Path(sys.argv[0]).name != "keel" or which("keel") else sys.argv[0]
    if reached < steps or preemption_signal():  # a preempted run is exported when it resumes
        resume = resume_command or shlex.join([program, *command])
        where = f"after step {reached} of {steps}" if reached else "before step 1"
        lines.append(f"stopped {where}; to resume: {resume}")
        if 0 < reached < steps and not resume_command and not _counts_epochs(command, config):
            lines.append(f"to export it now: {resume} run.steps={reached}")
    else:
        lines.append(f"trained model   {folder.model}")
    if not reached and not evaluations:
        return "\n".join(lines)
    lines += [
        f"report          {shlex.join([program, 'report', str(path)])}",
        f"curves          {shlex.join(['tensorboard', '--logdir', str(path)])}",
        f"numbers         {path / 'metrics.jsonl'}",
    ]
    if config.data.sources:
        lines.append(f"completions     {path / 'trajectories'}")
    return "\n".join(lines)


def _counts_epochs(command: Sequence[str], config: Config) -> bool:
    return command[0] in ("sft", "pretrain") and config.sft.epochs > 0
