"""Rewards of trajectories that an environment has graded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from keel.rewards.checks import check_spec
from keel.rewards.compose import check_weights
from keel.rewards.judge.service import JudgeService
from keel.rewards.length import LengthRule
from keel.rewards.scorer import Scorer
from keel.rl.types import ENVIRONMENT, PROGRAM, Group, Trajectory, Verdict
from tests.rewards.groups import PROMPT, trajectory
from tests.rewards.judge.judge_server import Server
from tests.rewards.judge.judging import settings

RUBRIC = {"kind": "rubric", "criteria": [{"name": "one", "text": "says 3", "weight": 1}]}
AGENTIC = replace(PROMPT, environment="shop", reward={"kind": ENVIRONMENT})


def graded(prompt: Any, *parts: dict[str, float], said: str = "<think></think>3") -> Group:
    found = tuple(
        replace(trajectory(i, said), verdict=Verdict(parts=given)) for i, given in enumerate(parts)
    )
    return Group(prompt=prompt, trajectories=found)


def scorer(**weights: float) -> Scorer:
    return Scorer({"maths": weights}, workers=0, environments=["maths"])


def test_the_verdicts_parts_are_weighed_and_nothing_else_is_looked_at() -> None:
    with scorer(correct=1.0, progress=0.5) as judge:
        group = graded(AGENTIC, {"correct": 1.0, "progress": 0.4}, {"correct": 0.0, "progress": 1})
        (scored,) = judge.score([group])
    assert scored.rewards_G.tolist() == pytest.approx([1.2, 0.5])
    assert scored.parts_G[0] == {"correct": 1.0, "progress": 0.4, "error": 0.0}


def test_a_rule_grades_where_the_prompt_has_one_and_the_verdicts_parts_stay() -> None:
    with scorer(correct=1.0, steps=0.1) as judge:
        prompt = replace(PROMPT, environment="shop")
        (scored,) = judge.score([graded(prompt, {"steps": 1.0}, {"steps": 0.0, "correct": 0.0})])
    assert scored.rewards_G.tolist() == pytest.approx([1.1, 1.0])


@pytest.mark.parametrize(
    ("weights", "parts", "message"),
    [
        ({"correct": 1.0}, {"score": 1.0}, r"verdict has no part `correct`"),
        ({"correct": 1.0, "pace": 1.0}, {"correct": 1.0}, r"no part 'pace'.*correct, error"),
    ],
)
def test_a_part_that_is_missing_is_named(
    weights: dict[str, float], parts: dict[str, float], message: str
) -> None:
    with scorer(**weights) as judge, pytest.raises(ValueError, match=f"prompt .*{message}"):
        judge.score([graded(AGENTIC, parts)])


def test_a_program_that_was_ended_before_its_verdict_leaves_its_siblings() -> None:
    """It can have none at its deadline, and the prompt's answer grades all the same."""
    prompt = replace(PROMPT, environment="shop")
    with scorer(correct=1.0, tidy=0.5) as judge:
        (scored,) = judge.score([graded(prompt, {"tidy": 1.0}, {})])
    assert scored.rewards_G.tolist() == [1.5]
    (reason,) = scored.group.dropped
    assert "gave no verdict: no part 'tidy'" in reason


def test_plain_prompts_of_such_a_domain_are_named_too() -> None:
    plain = Group(prompt=PROMPT, trajectories=(trajectory(0, "3"),))
    named = pytest.raises(ValueError, match=r"prompt file/1: no part 'pace'")
    with scorer(correct=1.0, pace=1.0) as judge, named:
        judge.score([plain])


def test_the_language_asked_for_is_that_of_the_environments_opening() -> None:
    said = (
        {"role": "user", "content": "Wo ist das nächste Hotel, und was kostet es heute Nacht?"},
        {"role": "assistant", "content": "<think></think>The hotel is near and it is not cheap."},
    )
    one = replace(trajectory(0, "3"), messages=said, verdict=Verdict(parts={"correct": 1.0}))
    with scorer(correct=1.0, language_answer=0.5) as judge:
        (scored,) = judge.score([Group(prompt=AGENTIC, trajectories=(one,))])
    assert scored.parts_G[0]["language_answer"] < 0.5


@pytest.mark.parametrize("reward", [{"kind": ENVIRONMENT}, RUBRIC])
def test_the_judge_is_told_what_the_environment_has_asked(
    reward: dict[str, Any], server: Server
) -> None:
    placeholder = {"role": "user", "content": "(task shop/17)"}
    prompt = replace(AGENTIC, messages=(placeholder,), reward=reward)
    said = ("Sell me a lock pick.", "Sell me a rope.")
    group = graded(prompt, *[{"correct": 1.0}] * 2)
    group = replace(
        group,
        trajectories=tuple(
            replace(one, messages=({"role": "user", "content": text}, *one.messages), opening=1)
            for one, text in zip(group.trajectories, said, strict=True)
        ),
    )
    weights = {"maths": {"correct": 1.0, "refusal": 0.0}}
    with (
        JudgeService(settings(server.url)) as judge,
        Scorer(weights, workers=0, environments=["maths"], judge=judge) as scorer,
    ):
        scorer.score([group])
    asked = [request["messages"][0]["content"] for request in server.requests]
    assert len(asked) == (4 if reward is RUBRIC else 2)
    assert not any("(task" in one for one in asked)
    assert all(sum(text in one for one in asked) == len(asked) // 2 for text in said)


GERMAN = {"role": "user", "content": "Wo ist das nächste Hotel, und was kostet es heute Nacht?"}
CALL = {"id": "c", "type": "function", "function": {"name": "ask", "arguments": {}}}


def turns(*said: dict[str, Any], tokens: int = 1) -> Trajectory:
    """Of several turns, each answered by a tool that speaks English."""
    messages: list[Any] = [GERMAN]
    for turn in said:
        messages += [{"role": "assistant", **turn, "tool_calls": [CALL]}]
        messages += [{"role": "tool", "content": ENGLISH, "tool_call_id": "c", "name": "ask"}]
    one = trajectory(0, "", tokens=tokens)
    return replace(one, messages=tuple(messages), opening=1, verdict=Verdict(parts={"correct": 1}))


ENGLISH = "The hotel is near the station, and a night there is not at all cheap."
DEUTSCH = "Das nächste Hotel ist gleich am Bahnhof, und eine Nacht dort ist nicht billig."


@pytest.mark.parametrize(
    ("said", "answer", "thinking"),
    [
        ([{"content": DEUTSCH}, {"content": DEUTSCH}], 1.0, 1.0),
        ([{"content": ENGLISH}, {"content": DEUTSCH}], 0.5, 1.0),
        ([{"content": DEUTSCH}, {"content": ENGLISH}], 0.5, 1.0),
        ([{"content": "", "reasoning_content": ENGLISH}, {"content": DEUTSCH}], 1.0, 0.0),
        (
            [
                {"content": "", "reasoning_content": DEUTSCH},
                {"content": "", "reasoning_content": ENGLISH},
                {"content": DEUTSCH},
            ],
            1.0,
            0.5,
        ),
    ],
)
def test_language_is_that_of_all_that_was_sampled(
    said: list[dict[str, Any]], answer: float, thinking: float
) -> None:
    """In every turn: what tools said in between is no fault of the policy's."""
    with scorer(correct=1.0, language_answer=0.5, language_thinking=0.5) as judge:
        (scored,) = judge.score([Group(prompt=AGENTIC, trajectories=(turns(*said),))])
    assert scored.parts_G[0]["language_answer"] == pytest.approx(answer, abs=0.05)
    assert scored.parts_G[0]["language_thinking"] == pytest.approx(thinking, abs=0.05)


def test_what_an_environment_shows_as_the_policys_is_not_sampled() -> None:
    """An opening may hold turns that somebody else took."""
    one = turns({"content": DEUTSCH})
    shown = ({"role": "user", "content": ENGLISH}, {"role": "assistant", "content": ENGLISH})
    one = replace(one, messages=(*shown, *one.messages), opening=3)
    with scorer(correct=1.0, language=0.5) as judge:
        (scored,) = judge.score([Group(prompt=AGENTIC, trajectories=(one,))])
    assert scored.parts_G[0]["language"] == 1.0


def test_length_is_that_of_all_that_was_sampled() -> None:
    """In every segment, and without what stands between."""
    long, short = turns({"content": DEUTSCH}, tokens=60), turns({"content": DEUTSCH}, tokens=20)
    between = replace(short.segments[0], trainable_T=np.arange(21) > 15)
    several = replace(long, segments=(*short.segments, between, between), sibling=1)
    assert several.sampled_tokens == 30 and several.total_tokens == 63
    rule = LengthRule(linear=0.1, limit=100)
    weights = {"maths": {"correct": 1.0}}
    with Scorer(weights, workers=0, environments=["maths"], lengths={"maths": rule}) as judge:
        (scored,) = judge.score([Group(prompt=AGENTIC, trajectories=(long, several))])
    assert [parts["length_cost"] for parts in scored.parts_G] == pytest.approx([0.06, 0.03])
    assert scored.rewards_G.tolist() == pytest.approx([1 - 0.015, 1 + 0.015])


@pytest.mark.parametrize("may_outweigh", [False, True])
def test_a_crash_gains_nothing_by_being_short(may_outweigh: bool) -> None:
    """Less than an honest failure is worth, whatever length counts."""
    rule = LengthRule(linear=0.5, limit=100, wrong_too=True, may_outweigh=may_outweigh)
    honest, crash = turns({"content": ""}, tokens=90), turns({"content": ""}, tokens=2)
    honest = replace(honest, verdict=Verdict(parts={"correct": 0.0}))
    crash = replace(crash, sibling=1, finish_reason="crash")
    weights = {"maths": {"correct": 1.0}}
    with Scorer(weights, workers=0, environments=["maths"], lengths={"maths": rule}) as judge:
        (scored,) = judge.score([Group(prompt=AGENTIC, trajectories=(honest, crash))])
    assert scored.rewards_G[1] <= scored.rewards_G[0]


@pytest.mark.parametrize("truncated", ["keep", "zero", "drop"])
def test_an_environment_brought_down_is_worth_the_least_there_is(
    truncated: Literal["keep", "zero", "drop"],
) -> None:
    """Also where failing costs more than nothing, and whatever becomes of what was cut off."""
    group = graded(AGENTIC, {"correct": 1.0, "cost": 0.2}, {"correct": 0.0, "cost": 1.0}, {})
    *others, last = group.trajectories
    crash = replace(last, finish_reason="crash", verdict=Verdict(parts={"correct": 0.0}))
    group = replace(group, trajectories=(*others, crash))
    weights = {"maths": {"correct": 1.0, "cost": -0.5}}
    rule = LengthRule(truncated=truncated)
    with Scorer(weights, workers=0, environments=["maths"], lengths={"maths": rule}) as judge:
        (scored,) = judge.score([group])
    assert scored.rewards_G.tolist() == pytest.approx([0.9, -0.5, -0.5])
    assert scored.parts_G[2] == {"correct": 0.0, "cost": 1.0, "error": 0.0}
    assert not scored.left_out


def test_a_group_that_lost_all_its_episodes_is_an_empty_one() -> None:
    with scorer(correct=1.0) as judge:
        (scored,) = judge.score([Group(prompt=AGENTIC, trajectories=(), dropped=("lost",))])
    assert len(scored.rewards_G) == 0 and scored.group.dropped == ("lost",)


def test_parts_of_an_environments_own_name_are_known_there_only() -> None:
    check_spec({"kind": ENVIRONMENT})
    check_weights({"shop": {"progress": 1.0}}, ["shop"])
    with pytest.raises(ValueError, match="no reward 'progress'"):
        check_weights({"shop": {"progress": 1.0}})


def test_a_programs_answer_is_graded_and_is_no_text_of_the_policys() -> None:
    prompt = replace(
        PROMPT,
        environment="shop",
        messages=({"role": "user", "content": "What is one and two, and why is it so?"},),
    )
    said = {"role": "assistant", "content": "The sum of one and two is three, as we all know."}
    (found,) = graded(prompt, {}).trajectories
    answers = ("3", "Die Summe von eins und zwei ist drei, wie wir alle wissen.")
    group = Group(
        prompt=prompt,
        trajectories=tuple(
            replace(found, sibling=i, messages=(*prompt.messages, said, answer))
            for i, answer in enumerate(
                {"role": "assistant", "content": text, "name": PROGRAM} for text in answers
            )
        ),
    )
    with scorer(correct=1.0, language=0.5) as judge:
        (scored,) = judge.score([group])
    assert [part["correct"] for part in scored.parts_G] == [1.0, 0.0]
    assert [part["language"] for part in scored.parts_G] == [1.0, 1.0]
