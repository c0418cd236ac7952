"""What may be sampled ahead, in what order it is trained on, what is filtered, and what a resumed
run asks again."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rl.buffer import GroupBuffer, Lag, uninformative
from keel.rl.types import Group, Prompt, ScoredGroup, Segment, Trajectory


def prompt(name: str) -> Prompt:
    return Prompt(prompt_id=name, domain="d", messages=({"role": "user", "content": name},))


def scored(
    name: str,
    correct: tuple[float, ...] = (1.0, 0.0),
    versions: tuple[int, ...] = (0,),
    rewards: tuple[float, ...] | None = None,
) -> ScoredGroup:
    """Answers of as many tokens as there are versions."""
    tokens = len(versions)
    segment = Segment(
        prompt_id=name,
        token_ids_T=np.arange(tokens + 1, dtype=np.int32),
        trainable_T=np.array([False] + [True] * tokens),
        logp_old_T=np.array([0.0] + [-1.0] * tokens, np.float32),
        version_T=np.array([-1, *versions], np.int32),
    )
    trajectories = tuple(
        Trajectory(
            prompt_id=name, sibling=i, segments=(segment,), finish_reason="stop", messages=({},)
        )
        for i in range(len(correct))
    )
    values = np.array(correct if rewards is None else rewards, np.float32)
    return ScoredGroup(
        group=Group(prompt=prompt(name), trajectories=trajectories),
        rewards_G=values,
        parts_G=tuple({"correct": value} for value in correct),
        advantages_G=values - values.mean() if len(values) else values,
    )


def buffer(batch: int = 2, steps: int = 10, lag: Lag | None = None, **how: Any) -> GroupBuffer:
    return GroupBuffer(batch=batch, steps=steps, lag=lag or Lag(), **how)


def fill(one: GroupBuffer) -> list[int]:
    return [one.drawn(prompt(f"p{i}")) for i in range(one.room())]


def test_on_policy_there_is_room_for_one_batch_until_its_weights_are_adopted() -> None:
    one = buffer()
    numbers = fill(one)
    assert len(numbers) == 2 and one.room() == 0
    for number in reversed(numbers):
        assert not one.ready()
        one.arrived(number, scored(f"g{number}"))
    assert one.ready()
    names = [group.group.prompt.prompt_id for group in one.take().groups]
    assert names == [f"g{number}" for number in numbers], "in the order they were drawn"
    assert one.room() == 0, "trained on, but the engines do not have the weights yet"
    one.adopted(1)
    assert one.room() == 2


def test_the_last_steps_ask_for_no_more_than_they_train_on() -> None:
    one = buffer(steps=3, lag=Lag(batches=5), start=1)
    assert one.room() == 4


@settings(deadline=None)
@given(
    lag=st.integers(0, 3),
    every=st.integers(1, 3),
    updates=st.integers(1, 2),
    refills=st.sampled_from([0.0, 0.7, 2.0]),
    random=st.randoms(use_true_random=False),
)
def test_whatever_order_groups_finish_in_they_train_in_the_order_they_were_drawn(
    lag: int, every: int, updates: int, refills: float, random: Random
) -> None:
    """A run of random luck: engines adopt weights every so many steps, groups take what they take,
    and about a third of them teach nothing. None is trained on past the lag, none is lost or
    trained on twice, the run never stalls, and what is filtered depends on no arrival."""
    bound = Lag(batches=lag, publish_every=every, updates=updates)
    one = buffer(batch=3, steps=8, lag=bound, filter_by="correct", max_refills=refills)
    luck = Random(7)
    drawn: list[tuple[int, bool]] = []
    """Version of the engines, and whether the group teaches anything, by number."""
    flying: list[int] = []
    step, engines = 0, 0
    trained, discarded = list[int](), list[int]()
    while step < 8:
        for number in fill(one):
            drawn.append((engines, luck.random() > 0.3))
            flying.append(number)
        assert len(flying) <= 3 * (lag + every)
        if not one.ready():
            assert flying, "stalled"
            assert set(one.awaited()) <= set(flying) and one.awaited()
            number = flying.pop(random.randrange(len(flying)))
            version, useful = drawn[number - 1]
            correct = (1.0, 0.0) if useful else (0.0, 0.0)
            one.arrived(number, scored(str(number), correct, versions=(version,)))
            continue
        batch = one.take()
        trained += [int(group.group.prompt.prompt_id) for group in batch.groups]
        discarded += [int(group.group.prompt.prompt_id) for group in batch.discarded]
        for group in batch.groups:
            version, _ = drawn[int(group.group.prompt.prompt_id) - 1]
            assert 0 <= step * updates - version <= bound.versions
        assert sum(m.value for m in batch.metrics.values()) == len(batch.discarded)
        step += 1
        if step % every == 0:
            engines = step * updates
            one.adopted(step)
    assert trained == sorted(trained) and len(trained) == 24
    assert sorted(trained + discarded) == list(range(1, max(trained) + 1))
    # One at a time, in the order of the draws:
    expected: list[int] = []
    members = spent = 0
    for number in range(1, max(trained) + 1):
        if not drawn[number - 1][1] and spent < int(refills * 3):
            spent += 1
            expected.append(number)
        elif (members := members + 1) % 3 == 0:
            spent = 0
    assert discarded == expected


def test_a_step_waits_for_its_own_groups_and_for_no_others() -> None:
    one = buffer(batch=2, lag=Lag(batches=1))
    first, second, third, fourth = fill(one)
    assert one.awaited() == [first, second]
    for number in (second, third, fourth):
        one.arrived(number, scored(f"g{number}"))
    assert not one.ready() and one.awaited() == [first]
    one.arrived(first, scored(f"g{first}", versions=(0, 3)))  # its first token is as old as can be
    names = [[group.group.prompt.prompt_id for group in one.take().groups] for _ in range(2)]
    assert names == [["g1", "g2"], ["g3", "g4"]]
    assert one.awaited() == []


@pytest.mark.parametrize(
    ("correct", "rewards", "by", "why"),
    [
        ((1.0, 1.0), None, "reward", "all_correct"),
        ((0.0, 0.0), None, "reward", "all_wrong"),
        ((0.5, 0.5), None, "reward", "all_equal"),
        ((1.0, 1.0), (1.0, 0.9), "reward", None),
        ((1.0, 1.0), (1.0, 0.9), "correct", "all_correct"),
        ((1.0, 0.0), None, "correct", None),
        ((0.0, 0.0), None, "none", None),
        ((), None, "correct", None),
    ],
)
def test_what_teaches_nothing(correct: Any, rewards: Any, by: Any, why: Any) -> None:
    assert uninformative(scored("p", correct, rewards=rewards), by) == why


def test_a_filtered_group_frees_its_slot_while_the_budget_lasts() -> None:
    one = buffer(batch=2, filter_by="correct", max_refills=0.5)
    first, second = fill(one)
    one.arrived(first, scored("a", (1.0, 1.0)))
    assert one.room() == 1
    (third,) = fill(one)
    one.arrived(second, scored("b", (0.0, 0.0)))  # one refill a batch: this one stays
    assert one.room() == 0
    one.arrived(third, scored("c"))
    batch = one.take()
    assert [group.group.prompt.prompt_id for group in batch.groups] == ["b", "c"]
    assert [group.group.prompt.prompt_id for group in batch.discarded] == ["a"]
    assert batch.metrics["rollout/filtered_all_correct"].value == 1


def test_the_budget_is_not_for_those_that_arrive_first() -> None:
    """They are short. The first drawn has it, if it needs it."""
    one = buffer(batch=2, filter_by="correct", max_refills=0.5)
    first, second = fill(one)
    one.arrived(second, scored("short", (0.0, 0.0)))
    assert one.room() == 0, "the one before it may need the refill"
    one.arrived(first, scored("long", (0.0, 0.0)))
    assert one.room() == 1
    (third,) = fill(one)
    one.arrived(third, scored("c"))
    assert [g.group.prompt.prompt_id for g in one.take().discarded] == ["long"]


def test_a_refill_does_not_wait_for_a_straggler_where_the_budget_has_enough_for_both() -> None:
    one = buffer(batch=2, filter_by="correct", max_refills=1.0)
    first, second = fill(one)
    one.arrived(second, scored("short", (0.0, 0.0)))
    assert one.room() == 1
    (third,) = fill(one)
    assert [p.prompt_id for p in one.unfinished()] == ["p0", "p0"], "what is filtered is done with"
    one.arrived(third, scored("c"))
    one.arrived(first, scored("long"))
    batch = one.take()
    assert [group.group.prompt.prompt_id for group in batch.groups] == ["long", "c"]
    assert [group.group.prompt.prompt_id for group in batch.discarded] == ["short"]


def test_what_was_drawn_and_not_trained_on_is_asked_again() -> None:
    one = buffer(batch=2, steps=9, lag=Lag(batches=2))
    numbers = [one.drawn(prompt(name)) for name in "abcdef"]
    for index in (2, 0, 3, 1, 4):  # a batch, another, and a part of the third
        one.arrived(numbers[index], scored("abcdef"[index]))
    one.take()
    assert [p.prompt_id for p in one.unfinished()] == ["c", "d", "e", "f"]
