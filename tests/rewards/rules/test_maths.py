r"""Mathematical answers: the corpus answers.jsonl by kind, formats of the answer, and bounds."""

import json
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.rewards.rules import formula
from keel.rewards.rules.verifiers import Verifier, verifier_for

PAIRS: dict[str, list[dict[str, Any]]] = defaultdict(list)
for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines():
    pair = json.loads(line)
    PAIRS[pair["kind"]].append(pair)


@cache
def verifier(right: str, tolerance: float | None = None) -> Verifier:
    spec = {"kind": "answer", "match": "math", "answer": right}
    return verifier_for(spec if tolerance is None else {**spec, "tolerance": tolerance})


@pytest.mark.parametrize("kind", sorted(PAIRS))
def test_corpus(kind: str) -> None:
    wrong = [
        (pair["answer"], pair["completion"], pair["expected"])
        for pair in PAIRS[kind]
        if verifier(pair["answer"], pair.get("tolerance"))(pair["completion"]) != pair["expected"]
    ]
    assert not wrong


MARKED = ["\\boxed{%s}", "So $\\boxed{%s}$.", "\\[\\boxed{%s}\\]", "<answer>%s</answer>"]
STATED = ["%s", "**%s**", "`%s`"]
STATED += ["The answer is %s.", "The answer is **%s**.", "The answer is `%s`."]
STATED += ["Therefore, the final answer is: %s", "Work.\n\nThe answer is\n> %s", "**Answer:** %s"]
TEXT = ["\\boxed{\\text{%s}}", "\\boxed{\\textbf{%s}}", "<answer>\\text{%s}</answer>"]
MATHS = ["$%s$", "\\(%s\\)", "The answer is $%s$.", "The answer is (%s).", "<answer>$%s$</answer>"]
MATHS += ["\\boxed{\\boldsymbol{%s}}", "\\boxed{\\text{The answer is }%s}", "Work.\n#### %s"]
MATHS += ["<answer>The answer is %s.</answer>", "The result is\n\\[\n%s.\n\\]"]
WORDS = ("no", "False", "no solution", "does not exist", "never", "unknown", "incorrect", "even")
WORDS += ("not enough information", "Not a function", "Paris", "undefined")


@pytest.mark.parametrize("format_", [*MARKED, *STATED, *TEXT])
def test_words_in_every_format(format_: str) -> None:
    for word in WORDS:
        for right in (word, f"\\text{{{word}}}"):
            assert verifier(right)(format_ % word) == verifier(right)(format_ % word.title()) == 1.0
            assert verifier(right)(format_ % "something else") == 0.0


@pytest.mark.parametrize("format_", [*MARKED, *STATED, *MATHS])
def test_numbers_and_formulas_in_every_format(format_: str) -> None:
    for right in ("42", "-7", "1/2", "3.14", "1000", "\\frac{3}{4}", "2\\sqrt{3}", "x^2+1"):
        assert verifier(right)(format_ % right) == 1.0, right
        assert verifier(right)(format_ % "17") == 0.0, right


@given(st.integers(-999, 999), st.integers(2, 99), st.sampled_from("+-*/^"))
def test_an_expression_is_not_its_value(left: int, right: int, sign: str) -> None:
    value = {"+": left + right, "-": left - right, "*": left * right}.get(sign, left // right)
    written = f"{left} {sign} {right}"
    if sign == "^":
        written, value = f"({left})^2", left**2
    elif sign == "/":
        written, value = f"{left * right} / {right}", left
    for format_ in ("%s", "\\boxed{%s}", "Compute %s.", "The answer is %s"):
        assert verifier(str(value))(format_ % written) == 0.0
    assert verifier(str(value))(f"\\boxed{{{written} = {value}}}") == 1.0


@given(st.integers(-9999, 9999), st.integers(1, 999), st.integers(1, 9))
def test_fractions_are_compared_exactly(top: int, bottom: int, factor: int) -> None:
    right = f"\\frac{{{top}}}{{{bottom}}}"
    assert verifier(right)(f"\\boxed{{{top * factor}/{bottom * factor}}}") == 1.0
    assert verifier(right)(f"\\boxed{{{top * factor + 1}/{bottom * factor}}}") == 0.0


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("(x+y)^2", "x^2+2xy+y^2", True),
        ("(x+y)^2", "x^2+2xy+y^2+10^{-20}", False),
        ("\\sqrt{x^2}", "x", False),
        ("|x|", "\\sqrt{x^2}", True),
        ("\\frac{n!}{(n-1)!}", "n", True),
        ("\\sqrt{5+2\\sqrt{6}}", "\\sqrt{2}+\\sqrt{3}", True),
        ("e^{-150}", "e^{-160}", False),
        ("\\sqrt{2}-\\sqrt{2}", "0", True),
        ("f(x)+1", "1+f(x)", True),
        ("f(x)", "f(2x)", False),
        ("\\cos 60^\\circ", "0.5", True),
        ("\\sqrt[3]{-8}", "-2", True),
        ("i^{2023}", "-i", True),
        ("e^{i\\pi}", "-1", True),
    ],
)
def test_formulas_are_equal_by_value(one: str, other: str, alike: bool) -> None:
    assert formula.equal(formula.parse_formula(one), formula.parse_formula(other)) is alike


@pytest.mark.parametrize(
    "text", ["", "1 2", "3)", "(3", "x^", "\\frac{1}", "\\foo{1}", "42_{16}", "\\sum n", "dollars"]
)
def test_malformed_formulas_are_unreadable(text: str) -> None:
    with pytest.raises(formula.Unreadable):
        formula.parse_formula(text)


PARTS = [
    *("1,", "(", "{", "[", r"\{", r"\frac", r"\frac{1}{2}", "^", "x^", "-", "1+", "|", "$"),
    *("$1$", r"\text{a}", r"1\text{ a}", r"\sqrt", "x=1,", "1<x<", r"(1,2)\cup", r"x\ne1,"),
    *("1.", "9^", "!", "(9^9)!", "(x+y+z)^{500}+", r"\pm 1,", "1:", r"\[", "not 5 but "),
    *("1 ", r"\sin ", "is ", "not ", "answer is ", "5% ", "5, which ", "5 a", r"a\in b "),
    *(r"\binom{n}{k}+", "(10^{14}+x)!+", r"\gcd(9^9,6)"),
]
RIGHT = ["7", "x^2+1", r"\{1,2\}", "Paris", "x<3", "x=1,y=2", r"\binom{n}{3}\sin 3", r"\gcd(2,x)!"]
EXPLOSIVE = ["(x+y+z)^{500}", "(a+b+c+d+e)^{200}", r"\prod_{n=1}^{1000000} n", "((9!)!)!"]
EXPLOSIVE += ["9^{9^{9^9}}", r"\binom{10^{9}}{10^{8}}", r"\int_0^{10^9} x^{999} dx"]


@pytest.mark.parametrize("start", range(3))
def test_hostile_texts_are_quick(start: int) -> None:
    texts = [part * (2_000 // len(part)) for part in PARTS] + EXPLOSIVE
    texts += ["(" * 900 + "1" + ")" * 900, "9" * 2_000, "\\begin{pmatrix}" + "1&2\\\\" * 300]
    formats = ("%s", "\\boxed{%s}", "The answer is $%s$.")
    for number, text in enumerate(texts):  # each in every format, for three of the answers
        verify = verifier(RIGHT[(number + 3 * start) % len(RIGHT)])
        began = time.thread_time()
        assert verify(formats[(number + start) % 3] % text) == 0.0, text[:40]
        assert time.thread_time() - began < 1.0, text[:40]


def test_tolerance_must_be_a_fraction() -> None:
    for wrong in (0, -1, 1, "0.1", True):
        with pytest.raises(ValueError, match="tolerance"):
            verifier_for({"kind": "answer", "match": "math", "answer": "1", "tolerance": wrong})
