r"""Answers that the computer algebra would take for the right one, and that say something else.

math-verify drops what it has no use for: the sign of `\leq 5`, the words of `5\text{ is wrong}`,
the base of `11_3`, the names of `x=1,y=2`, the order of `(0,1)` where the other is a set, and what
six decimal places do not show of `e^{-50}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_RELATION = (
    r"(?:\\(?:leqslant|geqslant|leq?|geq?|lt|gt|ll|gg|neq?)(?![A-Za-z])|(?<![=-])[<>]=?|[≤≥≠≪≫])"
)
_RELATED = re.compile(_RELATION)
_RELATED_LAST = re.compile(rf"{_RELATION}[\s$]{{0,9}}[^\s$]{{1,80}}[\s$.]{{0,9}}$")
_IN_TEXT = r"\\(?:text\w*|math\w+|operatorname)\s*\{"
_DENYING = re.compile(
    rf"{_IN_TEXT}[\s(,;]*(?:(?:this|that|it|which|but|and)\s+){{0,2}}"
    r"(?:(?:is|are|was|were|be)(?:n['’]t|\s+(?:not|never|wrong|false|incorrect|unknown))\b"
    r"|(?:can|could)(?:not|n['’]t)\s+be\b|(?:wrong|false|incorrect|dozens?)\b|not\s*\})"  # 3 is not
    rf"|{_IN_TEXT}[^{{}}]*(?:\b(?:not|never|except|but|(?:more|less|other|rather)\s+than)|n['’]t)"
    r"(?:\s+(?:be|equal\s+to|the|an?))*\s*\}",  # not 3
    re.IGNORECASE,
)
_BASED = re.compile(r"\(?([0-9A-F]*\d[0-9A-F]*)\)?_\{?\s*(\d{1,3})\s*\}?")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])|\$|(?<!\\)\\[;,:! ]")
_ASSIGNED = re.compile(r"\s*([A-Za-z])\s*=\s*([^=,]+)")
_AND = re.compile(
    r"\\text\s*\{[\s,;]*(?:and)?[\s,;]*\}|\band\b|\\q?quad(?![A-Za-z])|;|\\\\"
    r"|\\(?:begin|end)\s*\{(?:cases|aligned|array)\}(?:\{[lcr|]*\})?"
)
_TOGETHER = re.compile(r"\s*\(([^()=]*)\)\s*=\s*\((.*)\)\s*")
_SIDE = r"([^<>=\\]*(?:\\(?!le|ge|lt|gt)[^<>=\\]*)*)"
_BETWEEN = re.compile(rf"{_SIDE}(<=?|>=?)\s*[A-Za-z]\s*(<=?|>=?){_SIDE}")
_BELOW = re.compile(rf"{_SIDE}(<=?|>=?)\s*[A-Za-z]")
_BEYOND = re.compile(rf"[A-Za-z]\s*(<=?|>=?){_SIDE}")
_DECIMAL = re.compile(r"\s*-?\d{1,15}(?:\.\d{1,15})?\s*")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)")
_TINY = 10.0**-5
_DIGITS = 10.0**-6


def unlike(right: str, given: str, *, marked: bool) -> bool:
    r"""Whether `given` says something that `right` does not, whatever their numbers are: an order
    where that has none, words that deny, another base, a set in place of a tuple.

    marked: `given` was in a box, or is a formula by itself.
    """
    if not _RELATED.search(right):
        related = _RELATED if marked else _RELATED_LAST
        if related.search(given) and not (marked and _brackets(right) in ("(", "[")):
            return True
    if _DENYING.search(given) and not _DENYING.search(right):
        return True
    if _contradicts(given):
        return True
    based = _BASED.fullmatch(right.strip("$ ")), _BASED.fullmatch(given.strip("$ "))
    if based[0] and based[1] and based[0][2] != based[1][2]:
        return True
    if marked and {_brackets(right), _brackets(given)} in ({"{", "("}, {"{", "["}):
        return True
    return marked and _brackets(right) != "{" and _repeat(right, given)


def _repeat(right: str, given: str) -> bool:
    """Whether one of two lists has a value more often, as of a root that counts twice: read as sets
    they would be equal."""
    values, others = (listed(_GROUPED.sub(_whole, text)) for text in (right, given))
    longer = max(values, others, key=len)
    if any(mark in part for part in longer for mark in "()[]"):  # a function's arguments
        return False
    return len(values) != len(others) and len(set(longer)) < len(longer)


def _whole(found: re.Match[str]) -> str:
    return re.sub(r"\D", "", found[0])


def _contradicts(text: str) -> bool:
    """7 = 3.14"""
    sides = [float(side) for side in text.split("=") if _DECIMAL.fullmatch(side)]
    return bool(sides) and max(sides) - min(sides) > 0.01 * max(map(abs, sides))


def assigned(text: str) -> dict[str, str]:
    """`x=1, y=2` and `(x,y)=(1,2)` as name → value; empty for one name, for one that has two
    values, and for anything else."""
    together = _TOGETHER.fullmatch(_SIZES.sub("", text))
    if together is not None:
        names, values = listed(together[1]), listed(together[2])
        parts = [f"{name}={value}" for name, value in zip(names, values, strict=False)]
        parts = parts if len(names) == len(values) else []
    else:
        parts = listed(text)
    found: dict[str, str] = {}
    for part in parts:
        match = _ASSIGNED.fullmatch(part)
        if match is None or match[1] in found:
            return {}
        found[match[1]] = match[2].strip()
    return found if len(found) > 1 else {}


def listed(text: str) -> list[str]:
    """`(1, 2)` and `1, 2` as their values, in order."""
    text = _SIZES.sub("", text).strip()
    if _brackets(text) == "(":
        text = text[1:-1]
    return [part.strip() for part in _AND.sub(",", text).split(",") if part.strip()]


def interval(text: str) -> str:
    r"""`x \leq 3` as `(-\infty,3]`, and `1 < x \leq 2` as `(1,2]`; "" for anything else."""
    text = re.sub(r"\\(?:leqslant|leq?)(?![A-Za-z])|≤", "<=", _SIZES.sub("", text))
    text = re.sub(r"\\(?:geqslant|geq?)(?![A-Za-z])|≥", ">=", text)
    text = re.sub(r"\\lt(?![A-Za-z])", "<", text)
    text = re.sub(r"\\gt(?![A-Za-z])", ">", text).strip()
    both = _BETWEEN.fullmatch(text)
    if both is not None and both[2][0] == both[3][0] and both[1].strip() and both[4].strip():
        low, left, right, high = both[1], both[2], both[3], both[4]
        if left[0] == ">":
            low, left, right, high = high, right, left, low
        ends = "[" if "=" in left else "(", "]" if "=" in right else ")"
        return f"{ends[0]}{low.strip()},{high.strip()}{ends[1]}"
    other = _BELOW.fullmatch(text)
    if other is not None and other[1].strip():  # 2 < x
        sign = {"<": ">", ">": "<"}[other[2][0]] + other[2][1:]
        text = f"x{sign}{other[1]}"
    one = _BEYOND.fullmatch(text)
    if one is None or not one[2].strip():
        return ""
    closed, end = "=" in one[1], one[2].strip()
    if one[1][0] == "<":
        return f"(-\\infty,{end}{']' if closed else ')'}"
    return f"{'[' if closed else '('}{end},\\infty)"


def is_interval(text: str) -> bool:
    return _brackets(text) in ("(", "[") and len(listed(text)) == 2


def agree(right: Any, given: Any) -> bool:
    """Whether the numbers of two expressions of sympy's, which math-verify finds alike, are so to
    six digits where six places show nothing of them."""
    left, other = sorted(_numbers(right)), sorted(_numbers(given))
    if len(left) != len(other):
        return True  # the one is written out, and the other is not
    for one, two in zip(left, other, strict=True):
        larger = max(abs(one), abs(two))
        if larger < _TINY and abs(one - two) > _DIGITS * larger:
            return False
    return True


def _numbers(found: Any) -> Iterator[Any]:
    """Real numbers in collections, on either side of an equation, or by themselves."""
    inside = getattr(found, "args", ())
    if getattr(found, "is_number", False):
        value = found.evalf(15)
        if getattr(value, "_prec", 0) == 1:  # no digit of it is sure: 0, in a form to be worked out
            value = value * 0
        if getattr(value, "is_Float", False) or getattr(value, "is_Rational", False):
            yield value
    elif not getattr(found, "is_Add", False) and not getattr(found, "is_Mul", False):
        for part in inside:
            yield from _numbers(part)


def _brackets(text: str) -> str:
    """What opens a list in brackets: `{`, `(` or `[`; "" for anything else, and for several."""
    text = _SIZES.sub("", text).strip()
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{"
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]") or "," not in text:
        return ""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign in "([") - (sign in ")]")
        if depth == 0:
            return text[0] if place == len(text) - 1 else ""
    return ""
