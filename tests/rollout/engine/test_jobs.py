"""Tests the results of engine jobs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from keel.configs.schema import SamplingConfig
from keel.rl.turns import TurnRequest
from keel.rollout.engine.conversion import RenderedPrompt
from keel.rollout.engine.jobs import NOT_FINITE, Completion, GroupJob, TurnJob
from keel.rollout.recording.base import Recording, RecordingOptions
from keel.rollout.spec import LostTurn
from tests.rl.rollouts import prompt

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
    request = TurnRequest(
        conversation="p/train/0/0/0", token_ids_T=np.array([1, 2], np.int32), max_tokens=8, seed=0
    )
    turn = TurnJob.of(request, SamplingConfig(), OPTIONS)
    turn.add(0, completion(-1.0, value))
    lost = pickle.loads(pickle.dumps(turn.result()))  # as from the engine's process
    assert isinstance(lost, LostTurn) and str(lost) == NOT_FINITE
