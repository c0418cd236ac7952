"""The judge with a server that is slow, wrong, broken or absent."""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.rewards.judge.results import Failed, Judged, JudgeStopped
from keel.rewards.judge.service import JudgeService
from tests.rewards.judge.judge_server import (
    PROMPT,
    Reply,
    Server,
    failed,
    good,
    judge,
    judged,
    running,
    says,
    scripted,
    settings,
)
from tests.waiting import PATIENCE_S, wait_for


class Moving:
    """This run's server, at another URL each time."""

    key = "its key"

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)

    def url(self) -> str:
        if not self.urls:
            raise RuntimeError("it died 4 times")
        return self.urls.pop(0)


def test_a_moved_server_is_found_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    config = settings("http://unused", base_url="", serve=True)
    moving = Moving("http://127.0.0.1:9/v1", server.url)
    with JudgeService(config, servers=[moving], backoff_s=0.005) as service:
        judged(service, "blue")
        judged(service, "red")
    assert server.keys == ["Bearer its key"] * 2
    assert moving.urls == []


def test_a_lost_server_stops_the_run() -> None:
    moving = Moving("http://127.0.0.1:9/v1")
    config = settings("http://unused", base_url="", serve=True)
    with JudgeService(config, servers=[moving], backoff_s=0.005) as service:
        for _ in range(2):
            with pytest.raises(JudgeStopped, match="died"):
                service.submit_text(PROMPT, "blue").result(PATIENCE_S)
        assert service.counts().calls == 1


class Restarting(Moving):
    """A server that died and takes until `ready` to come back."""

    def __init__(self, *urls: str) -> None:
        super().__init__(*urls)
        self.died, self.ready = False, threading.Event()

    def url(self) -> str:
        if self.died:
            self.ready.wait(PATIENCE_S)
        self.died = True
        return super().url()


def test_other_servers_take_the_requests_while_one_restarts() -> None:
    config = settings("http://unused", base_url="", serve=True, retries=1)
    with running(good) as first, running(good) as second:
        lost = Restarting("http://127.0.0.1:9/v1", first.url, first.url)
        servers = [lost, Moving(second.url, second.url)]
        with JudgeService(config, servers=servers, backoff_s=0.001) as service:
            for number in range(6):
                judged(service, f"blue {number}")
            assert (len(first.requests), len(second.requests)) == (0, 6)
            lost.ready.set()
            wait_for(lambda: service.counts().restarts == 1)
            service.check_reachable()
            assert (len(first.requests), len(second.requests)) == (1, 7)


def test_each_server_has_its_own_limit() -> None:
    barrier = threading.Barrier(6)

    def slow(request: dict[str, Any]) -> Reply:
        barrier.wait(PATIENCE_S)
        return good(request)

    config = settings("http://unused", base_url="", serve=True, max_concurrent=3)
    with running(slow) as first, running(slow) as second:
        servers = [Moving(first.url), Moving(second.url)]
        with JudgeService(config, servers=servers, backoff_s=0.001) as service:
            futures = [service.submit_text(PROMPT, f"blue {n}") for n in range(24)]
            assert all(isinstance(future.result(PATIENCE_S), Judged) for future in futures)
        assert (first.most_busy, second.most_busy) == (3, 3)
        assert (len(first.requests), len(second.requests)) == (12, 12)


ANSWERS = (f"blue {number}" for number in itertools.count())
"""Unique answers, which are never cached."""


@pytest.fixture(scope="module")
def service(one_server: Server) -> Iterator[JudgeService]:
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
    "half a character": says('{"c1": "\ud800"}'),
}


@pytest.mark.parametrize("reply", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_reply_is_retried_and_never_a_score(
    server: Server, service: JudgeService, reply: Reply
) -> None:
    server.behave = scripted(reply)
    assert judged(service, next(ANSWERS)).value == 0.75
    assert len(server.requests) == 2
    server.behave = lambda request: reply
    assert failed(service, next(ANSWERS)).kind == "invalid"


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
def test_only_transient_failures_are_retried(
    server: Server, service: JudgeService, reply: Reply, kind: str, attempts: int
) -> None:
    server.behave = lambda request: reply
    assert failed(service, next(ANSWERS)).kind == kind
    assert len(server.requests) == attempts
    if attempts > 1:
        server.behave = scripted(reply, reply)
        judged(service, next(ANSWERS))


def test_pauses_double_and_vary_by_half(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    server.behave = lambda request: Reply("oops", status=500)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", record)
        for end in (0, 1):  # of the range of the random factor
            pick = SimpleNamespace(uniform=lambda *ends, end=end: ends[end])
            patch.setattr("keel.rewards.judge.client.random", pick)
            judge(settings(server.url), [f"blue {end}"])
    assert pauses == pytest.approx([0.0025, 0.005, 0.0075, 0.015])


def test_retry_after_is_respected(server: Server) -> None:
    times: list[float] = []

    def busy_once(request: dict[str, Any]) -> Reply:
        times.append(time.monotonic())
        busy = Reply("{}", status=429, headers={"retry-after": "0.1"})
        return good(request) if len(times) > 1 else busy

    server.behave = busy_once
    assert isinstance(judge(settings(server.url), ["blue"])[0], Judged)
    assert times[1] - times[0] >= 0.1


@pytest.mark.parametrize("reply", [Reply("{}", delay_s=1000), Reply("{}" * 50_000, drip_s=0.01)])
def test_slow_replies_time_out(server: Server, reply: Reply) -> None:
    server.behave = lambda request: reply
    (result,) = judge(settings(server.url, timeout_s=0.05, retries=1), ["blue"])
    assert isinstance(result, Failed) and result.kind == "timeout"


def test_an_absent_judge() -> None:
    with running(good) as gone:
        url = gone.url
    (result,) = judge(settings(url), ["blue"])
    assert isinstance(result, Failed) and result.kind == "unreachable"
    with (
        JudgeService(settings(url), backoff_s=0.005) as service,
        pytest.raises(ValueError, match="base_url"),
    ):
        service.check_reachable()


def test_check_reachable_needs_a_fresh_valid_reply(server: Server, tmp_path: Path) -> None:
    config = settings(server.url, cache_dir=str(tmp_path))
    server.behave = lambda request: says({"c1": MET})
    with JudgeService(config, backoff_s=0.005) as service:
        service.check_reachable()
        server.behave = lambda request: says("Sure! Blue is a colour.")
        with pytest.raises(ValueError, match="JSON"):
            service.check_reachable()  # despite the cached reply


def test_calls_are_concurrent_up_to_a_limit() -> None:
    barrier = threading.Barrier(6)

    def slow(request: dict[str, Any]) -> Reply:
        barrier.wait(PATIENCE_S)
        return good(request)

    with running(slow) as server:  # other tests may have left slow replies on the shared one
        results = judge(settings(server.url, max_concurrent=6), [f"blue {i}" for i in range(24)])
    assert all(isinstance(result, Judged) for result in results)
    assert server.most_busy == 6


def test_spent_calls_stop_the_run(server: Server) -> None:
    with pytest.raises(JudgeStopped, match="max_calls = 3"):
        judge(settings(server.url, max_calls=3, max_concurrent=1), [f"blue {i}" for i in range(9)])
    assert len(server.requests) == 3


def test_too_many_failures_stop_the_run(server: Server) -> None:
    server.behave = lambda request: Reply("{}", status=400)
    with JudgeService(settings(server.url, max_failure_fraction=0.2), backoff_s=0.005) as service:
        for number in range(4):
            failed(service, f"blue {number}")
        assert service.counts().failed == {"refused": 4}
        with pytest.raises(JudgeStopped, match=r"5 of the last 5 .*HTTP 400"):
            service.submit_text(PROMPT, "blue").result(PATIENCE_S)
        server.behave = good
        with pytest.raises(JudgeStopped):
            service.submit_text(PROMPT, "sky").result(PATIENCE_S)
    assert len(server.requests) == 5, "a stopped judge makes no calls"


def test_closing_cancels_calls_in_flight(server: Server) -> None:
    server.behave = lambda request: Reply("{}", delay_s=1000)
    service = JudgeService(settings(server.url))
    future = service.submit_text(PROMPT, "blue")
    wait_for(lambda: server.requests)
    service.close()
    service.close()
    assert future.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        service.submit_text(PROMPT, "blue")
