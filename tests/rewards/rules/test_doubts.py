"""Answers that say something else than what the computer algebra reads in them."""

from __future__ import annotations

from typing import Any

import pytest

from keel.rewards.code.compare import same_text, same_value
from keel.rewards.rules import maths
from keel.rewards.rules.doubts import interval
from keel.rewards.rules.towers import endless
from keel.rewards.rules.verifiers import verifier_for


def boxed(right: str, given: str, **more: Any) -> float:
    return said(right, f"\\boxed{{{given}}}", **more)


def said(right: str, text: str, **more: Any) -> float:
    spec = {"kind": "answer", "answer": right, "match": "math", **more}
    return verifier_for(spec)(text)


@pytest.mark.parametrize(
    ("right", "given"),
    [
        ("e^{-50}", "e^{-60}"),
        ("\\frac1{20!}", "-\\frac1{19!}"),
        ("2^{-100}", "2^{-200}"),
        ("\\frac1{2^{60}}", "2-2"),
        ("\\frac{1}{2598960}", "\\frac{1}{2598961}"),
        ("\\{e^{-50}, 1\\}", "\\{e^{-60}, 1\\}"),
        ("5", "\\leq 5"),
        ("5", "\\gt 5"),
        ("5", "x < 5"),
        ("5", "5\\text{ million}"),
        ("5", "5 million"),
        ("5", "5\\text{ dozen}"),
        ("3", "3\\text{ is wrong}"),
        ("3", "3\\text{ is not it}"),
        ("11_2", "11_3"),
        ("(0,1)", "\\{0,1\\}"),
        ("\\{\\pi, 2\\}", "(2, \\pi)"),
        ("x=1,y=2", "2,1"),
        ("x=1,y=2", "x=2,y=1"),
        ("x=1,y=2", "1"),
        ("3.14", "7=3.14"),
        ("(-\\infty,3]", "x < 3"),
        ("[1,2]", "1 < x \\le 2"),
        # How often is a part of it.
        ("2,2,3", "2,3"),
        ("2,3", "2,2,3"),
        ("1,1", "1"),
        ("-1,-1,2", "-1, 2"),
        ("x=1, x=1, x=2", "x=1, x=2"),
        ("5", "\\text{6 apples}"),
        ("17", "18 \\pmod{20}"),
        ("17 \\pmod{20}", "17"),
        ("100,200", "100, 300"),
    ],
)
def test_something_else(right: str, given: str) -> None:
    assert boxed(right, given) == 0.0


@pytest.mark.parametrize(
    ("right", "given"),
    [
        ("e^{-50}", "\\frac{1}{e^{50}}"),
        ("x \\leq 5", "x \\le 5"),
        ("5000000", "5\\text{ million}"),
        ("1.5 million", "1500000"),
        ("5", "5\\text{ cm}"),
        ("5", "5 dollars"),
        ("11_2", "11_{2}"),
        ("11_2", "11"),
        ("x=1,y=2", "y=2, x=1"),
        ("x=1,y=2", "(1, 2)"),
        ("x=1,y=2", "x = 1 \\text{ and } y = \\frac{4}{2}"),
        ("5", "2+3=5"),
        ("(-\\infty,3]", "x\\le3"),
        ("x\\le3", "(-\\infty,3]"),
        ("[1,2]", "1\\le x\\le2"),
        ("[1,2]", "2 \\geq x \\geq 1"),
        ("(2,\\infty)", "x>2"),
        ("\\emptyset", "\\varnothing"),
        ("\\{\\}", "∅"),
        ("2,2,3", "2, 2 \\text{ and } 3"),
        ("2,3", "3,2"),
        ("1", "\\max(0,0,0,1)=1"),
        ("\\{1,1,2\\}", "\\{1,2\\}"),
        ("1000000", "1,000,000"),
        ("1,000,000", "1{,}000{,}000"),
        ("100,200", "100, 200"),
        ("10,100", "100 \\text{ and } 10"),
        ("120,360", "120,360"),
        ("25\\%", "25\\,\\%"),
        ("25\\,\\%", "25\\%"),
        ("12", "\\text{12 hours}"),
        ("5", "\\text{5 apples}"),
        ("17", "17 \\pmod{20}"),
        ("17 \\pmod{20}", "17\\pmod{20}"),
    ],
)
def test_the_same(right: str, given: str) -> None:
    assert boxed(right, given) == 1.0


def test_to_see_whether_a_rule_can_be_made_reads_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    read, verify = maths._library()
    texts: list[str] = []
    monkeypatch.setattr(maths, "_library", lambda: (lambda t: texts.append(t) or read(t), verify))
    spec = {"kind": "answer", "answer": "\\sqrt{7} + 1"}
    later = verifier_for(spec, ready=False)
    assert texts == []
    verifier_for(spec)
    assert len(texts) == 1, "and no completion's deadline pays for it"
    assert later("\\boxed{1+\\sqrt7}") == 1.0


def test_what_is_not_marked() -> None:
    assert said("3", "\\boxed{3") == said("3", "\\boxed{4} or \\boxed{3") == 0.0
    assert said("3", "I know it cannot be 3") == said("3", "3 or 4") == 0.0
    assert said("3", "The answer is < 3") == said("1", "1e" + "9" * 40) == 0.0
    assert said("3", "x > 0, therefore it is 3") == said("3", "2 + 1 => 3") == 1.0


def test_a_tolerance_is_for_values() -> None:
    assert boxed("3.14", "x<3.14", tolerance=0.01) == boxed("3.14", "7=3.14", tolerance=0.01) == 0.0
    assert boxed("3.14", "x=3.141", tolerance=0.01) == 1.0


@pytest.mark.parametrize(
    "given",
    [
        "10^{10^{10}}",
        "9^9^9",
        "9**9**9**9",
        "2^{1000000}",
        "999999!",
        "5!!!",
        "((5!)!)!",
        "(x+1)^{99999}",
        "1e999999",
    ],
)
def test_what_would_never_be_worked_out_is_wrong_at_once(given: str) -> None:
    assert endless(given) and boxed("5", given) == 0.0
    assert boxed(given, given) == 1.0


def test_signs_and_digits() -> None:
    assert boxed("0", "-0") == boxed("0", "0.0") == boxed("42", "４２") == 1.0
    assert boxed("5", "-5") == boxed("50", "0.5") == boxed("5", "⑤5") == 0.0
    assert boxed("5", "") == boxed("5", " ") == boxed("5", "\u200b") == 0.0


def test_intervals() -> None:
    assert interval("3 > x \\ge 1") == "[1,3)" and interval("x ≥ \\frac12") == "[\\frac12,\\infty)"
    for other in ("x = 3", "1 < x > 2", "x <", "< 3", "5"):
        assert interval(other) == ""


@pytest.mark.parametrize(
    "text",
    [
        *(
            "\\frac{5}{2}",
            "5\\cdot 2",
            "2 \\times 5",
            "more than 5",
            "<5",
            "\\neq 5",
            "$> 5$",
            "5^2",
        ),
        *("All except B", "all but (B)", "It is anything but B.", "B is wrong"),
    ],
)
def test_a_choice_that_is_ruled_out_or_part_of_a_number(text: str) -> None:
    choices = {"kind": "answer", "match": "choice", "answer": "5", "choices": ["3", "5", "7"]}
    for whole in (text, f"\\boxed{{{text}}}"):
        assert verifier_for(choices)(whole) == 0.0
    assert verifier_for(choices)("\\boxed{5!}") == 0.0
    assert verifier_for(choices)("5!") == verifier_for(choices)("**5**") == 1.0
    assert verifier_for(choices)("5") == verifier_for(choices)("It is B.") == 1.0


def test_json_with_a_key_twice_is_no_answer() -> None:
    spec = {"kind": "answer", "match": "schema", "answer": {"properties": {"a": {"const": 1}}}}
    assert verifier_for(spec)('{"a": 1}') == 1.0
    assert verifier_for(spec)('{"a": 2, "a": 1}') == 0.0


def test_integers_of_programs() -> None:
    assert not same_value(1000000007, 1000000007.9) and same_value(1000000007, 1000000007.0)
    assert not same_value(1000000006, 1000000506.0, 1e-6) and same_value(3, 3.0000000001)
    assert not same_value(5, 1e9, 0.9) and not same_value(5.0, 1e9, 0.9)
    assert not same_text("1000000006", "1000000506", 1e-6)
    assert not same_text("1000000006", "1000000506.0", 1e-6)
    assert same_text("1000000006.0", "1000000506", 1e-6) and same_value(0.1, 0.1000000001, 1e-6)
    assert not same_value(float("inf"), -float("inf"), 0.5) and same_text("inf", "Infinity", 0.1)
