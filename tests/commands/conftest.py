"""A started system with scripted completions, for commands that sample."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keel.rl.types import Group, Prompt, ScoredGroup, Trajectory
from tests.rl import rollouts


@dataclass
class Fake:
    """A started system. Prompt n of a set has n correct completions, one of them late in its last
    group."""

    skill: int = 0
    asked: list[tuple[Prompt, int]] = field(default_factory=list[Any])
    loaded: list[str] = field(default_factory=list[str])
    stop_after: int = 10**9

    def __post_init__(self) -> None:
        self.learner = SimpleNamespace(load=lambda path: self.loaded.append(path.name))
        self.scorer = SimpleNamespace(submit=self.score)
        self.wake = lambda: None
        self.with_watchdog = lambda stop: stop
        self.agents, self.pool = None, SimpleNamespace(steps=0)
        self.counts: dict[str, int] = {}

    def submit(self, prompt: Prompt, purpose: str, size: int) -> Future[Any]:
        assert purpose == "eval"
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append((prompt, size))
        late = size < 3
        made = tuple(trajectory(prompt, n) for n in range(size - late))
        dropped = ("late: too slow",) * late
        return ready(Group(prompt=prompt, trajectories=made, dropped=dropped))

    def score(self, group: Group, purpose: str) -> Future[ScoredGroup]:
        number = len(group.trajectories)
        right = int(group.prompt.prompt_id.rpartition("/")[2]) % 4 + self.skill
        values = [float(n < right) for n in range(number)]
        return ready(
            ScoredGroup(
                group=group,
                rewards_G=np.array(values, np.float32),
                parts_G=tuple({"correct": value, "error": 0.0} for value in values),
                advantages_G=np.zeros(number, np.float32),
            )
        )


def trajectory(prompt: Prompt, sibling: int) -> Trajectory:
    sampled = rollouts.segment(tokens=6, context=sibling + 1, name=prompt.prompt_id)
    finish = "stop" if sibling else "length"
    message = {"role": "assistant", "content": f"so \\boxed{{ no {sibling}}}", "raw": ""}
    message["reasoning_content"] = "a<think>"  # two tokens
    return replace(
        rollouts.trajectory(sampled, sibling=sibling, finish=finish), messages=(message,)
    )


def ready(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    system = Fake()

    @contextmanager
    def running(task: object, say: object, log: Path, *, learner: bool) -> Iterator[Any]:
        assert log.name == "rewards" and log.parent.is_dir(), "what functions print has a place"
        before = len(system.loaded)
        yield system
        # A checkpoint's weights are the ranks' to read; a model folder's the engines'.
        assert learner == (len(system.loaded) > before)

    monkeypatch.setattr("keel.commands.sampling.launch", running)
    return system
