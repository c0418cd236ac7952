"""Requests to the judge, and what its replies are worth."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConversationsConfig
from keel.data.conversations.files import read_rows
from keel.rewards.judge import client
from keel.rewards.judge.results import Counts, Failed, Judged
from keel.rewards.judge.service import JudgeService
from tests.rewards.groups import with_message
from tests.rewards.judge.judge_server import (
    PROMPT,
    Reply,
    Server,
    criteria_of,
    judge,
    material_of,
    says,
    scripted,
    settings,
)
from tests.waiting import PATIENCE_S

THINKING = {"name": "doubt", "text": "says perhaps", "weight": 1, "thinking": True}
BOTH = [{"name": "answer", "text": "says blue", "weight": 0.5}, {**THINKING, "weight": 0.5}]


def rubric(*criteria: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "rubric", "criteria": list(criteria)}


def values(results: list[Judged | Failed]) -> list[float]:
    return [result.value for result in results if isinstance(result, Judged)]


def test_weights_parts_and_reasons(server: Server) -> None:
    results = judge(settings(server.url), ["blue sky", "sky", "red"])
    assert values(results) == [0.75 + 0.25 * 0.5, 0.125, 0.0]
    first = results[0]
    assert isinstance(first, Judged)
    assert first.parts == {"rubric": first.value, "disagreement": 0.0}
    assert [(v.name, v.score, v.reason) for v in first.verdicts] == [
        ("blue", 1.0, "looked for blue"),
        ("sky", 0.5, "looked for sky"),
    ]


def test_the_request(server: Server) -> None:
    prompt = replace(PROMPT, reward={**PROMPT.reward, "reference": "It is blue."})
    judge(settings(server.url, extra={"top_k": 1}), ["blue"], prompt)
    (request,) = server.requests
    assert server.keys == ["Bearer none"], "another service's key must not be sent"
    assert (request["model"], request["temperature"], request["top_k"]) == ("m", 0.0, 1)
    schema = request["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert schema["schema"]["required"] == ["c1", "c2"]
    system, user = request["messages"]
    assert [system["role"], user["role"]] == ["system", "user"]
    assert "What colour is it? {braces}" in system["content"]
    assert "It is blue." in system["content"]
    assert material_of(request["messages"]) == {"answer": "blue"}


def test_only_the_final_answer_is_judged(server: Server) -> None:
    results = judge(settings(server.url), ["<think>blue</think> red", "<think>blue", "red"])
    assert values(results) == [0.0, 0.0, 0.0]
    materials = [material_of(request["messages"]) for request in server.requests]
    assert materials == [{"answer": "red"}], "unfinished thinking is not sent, duplicates once"


def test_a_criterion_may_see_the_thinking(server: Server) -> None:
    prompt = replace(PROMPT, reward=rubric(*BOTH))
    message = {"role": "assistant", "content": "red", "reasoning_content": "perhaps blue"}
    with JudgeService(settings(server.url)) as service:
        result = service.submit(prompt, with_message(message)).result(PATIENCE_S)
    assert isinstance(result, Judged)
    assert {v.name: v.score for v in result.verdicts} == {"answer": 0.0, "doubt": 1.0}
    sent = {tuple(criteria_of(r).values()): material_of(r["messages"]) for r in server.requests}
    assert sent == {
        ("says blue",): {"answer": "red"},
        ("says perhaps",): {"thinking": "perhaps blue", "answer": "red"},
    }


def test_blank_and_long_answers_score_zero_unasked(server: Server) -> None:
    """Length counts escapes, six characters each in the request."""
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
    assert isinstance(result, Judged)
    assert result.value == pytest.approx(0.75 * 0.5 + 0.25)
    assert result.parts["disagreement"] == 0.75
    assert sorted(orders) == [("c1", "c2")] * 2 + [("c2", "c1")] * 2


@pytest.mark.parametrize(("failures", "kind"), [(1, Judged), (2, Failed)])
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
    """Each sample once, without failures and cached replies."""
    path = tmp_path / "new" / "chats.jsonl"
    config = settings(server.url, samples=2, chats=str(path))
    server.behave = scripted(says("no"))
    judge(config, ["blue", "blue", "red"])
    source = ConversationsConfig(name="judge", source="jsonl", path=str(path))
    chats = [example.messages for example in read_rows(source).examples]
    assert len(chats) == 4 and len(server.requests) == 5
    requests = [request["messages"] for request in server.requests]
    for *messages, reply in chats:
        assert [dict(message) for message in messages] in requests
        assert reply["role"] == "assistant" and "verdict" in str(reply["content"])


def test_the_key_comes_from_the_environment_and_stays_secret(
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
        assert isinstance(result, Failed)
        assert "sk-secret" not in result.reason and "***" in result.reason
    assert set(server.keys) == {"Bearer sk-secret"}


def test_counts_and_metrics(server: Server) -> None:
    slow = Reply("{}", status=500, delay_s=0.2)
    server.behave = scripted(slow, Reply("{}", status=429), says("It is met."))
    config = settings(server.url, max_concurrent=1, retries=3)
    with JudgeService(config, backoff_s=0.005) as service:
        futures = [service.submit_text(PROMPT, answer) for answer in ("blue", "sky", "blue", "")]
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


# --- Requests beyond the judge's context ---

FULL = Reply(
    json.dumps({"error": {"message": "This model's maximum context length is 4096 tokens."}}),
    status=400,
)
PROOF = "## Solution\nSee above.\n## Self Evaluation\nFine. \\boxed{1}"


@pytest.mark.parametrize(
    ("reward", "answer", "thinking", "kind"),
    [
        (PROMPT.reward, "<" * 9_990, 0, Judged),
        (PROMPT.reward, "blue" * 2_000, 5, Judged),
        (PROMPT.reward, "blue", 0, Failed),
        (PROMPT.reward, "blue", 9_000, Failed),
        ({"kind": "proof"}, PROOF, 9_000, Failed),
        ({"kind": "refusal", "refuse": True}, "blue", 9_000, Failed),
        (rubric(*BOTH), "blue", 9_000, Failed),
        (rubric(THINKING), "blue", 5, Failed),
        (rubric(THINKING), "blue", 9_000, Judged),
    ],
)
def test_a_long_completion_scores_zero_a_long_task_fails(
    server: Server, reward: dict[str, Any], answer: str, thinking: int, kind: type
) -> None:
    """Thinking counts only where it is sent."""
    server.behave = lambda request: FULL
    prompt = replace(PROMPT, reward=reward)
    with JudgeService(settings(server.url)) as service:
        thoughts = "perhaps " * (thinking // 8)
        result = service.submit_text(prompt, answer, thinking=thoughts).result(PATIENCE_S)
    assert isinstance(result, kind)
    assert result.kind == "too_long" if isinstance(result, Failed) else result.value == 0.0


# --- Hostile endpoints ---


def test_replies_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_REPLY_BYTES", 1 << 20)
    packed = gzip.compress(b"x" * 1000).decode("latin-1")
    for reply, message in (
        (says("x" * (2 << 20)), "MiB"),
        (says("x" * (2 << 20), status=400), "MiB"),
        (Reply(packed, headers={"content-encoding": "gzip"}), "compressed"),
    ):
        server.behave = lambda request, reply=reply: reply
        (result,) = judge(settings(server.url, retries=0), ["blue"])
        assert isinstance(result, Failed) and message in result.reason
