"""Only the answer passes, whatever surrounds it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from keel.configs.load import load_config
from keel.configs.schema import SourceConfig
from keel.data.procedural import REFUSED_TASKS, load_reasoning_gym
from keel.rewards.code.call_driver import from_jsonable
from keel.rewards.rules.reasoning_gym import MOST_PARTIAL
from keel.rewards.rules.verifiers import Verifier, verifier_for
from keel.rewards.text import answer_in
from keel.rewards.workers.worker import reply_to
from keel.rl.evaluation import passed

RECIPES = Path(__file__).parents[3] / "configs"
NAMING = sorted(p.name for p in RECIPES.glob("*.yaml") if "source: reasoning_gym" in p.read_text())
NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
SLOW = {"arc_agi", "figlet_font", "futoshiki", "group_anagrams", "knight_swap"}
"""Tasks that take most of a second to build."""


def items(task: str, count: int, params: dict[str, Any]) -> list[tuple[dict[str, Any], Verifier]]:
    source = SourceConfig(name="x", source="reasoning_gym", task=task, size=count, params=params)
    specs = [dict(item.prompt.reward) for item in load_reasoning_gym(source, seed=3).items]
    return [(json.loads(json.dumps(spec))["entry"], verifier_for(spec)) for spec in specs]


def score(verifier: Verifier, text: str) -> float:
    """Score as in a worker: an exception is worth 0."""
    return float(reply_to(verifier, text).get("score", 0.0))


def around(right: str) -> dict[str, str]:
    """The right answer with additions."""
    return {
        "words after it": f"{right} or so",
        "a line after it": f"{right}\nfoo bar",
        "a letter after it": f"{right}x",
        "much after it": right + " a" * 500,
        "a word before it": f"foo {right}",
        "a line before it": f"foo bar\n{right}",
        "a sentence": f"It may be {right}, or not.",
        "twice": f"{right} {right}",
        "twice, run together": right + right,
        "denied": f"not {right}",
    }


def junk(entry: dict[str, Any], others: list[str]) -> dict[str, str]:
    right = entry["answer"]
    return {
        **around(right),
        "nothing": "",
        "blank": " \n",
        **{f"always {text!r}": text for text in ("0", "1", "-1", "a", ".", "None", "[]", "nan")},
        "cut short": right[: len(right) // 2],
        "reversed": right[::-1],
        "a digit after it": f"{right}0",
        "negative": f"-{right}",
        "a list": ", ".join([right, *others]),
        "a list, by lines": "\n".join([right, *others]),
        "a list, its last": " or ".join([*others, right]),
        "the question": entry["question"],
        "the question and it": f"{entry['question']} {right}",
        **{f"another's {number}": other for number, other in enumerate(others)},
    }


def same_value(text: str, right: str) -> bool:
    """Junk may equal the answer: a number may be 0, a word a palindrome."""
    try:
        return float(text) == float(right)
    except ValueError:
        return text.strip() == right


@pytest.mark.parametrize("recipe", NAMING)
def test_only_answers_pass_in_recipes(recipe: str) -> None:
    sources = load_config(RECIPES / recipe).data.sources
    procedural = [source for source in sources if source.source == "reasoning_gym"]
    assert procedural
    for source in procedural:
        check_task(source.task, json.dumps(dict(source.params)))


@cache  # recipes have many in common
def check_task(task: str, params: str) -> None:
    entries = items(task, 24, json.loads(params))
    for index, (entry, verifier) in enumerate(entries):
        right = entry["answer"]
        for same in (right, f"  {right}\n", f"\\boxed{{{right}}}", f"So: <answer>{right}</answer>"):
            assert verifier(same) == 1.0, same
        others = [other["answer"] for other, _ in entries[index + 1 :] + entries[:index]]
        others = [other for other in others if other != right][:3]
        for kind, text in junk(entry, others).items():
            if not same_value(text, right):
                assert score(verifier, text) <= MOST_PARTIAL, f"{kind}: {text!r} for {right!r}"
                assert not passed(score(verifier, text))


FINE = {
    "sokoban": {"twice", "twice, run together"},  # moves after the last change nothing
}


@pytest.mark.parametrize("task", sorted(set(DATASETS) - NO_ORACLE - set(REFUSED_TASKS) - SLOW))
def test_additions_never_pass(task: str) -> None:
    for entry, verifier in items(task, 2, {}):
        right = entry["answer"]
        for kind, text in around(right).items():
            if kind not in FINE.get(task, ()):
                assert not passed(score(verifier, text)), f"{kind}: {text!r} for {right!r}"


@pytest.mark.parametrize("letters", range(3, 26))
def test_partial_credit_is_capped_despite_rounding(
    letters: int,
) -> None:
    # Shares of 1/9 add up to more than 1, those of 1/10 to less.
    right = "abcdefghijklmnopqrstuvwxyz"[:letters]
    entry = {"question": "?", "answer": right, "metadata": {}}
    verifier = verifier_for({"kind": "reasoning_gym", "task": "spell_backward", "entry": entry})
    assert verifier(right) == verifier(right.upper()) == 1.0
    assert verifier(f"{right}x") <= MOST_PARTIAL < 1.0


@pytest.mark.parametrize(
    ("task", "right", "same"),
    [
        ("knights_knaves", "Zoey is a sage, and Abe is a fool.", "Abe is a fool, Zoey is a sage"),
        ("knights_knaves", "A is a fool, B is a sage, and C is a sage.", "a fool b sage c sage"),
    ],
)
def test_word_order_is_the_verifiers_choice(task: str, right: str, same: str) -> None:
    entry = {"question": "?", "answer": right, "metadata": {}}
    verifier = verifier_for({"kind": "reasoning_gym", "task": task, "entry": entry})
    assert verifier(right) == verifier(same) == 1.0


def marked(right: str) -> dict[str, str]:
    """The right answer in common markup."""
    return {
        "a full stop": f"{right}.",
        "a sentence": f"The answer is {right}.",
        "so": f"Therefore, the final answer is: {right}",
        "a heading": f"#### {right}",
        "bold": f"**{right}**",
        "backticks": f"`{right}`",
        "a fence": f"```\n{right}\n```",
        "quotes": f'"{right}"',
        "dollars": f"$${right.strip('$')}$$",
        "brackets": f"\\[{right}\\]",
        "text": f"\\boxed{{\\text{{{right}}}}}",
        "bold, in a sentence": f"The answer is **{right}**.",
    }


def forms(task: str, right: str) -> list[str]:
    """Other spellings that the task's verifier accepts."""
    rows = [line.split() for line in right.split("\n")]
    match task:
        case "gsm_symbolic":
            return [
                *("\\boxed{\\$20}", "20 dollars", "\\boxed{20\\text{ apples}}", "\\boxed{20\\%}"),
                *("x = 20", "€20", "$20", "20 km per hour", "20 m", "20 minutes.", "20.00"),
            ]  # fmt: skip
        case "fraction_simplification":
            inside = right.strip("$")
            return [f"{right}.", f"$${inside}$$", f"{inside}.", f"\\boxed{{{inside}}}"]
        case "time_intervals":
            return [right.replace(", ", ","), f"{right}."]
        case "quantum_lock":
            between = ["\\to ", ", ", "=>", "-", "", "; ", "\n"]
            return [f"[{right.replace(' → ', ', ')}]", *(right.replace(" → ", b) for b in between)]
        case "sokoban":
            return [", ".join(right), " ".join(right), "-".join(right)]
        case "survo" | "kakurasu":
            return [
                "\n".join(f"| {' | '.join(row)} |" for row in rows),
                "\n".join(f"[ {' '.join(row)} ]" for row in rows),
            ]
        case "polynomial_equations":
            return [f"{right},"] if right else []
        case _:
            both = [right.replace(", and ", f", {word} ") for word in ("while", "but")]
            return [*both, *(f"{word} {right}" for word in ("So", "Thus", "Therefore,"))]


@pytest.mark.parametrize(
    "task",
    [
        *("gsm_symbolic", "fraction_simplification", "time_intervals", "quantum_lock", "sokoban"),
        *("survo", "kakurasu", "polynomial_equations", "knights_knaves"),
    ],
)
def test_right_answers_pass_in_other_forms(task: str) -> None:
    verify = cast(Any, create_dataset(task, size=1)).score_answer
    full = 0
    for entry, verifier in items(task, 4, {}):
        if task == "gsm_symbolic":
            entry["answer"] = "20"
            verifier = verifier_for({"kind": "reasoning_gym", "task": task, "entry": entry})
        right = entry["answer"]
        common = {} if task == "polynomial_equations" else marked(right)
        for text in [*common.values(), *forms(task, right)]:
            try:
                passes = verify(answer_in(text), from_jsonable(entry)) == 1.0
            except Exception:  # the verifier cannot parse it
                passes = False
            if passes:
                full += 1
                assert verifier(text) == 1.0, text
    assert full >= 4


@pytest.mark.parametrize(
    "text", ["20 or so", "20 or 30", "20 30", "not 20", "20, 30", "-20", "20x", "20 / 7", "20\nxx"]
)
def test_gsm_answers_hold_one_number(text: str) -> None:
    entry = {"question": "?", "answer": "20", "metadata": {}}
    verifier = verifier_for({"kind": "reasoning_gym", "task": "gsm_symbolic", "entry": entry})
    assert not passed(score(verifier, text))


def test_an_unsolved_integral_may_be_the_known_answer() -> None:
    integrand = {"variable": "x", "integrand": "3*x**3*cos(3*x)"}
    known = "3*Integral(x**3*cos(3*x), x) + C"
    entry = {"question": "?", "answer": known, "metadata": integrand}
    verifier = verifier_for(
        {"kind": "reasoning_gym", "task": "intermediate_integration", "entry": entry}
    )
    assert verifier(known) == 1.0
    assert verifier("x**3*sin(3*x) + x**2*cos(3*x) - 2*x*sin(3*x)/3 - 2*cos(3*x)/9 + C") == 1.0
    assert verifier("Integral(3*x**3*cos(3*x), x)") == 0.0
    assert verifier("Integral(x, x).__class__") == 0.0
