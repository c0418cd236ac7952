r"""Right answers as models write them are right: whatever a rule refuses, these it must not.

One verifier reads each kind of answer in every format, so that the next strictness meets them all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from keel.rewards.rules.verifiers import Verifier, verifier_for
from keel.rewards.workers.pool import WorkerPool
from tests.waiting import PATIENCE_S

MARKED = ["\\boxed{%s}", "So $\\boxed{%s}$.", "\\[\\boxed{%s}\\]", "<answer>%s</answer>"]
SAID = ["%s", "**%s**", "`%s`", "The answer is %s.", "The answer is **%s**.", "The answer is `%s`."]
SAID += [
    "Therefore, the final answer is: %s",
    "Some work.\n\nThe answer is\n> %s",
    "**Answer:** %s",
]
TEXT = ["\\boxed{\\text{%s}}", "\\boxed{\\textbf{%s}}", "<answer>\\text{%s}</answer>"]
MATHS = ["$%s$", "\\(%s\\)", "The answer is $%s$.", "The answer is (%s).", "<answer>$%s$</answer>"]
MATHS += ["\\boxed{\\boldsymbol{%s}}", "\\boxed{\\text{The answer is }%s}"]
MATHS += ["<answer>The answer is %s.</answer>"]


@cache
def verifier(right: str) -> Verifier:
    return verifier_for({"kind": "answer", "match": "math", "answer": right})


@pytest.mark.parametrize("format_", [*MARKED, *SAID, *TEXT])
def test_words(format_: str) -> None:
    for word in (
        *("no", "False", "no solution", "does not exist", "never", "unknown", "incorrect", "even"),
        *("not enough information", "Not a function", "Paris", "undefined"),
    ):
        for right in (word, f"\\text{{{word}}}"):
            for given in (word, word.capitalize()):
                assert verifier(right)(format_ % given) == 1.0, (right, given)
            assert verifier(right)(format_ % "something else") == 0.0


@pytest.mark.parametrize("format_", [*MARKED, *SAID, *MATHS])
def test_numbers_and_formulas(format_: str) -> None:
    for right in ("42", "-7", "1/2", "3.14", "1000", "\\frac{3}{4}", "2\\sqrt{3}", "x^2+1"):
        assert verifier(right)(format_ % right) == 1.0, right
        assert verifier(right)(format_ % "17") == 0.0, right


TYPICAL: dict[str, list[str]] = {
    "120": [r"\boxed{120\text{ (order does not matter)}}", r"\boxed{5!}", "5!"],
    "0": [
        *(r"\boxed{0\text{ (no solutions)}}", r"\boxed{1-1}", r"\boxed{\sqrt{2}-\sqrt{2}}"),
        r"\boxed{\sin^2(1)+\cos^2(1)-1}",
    ],
    "5": [
        *(r"\boxed{\text{No. of apples} = 5}", "The answer is 5!", r"\boxed{5 \text{ apples}}"),
        *("Not $9^{9^9}$, so the answer is $5$.", "Compared with 10^{10^{10}} that is small: 5."),
    ],
    "70000": ["The answer is 70000!", "70000!"],
    "42": ["The answer is 42!!", "Some work\n> 42", "x = 42", r"\boxed{x = 42}", "```\n42\n```"],
    "1/2": [r"\boxed{\frac{1}{2} \text{ or } 0.5}", "The answer is 1/2 or 0.5."],
    "512": [r"\boxed{2^{3^2}}"],
    "256": ["2^{2^3} = 2^8 = 256, so the answer is 256."],
    "2^{32}": [r"\boxed{2^{2^5}}"],
    "10^{100}": [r"\boxed{10^{10^2}}"],
    "5!!": [r"\boxed{15}", r"\boxed{5!!}"],
    "x=1,y=2": [
        *(r"\boxed{(x,y)=(1,2)}", r"\boxed{x=1,\quad y=2}", r"\boxed{x = 1, \; y = 2}"),
        *(r"\boxed{x=1,\text{ and }y=2}", r"\boxed{x=1, and y=2}", r"\boxed{x=1 \quad y=2}"),
        *(r"\boxed{\left(x,y\right)=\left(1,2\right)}", r"\boxed{(y,x)=(2,1)}", "$x=1$ and $y=2$"),
        *(r"\boxed{\begin{cases}x=1\\y=2\end{cases}}", r"\boxed{x=1;\, y=2}", "x=1, y=2"),
    ],
    "x=1,y=2,z=3": [r"\boxed{(x,y,z) = (1,2,3)}"],
    "x=1,x=2,y=3": [r"\boxed{x=1, x=2, y=3}"],
    "A_1+A_2": [r"\boxed{A_2+A_1}"],
    "C_1e^x+C_2e^{-x}": [r"\boxed{C_2e^{-x}+C_1e^{x}}"],
    "(1,2),(3,4)": [r"\boxed{\{(1,2),(3,4)\}}"],
    "\\{(1,2),(3,4)\\}": [r"\boxed{(1,2),(3,4)}"],
    "18": [r"She makes \$18.", "She makes $18.", r"**\$18**", r"\boxed{\$18}", r"\boxed{€18}"],
    "1000": [r"The total is \$1,000.", "The total is $1,000."],
    "540": [r"\boxed{540~\text{m}}", r"\boxed{540\,\text{m}}", r"\boxed{540 m}"],
    "60": [r"\boxed{60 km/h}", r"\boxed{60\text{ km/h}}", "60 km/h"],
    "9.8": [r"\boxed{9.8 m/s^2}", r"\boxed{9.8 m/s²}", r"\boxed{9.8\,\mathrm{m/s^2}}"],
    "36": [r"\boxed{36 cm^2}", r"\boxed{36 cm²}", r"\boxed{36\text{ cm}^2}"],
    "100": ["100°C", r"\boxed{100°C}", r"\boxed{100^\circ C}", r"\boxed{100^\circ\text{C}}"],
    "3.14": [r"\boxed{≈3.14}", r"\boxed{\approx 3.14}", r"\boxed{x \approx 3.14}"],
    "(2,\\infty)": [r"\boxed{2<x}", r"\boxed{x>2}", "The answer is $x > 2$."],
    "8:30 AM": [r"\boxed{8:30\text{ AM}}", "The answer is 8:30 AM."],
}


@pytest.mark.parametrize("right", TYPICAL)
def test_one_value_in_many_forms(right: str) -> None:
    refused = [text for text in TYPICAL[right] if verifier(right)(text) != 1.0]
    assert not refused


HOSTILE: dict[str, list[str]] = {
    "3": [
        *(r"\boxed{3\text{ is wrong}}", r"\boxed{3\text{ (wrong)}}", r"\boxed{\text{not }3}"),
        *(r"\boxed{3\text{ isn't it}}", r"\boxed{\text{anything but }3}", "3 is not right"),
    ],
    "no": [r"\boxed{\text{yes, no}}", r"\boxed{\text{not no}}"],
    "x=1,y=2": [r"\boxed{(x,y)=(2,1)}", r"\boxed{x=1}", r"\boxed{x=1,y=2,z=3}", "x=1, y=3"],
    "x=1,x=2,y=3": [r"\boxed{x=2,y=3}"],
    "0": [r"\boxed{e^{-50}}", r"\boxed{10^{-9}}"],
    "(2,\\infty)": [r"\boxed{x<2}", r"\boxed{2>x}", "The answer is $x < 2$."],
    "8:30 AM": [r"\boxed{8:30\text{ PM}}", r"\boxed{9:30\text{ AM}}"],
    "42": [r"\boxed{(41)}", "It is not (42).", "The answer is `43`.", "(6)(8)"],
    "5": ["6 or 5", "The answer is 5 or 6.", r"\boxed{5\text{ but wrong}}", "5 is not the answer"],
    "even": ["The answer is odd or even", "neither odd nor even", "not even"],
    "2^{1000000}": ["The answer is not $2^{1000000}$.", r"\boxed{\neq 2^{1000000}}"],
    "2": ["2π", "The answer is 2π."],
}


@pytest.mark.parametrize("right", HOSTILE)
def test_other_values_in_the_same_forms(right: str) -> None:
    accepted = [text for text in HOSTILE[right] if verifier(right)(text) != 0.0]
    assert not accepted


TOWERS = [
    *("9^{9^9}", r"10^{2 \cdot 10^{10}}", r"2^{2\cdot 5000000}", r"9^{9 \cdot 9^9}", "(10!)!"),
    *(r"(2\cdot 50000000)!", r"2 \cdot 9^{9^9}", r"\frac{9^{9^9}}{2}", r"(9^9)^{(9^9)}", "5!!!"),
    *(r"e^{e^{e^{e^{e}}}}", r"\sqrt{9^{9^9}}", r"9^{\frac{9^{9}}{1}}", r"{9^{9}}^{9^{9}}"),
    *(r"2^{\left(10^{10}\right)}", r"\binom{10^{9}}{5\cdot 10^{8}}", r"(x+y+1)^{2 \cdot 5000}"),
    *("(9**9)**(9**9)", r"9^{-9^{9}}", r"(\frac12)^{10^9}", r"9^{9^{9}}\text{ m}"),
]


@pytest.mark.e2e
def test_towers_have_a_deadline() -> None:
    """In a worker, which the deadline ends: none of them comes near it."""

    def spec(right: str) -> dict[str, Any]:
        return {"kind": "answer", "match": "math", "answer": right}

    given = [*(f"\\boxed{{{one}}}" for one in TOWERS), *(f"The answer is ${t}$" for t in TOWERS)]
    pool = WorkerPool(1, deadline_s=PATIENCE_S)
    try:
        small = pool.submit(spec("5"), [*given, "\\boxed{5}"]).result(PATIENCE_S)
        large = [
            pool.submit(spec(right), [f"\\boxed{{{right}}}", f"The answer is ${right}$.", *given])
            for right in ("2^{1000000}", "100000!", "9^{9^{9^9}}")
        ]
        verdicts = [[one.score for one in verdict.result(PATIENCE_S)] for verdict in large]
    finally:
        pool.close()
    assert [one.score for one in small] == [0.0] * len(given) + [1.0]
    assert verdicts == [[1.0, 1.0] + [0.0] * len(given)] * 3


def test_a_tower_is_compared_as_a_power() -> None:
    for right in ("2^{1000000}", "2^{10^6}"):
        for given in ("2^{10^6}", "4^{500000}", "2^{1{,}000{,}000}", "2 ^ {1000000}"):
            assert verifier(right)(f"\\boxed{{{given}}}") == 1.0
        for given in ("2^{10^5}", "3^{10^6}", "2", "-2^{10^6}"):
            assert verifier(right)(f"\\boxed{{{given}}}") == 0.0
