"""Whether two pieces of mathematics have the same value."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from typing import Any, cast

from keel.rewards.rules.doubts import (
    agree,
    assigned,
    interval,
    is_interval,
    listed,
    unlike,
)
from keel.rewards.rules.notation import denies, plain_notation, said, undressed
from keel.rewards.rules.plain_maths import Number, Reading, reading
from keel.rewards.rules.plain_maths import same as same_reading
from keel.rewards.rules.towers import endless, last_formula, same_tower, without_towers
from keel.rewards.text import BOXED, WRAPPED, marked_answer, normalise, raised

MAX_CHARACTERS = 2_048
"""A longer answer is wrong, unless the right one is about that long."""

_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")
_MODULO = re.compile(r"\s*(?:\\pmod|\\bmod|\\mod)\s*(?:\{[^{}]*\}|\d+)\s*$")
_SIGNS = re.compile(r"\\pm(?![A-Za-z])|±")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\bor\b")
# Read as a formula, "6 7" is a product and "a dog" has four factors.
_PROSE = re.compile(r"(?<!\\)\b(?!sqrt|sin|cos|tan|log|exp)[^\W\d_]{3,}|\d\s+\d")


def mathematical(
    right: str, *, tolerance: float | None = None, ready: bool = True
) -> Callable[[str], bool]:
    r"""A test for the value of `right`: `\frac12`, `1/2` and `0.5` are one; sets, intervals and
    expressions are compared up to their form (math-verify), words as text.

    An answer marked with `\boxed{}` is taken as it is; of other texts, the last expression counts.
    Decimals are compared to six places (below 1e-5 to six digits), units are set aside, and 50 % is
    both 50 and 1/2. Plain numbers, sets and intervals never reach the computer algebra
    (`keel.rewards.rules.plain_maths`). `keel.rewards.rules.notation` says which spellings are read
    alike.

    tolerance: between numbers, relative to the right one, and absolute where that is 0; where that
    says more than six places. ready: with `right` read already, milliseconds where it is no plain
    number, which no completion's deadline then pays for.
    Raises ValueError for one that is not between 0 and 1.
    """
    if tolerance is not None and not _is_share(tolerance):
        raise ValueError(f"tolerance = {tolerance!r} must be a number between 0 and 1")
    right = plain_notation(raised(right.strip()), alone=True) or right
    read, verify = _library()  # here rather than at the first completion, which has a deadline

    @cache
    def gold() -> list[Any]:  # when it is first asked for, which for numbers is seldom
        return read(f"\\boxed{{{right}}}")

    wanted = normalise(right)
    words = said(right) if _WORDS.fullmatch(WRAPPED.sub(r"\1", right)) else ""
    spelled = _spelled(right)
    single = not _OR.search(right) and "," not in right and not _SIGNS.search(right)
    tower = not words and endless(right)
    plain = reading(right)
    longest = max(MAX_CHARACTERS, 4 * len(right))
    alike = partial(mathematical, tolerance=tolerance, ready=ready)
    named = {name: alike(value) for name, value in _named(right)}
    bounds = interval(right)
    within = alike(bounds) if bounds else None
    modulus = _MODULO.search(right) is not None
    # 100,200 may be one number, or two.
    several = sorted(listed(right)) if isinstance(plain, Number) else []

    def verify_text(text: str) -> bool:
        marked = marked_answer(text)
        if marked is None and BOXED in text:  # it was never closed
            return False
        given = text.strip() if marked is None else marked
        if not given or len(given) > longest:
            return False
        given = undressed(given, marked=marked is not None)
        if same(given, marked=marked is not None):
            return True
        # "10000!" may be a factorial, or the end of a sentence.
        return marked is None and given.endswith("!") and same(given.rstrip("!"), marked=False)

    def same(given: str, *, marked: bool) -> bool:
        alone = marked or not _PROSE.search(given)
        spoken = plain_notation(raised(given), alone=False)
        given = plain_notation(raised(given), alone=True) if alone else spoken
        if alone and not modulus:
            given = _MODULO.sub("", given)
        if not given or normalise(given) == wanted:
            return bool(given)
        if alone and len(several) > 1 and sorted(listed(given)) == several:
            return True
        if words:  # as mathematics, Paris and Pairs are the same product
            told = said(given)
            if (
                told == words
                or marked
                or (denies(given, words=True) and not denies(right, words=True))
            ):
                return told == words
            return told.endswith(f" {words}") and not told.endswith(
                (f" or {words}", f" nor {words}")
            )
        if alone and _spelled(given) == spelled:
            return True
        parts = _OR.split(given) if alone and single else []
        if len(parts) > 1:  # 1/2 or 0.5, and not 5 or 6
            return all(part.strip() and same(part, marked=marked) for part in parts)
        if tower:
            denied = unlike(right, given, marked=alone) or denies(given)
            return not denied and same_tower(right, given if alone else last_formula(given))
        sentence = given if alone else without_towers(given)
        if sentence is None or (alone and endless(given)):
            return False
        given = sentence
        if unlike(right, given, marked=alone):
            return False
        if named and alone:
            verdict = _each(named, given)
            if verdict is not None:
                return verdict
        if alone and is_interval(right):
            given = interval(given) or given
        elif within is not None and alone and is_interval(given):
            return within(f"\\boxed{{{given}}}")
        if plain is not None and (other := reading(given)) is not None:
            if tolerance is not None and _near(plain, other, tolerance):
                return True
            verdict = _tiny(plain, other)
            verdict = same_reading(plain, other) if verdict is None else verdict
            if verdict is not None:
                return verdict
        if denies(given) and not denies(right):
            return False
        readings: list[str] = []
        if alone:
            readings.append(f"\\boxed{{{given}}}")
        if not marked:
            readings.append(spoken if alone else given)
        for found in map(read, readings):
            verdict = _quick(plain, found)
            if verdict or (verdict is None and verify(gold(), found) and _agreed(gold(), found)):
                return True
            if tolerance is not None and _close(_evaluated(gold()), _evaluated(found), tolerance):
                return True
        return False

    if ready and plain is None and not words and not tower:
        gold()
    return verify_text


@cache
def _library() -> tuple[Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    """math-verify's reader and comparison. Loading sympy and building its parser takes a second."""
    from math_verify import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,  # pyright: ignore[reportUnknownVariableType]
        verify,
    )

    # The library's own deadlines are off: they use the signal that `keel.rewards.workers.worker`
    # needs. It would warn about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def read(text: str) -> list[Any]:
        # Its patterns for LaTeX are the slow half, and all of them want one of these.
        latex = [LatexExtractionConfig()] if any(mark in text for mark in "\\$[") else []
        kinds = [*latex, ExprExtractionConfig()]
        return cast(list[Any], parse(text, kinds, parsing_timeout=0))

    def equal(right: list[Any], given: list[Any]) -> bool:
        return verify(right, given, timeout_seconds=0)

    equal(read("$\\sqrt{2}$"), read("$2$"))  # much of sympy is loaded when it is first needed
    return read, equal


def _named(right: str) -> list[tuple[str, str]]:
    return list(assigned(right).items())


def _each(named: dict[str, Callable[[str], bool]], given: str) -> bool | None:
    """Values of several names: with these names in any order, or without them in this one. None
    where that cannot be read."""
    values = assigned(given)
    if not values:
        parts = listed(given)
        if any("=" in part for part in parts):
            return None if all(name in given for name in named) else False
        if len(parts) != len(named):
            return False
        values = dict(zip(named, parts, strict=True))
    if values.keys() != named.keys():
        return False
    return all(same(f"\\boxed{{{values[name]}}}") for name, same in named.items())


def _agreed(gold: list[Any], found: list[Any]) -> bool:
    return not gold or not found or agree(gold[0], found[0])


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1


def _quick(plain: Reading | None, found: list[Any]) -> bool | None:
    """`same` for a whole number that the computer algebra has found in a text."""
    if plain is None or not found or not getattr(found[0], "is_Integer", False):
        return None
    return same_reading(plain, Number(Fraction(int(found[0]))))


def _tiny(right: Reading, given: Reading) -> bool | None:
    """Of numbers that six places leave nothing of, six digits; None for others."""
    if not (isinstance(right, Number) and isinstance(given, Number)):
        return None
    larger = max(abs(right.value), abs(given.value))
    if right.percent or given.percent or not 0 < larger < Fraction(1, 10**5):
        return None
    if not right.decimal and not given.decimal:
        return None  # fractions are exact
    return abs(right.value - given.value) * 10**6 <= larger


def _spelled(text: str) -> str:
    """As it reads when typeset: 8:30 AM, whatever of it is marked as text."""
    return normalise(WRAPPED.sub(r" \1 ", text))


def _near(right: Reading, given: Reading, tolerance: float) -> bool:
    if not (isinstance(right, Number) and isinstance(given, Number)):
        return False
    if right.percent == given.percent:
        return _close(right.value, given.value, tolerance)
    one, two = (right, given) if right.percent else (given, right)  # 50 % is 50 and 1/2
    return any(
        _close(value, two.value, tolerance)
        if right.percent
        else _close(two.value, value, tolerance)
        for value in (one.value, one.value / 100)
    )


def _close(
    right: float | Fraction | None, given: float | Fraction | None, tolerance: float
) -> bool:
    if right is None or given is None:
        return False
    try:
        return abs(right - given) <= tolerance * (abs(right) or 1)
    except OverflowError:  # an integer beyond floating point
        return False


def _evaluated(found: list[Any]) -> float | int | None:
    """Of the computer algebra's reading; None where that is no real number."""
    try:
        value = found[0]
        if hasattr(value, "rhs"):  # x = 3, and neither x < 3 nor 7 = 3
            if not (value.is_Equality and value.lhs.is_Symbol):
                return None
            value = value.rhs
        value = value.doit()
        return int(value) if value.is_Integer else float(value.evalf())
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError):
        return None
