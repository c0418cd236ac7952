r"""Values of LaTeX formulas: read once, then evaluated at sample points with a bound on every number.

A formula is read only if the grammar covers all of it, in time linear in its length. Two formulas
are equal if they agree to 30 digits at points whose coordinates are drawn from the names of the
symbols. Rational constants are exact. Nothing is expanded, so `(x+y+z)^{500}` costs one power.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from zlib import crc32

import mpmath  # pyright: ignore[reportMissingTypeStubs]

MOST_BITS = 20_000
"""Size limit of an exact rational; larger constants are evaluated to 50 digits."""
_LARGEST = 10**15
"""Limit for exponents and for arguments of functions."""
_DEEPEST = 40
_DIGITS = 50
_context: Any = mpmath.mp.clone()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_context.dps = _DIGITS
_ALIKE = _context.mpf(10) ** -30
_RESIDUE = _context.mpf(10) ** -40
"""Rounding errors of numbers of ordinary size are smaller."""
_LOST = _context.mpf(10) ** -65
"""A term is no rounding error if it is smaller than this share of a sum, and the sum loses it."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<command>\\[A-Za-z]+|\\[|])"
    r"|(?P<word>[a-z]{4,})|(?P<name>[A-Z]{2,}(?![a-z_'])|[A-Za-z])|(?P<other>\S))"
)
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho"
    " sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi"
    " Omega ell hbar".split()
)
_OPAQUE = frozenset(
    "vec hat mathbf mathcal mathbb mathfrak overrightarrow tilde widehat dot".split()
)
_TRIGONOMETRY = {
    **{name: name for name in "sin cos tan sec csc cot sinh cosh tanh coth".split()},
    **{name: name.replace("arc", "a") for name in "arcsin arccos arctan arccot".split()},
}
_INVERSE = {name: f"a{name}" for name in "sin cos tan cot sec csc sinh cosh tanh".split()}
_LISTS: dict[str, Callable[..., Any]] = {
    "max": max, "min": min, "gcd": math.gcd, "lcm": math.lcm,
}  # fmt: skip
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_FUNCTIONS = frozenset("fghEFGP")
"""Letters before a bracket that are functions; `x(x+1)` and `n(n+1)` are products."""


class Unreadable(ValueError):
    """The text is not a formula of this grammar, or it has no bounded value."""


Value = Any
"""A Fraction, or a number of mpmath."""
Node = Callable[["Point"], Value]


@dataclass(frozen=True)
class Point:
    """Coordinates of every symbol, derived from its name."""

    number: int

    def of(self, name: str) -> Value:
        drawn = crc32(f"{self.number} {name}".encode())
        sign = -1 if self.number and drawn >> 8 & 1 else 1
        return sign * (Fraction(drawn % 100_003, 50_000) + Fraction(1, 3))


@dataclass
class Formula:
    """A formula that has been read.

    work: operations on constants that a question may ask for, such as `binom`, `!` or `sin`.
    """

    node: Node
    text: str
    names: set[str] = field(default_factory=set[str])
    work: set[str] = field(default_factory=set[str])
    imaginary: bool = False

    def at(self, point: Point) -> Value:
        """The value at a point. Raises Unreadable where there is none, or none within bounds."""
        try:
            value = self.node(point)
            if _is_exact(value) or not 0 < abs(value) < _RESIDUE:
                return value
            with _context.workdps(3 * _DIGITS):  # a rounding error shrinks, and a value does not
                return value if abs(self.node(point)) > abs(value) * _RESIDUE else Fraction(0)
        except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
            raise Unreadable(str(error)) from error

    def constant(self) -> Value | None:
        """The value of a formula without symbols; None for others."""
        return None if self.names else self.at(Point(0))


def equal(one: Formula, other: Formula, *, ratio: bool = False) -> bool:
    """Whether two formulas have the same value at all points; with ratio, whether they are
    non-zero multiples of each other."""
    agreed, factors = 0, list[Value]()
    for number in range(3 if one.names or other.names else 1):
        point = Point(number)
        try:
            left = one.at(point)
        except Unreadable:
            continue
        if number and not one.imaginary and not _is_real(left):
            continue  # outside the domain of a real formula
        try:
            right = other.at(point)
        except Unreadable:
            return False
        if ratio:
            if not close(left, 0) and not close(right, 0):
                factors.append(_division(right, left))
                agreed += close(factors[0], factors[-1])
                if not close(factors[0], factors[-1]):
                    return False
            elif close(left, 0) != close(right, 0):
                return False
        elif not close(left, right):
            return False
        else:
            agreed += 1
    return agreed > 0


def close(left: Value, right: Value) -> bool:
    """Whether two values agree to 30 digits of the larger one."""
    if isinstance(left, Fraction | int) and isinstance(right, Fraction | int):
        return left == right
    left, right = inexact(left), inexact(right)
    return abs(left - right) <= max(abs(left), abs(right)) * _ALIKE


def read(text: str) -> Formula:
    """Read all of `text`. Raises Unreadable."""
    reader = _Reader(text)
    try:
        node = reader.sum()
    except (ValueError, RecursionError) as error:  # CPython's limits on digits and depth
        raise Unreadable(str(error)) from error
    if reader.kind:
        raise Unreadable(f"unexpected {reader.token!r}")
    return Formula(node, text, reader.names, reader.work, reader.imaginary)


class _Reader:
    """Recursive descent over the tokens; each method returns the node of what it has read."""

    def __init__(self, text: str) -> None:
        self.tokens = [(m.lastgroup or "", m[m.lastgroup or 0]) for m in _TOKEN.finditer(text)]
        self.at = self.depth = self.bars = self.symbols = 0
        self.degrees = self.imaginary = False
        self.names: set[str] = set()
        self.work: set[str] = set()

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    @property
    def token(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.token
        if not token or (expected and token != expected):
            raise Unreadable(f"expected {expected or 'more'}, got {token!r}")
        self.at += 1
        return token

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unreadable("it is nested too deeply")
        total: Node | None = None
        while total is None or self.token in ("+", "-"):
            sign = 1
            while self.token in ("+", "-"):
                sign *= -1 if self.take() == "-" else 1
            part = self.product()
            signed = part if sign > 0 else _apply(lambda value: -value, part)
            total = signed if total is None else _apply(_addition, total, signed)
        self.depth -= 1
        return total

    def product(self, *, argument: bool = False) -> Node:
        """argument: of a function without brackets, which ends before the next function."""
        result = self.power()
        while True:
            if self.token in ("*", "/") and not argument:
                operation = _product if self.take() == "*" else _division
                sign = 1
                while self.token in ("+", "-"):
                    sign *= -1 if self.take() == "-" else 1
                part = self.power()
                part = part if sign > 0 else _apply(lambda value: -value, part)
                result = _apply(operation, result, part)
            elif self.starts_factor(argument=argument):
                result = _apply(_product, result, self.power())
            else:
                return result

    def starts_factor(self, *, argument: bool) -> bool:
        kind, token = self.kind, self.token
        if kind == "command":
            name = token[1:]
            if argument and (name in _TRIGONOMETRY or name in ("ln", "log", "lg", "exp")):
                return False
            return token not in ("\\rfloor", "\\rceil", "\\circ", "\\|")
        return kind == "name" or token in ("(", "[", "{") or (token == "|" and not self.bars)

    def power(self) -> Node:
        start, symbols = self.at, self.symbols
        base = self.atom()
        mixed = self.mixed(start)
        if mixed is not None:
            return mixed
        while self.token in ("^", "!", "%", "_"):
            mark = self.take()
            if mark == "!":
                double = self.token == "!"
                if double and self.take() == self.token:
                    raise Unreadable("a factorial of a factorial needs brackets")
                self.worked("!", symbols)
                base = _apply(_double_factorial if double else _factorial, base)
            elif mark == "%":
                base = _apply(lambda value: value / 100, base)
            elif mark == "_":
                raise Unreadable("an index after what is no name")
            elif self.token == "\\circ" or [t for _, t in self.tokens[self.at : self.at + 3]] == [
                *("{", "\\circ", "}")
            ]:
                self.at += 1 if self.token == "\\circ" else 3
                if self.degrees:
                    base = _apply(_radians, base)
            else:
                base = _apply(_power, base, self.exponent())
        return base

    def exponent(self) -> Node:
        if self.token in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            node = self.exponent()
            return node if sign > 0 else _apply(lambda value: -value, node)
        node = self.argument()
        if self.token == "^":  # towers are read from the top
            self.take()
            return _apply(_power, node, self.exponent())
        return node

    def mixed(self, start: int) -> Node | None:
        r"""`2\frac{1}{3}` is 2 + 1/3."""
        texts = [token for _, token in self.tokens[start : start + 8]]
        kinds = [kind for kind, _ in self.tokens[start : start + 8]]
        if texts[1:3] != ["\\frac", "{"] or texts[4:6] != ["}", "{"] or texts[7:] != ["}"]:
            return None
        if any(kinds[index] != "number" or "." in texts[index] for index in (0, 3, 6)):
            return None
        whole, top, bottom = (int(texts[index]) for index in (0, 3, 6))
        if not 0 < top < bottom:
            return None
        self.at = start + 8
        value = whole + Fraction(top, bottom)
        return lambda _: value

    def argument(self) -> Node:
        r"""A group in braces, or one token as in `\frac12` and `x^2`."""
        if self.token == "{":
            return self.group()
        if self.kind == "number":
            text = self.token
            if len(text) > 1:  # \frac12 is a half, and x^10 is x^1 times 0
                self.tokens[self.at : self.at + 1] = [("number", digit) for digit in text]
            if not self.token.isdecimal():
                raise Unreadable("a decimal without braces")
            value = Fraction(self.take())
            return lambda _: value
        return self.atom()

    def group(self) -> Node:
        opening = self.take()
        bars, self.bars = self.bars, 0
        node = self.sum()
        self.bars = bars
        self.take(_CLOSING[opening])
        return node

    def atom(self) -> Node:
        kind, token = self.kind, self.token
        if kind == "number":
            value = Fraction(self.take())
            return lambda _: value
        if kind == "name":
            return self.name(self.take())
        if token in ("(", "[", "{"):
            return self.group()
        if token == "|":
            self.take()
            symbols = self.symbols
            self.bars += 1
            node = self.sum()
            self.bars -= 1
            self.take("|")
            self.worked("abs", symbols)
            return _apply(abs, node)
        if kind == "command":
            return self.command(self.take()[1:])
        raise Unreadable(f"unexpected {token!r}")

    def command(self, name: str) -> Node:
        if name == "frac":
            if [token for _, token in self.tokens[self.at : self.at + 2]] == ["{", "d"]:
                raise Unreadable("a derivative")
            return _apply(_division, self.argument(), self.argument())
        if name == "sqrt":
            index: Node = lambda _: Fraction(2)  # noqa: E731
            if self.token == "[":
                index = self.group()
            return _apply(_root, index, self.argument())
        if name in ("binom", "max", "min", "gcd", "lcm"):
            return self.several(name)
        if name in _TRIGONOMETRY or name in ("ln", "log", "lg", "exp"):
            return self.function(name)
        if name in ("lfloor", "lceil"):
            self.at -= 1
            symbols = self.symbols
            node = _apply(_floor if name == "lfloor" else _ceiling, self.group())
            self.worked(name, symbols)
            return node
        if name in ("overline", "bar") and not self.plain_group():
            return _apply(_conjugate, self.argument())
        if name in _OPAQUE or name in ("overline", "bar"):
            return self.name(f"{name} {self.raw()}")
        if name == "pi":
            return lambda _: +_context.pi
        if name in _GREEK:
            return self.name(name)
        raise Unreadable(f"unknown command {name!r}")

    def plain_group(self) -> bool:
        """Whether the next group holds a name alone, as in `\\overline{AB}`."""
        inside = [kind for kind, _ in self.tokens[self.at : self.at + 3]]
        return inside[:1] == ["name"] or inside == ["other", "name", "other"]

    def raw(self) -> str:
        """The text of the next group or token, as the name of a symbol."""
        if self.token != "{":
            return self.take()
        start, depth = self.at, 0
        while True:
            depth += {"{": 1, "}": -1}.get(self.take(), 0)
            if depth == 0:
                return "".join(token for _, token in self.tokens[start + 1 : self.at - 1])

    def worked(self, name: str, symbols: int) -> None:
        """Note an operation unless symbols have been read since there were so many."""
        if self.symbols == symbols:
            self.work.add(name)

    def several(self, name: str) -> Node:
        symbols = self.symbols
        if name == "binom":
            node = _apply(_binomial, self.argument(), self.argument())
            self.worked(name, symbols)
            return node
        opening = self.take()
        if opening not in ("(", "{"):
            raise Unreadable(f"{name} without brackets")
        nodes = [self.sum()]
        while self.token == ",":
            self.take()
            nodes.append(self.sum())
        self.take(_CLOSING[opening])
        self.worked(name, symbols)
        return _apply(lambda *values: Fraction(_LISTS[name](*map(_whole_or_real, values))), *nodes)

    def function(self, name: str) -> Node:
        exponent: Node | None = None
        base: Node | None = None
        while self.token in ("^", "_"):
            mark = self.take()
            if mark == "^":
                inverse = [token for _, token in self.tokens[self.at : self.at + 4]]
                if inverse == ["{", "-", "1", "}"] and name in _INVERSE:
                    self.at += 4
                    name = _INVERSE[name]
                else:
                    exponent = self.argument()
            elif name == "log":
                base = self.argument()
            else:
                raise Unreadable(f"an index of {name}")
        before, self.degrees = self.degrees, True
        symbols = self.symbols
        node = self.group() if self.token in _CLOSING else self.product(argument=True)
        if name != "exp":
            self.worked("log" if name in ("ln", "log", "lg") else "trigonometry", symbols)
        self.degrees = before
        if name in ("log", "lg"):
            base = base or (lambda _: Fraction(10))
            node = _apply(_logarithm, node, base)
        else:
            node = _apply(_FUNCTION_OF.get(name) or _named(_TRIGONOMETRY.get(name, name)), node)
        return node if exponent is None else _apply(_power, node, exponent)

    def name(self, name: str) -> Node:
        if name == "e" and self.token != "_":
            return lambda _: +_context.e
        if name == "i" and self.token != "_":
            self.imaginary = True
            return lambda _: _context.mpc(0, 1)
        if self.token == "_":
            self.take()
            name = f"{name}_{self.raw()}"
        while self.token == "'":
            name += self.take()
        self.names.add(name)
        self.symbols += 1
        if self.token == "(" and name.rstrip("'")[:1] in _FUNCTIONS:
            bracket = self.group()

            def applied(point: Point) -> Value:
                value = _bounded(inexact(bracket(point)))
                return _context.sin(value * point.of(name)) + point.of(name)

            return applied
        return lambda point: point.of(name)


def _apply(operation: Callable[..., Value], *nodes: Node) -> Node:
    return lambda point: operation(*(node(point) for node in nodes))


def inexact(value: Value) -> Any:
    """The value as a number of mpmath."""
    if isinstance(value, Fraction):
        return _context.mpf(value.numerator) / value.denominator
    return _context.mpmathify(value)


def _is_real(value: Value) -> bool:
    return isinstance(value, Fraction | int) or abs(_context.im(value)) <= abs(
        value
    ) * _context.mpf(10) ** (10 - _DIGITS)


def _is_exact(*values: Value) -> bool:
    return all(isinstance(value, Fraction) for value in values)


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _bounded(value: Value) -> Value:
    if abs(value) > _LARGEST:
        raise Unreadable("the number is too large")
    return value


def _addition(one: Value, two: Value) -> Value:
    if _is_exact(one, two):
        return _sized(one + two)
    one, two = inexact(one), inexact(two)
    small, large = sorted((abs(one), abs(two)))
    if 0 < small < large * _LOST:
        raise Unreadable("a sum that one of its terms is lost in")
    return one + two


def _product(one: Value, two: Value) -> Value:
    return _sized(one * two) if _is_exact(one, two) else inexact(one) * inexact(two)


def _division(one: Value, two: Value) -> Value:
    return _sized(one / two) if _is_exact(one, two) else inexact(one) / inexact(two)


def _sized(value: Fraction) -> Value:
    return value if _bits(value) <= MOST_BITS else inexact(value)


def _power(base: Value, exponent: Value) -> Value:
    if _is_exact(base, exponent) and exponent.denominator == 1:
        if _bits(base) * abs(exponent) <= MOST_BITS:
            return base**exponent.numerator
        if base in (0, 1, -1):
            return base ** (2 + exponent.numerator % 2)
    exponent = _bounded(inexact(exponent))
    base = inexact(base)
    if base == 0 and not exponent > 0:
        raise Unreadable("a power of zero")
    return base**exponent


def _root(index: Value, value: Value) -> Value:
    if _is_exact(index, value) and index.denominator == 1 and index > 0 and _bits(value) < 2_000:
        sign = -1 if value < 0 and index % 2 else 1
        size = sign * value
        if size >= 0:
            roots = [
                round(inexact(part) ** (1 / inexact(index))) for part in size.as_integer_ratio()
            ]
            if index < 100 and Fraction(roots[0], roots[1] or 1) ** int(index) == size:
                return sign * Fraction(*roots)
            return sign * inexact(size) ** (1 / inexact(index))
    value, index = inexact(value), _bounded(inexact(index))
    return value ** (1 / index)


def _factorial(value: Value) -> Value:
    if _is_exact(value) and value.denominator == 1 and 0 <= value <= 1_000:
        return Fraction(math.factorial(int(value)))
    return _context.factorial(_bounded(inexact(value)))


def _double_factorial(value: Value) -> Value:
    return _context.fac2(_bounded(inexact(value)))


def _binomial(n: Value, k: Value) -> Value:
    if _is_exact(n, k) and n.denominator == k.denominator == 1 and 0 <= k <= n <= 1_000:
        return Fraction(math.comb(int(n), int(k)))
    return _context.binomial(_bounded(inexact(n)), _bounded(inexact(k)))


def _logarithm(value: Value, base: Value) -> Value:
    return _context.log(inexact(value)) / _context.log(inexact(base))


def _floor(value: Value) -> Value:
    return Fraction(math.floor(value) if _is_exact(value) else int(_context.floor(_bounded(value))))


def _ceiling(value: Value) -> Value:
    return -_floor(-value)


def _conjugate(value: Value) -> Value:
    return value if _is_exact(value) else _context.conj(value)


def _radians(value: Value) -> Value:
    return inexact(value) * _context.pi / 180


def _exponential(value: Value) -> Value:
    return _context.exp(_bounded(inexact(value)))


def _whole_or_real(value: Value) -> Value:
    if _is_exact(value):
        return value if value.denominator > 1 else int(value)
    return value


def _named(name: str) -> Callable[[Value], Value]:
    function = getattr(_context, name)
    return lambda value: function(_bounded(inexact(value)))


_FUNCTION_OF: dict[str, Callable[[Value], Value]] = {
    "exp": _exponential,
    "ln": lambda value: _context.log(inexact(value)),
}
