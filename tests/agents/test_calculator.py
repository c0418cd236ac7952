"""The calculator evaluates arithmetic and refuses everything else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keel
from keel.agents.env_process.client import Hosted, Program
from keel.agents.environments.calculator import evaluate, shown
from tests.agents.episodes import TASK, run, use


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) ^ 2", "25"),
        ("-2 ** 2", "-4"),
        ("7 // 2 + 7 % 4", "6"),
        ("10 / 4", "2.5"),
        ("0.1 + 0.2", "0.3"),
        ("2 × 3 − 6 ÷ 4", "4.5"),
        ("sqrt(2) * sqrt(2)", "2"),
        ("round(2 * pi, 3)", "6.283"),
        ("max(1, 2.5, gcd(12, 18))", "6"),
        ("2 ** 100", str(2**100)),
        ("2 ** -1", "0.5"),
        ("  1e3 ", "1000"),
    ],
)
def test_arithmetic(expression: str, result: str) -> None:
    assert shown(evaluate(expression)) == result


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "no arithmetic expression"),
        ("2 +", "no arithmetic expression"),
        ("(" * 400, "no arithmetic expression"),
        ("round(5, -10 ** 9)", "at most 15 digits"),
        ("1" * 600, "at most 500 characters"),
        ("1 / 0", "division"),
        ("9 ** 9 ** 9", "at most 1000 digits"),
        ("9.0 ** 9 ** 9", "too large"),
        ("(-8) ** 0.5", "no real number"),
        ("10 ** 900 * 10 ** 900", "at most 1000 digits"),
        ("1e999", "not finite"),
        ("exp(1000)", "too large"),
        ("sqrt(-1)", "domain|nonnegative"),
        ("foo(1)", "there is no 'foo'; there are pi"),
        ("x + 1", "there is no 'x'"),
        ("sqrt()", "argument"),
        ("True + 1", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("[1] * 9", "only numbers"),
        ("1 < 2", "only numbers"),
        ("(1).real", "only numbers"),
        ("().__class__", "only numbers"),
        ("__import__('os').system('true')", "only numbers"),
        ("open('x')", "there is no 'open'"),
        ("lambda: 1", "only numbers"),
        ("max(*[1])", "only numbers"),
        ("round(1.5, ndigits=1)", "there is no 'round'"),
        ("1j", "only numbers"),
    ],
)
def test_invalid_expressions_are_refused(expression: str, why: str) -> None:
    began = time.thread_time()  # independent of the load of the machine
    with pytest.raises(ValueError, match=why):
        evaluate(expression)
    assert time.thread_time() - began < 2


Term = tuple[str, int]


def joined(parts: tuple[Term, str, Term]) -> Term:
    (left, one), op, (right, two) = parts
    return f"({left} {op} {right})", {"+": one + two, "-": one - two, "*": one * two}[op]


@settings(deadline=None)
@given(
    st.recursive(
        st.integers(-99, 99).map(lambda n: (str(n), n)),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(joined),
        max_leaves=8,
    )
)
def test_integers_are_exact(term: Term) -> None:
    text, value = term
    if len(text) <= 500:
        assert evaluate(text) == value


@pytest.mark.e2e
def test_the_calculator_runs_as_an_environment() -> None:
    async def play() -> None:
        target = "keel.agents.environments.calculator:Calculator"
        environment = Hosted(Program(target=target, folder=Path(keel.__file__).parent))
        opening = await environment.open(TASK, seed=3)
        assert [tool.name for tool in opening.tools] == ["calculate"]
        assert "For example" in str(opening.tools[0].parameters)
        assert (await use(environment, "calculate", expression="6 * 7")).text == "42"
        result = await use(environment, "calculate", expression="1 / 0")
        assert (result.failed, result.text) == (True, "ValueError: division by zero")
        await environment.close()

    run(play())
