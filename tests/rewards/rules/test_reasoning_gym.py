"""Verifiers of reasoning_gym: only the answer passes, in any markup, whatever surrounds it."""

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from keel.configs.load import load_config
from keel.configs.schema import SourceConfig
from keel.data.procedural import _REFUSED_TASKS, _to_jsonable, load_reasoning_gym
from keel.rewards.code.call_driver import from_jsonable
from keel.rewards.rules.reasoning_gym import _MOST_PARTIAL
from keel.rewards.rules.verifiers import Verifier, verifier_for
from keel.rewards.text import answer_in
from keel.rewards.worker import reply_to
from keel.rl.summary import passed

RECIPES = Path(__file__).parents[3] / "configs/recipes"
NAMING = sorted(p.name for p in RECIPES.glob("*.yaml") if "source: reasoning_gym" in p.read_text())
NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks with many right answers, without one in the entry."""
SLOW = {"arc_agi", "figlet_font", "futoshiki", "group_anagrams", "knight_swap"}
"""Tasks that take most of a second to build."""
NONSENSE = ["?", "0", "1", "nan", "-inf", "nan+nanj", "[]", "{}", "''", "None", "no idea at all"]
TASKS = sorted(set(DATASETS) - NO_ORACLE - set(_REFUSED_TASKS) - SLOW)


@cache
def specs(task: str, count: int, params: str = "{}") -> list[dict[str, Any]]:
    """Return reward specs of a task, after a trip through JSON."""
    options = json.loads(params)
    source = SourceConfig(name="x", source="reasoning_gym", task=task, size=count, params=options)
    prompts = load_reasoning_gym(source, seed=3).items
    return json.loads(json.dumps([dict(item.prompt.reward) for item in prompts]))


def spec_of(task: str, answer: str, **metadata: Any) -> dict[str, Any]:
    entry = {"question": "?", "answer": answer, "metadata": metadata}
    return {"kind": "reasoning_gym", "task": task, "entry": entry}


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


def junk(entry: dict[str, Any], others: list[str]) -> list[str]:
    right, question = entry["answer"], entry["question"]
    return [
        *(*around(right).values(), "", " \n", "0", "1", "-1", "a", ".", "None", "[]", "nan"),
        *(right[: len(right) // 2], right[::-1], f"{right}0", f"-{right}"),
        *(", ".join([right, *others]), "\n".join([right, *others]), " or ".join([*others, right])),
        *(question, f"{question} {right}", *others),
    ]


def _same_value(text: str, right: str) -> bool:
    """Junk may equal the answer: a number may be 0, a word a palindrome."""
    try:
        return float(text) == float(right)
    except ValueError:
        return text.strip() == right


@pytest.mark.parametrize("recipe", NAMING)
def test_only_answers_pass_in_recipes(recipe: str) -> None:
    for source in load_config(RECIPES / recipe).data.sources:
        if source.source == "reasoning_gym":
            check_task(source.task, json.dumps(dict(source.params)))


@cache  # recipes have many in common
def check_task(task: str, params: str) -> None:
    tasks = specs(task, 12, params)
    for index, spec in enumerate(tasks):
        entry, verifier = spec["entry"], verifier_for(spec)
        right = entry["answer"]
        for same in (right, f"  {right}\n", f"\\boxed{{{right}}}", f"So: <answer>{right}</answer>"):
            assert verifier(same) == 1.0, same
        others = [other["entry"]["answer"] for other in tasks[index + 1 :] + tasks[:index]]
        for text in junk(entry, [other for other in others if other != right][:3]):
            if not _same_value(text, right):
                assert score(verifier, text) <= _MOST_PARTIAL, f"{text!r} for {right!r}"
                assert not passed(score(verifier, text))


@pytest.mark.parametrize("task", TASKS)
def test_every_task_accepts_its_own_answer_only(task: str) -> None:
    (spec,) = specs(task, 1)
    verifier, right = verifier_for(spec), spec["entry"]["answer"]
    assert verifier(right) == 1.0 and verifier("") == 0.0
    for nonsense in NONSENSE:
        assert _same_value(nonsense, right) or score(verifier, nonsense) < 0.9, nonsense
    for kind, text in around(right).items():
        if task != "sokoban" or "twice" not in kind:  # moves after the last change nothing
            assert not passed(score(verifier, text)), f"{kind}: {text!r} for {right!r}"


@pytest.mark.parametrize("task", sorted(NO_ORACLE))
def test_tasks_without_an_answer_use_their_verifier(task: str) -> None:
    (spec,) = specs(task, 1)
    assert spec["entry"]["answer"] is None
    metadata = from_jsonable(spec["entry"]["metadata"])
    right = {
        "graph_color": lambda: json.dumps(metadata["possible_answer"]),
        "propositional_logic": lambda: metadata["example_answer"],
        "rubiks_cube": lambda: metadata["example_correct_answer"],
    }
    if task in right:
        assert verifier_for(spec)(right[task]()) == pytest.approx(1.0)
    assert verifier_for(spec)("no idea") < 0.5


def test_verifiers_use_the_tasks_options() -> None:
    # The options hold the tolerance.
    knobs = {"min_num_decimal_places": 1, "max_num_decimal_places": 1, "precision": 4, "seed": 1}
    (spec,) = specs("decimal_arithmetic", 1, json.dumps(knobs))
    assert spec["params"] == knobs
    assert verifier_for(spec)(spec["entry"]["answer"]) == 1.0


def test_values_beyond_json_survive_encoding() -> None:
    value = {"t": (1, ("a",)), "s": {1, 2}, "d": {1: "x", (1, 2): [None]}, "~odd": 1.5, "n": {}}
    value |= {"e": Decimal("0.10"), "f": Fraction(1, 3)}
    assert from_jsonable(json.loads(json.dumps(_to_jsonable(value)))) == value
    with pytest.raises(TypeError, match="object"):
        _to_jsonable({"a": [object()]})


def test_partial_credit_is_capped_despite_rounding() -> None:
    # Shares of 1/9 add up to more than 1, and shares of 1/10 to less.
    for letters in range(3, 26):
        right = "abcdefghijklmnopqrstuvwxyz"[:letters]
        verifier = verifier_for(spec_of("spell_backward", right))
        assert verifier(right) == verifier(right.upper()) == 1.0
        assert verifier(f"{right}x") <= _MOST_PARTIAL < 1.0


MARKED = ["{}.", "The answer is {}.", "Therefore, the final answer is: {}", "#### {}", "**{}**"]
MARKED += ["`{}`", "```\n{}\n```", '"{}"', "\\[{}\\]", "\\boxed{{\\text{{{}}}}}"]
MARKED += ["The answer is **{}**."]
"""Common markup."""


FORMS: dict[str, Callable[[str], list[str]]] = {
    "gsm_symbolic": lambda right: [
        *("\\boxed{\\$20}", "20 dollars", "\\boxed{20\\text{ apples}}", "\\boxed{20\\%}", "x = 20"),
        *("€20", "$20", "20 km per hour", "20 m", "20 minutes.", "20.00"),
    ],
    "fraction_simplification": lambda right: [f"{right}.", f"{right.strip('$')}."],
    "time_intervals": lambda right: [right.replace(", ", ","), f"{right}."],
    "quantum_lock": lambda right: [
        right.replace(" → ", between) for between in ("\\to ", ", ", "=>", "-", "", "; ", "\n")
    ],
    "sokoban": lambda right: [", ".join(right), " ".join(right), "-".join(right)],
    "survo": lambda right: ["\n".join(f"[ {row} ]" for row in right.split("\n"))],
    "knights_knaves": lambda right: [f"{word} {right}" for word in ("So", "Thus", "Therefore,")],
}
"""Other spellings that a task's verifier accepts."""


@pytest.mark.parametrize("task", FORMS)
def test_right_answers_pass_in_other_forms(task: str) -> None:
    verify = cast(Any, create_dataset(task, size=1)).score_answer
    full = 0
    for spec in specs(task, 4):
        if task == "gsm_symbolic":
            spec = {**spec, "entry": {**spec["entry"], "answer": "20"}}
        entry, verifier = spec["entry"], verifier_for(spec)
        right = entry["answer"]
        texts = [*(mark.format(right) for mark in MARKED), f"$${right.strip('$')}$$"]
        for text in [*texts, *FORMS[task](right)]:
            try:
                passes = verify(answer_in(text), from_jsonable(entry)) == 1.0
            except Exception:  # the verifier cannot parse it
                passes = False
            if passes:
                full += 1
                assert verifier(text) == 1.0, text
    assert full >= 4


def test_an_unsolved_integral_may_be_the_known_answer() -> None:
    known = "3*Integral(x**3*cos(3*x), x) + C"
    verifier = verifier_for(
        spec_of("intermediate_integration", known, variable="x", integrand="3*x**3*cos(3*x)")
    )
    assert verifier(known) == 1.0
    assert verifier("x**3*sin(3*x) + x**2*cos(3*x) - 2*x*sin(3*x)/3 - 2*cos(3*x)/9 + C") == 1.0
    assert verifier("Integral(3*x**3*cos(3*x), x)") == 0.0
    assert verifier("Integral(x, x).__class__") == 0.0
