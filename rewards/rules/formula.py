"""Parses LaTeX formulas and compares them by their values at sample points.

A formula is accepted only if the grammar covers all of it. Parsing takes linear time. Two formulas
are equal if they agree to 80 digits at all sample points, whose coordinates are derived from the
names of the symbols. Formulas are never expanded and all numbers are bounded, so evaluating
`(x+y+z)^{500}` takes a single power.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

import mpmath  # pyright: ignore[reportMissingTypeStubs]

_DIGITS = 100
_context: Any = mpmath.mp.clone()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_context.dps = _DIGITS
_MOST_DIGITS = 1_500
_LARGEST = 10**15
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<command>\\[A-Za-z]+|\\[|])"
    r"|(?P<word>[a-z]{4,})|(?P<name>[A-Z]{2,}(?![a-z_'])|[A-Za-z])|(?P<other>\S))"
)
_GREEK = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho
sigma tau upsilon phi varphi chi psi omega ell hbar
Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega
"""
_OPAQUE = """
vec hat mathbf mathcal mathbb mathfrak overrightarrow tilde widehat dot overline bar
"""
r"""Commands such as `\vec` whose argument becomes part of a symbol's name."""
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_OPENS_FUNCTION = frozenset("fghEFGP")  # before a bracket. Others are factors: `x(x+1)`.

Value = Any  # a number from mpmath
Node = Callable[[int], Value]  # from the number of a sample point to the value there


class Unreadable(ValueError):
    """Raised if the grammar doesn't cover a text, or if a value in a formula is too large."""


class LostTerm(Exception):
    """Raised if a term in a sum is too small for the current precision."""


@dataclass(frozen=True)
class Formula:
    """A parsed formula. `work` lists the operations that it applies to constants, such as `binom`,
    `!` or `sin`, because evaluating them may be the task itself."""

    node: Node
    text: str = ""
    names: frozenset[str] = frozenset()
    work: frozenset[str] = frozenset()
    imaginary: bool = False

    def evaluate(self, point: int) -> Value | None:
        """Evaluate the formula at a sample point. Returns None if the result is undefined or too
        large."""
        try:
            value = self.node(point)
            if (
                0 < abs(value) < _power_of_ten(10 - _context.dps)
            ):  # rounding errors shrink with precision
                with _context.workdps(2 * _context.dps):
                    return value if abs(self.node(point)) > abs(value) / 2 else value * 0
            return value
        except (ArithmeticError, ValueError, TypeError, RecursionError):
            return None

    def constant(self) -> Value | None:
        try:
            return None if self.names else self.evaluate(0)
        except LostTerm:
            return None


def number(value: Any) -> Value:
    return _context.mpf(value.numerator) / value.denominator


def values_close(left: Value, right: Value) -> bool:
    """Return whether two values agree, ignoring the last 20 digits of the larger one."""
    bound = max(abs(left), abs(right)) * _power_of_ten(20 - _context.dps)
    return bool(left == right or abs(left - right) <= bound < _context.inf)


def equal(one: Formula, other: Formula, *, ratio: bool = False) -> bool:
    """Return whether two formulas agree at all sample points, up to a constant factor if `ratio` is
    set."""
    symbols = bool(one.names or other.names)
    for digits in (_DIGITS, _MOST_DIGITS):
        with _context.workdps(digits):
            try:
                return _agree(one, other, range(3 + ratio if symbols else 1), ratio=ratio)
            except LostTerm:  # as in 3^{2020}-1
                if symbols or one.work or other.work:
                    return False
    return False


def _agree(one: Formula, other: Formula, points: range, *, ratio: bool) -> bool:
    factors: list[Value] = []
    for point in points:
        value = one.evaluate(point)
        if value is None or (point and not one.imaginary and _context.im(value)):
            continue  # outside the domain of a real formula
        right = other.evaluate(point)
        if right is None or bool(value) != bool(right) or not (ratio or values_close(value, right)):
            return False
        if value or not ratio:
            factors.append(right / value if ratio else 1)
    return len(factors) > ratio and all(values_close(factors[0], factor) for factor in factors)


def parse_formula(text: str) -> Formula:
    """Parse a formula. Raises Unreadable if the grammar doesn't cover the whole text."""
    reader = _Reader(text)
    try:
        node = reader.expression()
    except RecursionError as error:
        raise Unreadable(str(error)) from error
    if reader.token:
        raise Unreadable(f"unexpected {reader.token!r}")
    return Formula(node, text, frozenset(reader.names), frozenset(reader.work), reader.imaginary)


class _Reader:
    """A recursive-descent parser for formulas. Each method parses one construct and returns its
    syntax tree node."""

    def __init__(self, text: str) -> None:
        self.tokens = [(m.lastgroup or "", m[m.lastgroup or 0]) for m in _TOKEN.finditer(text)]
        self.tokens.append(("", ""))
        self.at = 0  # position in `tokens`
        self.bars = 0  # number of open `|`
        self.symbols = 0  # number of symbols so far, which tells whether an operand contains one
        self.in_function = False  # in the argument of a function, where `^\\circ` means degrees
        self.imaginary = False
        self.names: set[str] = set()
        self.work: set[str] = set()

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def token(self) -> str:
        return self.tokens[self.at][1]

    def take(self, expected: str = "") -> str:
        token = self.token
        if not token or (expected and token != expected):
            raise Unreadable(f"expected {expected or 'more'}, got {token!r}")
        self.at += 1
        return token

    def skip(self, *tokens: str) -> bool:
        for place, token in enumerate(tokens, self.at):
            if self.tokens[place][1] != token:
                return False
        self.at += len(tokens)
        return True

    def expression(self, level: int = 0) -> Node:
        r"""Parse an expression and return its node. `level` is 0 for a sum, 1 for a product, 2 for
        the argument of a function without brackets such as `\sin`, and 3 for a power."""
        symbols = self.symbols
        if self.token in ("+", "-"):
            negative = self.take() == "-"
            node = self.expression(max(level, 1))
            node = _apply(operator.neg, node) if negative else node
        else:
            node = self.atom()
        while True:
            token = self.token
            if level < 1 and token in ("+", "-"):
                node = _apply(_addition, node, self.expression(1))
            elif level < 2 and token in ("*", "/"):
                operation = operator.mul if self.take() == "*" else _quotient
                node = _apply(operation, node, self.expression(3))
            elif level < 3 and self.starts_factor(argument=level == 2):
                node = _apply(operator.mul, node, self.expression(3))
            elif token not in ("^", "!"):
                return node
            elif self.take() == "!":
                if self.token == "!":
                    raise Unreadable("`!!` is ambiguous")
                node = self.record_work("!", symbols, _apply(_FACTORIAL, node))
            elif self.skip("\\circ") or self.skip("{", "\\circ", "}"):
                node = _apply(_context.radians, node) if self.in_function else node
            else:
                node = _apply(_power, node, self.exponent())

    def starts_factor(self, *, argument: bool) -> bool:
        if self.kind == "command":
            ends = ("\\rfloor", "\\rceil", "\\circ", "\\|")
            return self.token not in ends and not (argument and self.token[1:] in _FUNCTIONS)
        starts = self.kind == "name" or self.token in ("(", "[", "{")
        return starts or (self.token == "|" and not self.bars)

    def exponent(self) -> Node:
        if self.token in ("+", "-"):
            return self.expression(3)
        node = self.argument()
        # x^{y}^{z} is read from the top.
        return _apply(_power, node, self.exponent()) if self.skip("^") else node

    def argument(self) -> Node:
        r"""Parse the argument of a command. Without braces it is one digit, as in `\frac12`, so a
        number is first split into its digits."""
        if self.kind == "number" and len(self.token) > 1:
            self.tokens[self.at : self.at + 1] = [("number", digit) for digit in self.token]
        return self.atom()

    def group(self) -> Node:
        opening = self.take()
        bars, self.bars = self.bars, 0
        node = self.expression()
        self.bars = bars
        self.take(_CLOSING[opening])
        return node

    def atom(self) -> Node:
        symbols = self.symbols
        if self.kind == "number":
            if len(self.token) > _DIGITS - 20:
                raise Unreadable("more digits than are compared")
            return _constant(self.take())
        if self.token in ("(", "[", "{"):
            return self.group()
        if self.skip("|"):
            self.bars += 1
            node = self.expression()
            self.bars -= 1
            self.take("|")
            return self.record_work("abs", symbols, _apply(abs, node))
        if self.token in ("\\lfloor", "\\lceil"):
            operation = _context.floor if self.token == "\\lfloor" else _context.ceil
            return self.record_work("floor", symbols, _apply(operation, self.group()))
        if self.kind == "name":
            return self.name(self.take())
        if self.kind == "command":
            return self.command(self.take()[1:])
        raise Unreadable(f"unexpected {self.token!r}")

    def command(self, name: str) -> Node:
        symbols = self.symbols
        if name == "frac":
            if self.skip("{", "d"):
                raise Unreadable("a derivative")
            return _apply(_quotient, self.argument(), self.argument())
        if name == "sqrt":
            index = self.group() if self.token == "[" else _constant("2")
            return _apply(_root, self.argument(), index)
        if name == "binom":
            node = _apply(_BINOMIAL, self.argument(), self.argument())
            return self.record_work(name, symbols, node)
        if name in _FUNCTIONS:
            return self.function(name)
        if name in _OPAQUE.split():
            if "name" in [kind for kind, _ in self.tokens[self.at : self.at + 2]]:
                return self.name(f"{name} {self.raw()}")
            if name in ("overline", "bar"):
                return _apply(_context.conj, self.argument())
        if name == "pi":
            return lambda _: +_context.pi
        if name in _GREEK.split():
            return self.name(name)
        raise Unreadable(f"unknown command {name!r}")

    def function(self, name: str) -> Node:
        exponent: Node | None = None
        base, operation = _constant("10"), _FUNCTIONS[name]
        while self.token in ("^", "_"):
            if name == "log" and self.skip("_"):
                base = self.argument()
            elif f"arc{name}" in _FUNCTIONS and self.skip("^", "{", "-", "1", "}"):
                operation = _FUNCTIONS[f"arc{name}"]
            else:
                self.take("^")
                exponent = self.argument()
        symbols, outer = self.symbols, self.in_function
        self.in_function = True
        node = self.group() if self.token in _CLOSING else self.expression(2)
        self.in_function = outer
        if name != "exp":
            self.record_work("log" if name in ("ln", "log") else "trigonometry", symbols, node)
        node = _apply(operation, node, base) if name == "log" else _apply(operation, node)
        return node if exponent is None else _apply(_power, node, exponent)

    def name(self, name: str) -> Node:
        if name == "e" and self.token != "_":
            return lambda _: +_context.e
        if name == "i" and self.token != "_":
            self.imaginary = True
            return lambda _: _context.mpc(0, 1)
        if self.skip("_"):
            name = f"{name}_{self.raw()}"
        while self.token == "'":
            name += self.take()
        self.names.add(name)
        self.symbols += 1
        if self.token == "(" and name[0] in _OPENS_FUNCTION and name.rstrip("'") == name[0]:
            argument = self.group()
            # An unknown function is a wave whose frequency is drawn from its name.
            return lambda point: _context.sin(
                _check_magnitude(argument(point)) * _sample_value(point, name)
            )
        return lambda point: _sample_value(point, name)

    def raw(self) -> str:
        start, depth = self.at, 0
        while True:
            depth += {"{": 1, "}": -1}.get(self.take(), 0)
            if depth == 0:
                return "".join(token for _, token in self.tokens[start : self.at]).strip("{}")

    def record_work(self, name: str, symbols: int, node: Node) -> Node:
        """Add the operation `name` to `work` if none of its arguments contains a symbol, and return
        `node`."""
        if self.symbols == symbols:
            self.work.add(name)
        return node


def _sample_value(point: int, name: str) -> Value:
    """Return a symbol's value at a sample point, derived from a hash of its name. The values at
    points 0 and 3 are positive."""
    drawn = crc32(f"{point} {name}".encode())
    sign = -1 if point % 3 and drawn >> 8 & 1 else 1
    return _context.mpf(sign * (3 * (drawn % 100_003) + 50_000)) / 150_000


def _apply(operation: Callable[..., Value], *nodes: Node) -> Node:
    return lambda point: operation(*(node(point) for node in nodes))


def _constant(text: str) -> Node:
    value = int(text) if text.isdecimal() else text
    return lambda _: _context.mpf(value)


@cache
def _power_of_ten(place: int) -> Value:
    return _context.mpf(10) ** place


def _check_magnitude(value: Value) -> Value:
    if not abs(value) <= _LARGEST:
        raise Unreadable("the number is too large")
    return value


def _quotient(one: Value, two: Value) -> Value:
    return one / two


def _addition(one: Value, two: Value) -> Value:
    small, large = sorted((abs(one), abs(two)))
    # A larger one is a rounding error, as of the cosine of 90 degrees.
    if 0 < small < large * _power_of_ten(-15 - _context.dps) < _context.inf:
        raise LostTerm("a sum loses one of its terms")
    return one + two


def _power(base: Value, exponent: Value) -> Value:
    return base ** _check_magnitude(exponent)


def _root(value: Value, index: Value) -> Value:
    if _context.im(value) == 0 > _context.re(value) and index % 2 == 1:
        return -_root(-value, index)
    return value ** (1 / _check_magnitude(index))


def _within_bounds(name: str) -> Callable[..., Value]:
    return lambda *values: getattr(_context, name)(*map(_check_magnitude, values))


_FACTORIAL, _BINOMIAL = map(_within_bounds, ("factorial", "binomial"))
_BOUNDED = "exp sin cos tan sec csc cot sinh cosh tanh coth"
_INVERTIBLE = "sin cos tan cot sec csc sinh cosh tanh"


def _logarithm(value: Value, base: Value) -> Value:
    return _context.log(value) / _context.log(base)


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    **{name: _within_bounds(name) for name in _BOUNDED.split()},
    **{f"arc{name}": _within_bounds(f"a{name}") for name in _INVERTIBLE.split()},
    "ln": _context.log,
    "log": _logarithm,
}

INFINITE = Formula(lambda _: _context.inf, "∞")
MINUS_INFINITE = Formula(lambda _: -_context.inf, "-∞")
