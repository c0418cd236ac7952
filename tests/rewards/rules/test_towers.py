"""How large the numbers of a formula are, before anything works them out."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rewards.rules.towers import MOST_BITS, endless

UNKNOWN = [
    "(2^{2000}-2^{2000}+3)",
    "(0\\cdot 2^{2000}+3)",
    "(\\frac{2^{2001}}{2^{2000}}+1)",
    "(\\frac{1}{2^{-3000}}+1)",
    "\\sqrt{2^{2000}-3\\cdot 2^{1998}}",
    "(\\sqrt{-10^{20}})^4",
    "((-1)^{0.5}-2^{2000}+2^{2000})",
    "\\binom{2^{2000}-2^{2000}}{2^{2000}-2^{2000}}",
]
"""Numbers that are small, or are not, and floating point does not say which."""


@pytest.mark.parametrize("number", UNKNOWN)
@pytest.mark.parametrize("of", ["({}!)^{{999999999}}", "{}!", "9^{{{}}}", "\\binom{{-5}}{{{}}}"])
def test_a_number_that_nobody_knows_may_be_too_large(number: str, of: str) -> None:
    assert endless(of.format(number))


@pytest.mark.parametrize(
    "formula",
    [
        "\\binom{100}{50}!",
        "2^{\\binom{40}{20}}",
        "(x+1)^{\\binom{20}{10}}",
        "\\binom{-5}{100000000}",
        "\\binom{-\\frac12}{100000000}",
        "(-\\frac{199999999}{2})!",
        "\\sqrt[\\frac{1}{10000000}]{9}",
        "(((-1)^2+1)\\cdot 300000)!",
        "2^{\\frac{9^9}1}",
    ],
)
def test_what_a_part_may_come_to_is_known(formula: str) -> None:
    assert endless(formula)


@pytest.mark.parametrize(
    "formula",
    [
        *("2^{2024}-2^{2023}", "2^{1800}\\cdot 0.5", "2^{900}\\cdot 2^{900}\\cdot 0.5", "10!"),
        *("\\frac{2^{900}\\cdot 2^{900}\\cdot 2}{3.5}", "\\binom{10000}{5000}", "e^{i\\pi}", "5/0"),
        *(
            "\\sqrt[3]{8}",
            "2^{\\sqrt[3]{-8}}",
            "\\sqrt[n]{8}",
            "\\sqrt{-4}",
            "(-1)^{2024}",
            "2^{\\frac12}",
            "(-5)!",
        ),
        *(
            "2^{\\binom{10}{5}}",
            "\\binom{2024}{1012}-1",
            "\\binom{n}{k}",
            "\\binom{0.5}{3}",
            "x^{n}",
        ),
        *("0^0", "\\sqrt{2}^{\\sqrt{2}}", "\\frac{\\sqrt{5}-1}{2}", "2^{", "\\sqrt"),
    ],
)
def test_ordinary_answers_are_worked_out(formula: str) -> None:
    assert not endless(formula)


FORMULAS: st.SearchStrategy[tuple[Any, ...]] = st.recursive(
    st.tuples(st.just("n"), st.integers(-3, 12)),
    lambda part: st.one_of(
        st.tuples(st.sampled_from("+-*/^c"), part, part), st.tuples(st.just("!"), part)
    ),
    max_leaves=6,
)
WRITTEN = {
    "n": "({})",
    "+": "({}+{})",
    "-": "({}-{})",
    "*": "{}\\cdot {}",
    "/": "\\frac{{{}}}{{{}}}",
    "^": "({})^{{{}}}",
    "c": "\\binom{{{}}}{{{}}}",
    "!": "({})!",
}


def written(formula: tuple[Any, ...]) -> str:
    kind, *parts = formula
    return WRITTEN[kind].format(*(parts if kind == "n" else map(written, parts)))


class Large(Exception):
    """More than `MOST_BITS` bits."""


def exact(formula: tuple[Any, ...], sizes: list[int]) -> Fraction:
    """Its value; the bits of each number on the way are added to `sizes`. Raises Large, and
    ValueError or ZeroDivisionError for what is no fraction."""
    kind, *parts = formula
    if kind == "n":
        return Fraction(parts[0])
    one, *others = (exact(part, sizes) for part in parts)
    two = others[0] if others else Fraction(0)
    if kind in "^c!" and (two.denominator > 1 or (kind != "^" and one.denominator > 1)):
        raise ValueError
    if kind == "^":
        if abs(int(two)) * (bits(one) - 2) > MOST_BITS:
            raise Large
        value = one ** int(two)
    elif kind == "c":
        if one < 0 or two < 0:
            raise ValueError
        some = int(min(two, one - two))
        if some > 0 and some * (math.log2(int(one)) - math.log2(some)) > MOST_BITS:
            raise Large
        value = Fraction(math.comb(int(one), int(two)))
    elif kind == "!":
        if one > MOST_BITS:
            raise Large
        value = Fraction(math.factorial(int(one)))
    else:
        value = {"+": one + two, "-": one - two, "*": one * two}.get(kind)
        value = one / two if value is None else value
    if bits(value) - 2 > MOST_BITS:
        raise Large
    sizes.append(max(bits(one), bits(two), bits(value)))
    return value


def bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


@settings(max_examples=500)
@given(FORMULAS)
def test_small_formulas_are_worked_out_and_large_ones_are_not(formula: tuple[Any, ...]) -> None:
    sizes: list[int] = []
    try:
        exact(formula, sizes)
    except Large:
        assert endless(written(formula))
    except (ValueError, ZeroDivisionError):
        endless(written(formula))  # raises nothing
    else:
        if max(sizes, default=0) < 64:
            assert not endless(written(formula))
