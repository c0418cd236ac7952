"""Multiple choice: an answer must name exactly one choice."""

from __future__ import annotations

import time
from typing import Any

import pytest

from keel.rewards.rules.verifiers import verifier_for

CITIES = ["London", "Paris", "York", "New York"]


def score(text: str, right: str = "B", choices: Any = CITIES) -> float:
    return verifier_for({"kind": "answer", "match": "choice", "answer": right, "choices": choices})(
        text
    )


@pytest.mark.parametrize(
    "text",
    [
        *("B", "b", "(B)", "(b)", "B.", "**B**", "[B]", "Option B", "\\boxed{B}"),
        *("\\boxed{\\text{(B)}}", "\\boxed{\\textbf{B}}", "<answer>B</answer>"),
        *("answer: B", "Answer: b", "**Answer:** (B)", "Answer:\n(B)", "Answer:\nB"),
        *("The answer is B", "The correct answer to this question is **B. Paris**."),
        *("The answer is option B, Paris.", "B. Paris", "B) Paris", "Paris", "paris."),
        *("It must be Paris.", "London is in England, so it is out.\n\nParis"),
        *("A is a port, and D is too young.\nThe answer is B.", "A dog would say\n(B)"),
        *("First \\boxed{B}, and again \\boxed{B}.", "<think>A, no, C</think>B"),
        *("<think>The answer is A.</think>The answer is B.",),
    ],
)
def test_ways_to_name_a_choice(text: str) -> None:
    assert score(text) == 1.0
    assert score(text, right="Paris") == 1.0
    assert score(text, right="(b)") == 1.0
    for wrong in "ACD":
        assert score(text, right=wrong) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        *("", "?", "E", "A or B", "A, B", "(A) (B)", "AB", "The answer is A or B."),
        *("The answer is B. No, the answer is A.", "\\boxed{A} or \\boxed{B}"),
        *("<answer>A</answer><answer>B</answer>", "\\boxed{}", "answer: London or Paris"),
        *("B. London", "\\boxed{B. London}", "The answer is not B.", "It isn't Paris."),
        *("<think>B</think>", "<think>B</think>I do not know.", "<think>B</think>A"),
        *("<think>The answer is B", "Bonn", "Parisians"),
    ],
)
def test_none_or_two_choices_are_wrong(text: str) -> None:
    assert score(text) == 0.0


def test_longer_choices_contain_shorter_ones() -> None:
    assert score("New York", "D") == score("It is New York.", "D") == 1.0
    assert score("New York", "C") == 0.0
    assert score("York", "C") == 1.0
    assert score("5", "B", ["15", "5"]) == score("\\boxed{15}", "A", ["15", "5"]) == 1.0
    assert score("Vitamin C", "A", ["Vitamin C", "Vitamin D", "Iron"]) == 1.0


def test_letters_beat_texts_like_letters() -> None:
    assert score("C", "C", {"A": "C", "B": "D", "C": "E"}) == 1.0
    assert score("C", "A", {"A": "C", "B": "D", "C": "E"}) == 0.0


def test_without_choices_there_are_letters() -> None:
    verifier = verifier_for({"kind": "answer", "match": "choice", "answer": "E"})
    assert verifier("The answer is (E).") == 1.0
    assert verifier("The answer is (D).") == verifier("E or F") == 0.0


@pytest.mark.parametrize(
    "spec",
    [
        {"answer": "E"},
        {"answer": "Rome"},
        {"answer": "Rome", "choices": None},
        {"choices": "ABCD"},
        {"choices": ["x"]},
        {"choices": {}},
        {"choices": ["x", " "]},
        {"choices": ["x", ["y"]]},
        {"choices": ["x", "X."]},
        {"choices": {"AB": "x", "B": "y"}},
        {"choices": {"a": "x", "b": "y"}},
        {"choices": ["x"] * 27},
        {"answer": 2},
    ],
)
def test_bad_choices_are_refused(spec: dict[str, Any]) -> None:
    fields = {"kind": "answer", "match": "choice", "answer": "A", "choices": CITIES, **spec}
    with pytest.raises(ValueError):
        verifier_for(fields)


def test_time_is_linear_in_the_answer() -> None:
    began = time.thread_time()  # independent of machine load
    for text in (
        "answer:" * 1_000,
        "answer" + " " * 7_500,
        "answer:" + "\n" * 7_500 + "?",
        "Paris " * 1_250 + "London",
        "\\boxed{" * 1_000,
        "\\boxed{" * 750 + "}" * 750,
        "<answer>" * 1_000,
        "<answer>" + "</answer" * 1_000,
        "A " * 3_750,
        "A, " * 1_250,
        "not " * 2_000,
        "not A (" * 1_000,
        "*" * 8_000,
        "\\text{" * 1_250,
    ):
        assert score(text) == 0.0
    assert time.thread_time() - began < 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("The answer is 1.5", "C"),
        ("The answer is 1.5.", "C"),
        ("The answer is 1.", "A"),
        ("\\boxed{−1}", "B"),
        ("\\boxed{-1}", "B"),
        ("\\boxed{$5}", "D"),
        ("2.5", ""),
        ("\\boxed{-5}", ""),
        ("\\boxed{5\\%}", ""),
        ("The answer is 1/5", ""),
        ("The answer is 5^2", ""),
    ],
)
def test_numbers_are_not_parts_of_others(text: str, named: str) -> None:
    for right in "ABCD":
        assert score(text, right, ["1", "-1", "1.5", "5"]) == float(right == named)


def test_words_around_a_letter() -> None:
    assert score("B is the answer because Paris is in France.") == 1.0
    assert score("I think it is C", "C", None) == 1.0
    assert score("I is the answer", "I", None) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        *("The correct answer is:\n\n**B**", "The answer is:\nB"),
        *("The answer is:\n\n**Paris**",),
        *("The answer is B, because Paris is in France and London is not.",),
        *("The correct answer is B (Paris), not A.", "The answer is not A but B."),
        *("The answer is B rather than A.", "The answer is Paris, not London."),
        *("I rule out A, so B.", "A is eliminated, so it is B."),
        *("A and C are wrong, so B.", "B!", "\\boxed{{B}}", '{"answer": "B"}'),
        *('{"answer": "Paris"}',),
    ],
)
def test_the_choice_beside_excluded_ones(text: str) -> None:
    assert score(text) == 1.0
    assert score(text, right="A") == score(text, right="C") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        *("I rule out B", "I rule out A and B", "B is excluded", "B is eliminated"),
        *("rather than B", "I would say A rather than B", "The answer is not A or B"),
        *("not A, B", "Paris is wrong", "I eliminated B.", "C instead of B"),
        *("Paris is ruled out", "A is right, B is wrong"),
    ],
)
def test_excluded_choices_do_not_count(text: str) -> None:
    assert score(text) == 0.0


def test_a_number_among_the_choices_in_braces() -> None:
    for text in ("\\boxed{{5}}", "5!", '{"answer": 5}', "**5**", "The answer is 5, not 7.", "$5$"):
        assert score(text, "5", ["3", "5", "7"]) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        *("\\frac{5}{2}", "5\\cdot 2", "2 \\times 5", "more than 5", "<5", "\\neq 5"),
        *("$> 5$", "5^2", "All except B", "all but (B)", "It is anything but B."),
        *("B is wrong",),
    ],
)
def test_negated_choices_and_longer_numbers(text: str) -> None:
    choices = {"kind": "answer", "match": "choice", "answer": "5", "choices": ["3", "5", "7"]}
    for whole in (text, f"\\boxed{{{text}}}"):
        assert verifier_for(choices)(whole) == 0.0
    assert verifier_for(choices)("\\boxed{5!}") == 0.0
    assert verifier_for(choices)("5!") == verifier_for(choices)("**5**") == 1.0
    assert verifier_for(choices)("5") == verifier_for(choices)("It is B.") == 1.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("The least likely answer is A.", ""),
        ("The worst option is B.", ""),
        ("The answer is A? No, C.", "C"),
        ("The answer is A? No, it is C.", "C"),
        ("The answer is A?", ""),
        ("I rule out B, C and D, so A.", "A"),
        ("I rule out B, C, and D. The answer is A.", "A"),
        ("The correct option is (B) Paris, because York is older.", "B"),
        ("The best choice is C, since A and B are wrong.", "C"),
    ],
)
def test_a_sentence_states_one_choice(text: str, named: str) -> None:
    for right in "ABCD":
        assert score(text, right) == float(right == named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("\\boxed{\\dfrac13}", "A"),
        ("\\boxed{\\frac{1}{3}}", "A"),
        ("$\\tfrac{1}{3}$", "A"),
        ("\\boxed{\\sqrt 2}", "B"),
        ("\\boxed{x^{2}-1}", "C"),
        ("\\boxed{\\left(3, 2\\right)}", "D"),
        ("\\boxed{\\frac23}", ""),
    ],
)
def test_choices_in_another_notation(text: str, named: str) -> None:
    for right in "ABCD":
        choices = ["$\\frac13$", "$\\sqrt{2}$", "$x^2-1$", "$(3,2)$"]
        assert score(text, right, choices) == float(right == named)
