"""Tests the results of an engine's jobs."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from keel.agents.episode import BROKE
from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.turns import TurnRequest, TurnResult
from keel.rollout.engine.conversion import RenderedPrompt
from keel.rollout.engine.jobs import NOT_FINITE, Completion, GroupJob, TurnJob
from keel.rollout.engine.thread import EngineThread
from keel.rollout.recording.base import Recording, RecordingOptions
from keel.rollout.spec import LostTurn
from tests.agents.scripted import Sums, play, says
from tests.rl.rollouts import prompt
from tests.rollout.engine.test_thread import FakeEngine

OPTIONS = RecordingOptions(routes=False, sampling_mask=False)


def completion(*logp: float) -> Completion:
    return Completion(
        ids=range(5, 5 + len(logp)),
        text="four",
        recording=Recording(logp=np.array(logp, np.float32), sampling_mask=None, routes=None),
        versions=np.zeros(len(logp), np.int32),
        finish_reason="stop",
        cached_tokens=0,
    )


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_non_finite_completions_are_dropped_alone(value: float) -> None:
    rendered = RenderedPrompt(token_ids=[1, 2], thinking=False)
    job = GroupJob.of(prompt(), rendered, SamplingConfig(), OPTIONS)
    job.add(0, completion(-1.0, value, -0.5))
    job.add(1, completion(-1.0, -0.5))
    group = job.result()
    assert [trajectory.sibling for trajectory in group.trajectories] == [1]
    assert group.dropped == (NOT_FINITE,)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_non_finite_turns_are_lost(value: float) -> None:
    request = TurnRequest(
        conversation="p/train/0/0/0", token_ids_T=np.array([1, 2], np.int32), max_tokens=8, seed=0
    )
    job = TurnJob.of(request, SamplingConfig(), OPTIONS)
    job.add(0, completion(-1.0, value))
    lost = pickle.loads(pickle.dumps(job.result()))  # as from the engine's process
    assert isinstance(lost, LostTurn) and str(lost) == NOT_FINITE


class Overflowing(FakeEngine):
    """Loses the second turn."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, TurnRequest] = {}
        self.policy = says("@add 1, 2", "")

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def add_turn(self, job: int, request: TurnRequest, **_: Any) -> None:
        self.requests[job] = request

    def step(self) -> Iterator[tuple[int, Any]]:
        for job in list(self.requests):
            turn = self.policy.say(self.requests.pop(job))
            yield job, LostTurn(NOT_FINITE) if len(self.policy.requests) == 2 else turn


def test_a_lost_turn_drops_its_conversation_only() -> None:
    thread = EngineThread(Overflowing, RolloutConfig(sampling=SamplingConfig(max_tokens=8)))
    environment = Sums()

    class Engine:
        async def sample(self, request: TurnRequest) -> TurnResult:
            return await asyncio.wrap_future(thread.turn(request))

    policy: Any = Engine()
    assert play(policy, environment) == f"{BROKE}{NOT_FINITE}"
    assert environment.log[1:] == ["call add {'a': 1, 'b': 2}", "close"]
    assert thread.stats()["groups"] == 0
    thread.close()
