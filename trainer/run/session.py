"""A run in its folder, from the first look at what is there to the closing words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, TypeVar

from keel.configs.schema import Config
from keel.trainer.run.alarms import Alarms
from keel.trainer.run.checkpoint import State, Unwritten, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.interrupt import preempted, tell
from keel.trainer.run.journal import Journal
from keel.trainer.run.manifest import Entry
from keel.trainer.run.saved import TokenFile
from keel.trainer.run.view import View, open_view
from keel.trainer.run.words import closing_words


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


def conduct(
    command: Sequence[str],
    config: Config,
    *,
    text: str,
    restore: Callable[[Mapping[str, Any]], None],
    started: Callable[[RunFolder], AbstractContextManager[S]],
    drive: Callable[[S, RunFolder, View, int], int],
) -> None:
    """Begin the run of `config`, or go on with it.

    command: what the user called, without `keel`. text: what is planned. restore: puts the data
    where a checkpoint says it stood. started: what trains. drive: the loop; returns the last step
    done.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(config))
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
        if state:
            restore(state.cursor)
        print(text, flush=True)
        system = stack.enter_context(started(folder))
        if state and folder.latest:
            system.learner.load(folder.latest)
        reached = start
        if start < steps:
            folder.begin(start)
            with open_view(str(folder.path), steps) as view:
                reached = drive(system, folder, view, start)
        if reached >= steps and not preempted():
            folder.export(system.learner.export)
        tell(closing_words(folder, config, reached, command))


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
    written, which is said; raises `Unwritten` where none would follow it."""
    state = State(step=step, version=learner.version, cursor=cursor, config=config_digest(config))
    try:
        folder.save(state, learner.save)
    except Unwritten as error:
        if step >= config.run.steps or stop():
            raise
        say(f"warning: {error}\nThe run goes on, and saves when the next one is due")
        return True
    return False
