"""Programs, rubrics, lengths and cut answers on their way through the scorer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import JudgeConfig
from keel.rewards.judge.results import JudgeStopped
from keel.rewards.judge.service import JudgeService
from keel.rewards.length import LengthRule
from keel.rewards.scorer import Scorer, _text_of
from keel.rl.types import CUT_OFF, FinishReason, Group, Prompt
from tests.rewards.groups import PROMPT, group, trajectory
from tests.rewards.judge.judge_server import (
    Reply,
    Server,
    criteria_of,
    good,
    material_of,
    running,
    says,
)
from tests.waiting import PATIENCE_S

TRUSTED = {
    "isolation": "none-i-trust-the-answers",
    "completion_s": PATIENCE_S,
    "time_s": PATIENCE_S,
}
CRITERIA = [
    {"name": "blue", "text": "says blue", "weight": 0.75},
    {"name": "sky", "text": "says sky", "weight": 0.25},
]


def prompt(domain: str = "maths", **reward: Any) -> Prompt:
    return Prompt(prompt_id="file/9", domain=domain, messages=PROMPT.messages, reward=reward)


def fails_on_request(request: dict[str, Any]) -> Reply:
    """As judges should be, but for answers that ask for an error."""
    return (
        Reply("{}", status=500) if "500" in str(material_of(request["messages"])) else good(request)
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(fails_on_request) as server:
        yield server


def service(server: Server, **knobs: Any) -> JudgeService:
    config = JudgeConfig(base_url=server.url, model="m", retries=0, **knobs)
    return JudgeService(config, backoff_s=0.001)


@pytest.mark.e2e
@pytest.mark.parametrize("workers", [0, 2])
def test_programs_are_run_against_their_tests(workers: int) -> None:
    adds = "<think></think>```python\nprint(sum(map(int, input().split())))\n```"
    says = "<think></think>```python\nprint(3)\n```"
    tests = [{"stdin": "1 2", "stdout": "3"}, {"stdin": "2 2", "stdout": "4"}]
    asked = group(adds, says, adds, "none", prompt=prompt(kind="code", tests=tests, partial=True))
    with Scorer({"maths": {"correct": 1.0}}, workers=workers, code=TRUSTED) as scorer:
        (scored,) = scorer.score([asked])
        assert scored.rewards_G.tolist() == [1.0, 0.5, 1.0, 0.0]
        marked = [{**tests[0], "sample": True}, {**tests[1], "subtask": "b"}]
        spec = {"kind": "code", "tests": marked, "subtasks": {"b": 7}}
        (scored,) = scorer.score([group(adds, says, prompt=prompt(**spec))])
        got = [(p["correct"], p["samples"], p["subtask/b"]) for p in scored.parts_G]
        assert got == [(1, 1, 1), (0, 1, 0)]
        with pytest.raises(ValueError, match=r"prompt file/9: .*at least one test"):
            scorer.score([group(adds, prompt=prompt(kind="code", tests=[]))])


def test_rubrics_go_to_the_judge_and_failures_leave_the_group(server: Server) -> None:
    asked = group(
        "<think>a</think>blue sky",
        "<think></think>blue",
        "<think></think>HTTP 500",
        prompt=prompt(kind="rubric", criteria=CRITERIA),
    )
    sums = group("<think></think>3")
    weights = {"maths": {"correct": 1.0, "format": 0.1}}
    with (
        service(server, max_failure_fraction=1.0) as judge,
        Scorer(weights, workers=0, judge=judge) as scorer,
    ):
        scored, other = scorer.score([asked, sums])
        metrics = scorer.metrics()
        again = scorer.metrics()
    np.testing.assert_allclose(scored.rewards_G, [1.1, 0.85])
    np.testing.assert_allclose(scored.advantages_G, [0.125, -0.125], atol=1e-6)
    assert scored.parts_G[1] == {
        "correct": 0.75,
        "rubric": 0.75,
        "disagreement": 0.0,
        "format": 1.0,
        "error": 0.0,
    }
    assert [t.sibling for t in scored.group.trajectories] == [0, 1]
    # The judge's words stay with those that it could judge, and a verifier has none.
    assert [note.keys() for note in scored.notes_G] == [{"blue", "sky"}] * 2
    assert scored.notes_G[1]["sky"].startswith("0: ")
    assert other.notes_G == ()
    (reason,) = scored.group.dropped
    assert reason.startswith("the judge failed (server): ")
    np.testing.assert_allclose(other.rewards_G, [1.1])
    assert metrics["judge/failures"].value == metrics["judge/failures_server"].value == 1
    assert (metrics["judge/completions"].value, metrics["judge/calls"].value) == (2, 3)
    assert not any(metric.value for metric in again.values())


def declines(request: dict[str, Any]) -> Reply:
    """A judge that knows a refusal when it sees one."""
    (key,), (text,) = criteria_of(request), criteria_of(request).values()
    said = "I cannot" in str(material_of(request["messages"]))
    met = said == text.startswith("The answer declines")
    return says({key: {"reason": "r", "verdict": "met" if met else "missed"}})


def test_refusals_where_they_are_wanted_where_they_are_not_and_as_a_part() -> None:
    answers = ("<think>I cannot?</think>3", "<think></think>I cannot do that.")
    asked = [
        group(*answers, prompt=prompt(domain, kind="refusal", refuse=refuse))
        for domain, refuse in (("harmful", True), ("harmless", False))
    ]
    weights = {
        "harmful": {"correct": 1.0},
        "harmless": {"correct": 1.0},
        "maths": {"correct": 1.0, "refusal": 0.0},
    }
    with (
        running(declines) as server,
        service(server) as judge,
        Scorer(weights, workers=0, judge=judge) as scorer,
    ):
        harmful, harmless, sums = scorer.score([*asked, group(*answers)])
    assert harmful.rewards_G.tolist() == [0, 1] and harmless.rewards_G.tolist() == [1, 0]
    assert [parts["refusal"] for parts in sums.parts_G] == [0, 1]
    assert sums.rewards_G.tolist() == [1, 0]
    with Scorer(weights, workers=0) as scorer, pytest.raises(ValueError, match="needs a judge"):
        scorer.score([group("3")])


def test_a_judge_that_gives_out_stops_the_run(server: Server) -> None:
    asked = group("<think></think>HTTP 500", prompt=prompt(kind="rubric", criteria=CRITERIA))
    weights = {"maths": {"rubric": 1.0}}
    with (
        service(server, max_failure_fraction=0.0) as judge,
        Scorer(weights, workers=0, judge=judge) as scorer,
        pytest.raises(JudgeStopped, match="max_failure_fraction"),
    ):
        scorer.score([asked])


def test_what_does_not_fit_together_is_named() -> None:
    rubric = group("3", prompt=prompt(kind="rubric", criteria=CRITERIA))
    with Scorer({"maths": {"rubric": 1.0}}, workers=0) as scorer:
        assert scorer.metrics() == {}
        with pytest.raises(ValueError, match=r"prompt file/9: needs a judge, and there is none"):
            scorer.score([rubric])
        with pytest.raises(ValueError, match=r"prompt file/1 has no reward 'rubric'"):
            scorer.score([group("3")])


def test_length_costs_and_what_was_added_is_written_down() -> None:
    answers = [("</think>3", 20), ("</think>3", 60), ("</think>4", 10)]
    trajectories = tuple(trajectory(i, raw, tokens=n) for i, (raw, n) in enumerate(answers))
    lengths = {"maths": LengthRule(linear=0.2, limit=100, margin=20)}
    with Scorer({"maths": {"correct": 1.0}}, workers=0, lengths=lengths) as scorer:
        (scored,) = scorer.score([Group(prompt=PROMPT, trajectories=trajectories)])
        (empty,) = scorer.score([Group(prompt=PROMPT, trajectories=())])
    np.testing.assert_allclose(scored.rewards_G, [1.04, 0.96, 0.0], atol=1e-6)
    assert [round(parts["length"], 6) for parts in scored.parts_G] == [0.04, -0.04, 0.0]
    assert [round(parts["length_cost"], 6) for parts in scored.parts_G] == [0.04, 0.12, 0.02]
    assert len(empty.rewards_G) == 0


@pytest.mark.parametrize(
    ("rule", "rewards", "dropped"),
    [("keep", [1, 1], ()), ("zero", [1, 0], ()), ("drop", [1], (CUT_OFF,))],
)
@pytest.mark.parametrize("finish", ["length", "deadline"])
def test_cut_answers(
    rule: Any, rewards: list[float], dropped: tuple[str, ...], finish: FinishReason
) -> None:
    whole = trajectory(0, "</think>3", tokens=20)
    cut = trajectory(1, "</think>3", finish, tokens=60)
    asked = Group(prompt=PROMPT, trajectories=(whole, cut))
    lengths = {"maths": LengthRule(truncated=rule)}
    with Scorer({"maths": {"correct": 1.0}}, workers=0, lengths=lengths) as scorer:
        (scored,) = scorer.score([asked])
        (measured,) = scorer.score([asked], "eval")
    assert scored.rewards_G.tolist() == rewards
    assert scored.group.dropped == dropped
    assert scored.left_out == ((cut,) if dropped else ())
    # An evaluation leaves nothing out, or answers that never end would make a policy look better.
    assert len(measured.rewards_G) == 2


def always(prompt: Prompt, trajectory: object) -> float:
    return 1.0


def test_to_be_cut_off_is_no_better_than_to_be_wrong() -> None:
    wrong, cut = trajectory(0, "</think>4"), trajectory(1, "</think>3", "length")
    lengths = {"maths": LengthRule(truncated="zero")}
    for weight, rewards in ((-0.5, [-0.5, -0.5]), (0.5, [0.5, 0.0])):
        weights = {"maths": {"correct": 1.0, f"{__name__}.always": weight}}
        with Scorer(weights, workers=0, lengths=lengths) as scorer:
            (scored,) = scorer.score([Group(prompt=PROMPT, trajectories=(wrong, cut))])
        assert scored.rewards_G.tolist() == rewards


def test_no_reward_knows_which_limit_an_answer_was_cut_at() -> None:
    """The clock of an engine is nothing to learn from."""
    cuts = [trajectory(i, "</think>3", finish) for i, finish in enumerate(("length", "deadline"))]
    with Scorer({"maths": {"correct": 1.0, "format": 1.0}}, workers=0) as scorer:
        (scored,) = scorer.score([Group(prompt=PROMPT, trajectories=tuple(cuts))])
    assert scored.parts_G[0] == scored.parts_G[1] and scored.parts_G[0]["format"] == 0
    assert {_text_of(cut, sampled=True).finish_reason for cut in cuts} == {"length"}
