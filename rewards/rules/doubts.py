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
_DENYING = re.compile(
    r"\\(?:text\w*|math\w+|operatorname)\s*\{[^{}]*\b"
    r"(?:not|no|never|wrong|false|incorrect|dozen|except|unknown|\w+n['’]t)\b",
    re.IGNORECASE,
)
_BASE = re.compile(r"(?<=[0-9A-F])_\{?\s*(\d{1,3})\s*\}?")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])|\$")
_ASSIGNED = re.compile(r"\s*([A-Za-z])\s*=\s*([^=,]+)")
_AND = re.compile(r"\\text\s*\{\s*(?:and)?\s*,?\s*\}|\band\b|\\quad|;")
_SIDE = r"([^<>=\\]*(?:\\(?!le|ge|lt|gt)[^<>=\\]*)*)"
_BETWEEN = re.compile(rf"{_SIDE}(<=?|>=?)\s*[A-Za-z]\s*(<=?|>=?){_SIDE}")
_BEYOND = re.compile(rf"[A-Za-z]\s*(<=?|>=?){_SIDE}")
_TOWER = re.compile(
    r"\d\s*(?:\^|\*\*)\s*[({]?\s*-?\d*\.?\d+\s*(?:\^|\*\*)"  # 9^9^9, 10^{10^{10}}
    r"|(?:\^|\*\*)\s*[({]?\s*-?\d{6,}"  # 2^1000000
    r"|\)\s*(?:\^|\*\*)\s*[({]?\s*-?\d{4,}"  # (x+1)^9999
    r"|\d{5,}\s*!|!\s*!|!\s*[)}]+\s*!"
    r"|(?<![\w.])\d[\d.]*[eE][+-]?\d{4,}"
)
_DECIMAL = re.compile(r"\s*-?\d{1,15}(?:\.\d{1,15})?\s*")
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
    bases = _BASE.findall(right), _BASE.findall(given)
    if all(bases) and bases[0] != bases[1]:
        return True
    return marked and {_brackets(right), _brackets(given)} in ({"{", "("}, {"{", "["})


def _contradicts(text: str) -> bool:
    """7 = 3.14"""
    sides = [float(side) for side in text.split("=") if _DECIMAL.fullmatch(side)]
    return bool(sides) and max(sides) - min(sides) > 0.01 * max(map(abs, sides))


def endless(right: str, given: str) -> bool:
    """Whether working `given` out could take for ever, where `right` is nothing of the kind."""
    return _TOWER.search(given) is not None and _TOWER.search(right) is None


def assigned(text: str) -> dict[str, str]:
    """`x=1, y=2` as name → value; empty for one name, and for anything else."""
    found: dict[str, str] = {}
    for part in _AND.sub(",", _SIZES.sub("", text)).split(","):
        match = _ASSIGNED.fullmatch(part)
        if match is not None:
            found[match[1]] = match[2].strip()
        elif part.strip():
            return {}
    return found if len(found) > 1 else {}


def listed(text: str) -> list[str]:
    """`(1, 2)` and `1, 2` as their values, in order."""
    text = _SIZES.sub("", text).strip()
    if text[:1] == "(" and text[-1:] == ")":
        text = text[1:-1]
    return [part.strip() for part in _AND.sub(",", text).split(",")]


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
        if getattr(value, "is_Float", False) or getattr(value, "is_Rational", False):
            yield value
    elif not getattr(found, "is_Add", False) and not getattr(found, "is_Mul", False):
        for part in inside:
            yield from _numbers(part)


def _brackets(text: str) -> str:
    """What opens a list in brackets: `{`, `(` or `[`; "" for anything else."""
    text = _SIZES.sub("", text).strip()
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{"
    return text[0] if text[:1] in ("(", "[") and text[-1:] in (")", "]") and "," in text else ""
