"""The judge against a server that is slow, wrong, broken, or not there."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.rewards.judge.results import Failed, Judged, JudgeStopped
from keel.rewards.judge.service import JudgeService
from tests.rewards.judge.judge_server import Reply, Server, good, material_of, running, says
from tests.rewards.judge.judging import PROMPT, judge, scripted, settings
from tests.waiting import PATIENCE_S, wait_for

KEY = "-".join(("sk", "0815", "4711"))


def test_half_a_character_in_a_reply_is_an_invalid_reply(server: Server) -> None:
    server.behave = scripted(says('{"c1": "\ud800"}'))
    (result,) = judge(settings(server.url, retries=0), ["blue"])
    assert isinstance(result, Failed)
    assert (result.kind, result.reason) == ("invalid", "invalid reply: not text")


@pytest.mark.parametrize("reply", [{KEY: 1}, {"c1": {"reason": "", "verdict": KEY}, "c2": 1}])
def test_a_key_that_a_reply_repeats_is_in_no_message(
    server: Server, monkeypatch: pytest.MonkeyPatch, reply: dict[str, Any]
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.behave = scripted(says(reply))
    (result,) = judge(settings(server.url, retries=0, api_key_env="JUDGE_KEY"), ["blue"])
    assert isinstance(result, Failed) and result.kind == "invalid"
    assert KEY not in result.reason and "***" in result.reason


@pytest.mark.parametrize("tokens", ["9" * 4000, "-5", "true", "1.5", "[1]"])
def test_tokens_that_no_call_takes_are_not_counted(
    server: Server, service: JudgeService, tokens: str
) -> None:
    before = service.counts()

    def counts(request: dict[str, Any]) -> Reply:
        reply = good(request)
        return replace(
            reply, body=reply.body.replace('"prompt_tokens": 10', f'"prompt_tokens": {tokens}')
        )

    server.behave = counts
    assert isinstance(service.submit_text(PROMPT, next(ANSWERS)).result(PATIENCE_S), Judged)
    now = service.counts()
    assert now.prompt_tokens == before.prompt_tokens
    assert now.reply_tokens == before.reply_tokens + 5


class Moving:
    """A server of the run's own that is somewhere else each time it is looked for."""

    key = "its key"

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)

    def url(self) -> str:
        if not self.urls:
            raise RuntimeError("it died 4 times; last lines of its log: no memory")
        return self.urls.pop(0)


def test_a_server_of_the_run_is_looked_for_where_it_is_now(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    chosen = settings("http://unused", base_url="", serve=True)
    moving = Moving("http://127.0.0.1:9/v1", server.url)
    with JudgeService(chosen, server=moving, backoff_s=0.005) as service:
        result = service.submit_text(PROMPT, "blue").result(PATIENCE_S)
        assert isinstance(result, Judged)
        service.submit_text(PROMPT, "red").result(PATIENCE_S)
    assert server.keys == ["Bearer its key"] * 2
    assert moving.urls == []


def test_a_server_of_the_run_that_is_given_up_stops_the_run() -> None:
    moving = Moving("http://127.0.0.1:9/v1")
    chosen = settings("http://unused", base_url="", serve=True)
    with JudgeService(chosen, server=moving, backoff_s=0.005) as service:
        for _ in range(2):
            with pytest.raises(JudgeStopped, match=r"died 4 times; .* no memory"):
                service.submit_text(PROMPT, "blue").result(PATIENCE_S)
        assert service.counts().calls == 1


ANSWERS = (f"blue {number}" for number in itertools.count())
"""Never the same twice: the cache stays out of it."""


@pytest.fixture(scope="module")
def service(one_server: Server) -> Iterator[JudgeService]:
    """One with two retries; making one takes longer than most of what is tested here."""
    with JudgeService(settings(one_server.url), backoff_s=0.001) as service:
        yield service


MET = {"reason": "", "verdict": "met"}

WRONG = {
    "not JSON": says("I would say it is met."),
    "JSON in prose": says('Here: {"c1": {"reason": "", "verdict": "met"}}'),
    "a missing criterion": says({"c1": MET}),
    "an extra criterion": says({"c1": MET, "c2": MET, "c3": MET}),
    "an unknown verdict": says({"c1": MET, "c2": {"reason": "", "verdict": "superb"}}),
    "a number out of range": says({"c1": MET, "c2": {"reason": "", "verdict": 7}}),
    "no reason": says({"c1": MET, "c2": {"verdict": "met"}}),
    "more than asked": says({"c1": MET, "c2": {**MET, "score": 3}}),
    "a key twice": says('{"c1": {"reason": "", "verdict": "met", "verdict": "missed"}, "c2": 1}'),
    "a list": says([MET, MET]),
    "NaN": says("NaN"),
    "nested deeply": says("[" * 5000),
    "cut off": says({"c1": MET, "c2": MET}, finish="length"),
    "nothing": says(""),
    "no choices": Reply('{"choices": []}'),
    "null": Reply("null"),
    "null usage and content": Reply('{"choices": [{"message": {"content": null}}]}'),
    "a web page": Reply("<html>", headers={"content-type": "text/html"}),
}


@pytest.mark.parametrize("reply", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_reply_is_asked_again_and_never_a_score(
    server: Server, service: JudgeService, reply: Reply
) -> None:
    server.behave = scripted(reply)
    result = service.submit_text(PROMPT, next(ANSWERS)).result(PATIENCE_S)
    assert isinstance(result, Judged)
    assert result.value == 0.75
    assert len(server.requests) == 2
    server.behave = lambda request: reply
    result = service.submit_text(PROMPT, next(ANSWERS)).result(PATIENCE_S)
    assert isinstance(result, Failed)
    assert result.kind == "invalid"


@pytest.mark.parametrize(
    ("reply", "kind", "attempts"),
    [
        (Reply("{}", status=429, headers={"retry-after": "0.01"}), "busy", 3),
        (Reply("{}", status=503, headers={"retry-after": "Fri, 31 Dec 1999"}), "server", 3),
        (Reply("oops", status=500), "server", 3),
        (Reply("{}", hang_up=True), "unreachable", 3),
        (Reply("{}", status=400), "refused", 1),
        (Reply("{}", status=401), "refused", 1),
        (Reply("{}", status=408), "refused", 3),
    ],
)
def test_trouble_is_retried_where_that_may_help(
    server: Server, service: JudgeService, reply: Reply, kind: str, attempts: int
) -> None:
    server.behave = lambda request: reply
    result = service.submit_text(PROMPT, next(ANSWERS)).result(PATIENCE_S)
    assert isinstance(result, Failed)
    assert (result.kind, len(server.requests)) == (kind, attempts)
    if attempts > 1:
        server.behave = scripted(reply, reply)
        assert isinstance(service.submit_text(PROMPT, next(ANSWERS)).result(PATIENCE_S), Judged)


def test_pauses_double_and_vary_by_half(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    server.behave = lambda request: Reply("oops", status=500)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", noted)
        for chosen in (0, 1):  # the least and the most that chance gives
            pick = SimpleNamespace(uniform=lambda *ends, chosen=chosen: ends[chosen])
            patch.setattr("keel.rewards.judge.client.random", pick)
            judge(settings(server.url), [f"blue {chosen}"])
    assert pauses == pytest.approx([0.0025, 0.005, 0.0075, 0.015])


def test_the_pause_that_the_server_asks_for(server: Server) -> None:
    asked: list[float] = []

    def busy_once(request: dict[str, Any]) -> Reply:
        asked.append(time.monotonic())
        busy = Reply("{}", status=429, headers={"retry-after": "0.1"})
        return good(request) if len(asked) > 1 else busy

    server.behave = busy_once
    (result,) = judge(settings(server.url), ["blue"])
    assert isinstance(result, Judged)
    assert asked[1] - asked[0] >= 0.1


@pytest.mark.parametrize("reply", [Reply("{}", delay_s=1000), Reply("{}" * 50_000, drip_s=0.01)])
def test_a_slow_judge_meets_the_deadline(server: Server, reply: Reply) -> None:
    server.behave = lambda request: reply
    (result,) = judge(settings(server.url, timeout_s=0.05, retries=1), ["blue"])
    assert isinstance(result, Failed)
    assert result.kind == "timeout"
    assert "0.05 s" in result.reason


def test_no_judge_at_all(server: Server) -> None:
    with running(good) as gone:
        url = gone.url
    (result,) = judge(settings(url), ["blue"])
    assert isinstance(result, Failed)
    assert result.kind == "unreachable"
    with (
        JudgeService(settings(url), backoff_s=0.005) as service,
        pytest.raises(ValueError, match=r"base_url = 'http://127.*does not answer"),
    ):
        service.check_reachable()


def test_check_reachable_wants_a_reply_in_due_form(server: Server, tmp_path: Path) -> None:
    chosen = settings(server.url, cache_dir=str(tmp_path))
    server.behave = lambda request: says({"c1": MET})
    with JudgeService(chosen, backoff_s=0.005) as service:
        service.check_reachable()
        server.behave = lambda request: says("Sure! Blue is a colour.")
        with pytest.raises(ValueError, match="invalid reply: not JSON"):
            service.check_reachable()  # a reply of yesterday is no proof
        server.behave = lambda request: Reply('{"error": {"message": "no model m"}}', status=404)
        with pytest.raises(ValueError, match="no model m"):
            service.check_reachable()


def test_calls_are_concurrent_up_to_the_ceiling() -> None:
    ceiling = threading.Barrier(6)

    def slow(request: dict[str, Any]) -> Reply:
        ceiling.wait(PATIENCE_S)
        return good(request)

    with running(slow) as server:  # of its own: others may still be busy with slow replies
        results = judge(settings(server.url, max_concurrent=6), [f"blue {i}" for i in range(24)])
    assert all(isinstance(result, Judged) for result in results)
    assert server.most_busy == 6


def test_the_ceiling_on_calls_stops_the_run(server: Server) -> None:
    with pytest.raises(JudgeStopped, match=r"max_calls = 3 is the ceiling; raise it"):
        judge(settings(server.url, max_calls=3, max_concurrent=1), [f"blue {i}" for i in range(9)])
    assert len(server.requests) == 3


def test_the_ceiling_holds_while_a_server_of_the_run_is_looked_for(server: Server) -> None:
    class Starting(Moving):
        def url(self) -> str:
            time.sleep(0.05)  # all calls wait for it together
            return server.url

    chosen = settings("http://unused", base_url="", serve=True, max_calls=3)
    with JudgeService(chosen, server=Starting()) as service:
        pending = [service.submit_text(PROMPT, f"blue {i}") for i in range(9)]
        with pytest.raises(JudgeStopped, match=r"max_calls = 3 is the ceiling"):
            [future.result(PATIENCE_S) for future in pending]
        assert service.counts().calls == 3


def test_failures_are_counted_and_past_a_share_stop_the_run(server: Server) -> None:
    server.behave = lambda request: Reply("{}", status=400)
    with JudgeService(settings(server.url, max_failure_fraction=0.2), backoff_s=0.005) as service:
        for number in range(4):
            result = service.submit_text(PROMPT, f"blue {number}").result(PATIENCE_S)
            assert isinstance(result, Failed)
        assert service.counts().failed == {"refused": 4}
        with pytest.raises(JudgeStopped, match=r"failed on 5 of the last 5 .*HTTP 400"):
            service.submit_text(PROMPT, "blue").result(PATIENCE_S)
        server.behave = good
        with pytest.raises(JudgeStopped):
            service.submit_text(PROMPT, "sky").result(PATIENCE_S)
    assert len(server.requests) == 5, "a stopped judge asks nothing more"


def test_few_failures_among_many_do_not_stop_the_run(server: Server) -> None:
    def every_tenth(request: dict[str, Any]) -> Reply:
        number = int(material_of(request["messages"])["answer"])
        return Reply("{}", status=400) if number % 10 == 0 else good(request)

    server.behave = every_tenth
    results = judge(settings(server.url, max_failure_fraction=0.2), [str(i) for i in range(40)])
    assert sum(isinstance(result, Failed) for result in results) == 4


def judge_threads() -> int:
    return sum(thread.name == "judge" for thread in threading.enumerate())


def test_closing_ends_what_is_under_way(server: Server) -> None:
    before = judge_threads()
    server.behave = lambda request: Reply("{}", delay_s=1000)
    service = JudgeService(settings(server.url))
    future = service.submit_text(PROMPT, "blue")
    wait_for(lambda: server.requests)
    service.close()
    service.close()
    assert future.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        service.submit_text(PROMPT, "blue")
    assert judge_threads() == before
