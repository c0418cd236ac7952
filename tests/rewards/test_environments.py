"""Rewards of trajectories that an environment has graded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keel.rewards.checks import check_spec
from keel.rewards.compose import check_weights
from keel.rewards.scorer import Scorer
from keel.rl.types import ENVIRONMENT, PROGRAM, Group, Verdict
from tests.rewards.groups import PROMPT, trajectory

AGENTIC = replace(PROMPT, environment="shop", reward={"kind": ENVIRONMENT})


def graded(prompt: Any, *parts: dict[str, float], said: str = "<think></think>3") -> Group:
    found = tuple(
        replace(trajectory(i, said), verdict=Verdict(parts=given)) for i, given in enumerate(parts)
    )
    return Group(prompt=prompt, trajectories=found)


def scorer(**weights: float) -> Scorer:
    return Scorer({"maths": weights}, workers=1, environments=["maths"])


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
