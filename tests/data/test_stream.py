"""Order of the prompts."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.data.stream import Stream
from keel.rl.types import Prompt

WEIGHTS = {"a": 3.0, "b": 1.0, "unused": 0.0}


def prompts(name: str, count: int) -> list[Prompt]:
    messages = ({"role": "user", "content": "?"},)
    return [Prompt(prompt_id=f"{name}/{i}", domain=name, messages=messages) for i in range(count)]


def stream(a: int = 5, b: int = 3, seed: int = 0, unused: float = 0.0) -> Stream[Prompt]:
    sources = {"a": prompts("a", a), "b": prompts("b", b), "unused": prompts("unused", 2)}
    return Stream(sources, weights=WEIGHTS | {"unused": unused}, seed=seed, content=str)


def ids(taken: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in taken]


@given(first=st.integers(0, 40), then=st.integers(0, 40))
def test_restored_stream_continues(first: int, then: int) -> None:
    uninterrupted = stream()
    taken = ids(uninterrupted.take(first))
    state = json.loads(json.dumps(uninterrupted.position()))
    rest = ids(uninterrupted.take(then))

    restored = stream()
    restored.take(3)
    restored.restore(state)
    assert ids(restored.take(then)) == rest
    assert ids(stream().take(first + then)) == taken + rest


def test_unfinished_prompts_come_first() -> None:
    first = stream()
    taken = first.take(6)
    state = json.loads(json.dumps(first.position(unfinished=taken[3:])))
    restored = stream()
    restored.restore(state)
    assert restored.position() == state
    assert ids(restored.take(5)) == ids([*taken[3:], *first.take(2)])
    assert restored.position()["unfinished"] == []


def test_epochs() -> None:
    only_a = Stream({"a": prompts("a", 20)}, weights=WEIGHTS, seed=0, content=str)
    first, second = ids(only_a.take(20)), ids(only_a.take(20))
    assert sorted(first) == sorted(second) == sorted(ids(prompts("a", 20)))
    assert len({tuple(first), tuple(second), tuple(ids(prompts("a", 20)))}) == 3


@given(count=st.integers(1, 100))
def test_weights(count: int) -> None:
    drawn = Counter(prompt.domain for prompt in stream().take(count))
    assert abs(drawn["a"] - 0.75 * count) <= 1
    assert abs(drawn["b"] - 0.25 * count) <= 1
    assert drawn["unused"] == 0


def test_states_of_other_data() -> None:
    state = stream().position()
    for other in ({"a": 6}, {"b": 4}, {"seed": 1}, {"unused": 1.0}):
        with pytest.raises(ValueError, match=next(iter(other))):
            stream(**other).restore(state)
