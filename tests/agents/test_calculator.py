"""The calculator evaluates arithmetic and refuses everything else."""

from __future__ import annotations

import time

import pytest

from keel.agents.environments.calculator import evaluate, shown


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) ^ 2 - 6", "19"),
        ("-2 ** 2", "-4"),
        ("7 // 2 + 7 % 4", "6"),
        ("0.1 + 0.2", "0.3"),
        ("2 × 3 − 6 ÷ 4", "4.5"),
        ("round(2 * pi, 3)", "6.283"),
        ("max(1, 2.5, gcd(12, 18))", "6"),
        ("2 ** 100", str(2**100)),
        ("2 ** -1", "0.5"),
    ],
)
def test_arithmetic(expression: str, result: str) -> None:
    assert shown(evaluate(expression)) == result


@pytest.mark.parametrize(
    "expression",
    [
        *("", "2 +", "(" * 400, "1" * 600, "1 / 0", "9 ** 9 ** 9", "9.0 ** 9 ** 9"),
        *("(-8) ** 0.5", "10 ** 900 * 10 ** 900", "1e999", "exp(1000)", "sqrt(-1)", "sqrt()"),
        *("foo(1)", "x + 1", "True + 1", "'a' * 9", "[1] * 9", "1 < 2", "(1).real", "1j"),
        *("__import__('os').system('true')", "lambda: 1", "max(*[1])", "round(5, -10 ** 9)"),
    ],
)
def test_everything_else_is_refused_quickly(expression: str) -> None:
    began = time.thread_time()  # independent of the load of the machine
    with pytest.raises(ValueError):
        evaluate(expression)
    assert time.thread_time() - began < 2
