"""JSON schemas and regular expressions."""

from __future__ import annotations

import time
from typing import Any

import pytest

from keel.rewards.checks import check_spec
from keel.rewards.rules.verifiers import _MATCH_TIMEOUT_S, verifier_for
from keel.rewards.workers.pool import WorkerPool
from tests.waiting import PATIENCE_S, within_some

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0},
        "born": {"type": "string", "format": "date"},
        "friends": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def spec(match: str, answer: Any) -> dict[str, Any]:
    return {"kind": "answer", "match": match, "answer": answer}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"name": "Ada", "age": 36}', True),
        (' {"name": "Ada"}\n', True),
        ('Here it is:\n```json\n{"name": "Ada"}\n```\nDone.', True),
        ('<answer>{"name": "Ada"}</answer>', True),
        ('{"name": "Ada", "friends": [{"name": "Bob"}]}', True),
        ('{"name": "Ada", "born": "1815-12-10"}', True),
        ('<think>{"name": 3}</think>{"name": "Ada"}', True),
        ('<think>{"name": "Ada"}</think>', False),
        ('<think>{"name": "Ada"}</think>{}', False),
        ('```json {"name": "Ada"} ```', True),
        ('Here:\n```json {"name": "Ada"}```\nDone.', True),
        ('```json\n{"name": "Ada"}\n```\nor\n```python\nperson = dict(name="Ada")\n```', True),
        ('```json\n{"name": "Ada"}\n```\nor\n```json\n{"name": 3}\n```', False),
        ('\ufeff{"name": "Ada"}', True),
        ('\ufeff```json\n{"name": "Ada"}\n```', True),
        ('It is <json>{"name": "Ada"}</json>.', True),
        ('It is <json>{"name": 3}</json>.', False),
        ('{"name": "<answer>x</answer>"}', True),
        ('{"name": "\\\\boxed{"}', True),
        ('```json\n{"name": "<answer>x</answer> \\\\boxed{"}\n```', True),
        ('<answer>{"name": "\\\\boxed{x}"}</answer>', True),
        ('```json\n{"name": "Ada"}\n```\n<answer>{}</answer>', False),
        ('```json {"name": "Ada"}', False),
        ('{"name": "Ada", "born": "soon"}', False),
        ('{"name": "Ada", "friends": [{"nam": "Bob"}]}', False),
        ('{"name": "Ada", "age": NaN}', False),
        ('{"name": "Ada", "age": 36.5}', False),
        ('{"name": ""}', False),
        ('It is {"name": "Ada"}', False),
        ('{"name": "Ada"', False),
        ('["Ada"]', False),
        ("", False),
        ("[" * 10_000, False),
        ('{"friends":[' * 5_000, False),
        ('{"name": "' + "a" * 40_000 + '"}', False),
    ],
)
def test_json_is_valid_under_the_schema(text: str, right: bool) -> None:
    assert verifier_for(spec("schema", PERSON))(text) == right


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"properties": {"a": {"minLength": "1"}}},
        {"properties": {"a": {"$ref": "#/$defs/b"}}},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "file:///etc/passwd"},
        "{}",
    ],
)
def test_bad_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="answer"):
        check_spec(spec("schema", schema))


def test_a_pattern_must_match_the_whole_answer() -> None:
    verifier = verifier_for(spec("regex", r"\d{4}-\d{2}"))
    assert verifier("2024-05") == verifier(" \\boxed{2024-05}\n") == 1.0
    assert verifier("<think>no</think>2024-05") == 1.0
    assert verifier("<think>2024-05</think>") == verifier("<think>2024-05</think>x") == 0.0
    assert verifier("2024-05-01") == verifier("on 2024-05") == verifier("2024-05\n2024-06") == 0.0
    assert verifier_for(spec("regex", "(?i)yes|no"))("YES") == 1.0


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


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("date-time", "2024-02-29T12:00:00Z", "2023-02-29T12:00:00Z"),
        ("date-time", "2024-02-29T12:00:00.5+01:00", "tomorrow"),
        ("time", "23:59:59Z", "25:00:00Z"),
        ("uri", "https://example.org/a?b#c", "not a uri"),
        ("hostname", "a-b.example.org", "-a.example.org"),
        ("iri", "https://exämple.org/wörter?ü=\U0001f600#é", "/wörter"),
        ("iri", "https://[::1]:80/", "https://[::ü]/"),
        ("iri", "urn:ü", "ürn:u"),
        ("iri", "http://a/?\ue000", "http://a/\ue000"),
        ("iri", "http://a/%C3%BC", "http://a/%ü"),
        ("iri-reference", "../wörter#ü", "a b"),
        ("iri-reference", "", "ü|b"),
        ("iri-reference", "//ü@exämple:80/x", "//a:ü"),
    ],
)
def test_formats_are_checked(name: str, right: str, wrong: str) -> None:
    verifier = verifier_for({"kind": "answer", "match": "schema", "answer": {"format": name}})
    assert verifier(f'"{right}"') == 1.0
    assert verifier(f'"{wrong}"') == 0.0
    assert verifier("5") == 1.0  # formats apply to texts


def test_a_code_block_inside_the_mark() -> None:
    verifier = verifier_for({"kind": "answer", "match": "schema", "answer": {"type": "object"}})
    assert verifier("<answer>\n```json\n{}\n```\n</answer>") == 1.0
    assert verifier("<answer>\n```json\n[]\n```\n</answer>") == 0.0


def test_duplicate_keys_are_wrong() -> None:
    verifier = verifier_for(spec("schema", {"properties": {"a": {"const": 1}}}))
    assert verifier('{"a": 1}') == 1.0
    assert verifier('{"a": 2, "a": 1}') == 0.0
