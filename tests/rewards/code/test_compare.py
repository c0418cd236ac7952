"""Values without an order, and rounding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rewards.code import compare
from keel.rewards.code.compare import same_text, same_value

LOW = 1.0 - 1e-12
NUMBERS = st.sampled_from([0, 1, 1.0, 1.004, 1.008, 1.012, 2.0, 2.009, math.nan])
ITEMS = st.one_of(NUMBERS, st.tuples(NUMBERS, NUMBERS).map(list))


def a_set(*items: Any) -> dict[str, Any]:
    return {"~set": list(items)}


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        (a_set([1.0, 7], [1.0, 5]), a_set([1.0000000001, 5], [1.0, 7]), True),
        (a_set([1.0, 7], [1.0, 5]), a_set([1.0000000001, 5], [1.0, 5]), False),
        (a_set([1, 7], [1, 5]), a_set([1, 5], [1, 6]), False),
        (a_set(math.nan, math.inf), a_set(math.inf, math.nan), True),
        (a_set([1, 2], a_set(1, 2)), a_set(a_set(2, 1), [1, 2]), True),
        (
            {"~dict": [[[1.0, 1], "a"], [[1.0, 0], "b"]]},
            {"~dict": [[[LOW, 1], "a"], [[1.0, 0], "b"]]},
            True,
        ),
        (
            a_set([1.0, a_set([1.0, 2], [1.0, 1])], [1.0, a_set()]),
            a_set([LOW, a_set([LOW, 2], [1.0, 1])], [1.0, a_set()]),
            True,
        ),
    ],
)
def test_rounding_changes_the_order_and_not_the_value(wanted: Any, found: Any, same: bool) -> None:
    assert same_value(wanted, found) is same


@pytest.mark.parametrize("found", [{"~dict": 7}, {"~tuple": "x"}, {"~set": 5}])
def test_what_is_no_collection_is_equal_to_nothing(found: Any) -> None:
    assert not same_value({"~set": 5}, found)
    assert not same_value([{"~set": 5}], [found])


@pytest.mark.parametrize("found", ["１２", "1_2", "1_2.0", "٣٤"])
def test_numbers_to_python_alone_are_none(found: str) -> None:
    assert not same_text("12", found, 1e-6) and not same_text("34", found, 1e-6)
    assert same_text("12", "12.0000001", 1e-6) and same_text(found, found, 1e-6)


@settings(max_examples=200)
@given(st.lists(st.tuples(ITEMS, ITEMS), max_size=5), st.booleans())
def test_items_are_equal_if_they_are_in_some_order(
    pairs: list[tuple[Any, Any]], other: bool
) -> None:
    wanted = [one for one, _ in pairs]
    found = [two if other else one for one, two in pairs][::-1]
    orders = (zip(wanted, order, strict=True) for order in itertools.permutations(found))
    right = any(all(same_value(a, b, 0.005) for a, b in order) for order in orders)
    assert same_value(a_set(*wanted), a_set(*found), 0.005) is right


CORNERS = st.tuples(*2 * [st.integers(0, 3)]).map(lambda point: [0.003 * each for each in point])


@settings(max_examples=200)
@given(st.lists(st.tuples(CORNERS, CORNERS), min_size=3, max_size=4))
def test_an_item_that_is_like_several_is_left_to_whom_needs_it(
    pairs: list[tuple[list[float], list[float]]],
) -> None:
    """Points of a plane, each like those around it: whom the first of them takes is another's."""
    wanted, found = ([*side] for side in zip(*pairs, strict=True))
    orders = (zip(wanted, order, strict=True) for order in itertools.permutations(found))
    right = any(all(same_value(a, b, 0.005) for a, b in order) for order in orders)
    assert same_value(a_set(*wanted), a_set(*found), 0.005) is right


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    close = compare._close

    def counted(*numbers: Any) -> bool:
        nonlocal compared
        compared += 1
        return close(*numbers)

    monkeypatch.setattr(compare, "_close", counted)
    monkeypatch.setattr(compare, "MOST_LOOKS", 5_000)
    wanted = [[1.0, number] for number in range(2_000)]
    reversed_ = [[1.0 - number * 1e-14, number] for number in range(2_000)]
    for found in (reversed_, [[LOW, 0.5]] * 2_000):
        compared = 0
        assert not same_value(a_set(*wanted), a_set(*found))
        assert compared < 2 * len(wanted) + 5_000


def test_of_many_items_few_are_alike() -> None:
    wanted = [[float(number // 4), number] for number in range(2_000)]
    found = [[one * (1 - number * 1e-14), number] for one, number in wanted]
    assert same_value(a_set(*wanted), a_set(*found))
    found[7][1] = 8
    assert not same_value(a_set(*wanted), a_set(*found))


def test_integers_of_programs() -> None:
    assert not same_value(1000000007, 1000000007.9) and same_value(1000000007, 1000000007.0)
    assert not same_value(1000000006, 1000000506.0, 1e-6) and same_value(3, 3.0000000001)
    assert not same_value(5, 1e9, 0.9) and not same_value(5.0, 1e9, 0.9)
    assert not same_text("1000000006", "1000000506", 1e-6)
    assert not same_text("1000000006", "1000000506.0", 1e-6)
    assert same_text("1000000006.0", "1000000506", 1e-6) and same_value(0.1, 0.1000000001, 1e-6)
    assert not same_value(float("inf"), -float("inf"), 0.5) and same_text("inf", "Infinity", 0.1)
