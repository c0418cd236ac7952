"""From groups to rewards and advantages."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import JudgeConfig
from keel.configs.sections.rewards import CodeConfig
from keel.rewards.compose import check_weights, compose
from keel.rewards.judge.service import JudgeService
from keel.rewards.length import LengthRule
from keel.rl.summary import evaluation
from keel.rl.types import CUT_OFF, FinishReason, Group, Prompt
from tests.rewards.groups import PROMPT, group, new_scorer, score, trajectory
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

WEIGHTS = {"maths": {"correct": 1.0, "format": 0.1}}
TRUSTED = CodeConfig(
    isolation="none-i-trust-the-answers", completion_s=PATIENCE_S, time_s=PATIENCE_S
)
CRITERIA = [
    {"name": "blue", "text": "says blue", "weight": 0.75},
    {"name": "sky", "text": "says sky", "weight": 0.25},
]


def prompt(domain: str = "maths", **reward: Any) -> Prompt:
    return Prompt(prompt_id="file/9", domain=domain, messages=PROMPT.messages, reward=reward)


def test_rewards_parts_and_advantages() -> None:
    answers = group("<think>a</think>3", "<think>a</think>4", "3 </think>", "<think>3")
    with new_scorer(WEIGHTS) as scorer:
        (scored,) = score(scorer, [answers])
        cut = replace(answers, trajectories=(trajectory(0, "<think>a</think>3", "length"),))
        (alone,) = score(scorer, [cut])
    assert scored.group is answers
    assert scored.rewards_G.dtype == scored.advantages_G.dtype == np.float32
    np.testing.assert_allclose(scored.rewards_G, [1.1, 0.1, 0.0, 0.0])
    np.testing.assert_allclose(scored.advantages_G, [0.8, -0.2, -0.3, -0.3], atol=1e-6)
    assert scored.parts_G[0] == {"correct": 1.0, "format": 1.0, "error": 0.0}
    assert scored.parts_G[3] == {"correct": 0.0, "format": 0.0, "error": 0.0}
    assert alone.parts_G[0] == {"correct": 1.0, "format": 0.0, "error": 0.0}
    np.testing.assert_array_equal(alone.advantages_G, [0.0])


@pytest.mark.e2e
def test_groups_keep_their_order_in_workers() -> None:
    groups = (group(f"<think></think>{i}", "<think></think>3") for i in range(20))
    with new_scorer(WEIGHTS, workers=2, timeout_s=PATIENCE_S) as scorer:
        scored = score(scorer, groups)
    assert [s.parts_G[0]["correct"] for s in scored] == [float(i == 3) for i in range(20)]
    assert evaluation(scored)["pass@1"].value == pytest.approx((20 + 1) / 40)


def test_empty_group_stays_empty() -> None:
    with new_scorer(WEIGHTS, lengths={"maths": LengthRule(linear=0.1)}) as scorer:
        (scored,) = score(scorer, [Group(prompt=PROMPT, trajectories=(), dropped=("late",))])
    assert len(scored.rewards_G) == len(scored.advantages_G) == len(scored.parts_G) == 0
    assert scored.group.dropped == ("late",)
    assert evaluation([scored])["pass@1"].value == 0


ANSWER = {"kind": "answer", "answer": "3"}


@pytest.mark.parametrize(
    ("domain", "reward", "part", "match"),
    [
        *(("code", ANSWER, "format", "code"), ("maths", {"kind": "k"}, "format", "kind 'k'")),
        ("maths", {"kind": "code", "tests": []}, "format", "tests"),
        ("maths", {"kind": "rubric", "criteria": CRITERIA}, "rubric", "judge"),
        *(("maths", ANSWER, "rubric", "rubric"), ("maths", ANSWER, "refusal", "judge")),
    ],
)
def test_errors_name_the_prompt(domain: str, reward: dict[str, Any], part: str, match: str) -> None:
    with (
        new_scorer({"maths": {"correct": 1.0, part: 0.0}}) as scorer,
        pytest.raises(ValueError, match=f"prompt file/9.*{match}"),
    ):
        score(scorer, [group("3", prompt=prompt(domain, **reward))])


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'corect'.*correct\?"):
        check_weights({"maths": {"corect": 1.0}})
    with pytest.raises(ValueError, match="length"):
        new_scorer({"maths": {"length": 1.0}})
    with pytest.raises(ValueError, match="progress"):
        check_weights({"shop": {"progress": 1.0}})
    check_weights({"shop": {"progress": 1.0}}, ["shop"])


def test_terms_that_cancel_leave_no_rounding() -> None:
    weights = {"correct": 0.3, "mine.wordy": -0.1, "mine.late": -0.2}
    assert compose(dict.fromkeys(weights, 1.0), weights).value == 0
    assert compose(dict.fromkeys(weights, 0.0), weights).value == 0
    assert compose({**dict.fromkeys(weights, 1.0), "correct": 1 + 1e-9}, weights).value > 0
    score = compose({"correct": 0.5, "format": 1.0}, {"correct": 2.0})
    assert (score.value, score.parts["format"]) == (1.0, 1.0)


@pytest.mark.e2e
def test_programs_run_against_their_tests() -> None:
    adds = "<think></think>```python\nprint(sum(map(int, input().split())))\n```"
    prints = "<think></think>```python\nprint(3)\n```"
    tests = [{"stdin": "1 2", "stdout": "3"}, {"stdin": "2 2", "stdout": "4"}]
    marked = [{**tests[0], "sample": True}, {**tests[1], "subtask": "b"}]
    subtasks = prompt(kind="code", tests=marked, subtasks={"b": 7})
    partial = prompt(kind="code", tests=tests, partial=True)
    with new_scorer({"maths": {"correct": 1.0}}, workers=2, code=TRUSTED) as scorer:
        groups = [group(adds, prints, adds, "none", prompt=partial)]
        first, second = score(scorer, [*groups, group(adds, prints, prompt=subtasks)])
    assert first.rewards_G.tolist() == [1.0, 0.5, 1.0, 0.0]
    parts = [(p["correct"], p["samples"], p["subtask/b"]) for p in second.parts_G]
    assert parts == [(1, 1, 1), (0, 1, 0)]


def fails_on_request(request: dict[str, Any]) -> Reply:
    failing = "500" in str(material_of(request["messages"]))
    return Reply("{}", status=500) if failing else good(request)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(fails_on_request) as server:
        yield server


def service(server: Server, **knobs: Any) -> JudgeService:
    config = JudgeConfig(base_url=server.url, model="m", retries=0, **knobs)
    return JudgeService(config)


def test_judge_failures_leave_the_group(server: Server) -> None:
    texts = [f"<think></think>{text}" for text in ("blue sky", "blue", "HTTP 500")]
    answers = group(*texts, prompt=prompt(kind="rubric", criteria=CRITERIA))
    with (
        service(server, max_failure_fraction=1.0) as judge,
        new_scorer(WEIGHTS, judge=judge) as scorer,
    ):
        scored, other = score(scorer, [answers, group("<think></think>3")])
        metrics, unchanged = scorer.metrics(), scorer.metrics()
    np.testing.assert_allclose(scored.rewards_G, [1.1, 0.85])
    np.testing.assert_allclose(scored.advantages_G, [0.125, -0.125], atol=1e-6)
    parts = {"correct": 0.75, "rubric": 0.75, "disagreement": 0.0, "format": 1.0, "error": 0.0}
    assert scored.parts_G[1] == parts
    assert [t.sibling for t in scored.group.trajectories] == [0, 1]
    assert [t.sibling for t in scored.left_out] == [2]
    assert [note.keys() for note in scored.notes_G] == [{"blue", "sky"}] * 2
    assert scored.notes_G[1]["sky"].startswith("0: ")
    assert other.notes_G == ()
    (reason,) = scored.group.dropped
    assert "(server)" in reason
    np.testing.assert_allclose(other.rewards_G, [1.1])
    assert metrics["judge/failures"].value == metrics["judge/failures_server"].value == 1
    assert (metrics["judge/completions"].value, metrics["judge/calls"].value) == (2, 3)
    assert not any(metric.value for metric in unchanged.values())


def declines(request: dict[str, Any]) -> Reply:
    """A judge that recognises refusals."""
    ((key, text),) = criteria_of(request).items()
    refuses = "I cannot" in str(material_of(request["messages"]))
    met = refuses == text.startswith("The answer declines")
    return says({key: {"reason": "r", "verdict": "met" if met else "missed"}})


def test_refusals_as_verdict_and_as_part() -> None:
    answers = ("<think>I cannot?</think>3", "<think></think>I cannot do that.")
    groups = [
        group(*answers, prompt=prompt(domain, kind="refusal", refuse=refuse))
        for domain, refuse in (("harmful", True), ("harmless", False))
    ]
    weights = {domain: {"correct": 1.0} for domain in ("harmful", "harmless", "maths")}
    weights["maths"]["refusal"] = 0.0
    with (
        running(declines) as server,
        service(server) as judge,
        new_scorer(weights, judge=judge) as scorer,
    ):
        harmful, harmless, sums = score(scorer, [*groups, group(*answers)])
    assert harmful.rewards_G.tolist() == [0, 1] and harmless.rewards_G.tolist() == [1, 0]
    assert [parts["refusal"] for parts in sums.parts_G] == [0, 1]
    assert sums.rewards_G.tolist() == [1, 0]
    assert sums.notes_G[0].keys() == {"refusal: refusal"}


@pytest.mark.parametrize(
    ("rule", "rewards", "dropped"),
    [("keep", [1, 1], ()), ("zero", [1, 0], ()), ("drop", [1], (CUT_OFF,))],
)
@pytest.mark.parametrize("finish", ["length", "deadline"])
def test_cut_off_completions(
    rule: Any, rewards: list[float], dropped: tuple[str, ...], finish: FinishReason
) -> None:
    whole = trajectory(0, "</think>3", tokens=20)
    cut = trajectory(1, "</think>3", finish, tokens=60)
    both = Group(prompt=PROMPT, trajectories=(whole, cut))
    lengths = {"maths": LengthRule(truncated=rule)}
    with new_scorer({"maths": {"correct": 1.0}}, lengths=lengths) as scorer:
        (scored,) = score(scorer, [both])
        (measured,) = score(scorer, [both], "eval")
    assert scored.rewards_G.tolist() == rewards
    assert scored.group.dropped == dropped
    assert scored.left_out == ((cut,) if dropped else ())
    # Evaluations drop nothing: endless answers would make a policy look better.
    assert len(measured.rewards_G) == 2


def always(prompt: Prompt, trajectory: object) -> float:
    return 1.0


@pytest.mark.parametrize(("weight", "rewards"), [(-0.5, [-0.5, -0.5]), (0.5, [0.5, 0.0])])
def test_cut_off_is_no_better_than_wrong(weight: float, rewards: list[float]) -> None:
    wrong, cut = trajectory(0, "</think>4"), trajectory(1, "</think>3", "length")
    lengths = {"maths": LengthRule(truncated="zero")}
    weights = {"maths": {"correct": 1.0, f"{__name__}.always": weight}}
    with new_scorer(weights, lengths=lengths) as scorer:
        (scored,) = score(scorer, [Group(prompt=PROMPT, trajectories=(wrong, cut))])
    assert scored.rewards_G.tolist() == rewards
