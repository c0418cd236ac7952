"""The buffer: room, order of training, filtering and resumption."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.configs.schema import AlgorithmConfig
from keel.trainer.batch_stream import GroupBuffer, filter_reason
from tests.rl.rollouts import finished, prompt


def buffer(batch: int = 2, steps: int = 10, start: int = 0, **how: Any) -> GroupBuffer:
    return GroupBuffer(AlgorithmConfig(prompts_per_step=batch, **how), steps=steps, start=start)


def fill(one: GroupBuffer) -> list[int]:
    return [one.submitted(prompt(f"p{i}")) for i in range(one.room())]


def test_resumed_room_ends_at_the_next_publication() -> None:
    whole = buffer(steps=8, publish_every=4)
    assert whole.room() == 4 * 2
    resumed = buffer(steps=8, publish_every=4, start=2)
    assert resumed.room() == 2 * 2
    fill(resumed)
    resumed.engines_updated(4)
    assert resumed.room() == 4 * 2


@given(
    lag=st.integers(0, 3),
    every=st.integers(1, 3),
    updates=st.integers(1, 2),
    refills=st.sampled_from([0.0, 0.7, 2.0]),
    random=st.randoms(use_true_random=False),
)
def test_groups_train_in_prompt_order_within_the_lag(
    lag: int, every: int, updates: int, refills: float, random: Random
) -> None:
    """Simulate a run with random arrivals, in which about a third of the groups are filtered.

    No group exceeds the lag, is lost or trains twice, and filtering is independent of arrival.
    """
    bound: Any = {"max_lag": lag, "publish_every": every}
    one = buffer(batch=3, steps=8, **bound, filter_groups="correct", max_refills=refills)
    draws = Random(7)
    submitted: list[tuple[int, bool]] = []
    """Engine version and usefulness of each group, by number."""
    flying: list[int] = []
    step, engines = 0, 0
    trained, discarded = list[int](), list[int]()
    while step < 8:
        for number in fill(one):
            submitted.append((engines, draws.random() > 0.3))
            flying.append(number)
        assert len(flying) <= 3 * (lag + every)
        if not one.ready():
            assert flying, "stalled"
            assert set(one.awaited()) <= set(flying) and one.awaited()
            number = flying.pop(random.randrange(len(flying)))
            version, useful = submitted[number - 1]
            correct = (1.0, 0.0) if useful else (0.0, 0.0)
            one.arrived(number, finished(str(number), correct, versions=(version,)))
            continue
        batch = one.take()
        trained += [int(group.group.prompt.prompt_id) for group in batch.groups]
        discarded += [int(group.group.prompt.prompt_id) for group in batch.discarded]
        for group in batch.groups:
            version, _ = submitted[int(group.group.prompt.prompt_id) - 1]
            assert 0 <= step * updates - version <= (lag + every - 1) * updates
        assert sum(m.value for m in batch.metrics.values()) == len(batch.discarded)
        step += 1
        if step % every == 0:
            engines = step * updates
            one.engines_updated(step)
    assert trained == sorted(trained) and len(trained) == 24
    assert sorted(trained + discarded) == list(range(1, max(trained) + 1))
    # The filter applied to one group at a time, in order:
    expected: list[int] = []
    members = spent = 0
    for number in range(1, max(trained) + 1):
        if not submitted[number - 1][1] and spent < int(refills * 3):
            spent += 1
            expected.append(number)
        elif (members := members + 1) % 3 == 0:
            spent = 0
    assert discarded == expected


def test_a_step_waits_only_for_its_groups() -> None:
    one = buffer(batch=2, max_lag=1)
    first, second, third, fourth = fill(one)
    assert one.awaited() == [first, second]
    for number in (second, third, fourth):
        one.arrived(number, finished(f"g{number}"))
    assert not one.ready() and one.awaited() == [first]
    one.arrived(first, finished(f"g{first}", versions=(0, 3)))
    names = [[group.group.prompt.prompt_id for group in one.take().groups] for _ in range(2)]
    assert names == [["g1", "g2"], ["g3", "g4"]]
    assert one.awaited() == []


@pytest.mark.parametrize(
    ("correct", "rewards", "by", "reason"),
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
def test_filter_reasons(correct: Any, rewards: Any, by: Any, reason: Any) -> None:
    assert filter_reason(finished("p", correct, rewards=rewards), by) == reason


def test_filtered_groups_free_slots_within_the_budget() -> None:
    one = buffer(batch=2, filter_groups="correct", max_refills=0.5)
    first, second = fill(one)
    one.arrived(first, finished("a", (1.0, 1.0)))
    assert one.room() == 1
    (third,) = fill(one)
    one.arrived(second, finished("b", (0.0, 0.0)))  # the budget is one refill per batch
    assert one.room() == 0
    one.arrived(third, finished("c"))
    batch = one.take()
    assert [group.group.prompt.prompt_id for group in batch.groups] == ["b", "c"]
    assert [group.group.prompt.prompt_id for group in batch.discarded] == ["a"]
    assert batch.metrics["rollout/filtered_all_correct"].value == 1


def test_unfinished_prompts_keep_their_order() -> None:
    one = buffer(batch=2, steps=9, max_lag=2)
    numbers = [one.submitted(prompt(name)) for name in "abcdef"]
    for index in (2, 0, 3, 1, 4):
        one.arrived(numbers[index], finished("abcdef"[index]))
    one.take()
    assert [p.prompt_id for p in one.unfinished()] == ["c", "d", "e", "f"]
