"""Tests completions from an endpoint and the handling of its errors."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.conversation import Conversation
from keel.commands.cli import main
from keel.configs.schema import EndpointConfig, SamplingConfig
from keel.rl.turns import conversation_of
from keel.rl.types import Group, Prompt
from keel.rollout.endpoint import (
    _MAX_FAILURES,
    LATER,
    EndpointCompletions,
    EndpointTurns,
    _to_endpoint_format,
)
from tests.rewards.judge.judge_server import Reply, Server, running
from tests.waiting import PATIENCE_S

ASKED = Prompt(
    prompt_id="p", domain="d", messages=({"role": "user", "content": "Why?"},), thinking=True
)
SAMPLING = SamplingConfig(max_tokens=20, top_k=8, top_p=0.9, temperature=0.7)


def says(message: dict[str, Any], tokens: int | None = 3, finish: str = "stop") -> Reply:
    usage = None if tokens is None else {"completion_tokens": tokens, "prompt_tokens": 1}
    if usage:
        usage["total_tokens"] = 1 + usage["completion_tokens"]
    body = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": usage,
    }
    return Reply(json.dumps(body))


def words(text: str, **more: Any) -> Reply:
    return says({"role": "assistant", "content": text}, **more)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Server]:
    with running(lambda _: words("")) as server:
        yield server


def config_of(server: Server, **knobs: Any) -> EndpointConfig:
    given = {"timeout_s": PATIENCE_S, "retries": 0, **knobs}
    return EndpointConfig(base_url=server.url, model="m", **given)


def group(server: Server, size: int = 2, **knobs: Any) -> Group:
    with EndpointCompletions(config_of(server, **knobs)) as completions:
        return completions.submit(ASKED, group_size=size, sampling=SAMPLING).result(PATIENCE_S)


def test_a_completion(endpoint: Server) -> None:
    endpoint.reset()
    thought = {"role": "assistant", "content": "So. ", "reasoning_content": "Hm"}
    endpoint.behave = lambda _: says(thought, tokens=7, finish="length")
    found = group(endpoint, tells_thinking=True, extra={"chat_template_kwargs": {"x": 1}})
    assert len(found.trajectories) == 2 and not found.dropped
    one = found.trajectories[1]
    assert (one.sibling, one.sampled_tokens, one.finish_reason) == (1, 7, "length")
    assert one.messages[0] == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "Hm",
        "raw": "<think>Hm</think>So. ",
    }
    sent = endpoint.requests[0]
    knobs = ("top_k", "top_p", "temperature", "max_tokens")
    assert [sent[knob] for knob in knobs] == [8, 0.9, 0.7, 20]
    told = {"x": 1, "enable_thinking": True, "thinking": True}
    assert sent["chat_template_kwargs"] == told and "tools" not in sent


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (words("x", tokens=None), "tokens"),
        (Reply('{"choices": []}'), "not a chat completion"),
        (Reply('{"error": {"message": "too long"}}', status=400), "HTTP 400: .*too long"),
        (replace(words("x"), delay_s=1000), "endpoint.timeout_s"),
        (Reply('{"error": {"message": "full"}}', status=429), f"^{LATER}.*429"),
    ],
)
def test_malformed_completions_are_dropped(endpoint: Server, reply: Reply, reason: str) -> None:
    endpoint.behave = lambda _: reply
    found = group(endpoint, timeout_s=0.05 if reply.delay_s else PATIENCE_S)
    assert not found.trajectories and len(found.dropped) == 2
    assert re.search(reason, found.dropped[0])


def test_refused_keys_end_the_run(endpoint: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDPOINTS_KEY", "k3y")
    endpoint.behave = lambda _: Reply('{"error": {"message": "bad key k3y"}}', status=401)
    with pytest.raises(RuntimeError, match=r"endpoint.base_url") as caught:
        group(endpoint, api_key_env="ENDPOINTS_KEY")
    assert "k3y" not in str(caught.value)


def test_lost_connections_end_the_run_unless_others_succeed(endpoint: Server) -> None:
    with EndpointCompletions(config_of(endpoint)) as completions:

        def ask(reply: Reply) -> Group:
            endpoint.behave = lambda _: reply
            future = completions.submit(ASKED, group_size=1, sampling=SAMPLING)
            return future.result(PATIENCE_S)

        with pytest.raises(RuntimeError, match=r"endpoint.base_url"):
            ask(Reply("", hang_up=True))
        assert ask(words("x")).trajectories
        for _ in range(_MAX_FAILURES):
            assert ask(Reply("", hang_up=True)).dropped[0].startswith(LATER)
        with pytest.raises(RuntimeError, match=r"endpoint.base_url"):
            ask(Reply("", hang_up=True))
        assert ask(words("x")).trajectories


def spells(request: dict[str, Any]) -> Reply:
    """Give the correct answer, except for words that contain an e."""
    word = re.findall(r": (\w+)", request["messages"][-1]["content"])[-1]
    return words(word if "e" in word else word[::-1], tokens=len(word))


RECIPE = (
    "quickstart",
    "data.only=[spelling]",
    "data.sources[spelling].size=20",
    "data.sources[spelling].holdout=8",
    "rewards.workers=0",
    "endpoint.model=m",
)


def test_an_endpoint_is_evaluated_and_filters(
    endpoint: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.behave = spells
    there = (*RECIPE, f"run.dir={tmp_path}", f"endpoint.base_url={endpoint.url}")
    assert main(["eval", *there, "eval.samples=2"]) == 0
    assert f"sampling with m at {endpoint.url}" in capsys.readouterr().out
    folder = tmp_path / "eval" / "m"
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    found = json.loads((folder / "results.json").read_text())["results"]["recipe"]["spelling"]
    right = ["e" not in line["samples"][0]["answer"] for line in lines]
    assert len(lines) == 8 and found["pass@1"] == sum(right) / 8 and 0 < sum(right) < 8
    assert [line["samples"][1]["correct"] == 1 for line in lines] == right

    assert main(["filter", *there, "filter.samples=2"]) == 0
    rates = [json.loads(line) for line in (tmp_path / "filter/pass_rates.jsonl").open()]
    assert {rate["pass_rate"] for rate in rates} <= {0, 1} and len(rates) >= 10


# Turns.

QUESTION = {"role": "user", "content": "Well?"}


def test_thinking_is_returned_until_a_user_message() -> None:
    key = "reasoning"

    def thinks(request: dict[str, Any]) -> Reply:
        turn = sum(one["role"] == "assistant" for one in request["messages"])
        function = {"name": "calculate", "arguments": "{}"}
        calls = [{"id": "of the server", "type": "function", "function": function}]
        return says({"role": "assistant", key: f"Hm {turn}", "tool_calls": calls})

    with running(thinks) as server, EndpointCompletions(config_of(server)) as completions:
        turns = EndpointTurns(completions, {"eval": SamplingConfig()})
        name = conversation_of("p", "eval", 0, 0, 0)
        talk = Conversation(
            name=name, prompt_id="p", chat=turns, messages=[QUESTION], tools=[], thinking=True
        )

        def speak() -> None:
            request = talk.request(max_tokens=50, seed=1)
            said = turns.turn(request, "eval").result(PATIENCE_S)
            (call,) = talk.append_turn(request, said).calls
            talk.continue_with([{"role": "tool", "content": "3", "tool_call_id": call.call_id}])

        speak()
        speak()
        talk.rewrite(talk.context)
        speak()
        talk.continue_with([QUESTION])
        speak()
        sent = [one["messages"] for one in server.requests]
    said = [[m for m in messages if m["role"] == "assistant"] for messages in sent]
    thoughts = [[message.get(key) for message in messages] for messages in said]
    assert thoughts == [[], ["Hm 0"], ["Hm 0", "Hm 1"], [None] * 3]
    assert set(said[2][0]) == {"role", "content", "tool_calls", key}
    assert len({message["tool_calls"][0]["id"] for message in said[3]}) == 3


@pytest.mark.parametrize("calls", [[], None])
def test_empty_tool_calls_are_not_sent(calls: Any) -> None:
    assert _to_endpoint_format({**QUESTION, "tool_calls": calls}) == QUESTION
