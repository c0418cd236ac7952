"""What a judge's endpoint sends, up to a size and from nowhere else; and what its context holds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest

from keel.rewards.judge import bounded
from keel.rewards.judge.results import Failed, Judged
from tests.rewards.judge.judge_server import Reply, Server, good, running, says
from tests.rewards.judge.judging import judge, settings

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
