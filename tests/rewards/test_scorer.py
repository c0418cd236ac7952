"""From groups to rewards and advantages."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keel.rewards.compose import check_weights, compose
from keel.rewards.scorer import Scorer
from keel.rl.evaluation import evaluation
from keel.rl.types import Group, Prompt
from tests.rewards.groups import PROMPT, group, trajectory
from tests.waiting import PATIENCE_S

WEIGHTS = {"maths": {"correct": 1.0, "format": 0.1}}


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(WEIGHTS, workers=1, timeout_s=PATIENCE_S) as scorer:
        yield scorer


@pytest.mark.e2e
def test_rewards_parts_and_advantages(scorer: Scorer) -> None:
    asked = group("<think>a</think>3", "<think>a</think>4", "3 </think>", "<think>3")
    (scored,) = scorer.score([asked])
    assert scored.group is asked
    assert scored.rewards_G.dtype == scored.advantages_G.dtype == np.float32
    np.testing.assert_allclose(scored.rewards_G, [1.1, 0.1, 0.0, 0.0])
    np.testing.assert_allclose(scored.advantages_G, [0.8, -0.2, -0.3, -0.3], atol=1e-6)
    assert scored.parts_G[0] == {"correct": 1.0, "format": 1.0, "error": 0.0}
    assert scored.parts_G[3] == {"correct": 0.0, "format": 0.0, "error": 0.0}


def test_a_cut_answer_may_be_right_but_is_not_in_format(scorer: Scorer) -> None:
    cut = Group(prompt=PROMPT, trajectories=(trajectory(0, "<think>a</think>3", finish="length"),))
    (scored,) = scorer.score([cut])
    assert scored.parts_G[0] == {"correct": 1.0, "format": 0.0, "error": 0.0}
    np.testing.assert_array_equal(scored.advantages_G, [0.0])


def test_groups_are_scored_as_they_arrive_and_keep_their_order(scorer: Scorer) -> None:
    def arriving() -> Iterator[Group]:
        for i in range(20):
            yield group(f"<think></think>{i}", "<think></think>3")

    scored = scorer.score(arriving())
    assert [s.parts_G[0]["correct"] for s in scored] == [float(i == 3) for i in range(20)]
    assert evaluation(scored)["pass@1"].value == pytest.approx((20 + 1) / 40)
    assert scorer.score([]) == []


def test_a_group_that_lost_all_its_trajectories(scorer: Scorer) -> None:
    (scored,) = scorer.score([Group(prompt=PROMPT, trajectories=(), dropped=("late",))])
    assert len(scored.rewards_G) == len(scored.advantages_G) == len(scored.parts_G) == 0
    assert evaluation([scored])["pass@1"].value == 0


def test_a_step_is_scored_in_no_time(scorer: Scorer) -> None:
    prompt = replace(PROMPT, reward={**PROMPT.reward, "match": "math"})
    groups = [
        group(*(f"<think>{i}</think>{i * j}" for j in range(8)), prompt=prompt) for i in range(16)
    ]

    def takes_s() -> float:
        began = time.process_time()
        scorer.score(groups)
        return time.process_time() - began

    assert any(takes_s() < 2 for _ in range(4))  # one of some, since the machine may be busy


def test_errors_name_the_prompt(scorer: Scorer) -> None:
    lost = Prompt(prompt_id="x/2", domain="code", messages=PROMPT.messages, reward=PROMPT.reward)
    with pytest.raises(ValueError, match=r"prompt x/2: no rewards for its domain 'code'"):
        scorer.score([group("3", prompt=lost)])
    odd = Prompt(prompt_id="x/3", domain="maths", messages=PROMPT.messages, reward={"kind": "k"})
    with pytest.raises(ValueError, match=r"prompt x/3: .*kind 'k'"):
        scorer.score([group("3", prompt=odd)])


def test_weights_and_composition() -> None:
    with pytest.raises(ValueError, match=r"domain 'maths': no reward 'corect'; did you mean corr"):
        check_weights({"maths": {"corect": 1.0}})
    with pytest.raises(ValueError, match="there are correct, format"):
        Scorer({"maths": {"length": 1.0}}, workers=0)
    score = compose({"correct": 0.5, "format": 1.0, "error": 0.0}, {"correct": 2.0})
    assert score.value == 1.0
    assert score.parts["format"] == 1.0


def test_terms_that_cancel_leave_no_rounding() -> None:
    """With `scale_advantages: std` that would be an advantage as large as any."""
    weights = {"correct": 0.3, "mine.wordy": -0.1, "mine.late": -0.2}
    assert compose(dict.fromkeys(weights, 1.0), weights).value == 0
    assert compose(dict.fromkeys(weights, 0.0), weights).value == 0
    assert compose({**dict.fromkeys(weights, 1.0), "correct": 1 + 1e-9}, weights).value > 0


@pytest.mark.e2e
def test_workers_stay_light() -> None:
    heavy = ("torch", "sympy", "numpy", "regex", "jsonschema", "rfc3986_validator")
    code = (
        f"import sys, keel.rewards.workers.worker; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.strip() == "[]"
