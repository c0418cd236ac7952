"""What may be sampled ahead, in what order it is trained on, what is filtered, and what a resumed
run asks again."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rl.buffer import GroupBuffer, Lag, uninformative
from keel.rl.summary import summarize
from tests.rl.rollouts import finished, prompt


def buffer(batch: int = 2, steps: int = 10, lag: Lag | None = None, **how: Any) -> GroupBuffer:
    return GroupBuffer(batch=batch, steps=steps, lag=lag or Lag(), **how)


def fill(one: GroupBuffer) -> list[int]:
    return [one.submitted(prompt(f"p{i}")) for i in range(one.room())]


def test_on_policy_there_is_room_for_one_batch_until_its_weights_are_adopted() -> None:
    one = buffer()
    numbers = fill(one)
    assert len(numbers) == 2 and one.room() == 0
    for number in reversed(numbers):
        assert not one.ready()
        one.arrived(number, finished(f"g{number}"))
    assert one.ready()
    names = [group.group.prompt.prompt_id for group in one.take().groups]
    assert names == [f"g{number}" for number in numbers], "in the order of their prompts"
    assert one.room() == 0, "trained on, but the engines do not have the weights yet"
    one.adopted(1)
    assert one.room() == 2


def test_the_last_steps_ask_for_no_more_than_they_train_on() -> None:
    one = buffer(steps=3, lag=Lag(batches=5), start=1)
    assert one.room() == 4


def test_a_resumed_run_samples_up_to_the_next_regular_publication() -> None:
    whole = buffer(steps=8, lag=Lag(publish_every=4))
    assert whole.room() == 4 * 2
    resumed = buffer(steps=8, lag=Lag(publish_every=4), start=2)
    assert resumed.room() == 2 * 2
    fill(resumed)
    resumed.adopted(4)
    assert resumed.room() == 4 * 2


@settings(deadline=None)
@given(
    lag=st.integers(0, 3),
    every=st.integers(1, 3),
    updates=st.integers(1, 2),
    refills=st.sampled_from([0.0, 0.7, 2.0]),
    random=st.randoms(use_true_random=False),
)
def test_whatever_order_groups_finish_in_they_train_in_the_order_of_their_prompts(
    lag: int, every: int, updates: int, refills: float, random: Random
) -> None:
    """A run of random luck: engines adopt weights every so many steps, groups take what they take,
    and about a third of them teach nothing. None is trained on past the lag, none is lost or
    trained on twice, the run never stalls, and what is filtered depends on no arrival."""
    bound = Lag(batches=lag, publish_every=every, updates=updates)
    one = buffer(batch=3, steps=8, lag=bound, filter_by="correct", max_refills=refills)
    luck = Random(7)
    asked: list[tuple[int, bool]] = []
    """Version of the engines, and whether the group teaches anything, by number."""
    flying: list[int] = []
    step, engines = 0, 0
    trained, discarded = list[int](), list[int]()
    while step < 8:
        for number in fill(one):
            asked.append((engines, luck.random() > 0.3))
            flying.append(number)
        assert len(flying) <= 3 * (lag + every)
        if not one.ready():
            assert flying, "stalled"
            assert set(one.awaited()) <= set(flying) and one.awaited()
            number = flying.pop(random.randrange(len(flying)))
            version, useful = asked[number - 1]
            correct = (1.0, 0.0) if useful else (0.0, 0.0)
            one.arrived(number, finished(str(number), correct, versions=(version,)))
            continue
        batch = one.take()
        trained += [int(group.group.prompt.prompt_id) for group in batch.groups]
        discarded += [int(group.group.prompt.prompt_id) for group in batch.discarded]
        for group in batch.groups:
            version, _ = asked[int(group.group.prompt.prompt_id) - 1]
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
        if not asked[number - 1][1] and spent < int(refills * 3):
            spent += 1
            expected.append(number)
        elif (members := members + 1) % 3 == 0:
            spent = 0
    assert discarded == expected


@settings(deadline=None)
@given(
    lag=st.integers(0, 4),
    every=st.integers(1, 2),
    updates=st.integers(1, 2),
    refills=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_trajectories_of_many_turns_over_several_updates_are_all_trained_on(
    lag: int, every: int, updates: int, refills: float, seed: int
) -> None:
    """On a clock: most groups take a few turns and some take dozens, while weights reach engines in
    flight. None is dropped or older than the lag allows, and there is always something to come."""
    random = Random(seed)
    bound = Lag(batches=lag, publish_every=every, updates=updates)
    steps, size = 6, 3
    one = buffer(batch=size, steps=steps, lag=bound, filter_by="correct", max_refills=refills)
    now, engines, step, busy = 0.0, 0, 0, False
    events: list[tuple[float, int]] = []
    """When a group's turn ends; 0: when the trainer's step does."""
    versions: dict[int, list[int]] = {}
    left: dict[int, int] = {}
    trained = discarded = 0
    spans = [0]
    while step < steps:
        for number in fill(one):
            left[number] = (
                random.randint(30, 60) if random.random() < 0.15 else random.randint(1, 4)
            )
            versions[number] = [engines]
            heappush(events, (now + random.random(), number))
        if one.ready() and not busy:
            batch = one.take()
            current = step * updates
            ages = summarize(batch.groups, version=current)["staleness/max"].value
            assert 0 <= ages <= bound.versions
            for group in batch.groups:
                seen = versions[int(group.group.prompt.prompt_id)]
                assert current - seen[0] <= bound.versions and seen[-1] <= current
                spans.append(seen[-1] - seen[0])
            trained += len(batch.groups)
            discarded += len(batch.discarded)
            busy = True
            heappush(events, (now + 5.0, 0))
        assert events, "stalled"
        now, number = heappop(events)
        if number == 0:
            step, busy = step + 1, False
            if step % every == 0:
                engines = step * updates
                one.adopted(step)
            continue
        versions[number].append(engines)  # of a turn's last token
        left[number] -= 1
        if left[number]:
            versions[number].append(engines)  # of the next one's first, after its tools
            heappush(events, (now + random.random(), number))
        else:
            correct = (0.0, 0.0) if random.random() < 0.3 else (1.0, 0.0)
            one.arrived(number, finished(str(number), correct, versions=tuple(versions[number])))
    assert trained == steps * size and trained + discarded <= len(versions)
    assert max(spans) <= bound.versions


def test_a_long_trajectory_spans_as_many_updates_as_the_lag_has() -> None:
    """It lives through all steps before its own and is then waited for: not dropped for its first
    token, which is as old as can be."""
    one = buffer(batch=2, steps=9, lag=Lag(batches=2))
    numbers = fill(one)
    for number in numbers[:5]:
        one.arrived(number, finished(str(number)))
    for step in (1, 2):
        one.take()
        one.adopted(step)
        for number in fill(one):
            one.arrived(number, finished(str(number), versions=(step,)))
    assert not one.ready() and one.room() == 0 and one.awaited() == [6], "the trainer waits"
    one.arrived(6, finished("6", versions=(0, 0, 1, 1, 2, 2)))
    batch = one.take()
    assert [group.group.prompt.prompt_id for group in batch.groups] == ["5", "6"]
    assert summarize(batch.groups, version=2)["staleness/max"].value == Lag(batches=2).versions


def test_a_step_waits_for_its_own_groups_and_for_no_others() -> None:
    one = buffer(batch=2, lag=Lag(batches=1))
    first, second, third, fourth = fill(one)
    assert one.awaited() == [first, second]
    for number in (second, third, fourth):
        one.arrived(number, finished(f"g{number}"))
    assert not one.ready() and one.awaited() == [first]
    one.arrived(
        first, finished(f"g{first}", versions=(0, 3))
    )  # its first token is as old as can be
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
        ((), None, "correct", "empty"),
        ((), None, "none", None),
        ((1.0,), None, "reward", "lone"),
    ],
)
def test_what_teaches_nothing(correct: Any, rewards: Any, by: Any, why: Any) -> None:
    assert uninformative(finished("p", correct, rewards=rewards), by) == why


def test_a_filtered_group_frees_its_slot_while_the_budget_lasts() -> None:
    one = buffer(batch=2, filter_by="correct", max_refills=0.5)
    first, second = fill(one)
    one.arrived(first, finished("a", (1.0, 1.0)))
    assert one.room() == 1
    (third,) = fill(one)
    one.arrived(second, finished("b", (0.0, 0.0)))  # one refill a batch: this one stays
    assert one.room() == 0
    one.arrived(third, finished("c"))
    batch = one.take()
    assert [group.group.prompt.prompt_id for group in batch.groups] == ["b", "c"]
    assert [group.group.prompt.prompt_id for group in batch.discarded] == ["a"]
    assert batch.metrics["rollout/filtered_all_correct"].value == 1


def test_the_budget_is_not_for_those_that_arrive_first() -> None:
    """They are short. The first submitted has it, if it needs it."""
    one = buffer(batch=2, filter_by="correct", max_refills=0.5)
    first, second = fill(one)
    one.arrived(second, finished("short", (0.0, 0.0)))
    assert one.room() == 0, "the one before it may need the refill"
    one.arrived(first, finished("long", (0.0, 0.0)))
    assert one.room() == 1
    (third,) = fill(one)
    one.arrived(third, finished("c"))
    assert [g.group.prompt.prompt_id for g in one.take().discarded] == ["long"]


def test_a_refill_does_not_wait_for_a_straggler_where_the_budget_has_enough_for_both() -> None:
    one = buffer(batch=2, filter_by="correct", max_refills=1.0)
    first, second = fill(one)
    one.arrived(second, finished("short", (0.0, 0.0)))
    assert one.room() == 1
    (third,) = fill(one)
    assert [p.prompt_id for p in one.unfinished()] == ["p0", "p0"], "what is filtered is done with"
    one.arrived(third, finished("c"))
    one.arrived(first, finished("long"))
    batch = one.take()
    assert [group.group.prompt.prompt_id for group in batch.groups] == ["long", "c"]
    assert [group.group.prompt.prompt_id for group in batch.discarded] == ["short"]


def test_what_was_drawn_and_not_trained_on_is_asked_again() -> None:
    one = buffer(batch=2, steps=9, lag=Lag(batches=2))
    numbers = [one.submitted(prompt(name)) for name in "abcdef"]
    for index in (2, 0, 3, 1, 4):  # a batch, another, and a part of the third
        one.arrived(numbers[index], finished("abcdef"[index]))
    one.take()
    assert [p.prompt_id for p in one.unfinished()] == ["c", "d", "e", "f"]
