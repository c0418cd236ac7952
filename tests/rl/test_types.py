"""Types validate themselves, futures combine, and JSON is strict."""

import gc
import json
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.rl import futures, strict_json
from keel.rl.futures import LoopThread, failed, then, when_all
from keel.rl.recordings import SamplingMasks
from keel.rl.types import ScoredGroup
from tests.rl.rollouts import prompt, scored, segment, trajectory

SPANS = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6)


@given(SPANS, SPANS, st.data())
def test_sampling_masks_behave_like_lists_of_spans(first, second, data) -> None:
    a, b = SamplingMasks.from_lists(first), SamplingMasks.from_lists(second)
    both = SamplingMasks.concat([a, b])
    spans = first + second
    assert [both[t].tolist() for t in range(len(both))] == spans
    assert both.sizes().tolist() == [len(span) for span in spans]
    stop = data.draw(st.integers(0, len(spans)))
    start = data.draw(st.integers(0, stop))
    cut = both.slice(start, stop)
    assert [cut[t].tolist() for t in range(len(cut))] == spans[start:stop]
    assert SamplingMasks.empty(3).sizes().tolist() == [0, 0, 0]
    assert len(SamplingMasks.concat([])) == 0


@pytest.mark.parametrize("offsets", [[0, 1], [1, 2], [], [[0, 2]], [0, 2, 1, 2]])
def test_sampling_masks_validate_their_offsets(offsets: list[Any]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        SamplingMasks(ids=np.zeros(2, np.int32), offsets=np.asarray(offsets, np.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version_T": np.zeros(3, np.int32)}, "version_T"),
        ({"sampling_mask": SamplingMasks.empty(5)}, "sampling_mask"),
        ({"routes_TLK": np.zeros((4, 2), np.int16)}, "routes_TLK"),
        ({"trainable_T": np.ones(4, np.bool_)}, "trainable"),
        ({"logp_old_T": np.full(4, -np.inf, np.float32)}, "logp_old_T"),
        ({"logp_old_T": np.full(4, 0.5, np.float32)}, "logp_old_T"),
    ],
)
def test_invalid_segments_name_prompt_and_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"segment of q: .*{message}"):
        replace(segment(name="q"), **change)


def test_invalid_prompts_and_trajectories_are_named() -> None:
    with pytest.raises(ValueError, match="prompt q: messages"):
        prompt("q", messages=())
    for kl_coef in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=r"prompt q: kl_coef"):
            prompt("q", kl_coef=kl_coef)
    with pytest.raises(ValueError, match="trajectory q/3"):
        trajectory(segment(name="q", context=4), sibling=3)


def test_invalid_scored_groups_name_the_field() -> None:
    group = scored([trajectory(segment(name="q"))], [1.0])
    with pytest.raises(ValueError, match="group of q: rewards_G"):
        replace(group, rewards_G=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="group of q: advantages_G"):
        replace(group, advantages_G=np.full(1, np.nan, np.float32))


@pytest.mark.parametrize(("rewards", "uniform"), [([1, 1], True), ([0, 1], False), ([], False)])
def test_uniform_groups(rewards: list[float], uniform: bool) -> None:
    group: ScoredGroup = scored(
        [trajectory(segment(), sibling=i) for i in range(len(rewards))], rewards
    )
    assert group.uniform == uniform


def done(value: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return future


def test_when_all_runs_once_after_the_last() -> None:
    parts, calls = [Future[int](), Future[int]()], []
    both = when_all(parts, lambda: calls.append(1) or sum(part.result() for part in parts))
    parts[1].set_result(3)
    assert not both.done()
    parts[0].set_result(4)
    assert both.result(timeout=1) == 7 and calls == [1]
    assert when_all([], lambda: 5).result(timeout=1) == 5


def test_when_all_propagates_errors() -> None:
    parts = [done(1), failed(ValueError("no"))]
    with pytest.raises(ValueError, match="no"):
        when_all(parts, lambda: [part.result() for part in parts]).result(timeout=1)
    cancelled: Future[int] = Future()
    whole = when_all([cancelled], cancelled.result)
    cancelled.cancel()
    with pytest.raises(CancelledError):
        whole.result(timeout=1)


def test_then_chains_results_and_errors() -> None:
    assert then(done(2), lambda two: done(two + 1)).result(timeout=1) == 3
    for broken in (
        then(failed(KeyError("first")), done),
        then(done(1), lambda _: failed(KeyError("second"))),
        then(done(1), lambda _: {}["raised"]),
    ):
        with pytest.raises(KeyError):
            broken.result(timeout=1)


def test_a_loop_thread_tells_its_time_limit_from_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    async def fail() -> None:
        raise TimeoutError("of its own")

    async def hang() -> None:
        released.wait(60)

    with pytest.raises(TimeoutError, match="of its own"):
        LoopThread("failing").stop(fail())
    assert LoopThread("ending").stop(futures.cancel_tasks())
    monkeypatch.setattr(futures, "JOIN_S", 0.01)
    assert not LoopThread("hanging").stop(hang(), 0.01)
    released.set()


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        '{"a": [-Infinity]}',
        "[1e999]",
        "1" * 5000,
        "[" * 101 + "]" * 101,
        '{"a": ' * 60 + "[" * 60 + "]" * 60 + "}" * 60,
        "[" * 100_000,
        "{",
        b"\xff",
    ],
)
def test_invalid_text_is_a_value_error(text: str | bytes, request: pytest.FixtureRequest) -> None:
    gc.disable()  # other tests' finalizers would fail at the recursion limit
    request.addfinalizer(gc.enable)
    with pytest.raises(ValueError):
        strict_json.load(text)


def test_valid_text_is_parsed_like_python() -> None:
    for value in (None, True, 1, -2.5e300, "é", [[]] * 3, {"a": {"b": [1, "x"]}}, 10**400):
        assert strict_json.load(json.dumps(value)) == value
    deep = "[" * 100 + "]" * 100
    assert strict_json.load(deep) == json.loads(deep)
    with pytest.raises(ValueError, match="99"):
        strict_json.load(deep, max_depth=99)
