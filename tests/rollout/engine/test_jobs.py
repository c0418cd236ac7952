"""What an engine's requests come to, put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keel.configs.schema import SamplingConfig
from keel.rl.types import Prompt
from keel.rollout.engine.conversion import RenderedPrompt
from keel.rollout.engine.jobs import NOT_FINITE, Sampled, group_job
from keel.rollout.recording.base import Recording, Wanted

PROMPT = Prompt(
    prompt_id="p", domain="d", messages=({"role": "user", "content": "?"},), reward={"kind": "x"}
)


def sampled(*logp: float) -> Sampled:
    recording = Recording(logp=np.array(logp, np.float32), kept=None, routes=None)
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
    wanted: Any = Wanted(routes=False, kept=False)
    rendered = RenderedPrompt(token_ids=[1, 2], thinking=False)
    job = group_job(PROMPT, rendered, SamplingConfig(), wanted)
    job.take(0, sampled(-1.0, value, -0.5))
    job.take(1, sampled(-1.0, -0.5))
    group = job.result()
    assert [trajectory.sibling for trajectory in group.trajectories] == [1]
    assert group.dropped == (NOT_FINITE,)
