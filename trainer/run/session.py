"""A run in its folder, from the first look at what is there to the closing words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ray.exceptions import RayError

from keel.configs.schema import Config, ConfigError
from keel.model.ray_timeouts import RayLost, is_loss, lost_reason
from keel.trainer.run.alarms import Alarms
from keel.trainer.run.checkpoint import SaveError, State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import Journal, note
from keel.trainer.run.manifest import Entry
from keel.trainer.run.progress import waiting
from keel.trainer.run.restarts import RESUME_HINT, OutOfMemory, Restarts, WorkerLost
from keel.trainer.run.signals import asked, preempted, print_line
from keel.trainer.run.summary import closing_summary
from keel.trainer.run.trackers.known import check_trackers, maker
from keel.trainer.run.trackers.sender import CLOSE_S, HURRY_S, OWN, Trackers, TrackerThread
from keel.trainer.run.trackers.tracker import End, knobs_of
from keel.trainer.run.trajectory_files import TokenFile
from keel.trainer.run.view import View, open_view


class Learner(Protocol):
    @property
    def version(self) -> int: ...
    @property
    def save(self) -> Callable[..., Mapping[str, Entry]]: ...
    @property
    def load(self) -> Callable[..., None]: ...
    @property
    def export(self) -> Callable[..., Mapping[str, Entry]]: ...


class Started(Protocol):
    @property
    def learner(self) -> Learner: ...


S = TypeVar("S", bound=Started)


def run_with_restarts(
    command: Sequence[str],
    config: Config,
    *,
    text: str,
    restore: Callable[[Mapping[str, Any]], None],
    position: Callable[[], Mapping[str, Any]],
    started: Callable[[RunFolder], AbstractContextManager[S]],
    drive: Callable[[S, RunFolder, View, int], int],
    chosen: Callable[[Path], None] = lambda _: None,
    lowered: Callable[[OutOfMemory], str] | None = None,
    again: str = "",
    tokenizer: str = "",
) -> None:
    """Begin the run of `config`, or go on with it.

    command: what the user called, without `keel`. text: what is planned. restore: puts the data
    where a checkpoint, or `position`, says it stood. started: what trains. drive: the loop; returns
    the last step done. chosen: keeps in the folder what was chosen for the run. When it has lost a
    process (`WorkerLost`), all of it is started again from the newest checkpoint,
    `run.max_restarts` times; `lowered` is first called after a step that did not fit a GPU, and
    says what it has changed. again: as `closing_summary` has it. tokenizer: as `RunFolder` has it.
    """
    check_trackers(config.run.trackers)  # again: from Python nobody has
    with ExitStack() as stack:
        with waiting("verifying the newest checkpoint"):
            folder = stack.enter_context(RunFolder(config, tokenizer))
        if folder.set_aside:
            print(
                f"{folder.path} holds a run that left no checkpoint to resume from. What it wrote "
                f"is kept in {folder.set_aside}; this run starts over. run.checkpoint_every=N "
                "saves a checkpoint every N steps"
            )
        for line in folder.words():
            print(f"warning: {line}")
        state, steps = folder.state(), config.run.steps
        start = state.step if state else 0
        folder.check_heldout(start)
        if start >= steps and folder.model.exists():
            folder.check_model()
            lessons = command[0] in ("sft", "pretrain")
            knob = "sft.epochs" if lessons and config.sft.epochs else "run.steps"
            print(f"{folder.path} has done its {start} steps. Raise {knob} to go on.")
            return
        beginning = position()
        if state:
            restore_data(folder, restore)
        chosen(folder.path)
        resumes = f"\nresumes after step {start}; later steps will be repeated" * (start > 0)
        print(f"{text}{resumes}", flush=True)
        restarts = Restarts(config.run.max_restarts)
        while True:
            try:
                with started(folder) as system:
                    reached = run_attempt(system, folder, config, restarts, drive)
                break
            except (WorkerLost, RayError) as raised:
                error: object = again_after(raised, restarts)
                if isinstance(raised, OutOfMemory) and lowered is not None:
                    error = lowered(raised)
                state = folder.state()
                restore(state.cursor if state else beginning)
                where = f"step {state.step}" if state else "its beginning: it has no checkpoint yet"
                line = f"{error}\nThe run starts again from {where}"
                note(folder.path, state.step if state else 0, "restart", line)
                print_line(f"warning: {line}")
        print_line(closing_summary(folder, config, reached, command, again=again))


def restore_data(folder: RunFolder, restore: Callable[[Mapping[str, Any]], object]) -> None:
    """The data stands where the newest checkpoint, if there is one, says it stood. Raises
    ConfigError where it is other data."""
    if (state := folder.state()) is None:
        return
    try:
        restore(state.cursor)
    except ValueError as error:
        raise ConfigError(f"run.dir = {folder.path}: step {state.step}: {error}") from error


def run_attempt(
    system: S,
    folder: RunFolder,
    config: Config,
    restarts: Restarts,
    drive: Callable[[S, RunFolder, View, int], int],
) -> int:
    """From the newest checkpoint to the end, or as far as it goes: the last step done."""
    state, steps = folder.state(), config.run.steps
    start = reached = state.step if state else 0
    if state and folder.latest:
        with waiting(f"loading {folder.latest.name}", f"loading {config.model.path}"):
            system.learner.load(folder.latest)
    restarts.begun = True
    if start < steps or folder.unmeasured(steps):
        folder.begin(start)
        try:
            with open_view(str(folder.path), steps) as view:
                reached = drive(system, folder, view, start)
        except SaveError as error:
            if error.done and not preempted():
                export_at_least(folder, system, error)
            raise
    if reached >= steps and not preempted():
        with waiting("exporting the model", f"exporting {config.model.path}"):
            folder.export(system.learner.export)
    return reached


def export_at_least(folder: RunFolder, system: Started, error: SaveError) -> None:
    """The model of a run that has done all its steps and has no room for their checkpoint, which is
    many times as large. error: is told what came of it."""
    try:
        folder.export(system.learner.export)
    except (OSError, RuntimeError) as second:
        error.add_note(f"The trained model cannot be written either: {second}")
    else:
        error.add_note(f"The trained model is in {folder.model} all the same")


def again_after(raised: WorkerLost | RayError, restarts: Restarts) -> WorkerLost:
    """What another start mends. Raises what there is to say, with what to do, where it would mend
    nothing, or nobody wants it."""
    if lost_reason():
        raise RayLost(lost_reason()) from raised
    if isinstance(raised, WorkerLost):
        error = raised
    elif is_loss(raised):  # weights, say, that went with the rank that held them
        said = str(raised).strip().partition("\n")[0]
        error = WorkerLost(f"a process or a node is gone with what others need of it: {said}")
        error.__cause__ = raised
    else:
        raise raised
    if preempted():
        raise error
    if asked():
        raise WorkerLost(
            f"{error}\nThe run was asked to stop, and does not start again: {RESUME_HINT}"
        ) from error
    restarts.another(error)
    return error


def open_journal(
    stack: ExitStack,
    folder: RunFolder,
    view: View,
    config: Config,
    *,
    start: int,
    tokenizer: str,
    tokens: TokenFile | None = None,
) -> Journal:
    """As the recipe has it; closed with `stack`."""
    journal = Journal(
        folder.path,
        view,
        trajectories=config.run.save_trajectories,
        every=config.run.save_all_trajectories,
        tokenizer=tokenizer,
        tokens=tokens,
        alarms=Alarms(config.alarms),
        resumed_at=start,
    )
    stack.callback(journal.close)
    if names := config.run.trackers:
        say, knobs = partial(journal.say, OWN), knobs_of(config)
        trackers = Trackers(
            [TrackerThread(n, maker(n), folder.path, knobs, say) for n in names], say
        )
        journal.written = trackers.look

        def ended(kind: type[BaseException] | None, *_: object) -> None:
            failed = bool(journal.ends) or (kind is not None and issubclass(kind, Exception))
            over = journal.step >= config.run.steps
            end: End = "failed" if failed else "finished" if over else "stopped"
            journal.begin(f"sending the rest to {', '.join(names)}")
            hurry = preempted() or (kind is not None and not failed)  # a second Ctrl-C, that is
            trackers.close(end, journal.step, HURRY_S if hurry else CLOSE_S)

        stack.push(ended)
    return journal


def save_checkpoint(
    folder: RunFolder,
    config: Config,
    learner: Learner,
    step: int,
    cursor: Mapping[str, Any],
    *,
    stop: Callable[[], bool],
    say: Callable[[str], object],
) -> bool:
    """Of everything that a run resumed after this step needs. Returns whether it could not be
    written, which is said; raises `SaveError` where none would follow it."""
    state = State(
        step=step,
        version=learner.version,
        cursor=cursor,
        config=config_digest(config),
        model=folder.base,
        tokenizer=folder.tokenizer,
    )
    try:
        folder.save(state, learner.save, say)
    except SaveError as error:
        error.done = step >= config.run.steps
        if error.done or stop():
            raise
        say(f"warning: {error}\nThe run goes on, and saves when the next one is due")
        return True
    return False
