"""What the judge is asked, and what its replies are worth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConversationsConfig, JudgeConfig
from keel.data.conversations.files import read_rows
from keel.rewards.judge.judge import Judge
from keel.rewards.judge.results import Counts, Failed, Judged
from keel.rewards.judge.service import JudgeService
from keel.rewards.text import thinking_text
from tests.rewards.groups import spoken
from tests.rewards.judge.judge_server import Reply, Server, criteria_of, material_of, says
from tests.rewards.judge.judging import PROMPT, judge, scripted, settings
from tests.waiting import PATIENCE_S


def test_weights_parts_and_reasons(server: Server) -> None:
    first, second, third = judge(settings(server.url), ["blue sky", "sky", "red"])
    assert isinstance(first, Judged)
    assert first.value == 0.75 + 0.25 * 0.5
    assert first.parts == {"rubric": first.value, "disagreement": 0.0}
    assert [(v.name, v.score, v.reason) for v in first.verdicts] == [
        ("blue", 1.0, "looked for blue"),
        ("sky", 0.5, "looked for sky"),
    ]
    assert isinstance(second, Judged)
    assert second.value == 0.125
    assert isinstance(third, Judged)
    assert third.value == 0.0


def test_the_request(server: Server) -> None:
    prompt = replace(PROMPT, reward={**PROMPT.reward, "reference": "It is blue."})
    judge(settings(server.url, extra={"top_k": 1}), ["blue"], prompt)
    (request,) = server.requests
    assert server.keys == ["Bearer none"], "the key of another endpoint must not be sent"
    assert (request["model"], request["temperature"], request["top_k"]) == ("m", 0.0, 1)
    schema = request["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert schema["schema"]["required"] == ["c1", "c2"]
    assert schema["schema"]["additionalProperties"] is False
    system, user = request["messages"]
    assert [system["role"], user["role"]] == ["system", "user"]
    assert "What colour is it? {braces}" in system["content"]
    assert "It is blue." in system["content"]
    assert material_of(request["messages"]) == {"answer": "blue"}


def test_only_the_final_answer_is_judged(server: Server) -> None:
    results = judge(settings(server.url), ["<think>blue</think> red", "<think>blue", "red"])
    assert [r.value for r in results if isinstance(r, Judged)] == [0.0, 0.0, 0.0]
    sent = [material_of(request["messages"]) for request in server.requests]
    assert sent == [{"answer": "red"}], "an unfinished thought is not sent, equal answers once"


def test_a_criterion_may_ask_for_the_thinking(server: Server) -> None:
    criteria = [
        {"name": "answer", "text": "says blue", "weight": 0.5},
        {"name": "doubt", "text": "says perhaps", "weight": 0.5, "thinking": True},
    ]
    prompt = replace(PROMPT, reward={"kind": "rubric", "criteria": criteria})
    message = {"role": "assistant", "content": "red", "reasoning_content": "perhaps blue"}
    with JudgeService(settings(server.url)) as service:
        result = service.submit(prompt, spoken(message)).result(PATIENCE_S)
        assert service.counts().calls == 2
    assert isinstance(result, Judged)
    assert {v.name: v.score for v in result.verdicts} == {"answer": 0.0, "doubt": 1.0}
    sent = {tuple(criteria_of(r).values()): material_of(r["messages"]) for r in server.requests}
    assert sent[("says blue",)] == {"answer": "red"}
    assert sent[("says perhaps",)] == {"thinking": "perhaps blue", "answer": "red"}


def test_thinking_text() -> None:
    assert thinking_text([{"role": "assistant", "raw": "<think>a</think>b"}]) == "a"
    assert thinking_text([{"role": "assistant", "raw": "b"}]) == ""
    assert thinking_text([{"role": "user", "content": "b"}]) == ""


def test_blank_and_endless_answers_cost_nothing(server: Server) -> None:
    results = judge(settings(server.url, max_characters=10), ["", "  ", "blue " * 3])
    assert [r.value for r in results if isinstance(r, Judged)] == [0.0, 0.0, 0.0]
    assert isinstance(results[2], Judged)
    assert "max_characters = 10" in results[2].verdicts[0].reason
    assert server.requests == []


def test_the_length_is_the_one_that_the_judge_sees(server: Server) -> None:
    """Or an answer of escapes, six times as long for the judge, would fail it and stop the run."""
    criteria = [{"name": "doubt", "text": "says blue", "weight": 1, "thinking": True}]
    prompt = replace(PROMPT, reward={"kind": "rubric", "criteria": criteria})
    hidden = "\ue000" * 100
    with JudgeService(settings(server.url, max_characters=300)) as service:
        result = service.submit_text(PROMPT, hidden).result(PATIENCE_S)
        service.submit_text(prompt, "red", thinking=f"{hidden}blue").result(PATIENCE_S)
    assert isinstance(result, Judged)
    assert "has 600 characters, more than max_characters = 300" in result.verdicts[0].reason
    (request,) = server.requests
    assert len(request["messages"][1]["content"]) < 500
    assert material_of(request["messages"])["thinking"].endswith("blue")


def test_samples_are_averaged_and_their_disagreement_is_told(server: Server) -> None:
    asked: list[tuple[str, ...]] = []

    def moody(request: dict[str, Any]) -> Reply:
        order = tuple(criteria_of(request))
        asked.append(order)
        verdict = "met" if order[0] == "c1" else "missed"
        both = {key: {"reason": "", "verdict": "met"} for key in order}
        return says({**both, "c1": {"reason": "", "verdict": verdict}})

    server.behave = moody
    (result,) = judge(settings(server.url, samples=4), ["blue"])
    assert isinstance(result, Judged)
    assert result.value == pytest.approx(0.75 * 0.5 + 0.25)
    assert result.parts["disagreement"] == 0.75
    assert sorted(asked) == [("c1", "c2")] * 2 + [("c2", "c1")] * 2


def test_more_than_half_of_the_samples_have_to_succeed(server: Server) -> None:
    refused = Reply("{}", status=400)
    server.behave = scripted(refused)
    (result,) = judge(settings(server.url, samples=3), ["blue"])
    assert isinstance(result, Judged)
    server.behave = scripted(refused, refused)
    (result,) = judge(settings(server.url, samples=3), ["blue"])
    assert isinstance(result, Failed)


def test_equal_questions_are_asked_once(server: Server, tmp_path: Path) -> None:
    chosen = settings(server.url, cache_dir=str(tmp_path / "cache"))
    first = judge(chosen, ["blue"] * 8 + ["red"])
    assert len(server.requests) == 2
    assert judge(chosen, ["blue"] * 8 + ["red"]) == first
    assert len(server.requests) == 2, "the next run finds them on the disk"
    judge(replace(chosen, model="other"), ["blue"])
    judge(chosen, ["blue"], replace(PROMPT, messages=({"role": "user", "content": "?"},)))
    judge(chosen, ["blue"], replace(PROMPT, reward={**PROMPT.reward, "reference": "x"}))
    assert len(server.requests) == 5


def test_replies_become_chats_that_can_be_learned(server: Server, tmp_path: Path) -> None:
    """Each sample of them once, the failed ones and those from the cache not at all."""
    path = tmp_path / "new" / "chats.jsonl"
    chosen = settings(server.url, samples=2, chats=str(path))
    server.behave = scripted(says("no"))
    judge(chosen, ["blue", "blue", "red"])
    source = ConversationsConfig(name="judge", source="jsonl", path=str(path))
    chats = [example.messages for example in read_rows(source).examples]
    assert len(chats) == 4 and len(server.requests) == 5
    answered = [request["messages"] for request in server.requests]
    for asked, (said,) in ((chat[:2], chat[2:]) for chat in chats):
        assert [dict(message) for message in asked] in answered
        assert said["role"] == "assistant" and "verdict" in str(said["content"])
    with pytest.raises(ValueError, match=r"rewards.judge.chats = .*cannot be written"):
        judge(settings(server.url, chats=str(tmp_path)), [])


def test_failures_are_not_cached(server: Server, tmp_path: Path) -> None:
    chosen = settings(server.url, cache_dir=str(tmp_path), retries=0)
    server.behave = scripted(says("no"))
    assert isinstance(judge(chosen, ["blue"])[0], Failed)
    assert isinstance(judge(chosen, ["blue"])[0], Judged)


def test_the_key_comes_from_the_environment_and_stays_secret(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"api_key_env = 'JUDGE_KEY'.*not set"):
        judge(settings(server.url, api_key_env="JUDGE_KEY"), [])
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
    server.behave = lambda request: Reply(
        '{"error": {"message": "bad key: sk-secret"}}', status=401
    )
    (result,) = judge(settings(server.url, api_key_env="JUDGE_KEY"), ["blue"])
    assert server.keys == ["Bearer sk-secret"]
    assert isinstance(result, Failed)
    assert "bad key: ***" in result.reason


def test_bad_specs_name_the_prompt(server: Server) -> None:
    with pytest.raises(ValueError, match=r"prompt file/1: rubric: without criteria"):
        judge(settings(server.url), ["blue"], replace(PROMPT, reward={"kind": "rubric"}))
    with pytest.raises(ValueError, match=r"prompt file/1: .*kind 'answer'"):
        judge(settings(server.url), ["blue"], replace(PROMPT, reward={"kind": "answer"}))
    with pytest.raises(ValueError, match=r"rewards.judge.base_url is empty"):
        Judge(JudgeConfig())


def test_counts(server: Server) -> None:
    server.behave = scripted(Reply("{}", status=500))
    with JudgeService(settings(server.url), backoff_s=0.005) as service:
        for answer in ("blue", "blue", ""):
            service.submit_text(PROMPT, answer).result(PATIENCE_S)
        counts = service.counts()
    assert (counts.judged, counts.unasked, counts.failed) == (3, 1, {})
    assert (counts.calls, counts.cached) == (2, 1)
    assert (counts.prompt_tokens, counts.reply_tokens) == (10, 5)
    assert json.dumps(dict(counts.failed)) == "{}"


def test_metrics_say_what_a_slow_judge_waits_for(server: Server) -> None:
    slow = Reply("{}", status=500, delay_s=0.2)
    server.behave = scripted(slow, Reply("{}", status=429), says("It is met."))
    with JudgeService(
        settings(server.url, max_concurrent=1, retries=3), backoff_s=0.005
    ) as service:
        pending = [service.submit_text(PROMPT, answer) for answer in ("blue", "sky")]
        for future in pending:
            future.result(PATIENCE_S)
        counts = service.counts()
    metrics = counts.since(Counts())
    again = {name: metric.value for name, metric in metrics.items() if "retries" in name}
    assert again == {f"judge/retries_{kind}": 1 for kind in ("server", "busy", "invalid")}
    assert metrics["judge/failures"].value == 0 and metrics["judge/calls"].value == 5
    assert (counts.call_s.count, counts.queue_s.count) == (5, 2)
    assert metrics["judge/call_seconds"].value >= 0.2 / 5
    assert metrics["judge/queue_seconds"].value >= 0.2 / 2  # the second waited for the first
    after = counts.since(counts)
    assert not any(metric.value for metric in after.values())
    assert not [name for name in after if "seconds" in name or "retries" in name]
