"""The short cut says what math-verify would say, or nothing."""

from __future__ import annotations

from fractions import Fraction

import pytest

from keel.rewards.rules.plain_maths import Number, reading, same
from tests.rewards.rules.maths_pairs import compared


def test_verdicts_are_the_librarys() -> None:
    counts, wrong = compared(seed=1, count=120)
    assert wrong == []
    assert min(counts["alike"], counts["different"]) > 15


@pytest.mark.parametrize(
    ("right", "given", "verdict"),
    [
        ("1/3", "0.333333", True),
        ("1/3", "0.33333", False),
        ("11", "11.0000004", None),
        ("3%", "9/3\\%", None),
        ("50\\%", "1/2", None),
        ("x = 3", "3", True),
        ("x = 3", "y = 3", None),
        ("[1, 2)", "\\left[1,2\\right)", True),
        ("[1, 2)", "[1, 2]", False),
        ("(2, 1)", "(1, 2)", None),
        ("(-\\infty, 1)", "[-\\infty, 1)", True),
        ("\\{1, 2\\}", "\\{2, 1, 1\\}", True),
        ("\\{1, 2\\}", "(1, 2)", None),
    ],
)
def test_where_there_is_doubt_it_says_nothing(right: str, given: str, verdict: bool | None) -> None:
    left, other = reading(right), reading(given)
    decided = same(left, other) if left is not None and other is not None else None
    assert decided is verdict


@pytest.mark.parametrize("text", ["", "a", "1/0", "x", "e = 3", "x = 1,000", "12,34", "()", "{1}"])
def test_what_is_not_plain(text: str) -> None:
    assert reading(text) is None


def test_numbers() -> None:
    assert reading("\\$1{,}234.50") == Number(Fraction(2469, 2), decimal=True)
    assert reading("−5\\text{ cm}") == Number(Fraction(-5))
