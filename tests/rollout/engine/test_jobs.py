"""What an engine's requests come to, put together."""

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
from keel.rl.types import Prompt
from keel.rollout.engine.conversion import RenderedPrompt
from keel.rollout.engine.jobs import NOT_FINITE, Sampled, group_job, turn_job
from keel.rollout.engine.thread import EngineThread
from keel.rollout.recording.base import Recording, Wanted
from keel.rollout.spec import LostTurn
from tests.agents.scripted import Sums, play, says
from tests.rollout.engine.test_thread import FakeEngine

PROMPT = Prompt(
    prompt_id="p", domain="d", messages=({"role": "user", "content": "?"},), reward={"kind": "x"}
)


def sampled(*logp: float) -> Sampled:
    recording = Recording(logp=np.array(logp, np.float32), sampling_mask=None, routes=None)
    return Sampled(
        ids=range(5, 5 + len(logp)),
        text="four",
        recording=recording,
        versions=np.zeros(len(logp), np.int32),
        finish_reason="stop",
        cached_tokens=0,
    )


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_completion_whose_logits_overflowed_is_dropped_alone(value: float) -> None:
    wanted: Any = Wanted(routes=False, sampling_mask=False)
    rendered = RenderedPrompt(token_ids=[1, 2], thinking=False)
    job = group_job(PROMPT, rendered, SamplingConfig(), wanted)
    job.take(0, sampled(-1.0, value, -0.5))
    job.take(1, sampled(-1.0, -0.5))
    group = job.result()
    assert [trajectory.sibling for trajectory in group.trajectories] == [1]
    assert group.dropped == (NOT_FINITE,)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_turn_whose_logits_overflowed_is_lost(value: float) -> None:
    request = TurnRequest(
        conversation="p/train/0/0/0", token_ids_T=np.array([1, 2], np.int32), max_tokens=8, seed=0
    )
    wanted: Any = Wanted(routes=False, sampling_mask=False)
    job = turn_job(request, SamplingConfig(), wanted)
    job.take(0, sampled(-1.0, value))
    lost = job.result()
    assert isinstance(lost, LostTurn) and str(lost) == NOT_FINITE
    again = pickle.loads(pickle.dumps(lost))  # from the engine's process
    assert isinstance(again, LostTurn) and str(again) == NOT_FINITE


class Overflowing(FakeEngine):
    """Loses every second turn."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, TurnRequest] = {}
        self.policy = says("@add 1, 2", "")

    @property
    def busy(self) -> bool:
        return bool(self.asked)

    def add_turn(self, job: int, request: TurnRequest, **_: Any) -> None:
        self.asked[job] = request

    def step(self) -> Iterator[tuple[int, Any]]:
        for job in list(self.asked):
            request = self.asked.pop(job)
            said = self.policy.say(request)
            yield job, LostTurn(NOT_FINITE) if len(self.policy.requests) == 2 else said


def test_its_conversation_is_dropped_at_once_and_the_engine_goes_on() -> None:
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
