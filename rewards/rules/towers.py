r"""Numbers that nobody can write out: `9^{9^9}`, `100000!`.

The computer algebra works out whatever it reads, for hours where it must. So the size of a formula
is bounded first, from its parts; letters and what is not understood count for nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MOST_BITS = 100_000
"""Of a number that is worked out: 2^{100000} and 8000! are."""
_SUM_BITS = 200
"""What a sum with letters counts, as the base of a power that is multiplied out."""
_DEEPEST = 40
_TOKEN = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d{4,})?|\.\d+|\\[A-Za-z]+|\S")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![A-Za-z])|\\[,;:! ]|\{,\}"
    r"|(?<=\d),(?=\d{3}(?!\d))"
)
_FORMULA = re.compile(
    r"\$\$?[^$]+\$|\\\(.+?\\\)|\\\[.+?\\\]|[({\d.][\d.,^*/+!(){} -]*", flags=re.DOTALL
)
_TWO_DIGITS = re.compile(r"(\\[dt]?(?:frac|binom))\s*(\d)\s*(\d)")
r"""One over the other: `\frac12` is a half."""
_POWER = re.compile(r"(\d{1,40})\^(.+)")
_CLOSING = {"{": "}", "(": ")", "[": "]"}


@dataclass(frozen=True, slots=True)
class _Part:
    bits: float
    """At most so many in the numerator and the denominator together."""
    value: float | int | None = None
    """None for what has letters in it; NaN for a number that is not known, which may be large."""


class _TooLarge(Exception):
    pass


def endless(formula: str) -> bool:
    """Whether a number in it has more than `MOST_BITS` bits, or it is nested beyond reading."""
    try:
        _Reader(formula).all()
    except _TooLarge:
        return True
    return False


def without_towers(text: str) -> str | None:
    """A sentence without the formulas that cannot be worked out; None where it ends with one."""
    found = [match for match in _FORMULA.finditer(text) if any(map(str.isdecimal, match[0]))]
    large = [match for match in found if endless(re.sub(r"[!.\s]+$", "", match[0].strip("$")))]
    if large and large[-1] is found[-1]:
        return None
    for match in reversed(large):
        text = f"{text[: match.start()]} … {text[match.end() :]}"
    return text


def last_formula(text: str) -> str:
    found = [match[0] for match in _FORMULA.finditer(text) if any(map(str.isdecimal, match[0]))]
    return found[-1] if found else ""


def same_tower(right: str, given: str) -> bool:
    """Whether two formulas that cannot be worked out are one: as they are written, or as powers of
    whole numbers (2^{1000000} is 2^{10^6} and 4^{500000})."""
    left, other = _squeezed(right), _squeezed(given)
    one, two = _power(left), _power(other)
    if one is None or two is None:
        return left == other
    shared = math.gcd(one[1], two[1])
    exponents = one[1] // shared, two[1] // shared
    if max(exponents) > 100:
        return False  # of bases below 10^40 no two such powers are equal but for 1
    return one[0] ** exponents[0] == two[0] ** exponents[1]


def _squeezed(text: str) -> str:
    text = _DROPPED.sub("", text.strip("$. ")).replace("**", "^")
    return re.sub(r"\s", "", re.sub(r"\{(\w)\}", r"\1", text))


def _power(text: str) -> tuple[int, int] | None:
    match = _POWER.fullmatch(text)
    if match is None:
        return None
    try:
        reader = _Reader("^" + match[2])
        exponent = reader.raised()
    except _TooLarge:
        return None
    alone = reader.at == len(reader.tokens) and isinstance(exponent.value, int)
    if not alone or exponent.value is None or exponent.value <= 0:
        return None
    return int(match[1]), int(exponent.value)


class _Reader:
    """Reads arithmetic in LaTeX or in Python's notation, from left to right."""

    def __init__(self, text: str) -> None:
        text = _DROPPED.sub("", text).replace("**", "^").replace("\\exp", "e^")
        text = _TWO_DIGITS.sub(r"\1{\2}{\3}", text)
        self.tokens: list[str] = _TOKEN.findall(text)
        self.at = 0
        self.depth = 0

    def all(self) -> None:
        while self.at < len(self.tokens):  # what closes nothing is passed over
            self.sum()
            self.at += 1

    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next()
        self.at += 1
        return token

    def sum(self) -> _Part:
        """Up to what closes it. Commas and relations are taken for additions."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _TooLarge
        parts: list[_Part] = []
        sign = 1
        while (token := self.next()) and token not in "})]":
            if token in ("+", "-", ",", "=", "<", ">", "|", "&", "^", "_", "!"):
                sign = -1 if token == "-" else 1
                self.at += 1
                continue
            part = self.product()
            value = None if part.value is None else sign * part.value
            parts.append(_Part(part.bits, value))
            sign = 1
        self.depth -= 1
        if len(parts) < 2:
            return parts[0] if parts else _Part(0.0)
        bits = max(part.bits for part in parts)
        values = [part.value for part in parts if part.value is not None]
        if len(values) < len(parts):
            return _checked(bits + _SUM_BITS, None)
        return _checked(bits + len(parts), sum(values))

    def product(self) -> _Part:
        bits, over = 0.0, False
        result: float | int | None = 1
        while (token := self.next()) and token not in "})]+-,=<>|&":
            if token in ("*", "/", "\\cdot", "\\times", "\\div"):
                over = token in ("/", "\\div")
                self.at += 1
                continue
            part = self.factor()
            bits += part.bits
            result = _over(result, part.value) if over else _times(result, part.value)
            over = False
        return _checked(bits, result)

    def factor(self) -> _Part:
        part = self.atom()
        while (token := self.next()) in ("^", "!", "_"):
            if token == "^":
                part = _raised(part, self.raised())
            else:
                self.at += 1
                if token == "!":
                    part = _factorial(part)
                else:
                    self.atom()
        return part

    def raised(self) -> _Part:
        """From `^` on: towers are read from the top."""
        self.at += 1
        sign = 1
        while self.next() in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _TooLarge
        part = self.atom()
        if self.next() == "^":
            part = _raised(part, self.raised())
        self.depth -= 1
        return _Part(part.bits, None if part.value is None else sign * part.value)

    def atom(self) -> _Part:
        if self.next() in "})]":  # there is none, and what is open is closed by others
            return _Part(0.0)
        token = self.take()
        if token in _CLOSING:
            part = self.sum()
            if self.next() == _CLOSING[token]:
                self.at += 1
            return part
        if token[:1].isdecimal() or (token[:1] == "." and len(token) > 1):
            return _number(token)
        if token in ("\\frac", "\\dfrac", "\\tfrac"):
            top, below = self.atom(), self.atom()
            return _checked(top.bits + below.bits, _over(top.value, below.value))
        if token == "\\sqrt":
            index = self.atom() if self.next() == "[" else _Part(1.0, 2)
            return _root(index, self.atom())
        if token in ("\\binom", "\\dbinom", "\\tbinom"):
            return _chosen(self.atom(), self.atom())
        if token in ("e", "\\pi"):
            return _Part(2.0, math.e if token == "e" else math.pi)
        return _Part(0.0)


def _number(token: str) -> _Part:
    if "e" in token.lower():
        raise _TooLarge
    value = float(token) if "." in token or len(token) > 300 else int(token)
    bits = len(token) * math.log2(10) if "." in token else math.log2(max(value, 1))
    return _checked(len(token) * 4.0 if bits == math.inf else bits, value)


def _checked(bits: float, value: float | int | None) -> _Part:
    if not bits <= MOST_BITS:  # nor NaN
        raise _TooLarge
    return _Part(bits, _held(value))


def _held(value: float | int | None) -> float | int | None:
    """A whole number only where floating point holds it too."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return math.inf if value > 0 else -math.inf
    return value


def _times(one: float | int | None, two: float | int | None) -> float | int | None:
    return None if one is None or two is None else _held(one * two)


def _over(one: float | int | None, two: float | int | None) -> float | int | None:
    if one is None or two is None:
        return None
    if two == 0:  # or too small for floating point
        return math.nan
    if isinstance(one, int) and isinstance(two, int) and one % two == 0:
        return one // two
    return one / two


def _root(index: _Part, of: _Part) -> _Part:
    exponent = _Part(index.bits, _over(1, index.value))
    odd = isinstance(index.value, int) and index.value % 2
    if not odd or of.value is None or not of.value < 0:
        return _raised(of, exponent)
    root = _raised(_Part(of.bits, -of.value), exponent)
    return _Part(root.bits, None if root.value is None else -root.value)


def _raised(base: _Part, exponent: _Part) -> _Part:
    if exponent.value is None:
        return _checked(base.bits + exponent.bits, None)
    if math.isnan(exponent.value):
        raise _TooLarge
    # Of a sum of letters or of a number; a letter by itself is never multiplied out.
    grows = base.bits > 0 and not (isinstance(base.value, int) and abs(base.value) <= 1)
    bits = base.bits * max(1.0, abs(exponent.value)) if grows else base.bits
    _checked(bits, None)
    return _checked(bits, _power_of(base.value, exponent.value))


def _power_of(base: float | int | None, exponent: float | int) -> float | int | None:
    """`base` to the power of `exponent`; NaN where that is no real number."""
    if base is None or base == 1 or (base == 0 and exponent != 0):
        return base
    whole = isinstance(exponent, int)
    if base == -1:
        return 1 - 2 * (exponent % 2) if whole else math.nan
    if isinstance(base, int) and whole and exponent >= 0:
        return base**exponent
    try:
        value = float(base) ** float(exponent)
    except OverflowError:
        return math.inf
    return math.nan if isinstance(value, complex) else value


def _factorial(part: _Part) -> _Part:
    if part.value is None:
        return part
    size = abs(part.value)  # of halves below 0, as many factors are multiplied out
    if not size <= MOST_BITS:
        raise _TooLarge
    known = isinstance(part.value, int) and 0 <= part.value < 200
    value = math.factorial(int(part.value)) if known else math.inf
    return _checked(size * math.log2(max(size, 2)), value)


def _chosen(all_: _Part, some: _Part) -> _Part:
    n, k = all_.value, some.value
    if n is None or k is None:
        return _Part(all_.bits + some.bits)
    each = max(all_.bits, some.bits) + 1
    if isinstance(n, int) and isinstance(k, int) and n >= 0:
        factors = max(0, min(k, n - k))
        _checked(factors * each, None)
        return _checked(factors * each, math.comb(n, k) if k >= 0 else 0)
    # Of what is below 0 or no whole number, as many factors are multiplied out as are chosen.
    return _checked(abs(k) * each, math.nan)
