"""What may be sampled ahead, what is thrown away, and what a resumed run asks again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.buffer import GroupBuffer, Lag, oldest_version, uninformative
from rl.types import Group, Prompt, ScoredGroup, Segment, Trajectory


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
        assert not one.ready(0)
        one.arrived(number, scored(f"g{number}"))
    assert one.ready(0)
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
    order=st.lists(st.integers(0, 30), min_size=30, max_size=60),
)
def test_whatever_order_groups_finish_in_none_is_trained_on_past_the_lag(
    lag: int, every: int, order: list[int]
) -> None:
    """A run of random luck: engines adopt weights every so many steps, groups take what they take.
    Nothing is lost, nothing is trained on twice, and the run never stalls."""
    one = buffer(batch=3, steps=8, lag=Lag(batches=lag, publish_every=every))
    flying: list[tuple[int, int]] = []
    step, engines, trained = 0, 0, list[int]()
    while step < 8:
        ready = one.ready(step)
        flying += [(number, engines) for number in fill(one)]
        assert len(flying) <= 3 * (lag + every)
        if ready:
            batch = one.take()
            ages = [step - (oldest_version(group) or 0) for group in batch.groups]
            assert max(ages) <= lag + every - 1
            trained += [int(group.group.prompt.prompt_id) for group in batch.groups]
            step += 1
            if step % every == 0:
                engines = step
                one.adopted(step)
            continue
        assert flying, "stalled"
        number, version = flying.pop((order.pop() if order else 0) % len(flying))
        one.arrived(number, scored(str(number), versions=(version,)))
    assert len(trained) == len(set(trained)) == 24


def test_stale_groups_are_counted_and_replaced() -> None:
    one = buffer(batch=1, lag=Lag(batches=1))
    old, new = fill(one)
    one.arrived(new, scored("new", versions=(0, 3)))  # its first token is as old as can be
    assert not one.ready(version=2)
    assert one.room() == 1
    one.arrived(old, scored("old", versions=(1,)))
    assert one.ready(version=2)
    batch = one.take()
    assert [group.group.prompt.prompt_id for group in batch.discarded] == ["new"]
    assert batch.metrics["rollout/stale"].value == 1


@pytest.mark.parametrize(
    ("correct", "rewards", "by", "why"),
    [
        ((1.0, 1.0), None, "reward", "right"),
        ((0.0, 0.0), None, "reward", "wrong"),
        ((0.5, 0.5), None, "reward", "even"),
        ((1.0, 1.0), (1.0, 0.9), "reward", None),
        ((1.0, 1.0), (1.0, 0.9), "correct", "right"),
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
    assert one.ready(0)
    batch = one.take()
    assert [group.group.prompt.prompt_id for group in batch.groups] == ["b", "c"]
    assert batch.metrics["rollout/filtered_right"].value == 1


def test_what_was_drawn_and_not_trained_on_is_asked_again() -> None:
    one = buffer(batch=1, steps=9, lag=Lag(batches=2))
    numbers = [one.drawn(prompt(name)) for name in "abc"]
    one.arrived(numbers[2], scored("c"))
    one.arrived(numbers[0], scored("a"))
    assert one.ready(0)
    one.take()
    assert [p.prompt_id for p in one.unfinished()] == ["b", "c"]
