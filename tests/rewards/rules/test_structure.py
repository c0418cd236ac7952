"""JSON schemas, regular expressions and exact texts."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from keel.rewards.checks import check_spec
from keel.rewards.rules.verifiers import _MATCH_TIMEOUT_S, Verifier, verifier_for
from keel.rewards.workers.pool import WorkerPool
from tests.waiting import PATIENCE_S, within_some

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


def test_backtracking_is_bounded() -> None:
    verifier = verifier_for(spec("regex", "(a|a)+b"))
    began = time.thread_time()
    assert verifier("a" * 5_000) == 0.0 and verifier("aab") == 1.0
    assert time.thread_time() - began < 5 * _MATCH_TIMEOUT_S


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
