"""Requests to the judge, what its replies are worth, and servers that are slow, wrong or absent."""

import asyncio
import gzip
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.configs.schema import ConversationsConfig
from keel.data.conversations.load import read_conversations
from keel.rewards.failures import RewardStopped
from keel.rewards.judge import servers
from keel.rewards.judge.service import JudgeService
from keel.rewards.judge.specs import CallError, Counts, Judgement
from keel.rewards.text import final_text, thinking_text
from tests.rewards.judge.judge_server import (
    PROMPT,
    Reply,
    Server,
    criteria_of,
    failed,
    good,
    judge,
    judged,
    material_of,
    process_of,
    running,
    says,
    scripted,
    settings,
)
from tests.waiting import PATIENCE_S, wait_for

THINKING = {"name": "doubt", "text": "says perhaps", "weight": 1, "thinking": True}
BOTH = [{"name": "answer", "text": "says blue", "weight": 0.5}, {**THINKING, "weight": 0.5}]


def rubric(*criteria: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "rubric", "criteria": list(criteria)}


def values(results: list[Judgement | CallError]) -> list[float]:
    return [result.value for result in results if isinstance(result, Judgement)]


def test_weights_parts_and_reasons(server: Server) -> None:
    results = judge(settings(server.url), ["blue sky", "sky", "red"])
    assert values(results) == [0.75 + 0.25 * 0.5, 0.125, 0.0]
    first = results[0]
    assert first.parts == {"rubric": first.value, "disagreement": 0.0}
    verdicts = [("blue", 1.0, "looked for blue"), ("sky", 0.5, "looked for sky")]
    assert [(v.name, v.score, v.reason) for v in first.verdicts] == verdicts


def test_the_request(server: Server) -> None:
    prompt = replace(PROMPT, reward={**PROMPT.reward, "reference": "It is blue."})
    judge(settings(server.url, extra={"top_k": 1}), ["blue"], prompt)
    (request,) = server.requests
    assert server.keys == ["Bearer none"], "another service's key must not be sent"
    assert (request["model"], request["temperature"], request["top_k"]) == ("m", 0.0, 1)
    schema = request["response_format"]["json_schema"]
    assert schema["strict"] is True and schema["schema"]["required"] == ["c1", "c2"]
    system, user = request["messages"]
    assert [system["role"], user["role"]] == ["system", "user"]
    assert all(part in system["content"] for part in ("colour is it? {braces}", "It is blue."))
    assert material_of(request["messages"]) == {"answer": "blue"}


def test_only_the_final_answer_is_judged(server: Server) -> None:
    results = judge(settings(server.url), ["<think>blue</think> red", "<think>blue", "red"])
    assert values(results) == [0.0, 0.0, 0.0]
    materials = [material_of(request["messages"]) for request in server.requests]
    assert materials == [{"answer": "red"}], "unfinished thinking is not sent, duplicates once"


def test_a_criterion_may_see_the_thinking(server: Server) -> None:
    prompt = replace(PROMPT, reward=rubric(*BOTH))
    message = {"role": "assistant", "content": "red", "reasoning_content": "perhaps blue"}
    texts = final_text([message]), thinking_text([message])
    with JudgeService(settings(server.url)) as service:
        result = service.submit(prompt, *texts).result(PATIENCE_S)
    assert {v.name: v.score for v in result.verdicts} == {"answer": 0.0, "doubt": 1.0}
    sent = {tuple(criteria_of(r).values()): material_of(r["messages"]) for r in server.requests}
    assert sent == {
        ("says blue",): {"answer": "red"},
        ("says perhaps",): {"thinking": "perhaps blue", "answer": "red"},
    }


def test_blank_and_long_answers_score_zero_unasked(server: Server) -> None:
    answers = ["", "  ", "blue " * 30, "\ue000" * 20]
    results = judge(settings(server.url, max_characters=99), answers)
    assert values(results) == [0.0] * 4 and server.requests == []


def test_samples_are_averaged_and_rotate_criteria(server: Server) -> None:
    orders: list[tuple[str, ...]] = []

    def moody(request: dict[str, Any]) -> Reply:
        order = tuple(criteria_of(request))
        orders.append(order)
        verdict = "met" if order[0] == "c1" else "missed"
        both = {key: {"reason": "", "verdict": "met"} for key in order}
        return says({**both, "c1": {"reason": "", "verdict": verdict}})

    server.behave = moody
    (result,) = judge(settings(server.url, samples=4), ["blue"])
    assert result.value == pytest.approx(0.75 * 0.5 + 0.25)
    assert result.parts["disagreement"] == 0.75
    assert sorted(orders) == [("c1", "c2")] * 2 + [("c2", "c1")] * 2


@pytest.mark.parametrize(("failures", "kind"), [(1, Judgement), (2, CallError)])
def test_more_than_half_of_the_samples_must_succeed(
    server: Server, failures: int, kind: type
) -> None:
    server.behave = scripted(*[Reply("{}", status=400)] * failures)
    assert isinstance(judge(settings(server.url, samples=3), ["blue"])[0], kind)


def test_equal_questions_are_asked_once(server: Server, tmp_path: Path) -> None:
    config = settings(server.url, cache_dir=str(tmp_path / "cache"))
    first = judge(config, ["blue"] * 8 + ["red"])
    assert len(server.requests) == 2
    assert judge(config, ["blue"] * 8 + ["red"]) == first
    assert len(server.requests) == 2, "the next run reads the cache"
    judge(replace(config, model="other"), ["blue"])
    judge(config, ["blue"], replace(PROMPT, messages=({"role": "user", "content": "?"},)))
    judge(config, ["blue"], replace(PROMPT, reward={**PROMPT.reward, "reference": "x"}))
    assert len(server.requests) == 5


def test_valid_replies_become_chats(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "new" / "chats.jsonl"
    config = settings(server.url, samples=2, chats=str(path))
    server.behave = scripted(says("no"))
    judge(config, ["blue", "blue", "red"])
    source = ConversationsConfig(name="judge", source="jsonl", path=str(path))
    chats = [example.messages for example in read_conversations(source).examples]
    assert len(chats) == 4 and len(server.requests) == 5
    requests = [request["messages"] for request in server.requests]
    for *messages, reply in chats:
        assert [dict(message) for message in messages] in requests
        assert reply["role"] == "assistant" and "verdict" in str(reply["content"])


def test_key_comes_from_environment_and_stays_secret(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(server.url, api_key_env="JUDGE_KEY", retries=0)
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
    replies = [
        Reply('{"error": {"message": "bad key: sk-secret"}}', status=401),
        says({key: {"reason": "", "verdict": "met"} for key in ("c1", "c2")} | {"sk-secret": 1}),
        says({"c1": {"reason": "", "verdict": "sk-secret"}, "c2": 1}),
    ]
    for reply in replies:
        server.behave = scripted(reply)
        (result,) = judge(config, ["blue"])
        assert isinstance(result, CallError)
        assert "sk-secret" not in result.reason and "***" in result.reason
    assert set(server.keys) == {"Bearer sk-secret"}


def test_counts_and_metrics(server: Server) -> None:
    slow = Reply("{}", status=500, delay_s=0.2)
    server.behave = scripted(slow, Reply("{}", status=429), says("It is met."))
    config = settings(server.url, max_concurrent=1, retries=3)
    with JudgeService(config) as service:
        futures = [service.submit(PROMPT, answer) for answer in ("blue", "sky", "blue", "")]
        for future in futures:
            future.result(PATIENCE_S)
        counts = service.counts()
    assert (counts.completions, counts.skipped, counts.failed) == (4, 1, {})
    assert (counts.calls, counts.cache_hits) == (5, 1)
    assert (counts.prompt_tokens, counts.reply_tokens) == (30, 15)
    metrics = counts.since(Counts())
    retries = {name: metric.value for name, metric in metrics.items() if "retries" in name}
    assert retries == {f"judge/retries_{kind}": 1 for kind in ("server", "busy", "invalid")}
    assert metrics["judge/failures"].value == 0 and metrics["judge/calls"].value == 5
    assert (counts.call_s.count, counts.queue_s.count) == (5, 5)
    assert metrics["judge/call_seconds"].value >= 0.2 / 5
    assert metrics["judge/queue_seconds"].value >= 0.2 / 5  # the second waited for the first
    assert not any(metric.value for metric in counts.since(counts).values())


FULL = Reply(
    json.dumps({"error": {"message": "This model's maximum context length is 4096 tokens."}}),
    status=400,
)
PROOF = "## Solution\nSee above.\n## Self Evaluation\nFine. \\boxed{1}"


@pytest.mark.parametrize(
    ("reward", "answer", "thinking", "kind"),
    [
        (PROMPT.reward, "<" * 9_990, 0, Judgement),
        (PROMPT.reward, "blue" * 2_000, 5, Judgement),
        (PROMPT.reward, "blue", 0, CallError),
        (PROMPT.reward, "blue", 9_000, CallError),
        ({"kind": "proof"}, PROOF, 9_000, CallError),
        ({"kind": "refusal", "refuse": True}, "blue", 9_000, CallError),
        (rubric(*BOTH), "blue", 9_000, Judgement),
        (rubric(THINKING), "blue", 5, CallError),
        (rubric(THINKING), "blue", 9_000, Judgement),
    ],
)
def test_long_completion_scores_zero_long_task_fails(
    server: Server, reward: dict[str, Any], answer: str, thinking: int, kind: type
) -> None:
    server.behave = lambda request: FULL
    prompt = replace(PROMPT, reward=reward)
    with JudgeService(settings(server.url)) as service:
        thoughts = "perhaps " * (thinking // 8)
        result = service.submit(prompt, answer, thinking=thoughts).result(PATIENCE_S)
    assert isinstance(result, kind)
    assert result.kind == "too_long" if isinstance(result, CallError) else result.value == 0.0


def test_replies_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_MAX_REPLY_BYTES", 1 << 20)
    packed = gzip.compress(b"x" * 1000).decode("latin-1")
    for reply, message in (
        (says("x" * (2 << 20)), "MiB"),
        (says("x" * (2 << 20), status=400), "MiB"),
        (Reply(packed, headers={"content-encoding": "gzip"}), "compressed"),
    ):
        server.behave = lambda request, reply=reply: reply
        (result,) = judge(settings(server.url, retries=0), ["blue"])
        assert isinstance(result, CallError) and message in result.reason


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
    with JudgeService(config, servers=[moving]) as service:
        judged(service, "blue")
        judged(service, "red")
    assert server.keys == ["Bearer its key"] * 2
    assert moving.urls == []


def test_a_lost_server_stops_the_run() -> None:
    moving = Moving("http://127.0.0.1:9/v1")
    config = settings("http://unused", base_url="", serve=True)
    with JudgeService(config, servers=[moving]) as service:
        for _ in range(2):
            with pytest.raises(RewardStopped, match="died"):
                service.submit(PROMPT, "blue").result(PATIENCE_S)
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
        with JudgeService(config, servers=servers) as service:
            for number in range(6):
                judged(service, f"blue {number}")
            assert (len(first.requests), len(second.requests)) == (0, 6)
            lost.ready.set()
            wait_for(lambda: service.counts().restarts == 1)
            service.check_reachable()
            assert (len(first.requests), len(second.requests)) == (1, 7)


def test_other_servers_go_on_without_a_lost_one() -> None:
    config = settings("http://unused", base_url="", serve=True)
    with running(good) as fine:
        servers = [Moving("http://127.0.0.1:9/v1"), Moving(*[fine.url] * 9)]
        with JudgeService(config, servers=servers) as service:
            for number in range(6):
                judged(service, f"blue {number}")
            wait_for(lambda: service._endpoint.pool.servers[0].lost)
            judged(service, "green")
        assert len(fine.requests) == 7
        with (
            JudgeService(config, servers=[Moving(), Moving(fine.url)]) as service,
            pytest.raises(RewardStopped, match="died"),
        ):
            service.check_reachable()


@pytest.mark.parametrize(
    "broken", [says("garbage"), Reply("", hang_up=True), Reply("", 500), Reply("", 404)]
)
def test_failing_server_rests(monkeypatch: pytest.MonkeyPatch, broken: Reply) -> None:
    monkeypatch.setattr("keel.rewards.judge.servers._MAX_FAILURES", 2)
    monkeypatch.setattr("keel.rewards.judge.servers._BACKOFF_S", 0.001)
    config = settings("http://unused", base_url="", serve=True, max_concurrent=1)
    with running(lambda _: broken) as failing, running(good) as fine:
        servers = [Moving(*[failing.url] * 99), Moving(*[fine.url] * 99)]
        with JudgeService(config, servers=servers) as service:
            for number in range(4):
                judged(service, f"blue {number}")
            assert (len(failing.requests), len(fine.requests)) == (2, 4)
            failing.behave = good
            for backend in service._endpoint.pool.servers:
                backend.rests_until = 0.0
            for number in range(4):
                judged(service, f"red {number}")
            assert len(failing.requests) > 2, "it works again"


def test_busy_server_rests() -> None:
    busy = Reply("{}", status=429, headers={"retry-after": "1000"})
    with running(lambda _: busy) as full, running(good) as fine:
        config = settings(f"{full.url} {fine.url}", max_concurrent=2)
        answers = [f"blue {number}" for number in range(8)]
        assert all(isinstance(result, Judgement) for result in judge(config, answers))
        assert (len(full.requests), len(fine.requests)) == (2, 8)


def test_each_server_must_be_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.rewards.judge.servers._BACKOFF_S", 0.001)
    with running(lambda _: Reply("no such model", 404)) as wrong, running(good) as fine:
        config, reason = settings(f"{fine.url} {wrong.url}"), f"{wrong.url}: HTTP 404"
        with JudgeService(config) as service, pytest.raises(ValueError, match=reason):
            service.check_reachable()
        assert len(fine.requests) == 1


@pytest.mark.e2e
def test_stopped_server_rests_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.rewards.judge.servers._MAX_FAILURES", 2)
    text = json.dumps({"c1": MET, "c2": MET})
    with process_of(text) as (first, pid), process_of(text) as (second, _):
        config = settings(f"{first} {second}", timeout_s=5.0, retries=1)
        with JudgeService(config) as service:
            stopped, fine = service._endpoint.pool.servers
            os.kill(pid, signal.SIGSTOP)
            futures = [service.submit(PROMPT, f"blue {number}") for number in range(6)]
            assert all(isinstance(future.result(PATIENCE_S), Judgement) for future in futures)
            assert stopped.failing and not fine.failures
            judged(service, "green")
            assert service.counts().retried == {"timeout": stopped.failures}
            os.kill(pid, signal.SIGCONT)
            stopped.rests_until = 0.0
            judged(service, "red")
            assert not stopped.failing


def test_restarted_server_gets_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.rewards.judge.servers._MAX_FAILURES", 1)
    monkeypatch.setattr("keel.rewards.judge.servers._BACKOFF_S", 0.001)
    barrier, full, late = threading.Barrier(3), threading.Event(), threading.Event()

    def die(request: dict[str, Any]) -> Reply:
        is_late = barrier.wait(PATIENCE_S) == 0
        full.set()
        if is_late:
            late.wait(PATIENCE_S)
        return Reply("", hang_up=True)

    def work(request: dict[str, Any]) -> Reply:
        full.wait(PATIENCE_S)
        return good(request)

    config = settings("http://unused", base_url="", serve=True, max_concurrent=3, retries=1)
    with running(die) as dead, running(good) as restarted, running(work) as fine:
        dying = Restarting(dead.url, *[restarted.url] * 9)
        servers = [dying, Moving(*[fine.url] * 9)]
        with JudgeService(config, servers=servers) as service:
            futures = [service.submit(PROMPT, f"blue {number}") for number in range(6)]
            wait_for(lambda: service._endpoint.pool.servers[0].failing)
            dying.ready.set()
            wait_for(lambda: service.counts().restarts == 1)
            wait_for(lambda: sum(future.done() for future in futures) == 5)
            late.set()
            assert all(isinstance(future.result(PATIENCE_S), Judgement) for future in futures)
            before = len(restarted.requests)
            service.check_reachable()
            assert len(restarted.requests) == before + 1


def test_a_retry_leaves_a_failing_server() -> None:
    with running(lambda _: Reply("down", 500)) as failing, running(good) as fine:
        with JudgeService(settings(f"{failing.url} {fine.url}", retries=1)) as service:
            judged(service, "blue")
        assert len(failing.requests) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_each_server_has_its_own_limit(count: int) -> None:
    barrier = threading.Barrier(3 * count)

    def slow(request: dict[str, Any]) -> Reply:
        barrier.wait(PATIENCE_S)
        return good(request)

    config = settings("http://unused", base_url="", serve=True, max_concurrent=3)
    with ExitStack() as stack:
        servers = [stack.enter_context(running(slow)) for _ in range(count)]
        moving = [Moving(server.url) for server in servers]
        with JudgeService(config, servers=moving) as service:
            futures = [service.submit(PROMPT, f"blue {n}") for n in range(12 * count)]
            assert all(isinstance(future.result(PATIENCE_S), Judgement) for future in futures)
        assert {(server.most_busy, len(server.requests)) for server in servers} == {(3, 12)}


ANSWERS = (f"blue {number}" for number in itertools.count())
"""Unique answers, which are never cached."""


@pytest.fixture(scope="module")
def service(one_server: Server) -> Iterator[JudgeService]:
    with JudgeService(settings(one_server.url)) as service:
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
    "nested deeply": says("[" * 5000),
    "cut off": says({"c1": MET, "c2": MET}, finish="length"),
    "no choices": Reply('{"choices": []}'),
    "null usage and content": Reply('{"choices": [{"message": {"content": null}}]}'),
    "a web page": Reply("<html>", headers={"content-type": "text/html"}),
    "half a character": says('{"c1": "\ud800"}'),
}


@pytest.mark.parametrize("reply", WRONG.values(), ids=WRONG.keys())
def test_wrong_reply_is_retried_and_never_scored(
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
            patch.setattr("keel.rewards.judge.servers.random", pick)
            judge(settings(server.url), [f"blue {end}"])
    assert pauses == pytest.approx([0.0025, 0.005, 0.0075, 0.015])


def test_retry_after_is_respected(server: Server) -> None:
    times: list[float] = []

    def busy_once(request: dict[str, Any]) -> Reply:
        times.append(time.monotonic())
        busy = Reply("{}", status=429, headers={"retry-after": "0.1"})
        return good(request) if len(times) > 1 else busy

    server.behave = busy_once
    assert isinstance(judge(settings(server.url), ["blue"])[0], Judgement)
    assert times[1] - times[0] >= 0.1


@pytest.mark.parametrize("reply", [Reply("{}", delay_s=1000), Reply("{}" * 50_000, drip_s=0.01)])
def test_slow_replies_time_out(server: Server, reply: Reply) -> None:
    server.behave = lambda request: reply
    (result,) = judge(settings(server.url, timeout_s=0.05, retries=1), ["blue"])
    assert isinstance(result, CallError) and result.kind == "timeout"


def test_an_absent_judge() -> None:
    with running(good) as gone:
        url = gone.url
    (result,) = judge(settings(url), ["blue"])
    assert isinstance(result, CallError) and result.kind == "unreachable"
    with JudgeService(settings(url)) as service, pytest.raises(ValueError):
        service.check_reachable()


def test_check_reachable_needs_a_fresh_valid_reply(server: Server, tmp_path: Path) -> None:
    config = settings(server.url, cache_dir=str(tmp_path))
    server.behave = lambda request: says({"c1": MET})
    with JudgeService(config) as service:
        service.check_reachable()
        server.behave = lambda request: says("Sure! Blue is a colour.")
        with pytest.raises(ValueError, match="JSON"):
            service.check_reachable()  # despite the cached reply


def test_spent_calls_stop_the_run(server: Server) -> None:
    with pytest.raises(RewardStopped, match="max_calls = 3"):
        judge(settings(server.url, max_calls=3, max_concurrent=1), [f"blue {i}" for i in range(9)])
    assert len(server.requests) == 3


def test_too_many_failures_stop_the_run(server: Server) -> None:
    server.behave = lambda request: Reply("{}", status=400)
    with JudgeService(settings(server.url, max_failure_fraction=0.2)) as service:
        for number in range(4):
            failed(service, f"blue {number}")
        assert service.counts().failed == {"refused": 4}
        with pytest.raises(RewardStopped, match=r"5 of the last 5 .*HTTP 400"):
            service.submit(PROMPT, "blue").result(PATIENCE_S)
        server.behave = good
        with pytest.raises(RewardStopped):
            service.submit(PROMPT, "sky").result(PATIENCE_S)
    assert len(server.requests) == 5, "a stopped judge makes no calls"


def test_closing_cancels_calls_in_flight(server: Server) -> None:
    server.behave = lambda request: Reply("{}", delay_s=1000)
    service = JudgeService(settings(server.url))
    future = service.submit(PROMPT, "blue")
    wait_for(lambda: server.requests)
    service.close()
    service.close()
    assert future.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        service.submit(PROMPT, "blue")
