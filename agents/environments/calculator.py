"""An environment with a calculator for arithmetic expressions on numbers of limited size."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, cast

Number = int | float

_MAX_CHARACTERS = 500
_MAX_DIGITS = 1000
"""Maximum number of digits in an integer, including intermediate results."""
_LIMIT = 10**_MAX_DIGITS
_TWO: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda one, two: one / two,
    ast.FloorDiv: lambda one, two: one // two,
    ast.Mod: operator.mod,
}
_NAMES: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def _round(value: Number, digits: int = 0) -> Number:
    if abs(digits) > 15:
        raise ValueError("round to at most 15 digits")
    return round(value, digits) if digits else round(value)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in (
        *("acos", "asin", "atan", "ceil", "cos", "exp", "floor", "gcd", "lcm", "log", "log10"),
        *("log2", "sin", "sqrt", "tan"),
    )
} | {"abs": abs, "max": max, "min": min, "round": _round}


class Calculator:
    """An environment with one tool and no verdict."""

    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and brackets; pi, e; sqrt, log, sin, round,
                gcd and the like. For example: (3 + 4) * 2 ** 5
        """
        return shown(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Evaluate an arithmetic expression. Raises ValueError if it is invalid, undefined or too
    large."""
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {_MAX_CHARACTERS} characters")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    try:
        tree = ast.parse(text.replace("−", "-"), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    except OverflowError as error:
        raise ValueError("a number is too large") from error
    except (ArithmeticError, TypeError) as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _bounded(cast(Number, node.value))
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TWO:
            return _bounded(_TWO[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, args)))
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
            known = ", ".join((*_NAMES, *_FUNCTIONS))
            raise ValueError(f"there is no {name!r}; there are {known}")
        case _:
            raise ValueError("only numbers, + - * / // % **, brackets and functions can be used")


def _power(base: Number, exponent: Number) -> Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    # Checked first: computing a huge power takes long.
    if whole and abs(base) > 1 and exponent > _MAX_DIGITS / math.log10(abs(base)):
        raise ValueError(f"a number may have at most {_MAX_DIGITS} digits")
    result: object = base**exponent
    if isinstance(result, complex):
        raise ValueError(f"({base}) ** ({exponent}) is no real number")
    return _bounded(cast(Number, result))


def _bounded(value: Number) -> Number:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the result is not finite")
    elif abs(value) > _LIMIT:
        raise ValueError(f"a number may have at most {_MAX_DIGITS} digits")
    return value


def shown(value: Number) -> str:
    """Format a number with 12 significant digits, so that 0.1 + 0.2 is shown as 0.3."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)
