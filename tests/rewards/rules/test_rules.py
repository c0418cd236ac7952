"""Verifiers accept right answers, reject wrong ones and survive hostile ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from keel.configs.schema import SourceConfig
from keel.data.jsonable import to_jsonable
from keel.data.procedural import REFUSED_TASKS, load_reasoning_gym
from keel.rewards.code.call_driver import from_jsonable
from keel.rewards.rules.reasoning_gym import (
    _EVALUATED_TASKS,
    _SYMBOLIC_TASKS,
    _may_be_verified,
)
from keel.rewards.rules.verifiers import Verifier, keeps_format, verifier_for
from keel.rewards.workers.worker import reply_to

NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks with many right answers, of which they name none."""
SLOW = {"arc_agi", "figlet_font", "futoshiki", "group_anagrams", "knight_swap", "sokoban"}
"""Tasks that take most of a second to build."""


def score(verifier: Verifier, text: str) -> float:
    """Score as in a worker: an exception is worth 0."""
    return float(reply_to(verifier, text).get("score", 0.0))


NONSENSE = ["?", "0", "1", "nan", "-inf", "nan+nanj", "[]", "{}", "''", "None", "no idea at all"]


def entry_of(task: str, index: int = 0, size: int = 1) -> dict[str, Any]:
    if task in REFUSED_TASKS:  # refused as a source, but not in a file
        return {"kind": "reasoning_gym", "task": task, "entry": {"answer": "1", "metadata": {}}}
    source = SourceConfig(
        name="x", source="reasoning_gym", task=task, size=size, params={"seed": 7}
    )
    return dict(load_reasoning_gym(source, seed=0).items[index].prompt.reward)


@pytest.mark.parametrize("task", sorted(set(DATASETS) - NO_ORACLE - set(REFUSED_TASKS) - SLOW))
def test_every_task_accepts_its_own_answer(task: str) -> None:
    spec = json.loads(json.dumps(entry_of(task)))
    verifier = verifier_for(spec)
    right = spec["entry"]["answer"]
    assert verifier(right) == 1.0
    assert verifier("") == 0.0
    for nonsense in NONSENSE:
        assert nonsense == right or score(verifier, nonsense) < 0.9, nonsense


@pytest.mark.parametrize("task", sorted(NO_ORACLE))
def test_tasks_without_an_answer_use_their_verifier(task: str) -> None:
    spec = json.loads(json.dumps(entry_of(task)))
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
    source = SourceConfig(
        name="x", source="reasoning_gym", task="decimal_arithmetic", size=1, params=knobs
    )
    spec = load_reasoning_gym(source, seed=0).items[0].prompt.reward
    assert spec["params"] == knobs
    assert verifier_for(spec)(spec["entry"]["answer"]) == 1.0


def test_values_beyond_json_survive_encoding() -> None:
    value = {"t": (1, ("a",)), "s": {1, 2}, "d": {1: "x", (1, 2): [None]}, "~odd": 1.5, "n": {}}
    value |= {"e": Decimal("0.10"), "f": Fraction(1, 3)}
    assert from_jsonable(json.loads(json.dumps(to_jsonable(value)))) == value
    with pytest.raises(TypeError, match=r"metadata.a\[0\]"):
        to_jsonable({"a": [object()]}, "metadata")


def answer(right: Any, text: str, match: str = "math", **more: Any) -> float:
    return verifier_for({"kind": "answer", "answer": right, "match": match, **more})(text)


def test_exact_ignores_white_space_only() -> None:
    assert answer("a b", " a\n b ", "exact") == 1.0
    assert answer("a b", "so \\boxed{a b}", "exact") == 1.0
    assert answer("a b", "A b", "exact") == 0.0
    assert answer("Monday", "so \\boxed{\\text{Monday}}", "exact") == 1.0
    assert answer("Monday", "so \\boxed{\\text{Mon}day}", "exact") == 0.0
    assert answer("\\text{Monday}", "\\boxed{\\text{Monday}}", "exact") == 1.0
    assert answer("0.10", "0.1", "exact") == 0.0


@pytest.mark.parametrize(
    ("raw", "thinking", "kept"),
    [
        ("<think>a</think>b", True, True),
        ("a</think>b", True, True),
        ("<think></think>b", True, True),
        ("b", True, False),
        ("<think>a</think>", True, False),
        ("<think>a", True, False),
        ("<think>a</think><think>b</think>c", True, False),
        ("<think>a</think>b</think>c", True, False),
        ("c<think>a</think>b", True, False),
        ("<think>\\boxed{1} \\boxed{2}</think>\\boxed{2}", True, True),
        ("<think>a</think>\\boxed{1} or \\boxed{2}", True, False),
        ("<answer>1</answer><answer>2</answer>", False, False),
        ("<answer>\\boxed{1}</answer>", False, True),
        ("b", False, True),
        ("<think>a</think>b", False, False),
        ("a</think>b", False, False),
        ("", False, False),
    ],
)
def test_format(raw: str, thinking: bool, kept: bool) -> None:
    assert keeps_format(raw, thinking=thinking, finished=True) is kept
    assert keeps_format(raw, thinking=thinking, finished=False) is False


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "an answer was executed"


@pytest.mark.parametrize("task", [*sorted(_EVALUATED_TASKS | _SYMBOLIC_TASKS), "math"])
def test_answers_are_never_executed(task: str, canary: Path) -> None:
    attacks = [
        f"open({str(canary)!r}, 'w')",
        f"[open({str(canary)!r}, 'w')]",
        f"__import__('pathlib').Path({str(canary)!r}).touch()",
        f"(lambda: open({str(canary)!r}, 'w'))()",
        f"[x for x in [open({str(canary)!r}, 'w')]]",
        f"f\"{{open({str(canary)!r}, 'w')}}\"",
        f"1 + open({str(canary)!r}, 'w')!",
        f"ｏｐｅｎ({str(canary)!r}, 'w')",
        f"sin(open({str(canary)!r}, 'w'))",
        f"\\boxed{{open({str(canary)!r}, 'w')}}",
        f"sympify(\"open({str(canary)!r}, 'w')\")",
    ]
    attacks += [f"\\boxed{{\\{{{attack}\\}}}}" for attack in attacks]
    math = {"kind": "answer", "answer": "\\sqrt{2}", "match": "math"}
    verifier = verifier_for(math if task == "math" else entry_of(task))
    for attack in attacks:
        assert score(verifier, attack) < 0.5


@pytest.mark.parametrize(
    ("task", "text", "allowed"),
    [
        ("countdown", "(3 + 4) * 2 - 1/5", True),
        ("countdown", "9**9**9", False),
        ("countdown", "(9**999)**999", False),
        ("countdown", "2**(10**6)", False),
        ("countdown", "2**99999", False),
        ("countdown", "exec(x)", False),
        ("countdown", "x.y", False),
        ("countdown", "'a'", False),
        ("simple_integration", "x**2/2 + 3*sin(x) + C", True),
        ("simple_integration", "(x**2 + x**3)**2 + exp(x**2)", True),
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "[1, -2, 3]", True),
        ("spiral_matrix", "[0] * 10**10", False),
        ("string_insertion", "ABCDE", True),
        ("string_insertion", "['A', 'B']", True),
        ("n_queens", "_ Q\nQ _", True),
        ("gcd", "exec(x)", True),
    ],
)
def test_only_literals_and_formulas_are_evaluated(task: str, text: str, allowed: bool) -> None:
    assert _may_be_verified(task, text, "") is allowed


HOSTILE = [
    *("9" * 100_000, "(" * 50_000, "[" * 50_000 + "]" * 50_000, "{" * 10_000 + "}" * 10_000),
    *("\\boxed{" * 10_000, "\\boxed{" + "{" * 5_000 + "}" * 5_000 + "}"),
    *("\\frac{" * 300 + "1" + "}{2}" * 300, "<think>" * 10_000 + "</think>", "-" * 20_000 + "1"),
    *("1+" * 100 + "1", "1 " * 1_000, "\x00\x01\x02", "\ud800", "\u202e42\u202c", "𝟜𝟚", "٤٢", "½"),
    *("\\" * 1_001, "$" * 1_001, "nan", "1e999", "-inf", "{'a': 1}", '{"a": [1, 2', "None"),
    *("[null, [], {}]", "%s %n {0} ${x}", "𒐫" * 3_000, "a\u0301" * 3_000),
]
BROAD = "chain_sum countdown simple_integration game_of_life complex_arithmetic codeio tsumego"


COMPARED: dict[str, Any] = {
    "math": "1/7",
    "exact": "1/7",
    "choice": "Q",
    "regex": "[a-z]{3,}-x",
    "schema": {"type": "object", "required": ["q"]},
}


@pytest.mark.parametrize("task", [*BROAD.split(), *COMPARED])
def test_hostile_answers_are_wrong_and_quick(task: str) -> None:
    spec: dict[str, Any] = {"kind": "answer", "answer": COMPARED.get(task), "match": task}
    verifier = verifier_for(spec if task in COMPARED else entry_of(task))
    for text in HOSTILE:
        assert score(verifier, text) < 0.5, text[:50]
