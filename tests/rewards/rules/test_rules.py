"""Formats, choices, JSON schemas, patterns and exact texts, and hostile answers."""

import json
import string
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import SourceConfig
from keel.data.procedural import _REFUSED_TASKS, load_reasoning_gym
from keel.rewards.checks import check_spec
from keel.rewards.pool import WorkerPool
from keel.rewards.rules import verifiers
from keel.rewards.rules.reasoning_gym import _EVALUATED_TASKS, _SYMBOLIC_TASKS, _is_safe_to_verify
from keel.rewards.rules.verifiers import Verifier, verifier_for
from keel.rewards.text import keeps_format
from keel.rewards.worker import reply_to
from tests.waiting import PATIENCE_S, within_some


def score(verifier: Verifier, text: str) -> float:
    """Score as in a worker: an exception is worth 0."""
    return float(reply_to(verifier, text).get("score", 0.0))


def entry_of(task: str) -> dict[str, Any]:
    if task in _REFUSED_TASKS:  # refused as a source, but not in a file
        return {"kind": "reasoning_gym", "task": task, "entry": {"answer": "1", "metadata": {}}}
    gym = {"name": "x", "source": "reasoning_gym", "size": 1, "params": {"seed": 7}}
    source = SourceConfig(task=task, **gym)
    return dict(load_reasoning_gym(source, seed=0).items[0].prompt.reward)


WELL_FORMED = ["<think>a</think>b", "a</think>b", "<think></think>b"]
WELL_FORMED += ["<think>\\boxed{1} \\boxed{2}</think>\\boxed{2}"]
MALFORMED = ["b", "<think>a</think>", "<think>a", "<think>a</think><think>b</think>c", ""]
MALFORMED += ["<think>a</think>b</think>c", "c<think>a</think>b"]
MALFORMED += ["<think>a</think>\\boxed{1} or \\boxed{2}"]


def test_format() -> None:
    for raw in WELL_FORMED + MALFORMED:
        assert keeps_format(raw, thinking=True, finished=True) is (raw in WELL_FORMED), raw
        assert keeps_format(raw, thinking=True, finished=False) is False
    for raw, kept in {
        "b": True,
        "<answer>\\boxed{1}</answer>": True,
        "<answer>1</answer><answer>2</answer>": False,
        "<think>a</think>b": False,
        "a</think>b": False,
    }.items():
        assert keeps_format(raw, thinking=False, finished=True) is kept, raw


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "an answer was executed"


@pytest.mark.parametrize("task", [*sorted(_EVALUATED_TASKS | _SYMBOLIC_TASKS), "math"])
def test_answers_are_never_executed(task: str, canary: Path) -> None:
    opening = f"open({str(canary)!r}, 'w')"
    attacks = [opening, f"[{opening}]", f"(lambda: {opening})()", f"[x for x in [{opening}]]"]
    attacks += [f'f"{{{opening}}}"', f"1 + {opening}!", opening.replace("open", "ｏｐｅｎ")]
    attacks += [f"sin({opening})", f"\\boxed{{{opening}}}", f'sympify("{opening}")']
    attacks += [f"__import__('pathlib').Path({str(canary)!r}).touch()"]
    attacks += [f"\\boxed{{\\{{{attack}\\}}}}" for attack in attacks]
    math = {"kind": "answer", "answer": "\\sqrt{2}", "match": "math"}
    verifier = verifier_for(math if task == "math" else entry_of(task))
    for attack in attacks:
        assert score(verifier, attack) < 0.5


EVALUATED = [
    ("countdown", "(3 + 4) * 2 - 1/5"),
    ("simple_integration", "(x**2 + x**3)**2 + exp(x**2)"),
    *(("spiral_matrix", "1 2 3"), ("spiral_matrix", "[1, -2, 3]"), ("n_queens", "_ Q\nQ _")),
    *(("string_insertion", "ABCDE"), ("string_insertion", "['A', 'B']"), ("gcd", "exec(x)")),
]
REFUSED = ["9**9**9", "(9**999)**999", "2**(10**6)", "2**99999", "exec(x)", "x.y", "'a'"]


def test_only_literals_and_formulas_are_evaluated() -> None:
    assert all(_is_safe_to_verify(task, text, "") for task, text in EVALUATED)
    assert not any(_is_safe_to_verify("countdown", text, "") for text in REFUSED)
    assert not _is_safe_to_verify("spiral_matrix", "[0] * 10**10", "")


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


CORPUS = Path(__file__).with_name("structures.jsonl").read_text().splitlines()


def spec(match: str, answer: Any) -> dict[str, Any]:
    return {"kind": "answer", "match": match, "answer": answer}


@cache
def verifier(match: str, answer: str) -> Verifier:
    return verifier_for(spec(match, json.loads(answer)))


def test_corpus() -> None:
    for case in map(json.loads, CORPUS):
        verify = verifier(case["match"], json.dumps(case["answer"]))
        assert verify(case["text"]) == case["right"], case
    for long in ("[" * 10_000, '{"friends":[' * 5_000, '"' + "a" * 40_000 + '"'):
        assert verifier_for(spec("schema", {}))(long) == 0.0


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "objekt"}, {"properties": {"a": {"minLength": "1"}}}, "{}"),
        {"properties": {"a": {"$ref": "#/$defs/b"}}},
        *({"$ref": "http://127.0.0.1:9/schema.json"}, {"$ref": "file:///etc/passwd"}),
    ],
)
def test_bad_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="answer"):
        check_spec(spec("schema", schema))


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "(?P<a", "a{2,1}", "(?<=a+)b"])
def test_bad_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError):
        check_spec(spec("regex", pattern))


def test_backtracking_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "_MATCH_TIMEOUT_S", 0.05)
    verifier = verifier_for(spec("regex", "(a|a)+b"))
    began = time.thread_time()
    assert verifier("a" * 5_000) == 0.0 and verifier("aab") == 1.0
    assert time.thread_time() - began < 2


@pytest.mark.e2e
def test_an_endless_pattern_costs_its_own_answer() -> None:
    one = spec("schema", {"type": "string", "pattern": "^(a+)+b$"})
    answers = ['"ab"', f'"{"a" * 60}"', '"x"', '"aab"']

    def check(limit_s: float) -> None:
        pool = WorkerPool(1, timeout_s=limit_s)
        try:
            scores = pool.submit(one, answers).result(PATIENCE_S)
        finally:
            pool.close()
        assert [score.score for score in scores] == [1, 0, 0, 1]
        assert [bool(score.error) for score in scores] == [False, True, False, False]

    within_some(check, (1.0, 10.0, 60.0))


CITIES = ["London", "Paris", "York", "New York"]
CHOICES = [
    json.loads(line) for line in Path(__file__).with_name("choices.jsonl").read_text().splitlines()
]
"""Each line has choices, an answer and the letter that it names, or "" if it names none."""


def chosen(text: str, right: str = "B", choices: Any = CITIES) -> float:
    spec = {"kind": "answer", "match": "choice", "answer": right, "choices": choices}
    return verifier_for(spec)(text)


def test_corpus_of_choices() -> None:
    for case in CHOICES:
        letters = string.ascii_uppercase[: len(case["choices"] or string.ascii_uppercase)]
        named = [right for right in letters if chosen(case["text"], right, case["choices"])]
        assert named == list(case["named"]), case


def test_right_answer_may_be_letter_or_text() -> None:
    for right in ("Paris", "(b)", "paris."):
        assert chosen("The answer is option B, Paris.", right) == 1.0


@pytest.mark.parametrize(
    "spec",
    [
        *({"answer": "E"}, {"answer": "Rome"}, {"answer": "Rome", "choices": None}, {"answer": 2}),
        *({"choices": bad} for bad in ("ABCD", ["x"], {}, ["x", " "], ["x", ["y"]], ["x", "X."])),
        *({"choices": {"AB": "x", "B": "y"}}, {"choices": {"a": "x", "b": "y"}}),
        {"choices": ["x"] * 27},
    ],
)
def test_bad_choices_are_refused(spec: dict[str, Any]) -> None:
    fields = {"kind": "answer", "match": "choice", "answer": "A", "choices": CITIES, **spec}
    with pytest.raises(ValueError):
        verifier_for(fields)


def test_time_is_linear_in_the_answer() -> None:
    began = time.thread_time()  # independent of machine load
    for text in (
        *("answer:" * 1_000, "answer" + " " * 7_500, "answer:" + "\n" * 7_500 + "?"),
        *("Paris " * 1_250 + "London", "\\boxed{" * 1_000, "\\boxed{" * 750 + "}" * 750),
        *("<answer>" * 1_000, "<answer>" + "</answer" * 1_000, "A " * 3_750, "A, " * 1_250),
        *("not " * 2_000, "not A (" * 1_000, "*" * 8_000, "\\text{" * 1_250),
    ):
        assert chosen(text) == 0.0
    assert time.thread_time() - began < 3
