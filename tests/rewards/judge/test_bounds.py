"""What a judge's endpoint sends, up to a size and from nowhere else; and what its context holds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from keel.rewards.judge import bounded
from keel.rewards.judge.results import Failed, Judged
from keel.rewards.judge.service import JudgeService
from tests.rewards.judge.judge_server import Reply, Server, good, material_of, running, says
from tests.rewards.judge.judging import PROMPT, judge, settings
from tests.waiting import PATIENCE_S

FULL = Reply(
    json.dumps({"error": {"message": "This model's maximum context length is 4096 tokens."}}),
    status=400,
)


@pytest.fixture
def server() -> Iterator[Server]:
    with running(good) as server:
        yield server


def test_a_completion_that_takes_many_tokens_is_its_authors_doing(server: Server) -> None:
    server.behave = lambda request: FULL
    chosen = settings(server.url, max_failure_fraction=0.0, retries=4)
    (result,) = judge(chosen, ["<" * 9_990])  # some 50,000 tokens within `max_characters`
    assert isinstance(result, Judged) and result.value == 0.0
    assert "context" in result.verdicts[0].reason
    assert len(server.requests) == 1


def test_a_task_that_the_judge_cannot_hold_is_not(server: Server) -> None:
    server.behave = lambda request: FULL
    (result,) = judge(settings(server.url), ["blue"])
    assert isinstance(result, Failed) and result.kind == "too_long"


ALONE = {"name": "doubt", "text": "says perhaps", "weight": 1, "thinking": True}
BOTH = [{"name": "blue", "text": "says blue", "weight": 0.5}, {**ALONE, "weight": 0.5}]
PROOF = "## Solution\nAs it is.\n## Self Evaluation\nFine. \\boxed{1}"


@pytest.mark.parametrize(
    ("reward", "answer", "thinking", "kind"),
    [
        (PROMPT.reward, "blue", 9_000, "too_long"),
        ({"kind": "proof"}, PROOF, 9_000, "too_long"),
        ({"kind": "refusal", "refuse": True}, "blue", 9_000, "too_long"),
        ({"kind": "rubric", "criteria": BOTH}, "blue", 9_000, "too_long"),
        ({"kind": "rubric", "criteria": [ALONE]}, "blue", 5, "too_long"),
        ({"kind": "rubric", "criteria": [ALONE]}, "blue", 9_000, ""),
        (PROMPT.reward, "blue" * 2_000, 5, ""),
    ],
)
def test_thinking_that_is_not_sent_makes_nothing_too_long(
    server: Server, reward: dict[str, Any], answer: str, thinking: int, kind: str
) -> None:
    server.behave = lambda request: FULL
    prompt = replace(PROMPT, reward=reward)
    with JudgeService(settings(server.url)) as service:
        thoughts = "perhaps " * (thinking // 8)
        result = service.submit_text(prompt, answer, thinking=thoughts).result(PATIENCE_S)
    assert (result.kind if isinstance(result, Failed) else "") == kind
    assert isinstance(result, Failed) or result.value == 0.0


def test_thinking_that_is_too_long_where_the_answer_is_not(server: Server) -> None:
    server.behave = lambda r: FULL if "thinking" in material_of(r["messages"]) else good(r)
    prompt = replace(PROMPT, reward={"kind": "rubric", "criteria": BOTH})
    with JudgeService(settings(server.url)) as service:
        for thinking, kind in (("perhaps " * 1_000, Judged), ("perhaps", Failed)):
            result = service.submit_text(prompt, "blue", thinking=thinking).result(PATIENCE_S)
            assert isinstance(result, kind)


def test_a_redirect_leads_nowhere(server: Server) -> None:
    with running(good) as elsewhere:
        moved = Reply("", status=307, headers={"location": f"{elsewhere.url}/chat/completions"})
        server.behave = lambda request: moved
        (result,) = judge(settings(server.url, max_calls=1), ["blue"])
        assert isinstance(result, Failed) and result.kind == "refused" and "307" in result.reason
        assert (len(server.requests), elsewhere.requests) == (1, [])


def test_a_reply_without_end_is_not_read_to_its_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "MOST_BYTES", 1 << 20)
    for status in (200, 400):
        server.behave = lambda request, status=status: says("x" * (2 << 20), status=status)
        (result,) = judge(settings(server.url, retries=0), ["blue"])
        assert isinstance(result, Failed) and "more than 1 MiB" in result.reason
    packed = gzip.compress(b"x" * 1000).decode("latin-1")
    server.behave = lambda request: Reply(packed, headers={"content-encoding": "gzip"})
    (result,) = judge(settings(server.url, retries=0), ["blue"])
    assert isinstance(result, Failed) and "compressed" in result.reason
