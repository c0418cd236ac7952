"""Rewards of trajectories that an environment has graded."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from keel.rewards.checks import check_spec
from keel.rewards.judge.service import JudgeService
from keel.rewards.length import LengthRule
from keel.rl.types import ENVIRONMENT, PROGRAM, Group, ScoredGroup, Trajectory, Verdict
from tests.rewards.groups import PROMPT, new_scorer, trajectory
from tests.rewards.judge.judge_server import Server, settings

RUBRIC = {"kind": "rubric", "criteria": [{"name": "one", "text": "says 3", "weight": 1}]}
AGENTIC = replace(PROMPT, environment="shop", reward={"kind": ENVIRONMENT})
GERMAN = {"role": "user", "content": "Wo ist das nächste Hotel, und was kostet es heute Nacht?"}
ENGLISH = "The hotel is near the station, and a night there is not at all cheap."
DEUTSCH = "Das nächste Hotel ist gleich am Bahnhof, und eine Nacht dort ist nicht billig."


def graded(prompt: Any, *verdicts: dict[str, float]) -> Group:
    trajectories = tuple(
        replace(trajectory(i, "<think></think>3"), verdict=Verdict(parts=parts))
        for i, parts in enumerate(verdicts)
    )
    return Group(prompt=prompt, trajectories=trajectories)


def score(group: Group, weights: dict[str, float], rule: LengthRule | None = None) -> ScoredGroup:
    lengths = {"maths": rule} if rule else None
    with new_scorer({"maths": weights}, environments=["maths"], lengths=lengths) as scorer:
        return scorer.submit(group).result()


def turns(*messages: dict[str, Any], tokens: int = 1) -> Trajectory:
    """Several turns, each answered by a tool in English."""
    call = {"id": "c", "type": "function", "function": {"name": "ask", "arguments": {}}}
    chat: list[Any] = [GERMAN]
    for message in messages:
        chat += [{"role": "assistant", **message, "tool_calls": [call]}]
        chat += [{"role": "tool", "content": ENGLISH, "tool_call_id": "c", "name": "ask"}]
    empty = trajectory(0, "", tokens=tokens)
    return replace(empty, messages=tuple(chat), opening=1, verdict=Verdict(parts={"correct": 1}))


def test_verdict_parts_are_weighted() -> None:
    check_spec({"kind": ENVIRONMENT})
    group = graded(AGENTIC, {"correct": 1.0, "progress": 0.4}, {"correct": 0.0, "progress": 1})
    scored = score(group, {"correct": 1.0, "progress": 0.5})
    assert scored.rewards_G.tolist() == pytest.approx([1.2, 0.5])
    assert scored.parts_G[0] == {"correct": 1.0, "progress": 0.4, "error": 0.0}


def test_a_rule_overrides_the_verdict() -> None:
    prompt = replace(PROMPT, environment="shop")
    group = graded(prompt, {"steps": 1.0}, {"steps": 0.0, "correct": 0.0})
    scored = score(group, {"correct": 1.0, "steps": 0.1})
    assert scored.rewards_G.tolist() == pytest.approx([1.1, 1])


@pytest.mark.parametrize(
    ("group", "part"),
    [
        (graded(AGENTIC, {"score": 1.0}), "correct"),
        (graded(AGENTIC, {"correct": 1.0}), "pace"),
        (Group(prompt=PROMPT, trajectories=(trajectory(0, "3"),)), "pace"),
    ],
)
def test_missing_parts_name_the_prompt(group: Group, part: str) -> None:
    with pytest.raises(ValueError, match=f"prompt file/1.*{part}"):
        score(group, {"correct": 1.0, part: 1.0})


def test_an_empty_verdict_leaves_the_group() -> None:
    group = graded(replace(PROMPT, environment="shop"), {"tidy": 1.0}, {})
    scored = score(group, {"correct": 1.0, "tidy": 0.5})
    assert scored.rewards_G.tolist() == [1.5]
    (reason,) = scored.group.dropped
    assert "'tidy'" in reason


@pytest.mark.parametrize("reward", [{"kind": ENVIRONMENT}, RUBRIC])
def test_the_judge_sees_the_environments_task(reward: dict[str, Any], server: Server) -> None:
    placeholder = {"role": "user", "content": "(task shop/17)"}
    prompt = replace(AGENTIC, messages=(placeholder,), reward=reward)
    tasks = ("Sell me a lock pick.", "Sell me a rope.")
    group = graded(prompt, *[{"correct": 1.0}] * 2)
    trajectories = tuple(
        replace(one, messages=({"role": "user", "content": task}, *one.messages), opening=1)
        for one, task in zip(group.trajectories, tasks, strict=True)
    )
    weights = {"maths": {"correct": 1.0, "refusal": 0.0}}
    with (
        JudgeService(settings(server.url)) as judge,
        new_scorer(weights, environments=["maths"], judge=judge) as scorer,
    ):
        scorer.submit(replace(group, trajectories=trajectories)).result()
    systems = [request["messages"][0]["content"] for request in server.requests]
    assert len(systems) == (4 if reward is RUBRIC else 2)
    assert not any("(task" in system for system in systems)
    assert all(sum(task in one for one in systems) == len(systems) // 2 for task in tasks)


def thinks(text: str) -> dict[str, Any]:
    return {"content": "", "reasoning_content": text}


@pytest.mark.parametrize(
    ("messages", "answer", "thinking"),
    [
        ([{"content": ENGLISH}, {"content": DEUTSCH}], 0.5, 1.0),
        ([thinks(ENGLISH), {"content": DEUTSCH}], 1.0, 0.0),
        ([thinks(DEUTSCH), thinks(ENGLISH), {"content": DEUTSCH}], 1.0, 0.5),
    ],
)
def test_language_covers_all_sampled_turns(
    messages: list[dict[str, Any]], answer: float, thinking: float
) -> None:
    weights = {"correct": 1.0, "language_answer": 0.5, "language_thinking": 0.5}
    scored = score(Group(prompt=AGENTIC, trajectories=(turns(*messages),)), weights)
    assert scored.parts_G[0]["language_answer"] == pytest.approx(answer, abs=0.05)
    assert scored.parts_G[0]["language_thinking"] == pytest.approx(thinking, abs=0.05)


def test_an_opening_is_not_sampled() -> None:
    one = turns({"content": DEUTSCH})
    shown = ({"role": "user", "content": ENGLISH}, {"role": "assistant", "content": ENGLISH})
    one = replace(one, messages=(*shown, *one.messages), opening=3)
    scored = score(Group(prompt=AGENTIC, trajectories=(one,)), {"correct": 1.0, "language": 0.5})
    assert scored.parts_G[0]["language"] == 1.0


def test_length_counts_sampled_tokens_of_all_segments() -> None:
    long, short = turns({"content": DEUTSCH}, tokens=60), turns({"content": DEUTSCH}, tokens=20)
    between = replace(short.segments[0], trainable_T=np.arange(21) > 15)
    several = replace(long, segments=(*short.segments, between, between), sibling=1)
    assert several.sampled_tokens == 30 and several.total_tokens == 63
    rule = LengthRule(linear=0.1, limit=100)
    scored = score(Group(prompt=AGENTIC, trajectories=(long, several)), {"correct": 1.0}, rule)
    assert [parts["length_cost"] for parts in scored.parts_G] == pytest.approx([0.06, 0.03])
    assert scored.rewards_G.tolist() == pytest.approx([1 - 0.015, 1 + 0.015])


@pytest.mark.parametrize("may_outweigh", [False, True])
def test_a_crash_gains_nothing_by_being_short(may_outweigh: bool) -> None:
    rule = LengthRule(linear=0.5, limit=100, wrong_too=True, may_outweigh=may_outweigh)
    honest, crash = turns({"content": ""}, tokens=90), turns({"content": ""}, tokens=2)
    honest = replace(honest, verdict=Verdict(parts={"correct": 0.0}))
    crash = replace(crash, sibling=1, finish_reason="crash")
    scored = score(Group(prompt=AGENTIC, trajectories=(honest, crash)), {"correct": 1.0}, rule)
    assert scored.rewards_G[1] <= scored.rewards_G[0]


@pytest.mark.parametrize("truncated", ["keep", "zero", "drop"])
def test_a_crash_gets_the_lowest_reward(truncated: Literal["keep", "zero", "drop"]) -> None:
    group = graded(AGENTIC, {"correct": 1.0, "cost": 0.2}, {"correct": 0.0, "cost": 1.0}, {})
    *others, last = group.trajectories
    crash = replace(last, finish_reason="crash", verdict=Verdict(parts={"correct": 0.0}))
    group = replace(group, trajectories=(*others, crash))
    weights = {"correct": 1.0, "cost": -0.5}
    scored = score(group, weights, LengthRule(truncated=truncated))
    assert scored.rewards_G.tolist() == pytest.approx([0.9, -0.5, -0.5])
    assert scored.parts_G[2] == {"correct": 0.0, "cost": 1.0, "error": 0.0}
    assert not scored.left_out


def test_a_programs_answer_is_graded_but_not_sampled() -> None:
    question = ({"role": "user", "content": "What is one and two, and why is it so?"},)
    prompt = replace(PROMPT, environment="shop", messages=question)
    said = {"role": "assistant", "content": "The sum of one and two is three, as we all know."}
    told = [{"role": "assistant", "content": text, "name": PROGRAM} for text in ("3", DEUTSCH)]
    group = graded(prompt, {}, {})
    both = tuple(
        replace(each, messages=(*question, said, last))
        for each, last in zip(group.trajectories, told, strict=True)
    )
    scored = score(replace(group, trajectories=both), {"correct": 1.0, "language": 0.5})
    assert [part["correct"] for part in scored.parts_G] == [1.0, 0.0]
    assert [part["language"] for part in scored.parts_G] == [1.0, 1.0]
