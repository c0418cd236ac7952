"""Tests completions from an endpoint, and how its errors are handled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keel.commands.cli import main
from keel.configs.schema import EndpointConfig, SamplingConfig
from keel.rl.types import Group, Prompt
from keel.rollout.endpoint import LATER, MAX_FAILURES, EndpointCompletions
from tests.rewards.judge.judge_server import Reply, Server, running
from tests.waiting import PATIENCE_S, within_some

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
    assert (sent["top_k"], sent["top_p"], sent["temperature"], sent["max_tokens"]) == (
        8,
        0.9,
        0.7,
        20,
    )
    told = {"x": 1, "enable_thinking": True, "thinking": True}
    assert sent["chat_template_kwargs"] == told and "tools" not in sent


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (words("x", tokens=None), "does not count the tokens"),
        (Reply('{"choices": []}'), "not a chat completion"),
        (Reply('{"choices": ["oops"]}'), "not a chat completion"),
        (Reply('{"choices": {"a": 1}}'), "not a chat completion"),
        (Reply('{"choices": [{"message": {}}], "usage": [1]}'), "does not count the tokens"),
        (says({"role": "assistant", "tool_calls": ["oops"]}), "not a chat completion"),
        (Reply("[]"), "reply is invalid"),
        (Reply('{"error": {"message": "too long"}}', status=400), "HTTP 400: .*too long"),
        (replace(words("x"), delay_s=1000), "no reply within endpoint.timeout_s = 0.05"),
    ],
)
def test_malformed_completions_are_dropped(endpoint: Server, reply: Reply, reason: str) -> None:
    endpoint.behave = lambda _: reply
    found = group(endpoint, timeout_s=0.05 if reply.delay_s else PATIENCE_S)
    assert not found.trajectories and len(found.dropped) == 2
    assert re.search(reason, found.dropped[0])


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_transient_errors_are_postponed(endpoint: Server, status: int) -> None:
    endpoint.behave = lambda _: Reply('{"error": {"message": "full"}}', status=status)
    (reason,) = group(endpoint, size=1).dropped
    assert reason.startswith(f"{LATER}the endpoint returned HTTP {status}: ") and "full" in reason


def test_long_retry_after_is_postponed(endpoint: Server) -> None:
    endpoint.behave = lambda _: Reply("{}", status=429, headers={"Retry-After": "100"})
    said = "later: the endpoint returned HTTP 429 for {:g} s ({})".format

    def waits(limit_s: float) -> None:
        (reason,) = group(endpoint, size=1, timeout_s=limit_s, retries=1).dropped
        assert reason == said(limit_s * 2, "endpoint.timeout_s and endpoint.retries")
        knobs = {"timeout_s": PATIENCE_S, "retries": 1}
        with EndpointCompletions(config_of(endpoint, **knobs)) as completions:
            asked = completions.complete(
                ASKED.messages, (), SAMPLING, max_tokens=9, thinking=False, within_s=limit_s
            )
            reason = completions.schedule(asked).result(PATIENCE_S)
        assert reason == said(limit_s, "rollout.timeout_s")

    within_some(waits, (0.2, 5.0, 60.0))


@pytest.mark.parametrize(
    "reply",
    [
        Reply('{"error": {"message": "bad key k3y"}}', status=401),
        Reply('{"error": {"message": "nothing left"}}', status=402),
        Reply("", hang_up=True),
    ],
)
def test_what_every_request_would_meet_ends_it(
    endpoint: Server, reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINTS_KEY", "k3y")
    endpoint.behave = lambda _: reply
    with pytest.raises(RuntimeError, match=r"endpoint.base_url = http") as caught:
        group(endpoint, api_key_env="ENDPOINTS_KEY")
    assert "k3y" not in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "dropped", "ends"),
    [
        (
            Reply('{"error": {"message": "flagged"}}', status=403),
            "the endpoint returned HTTP 403: .*flagged",
            "flagged",
        ),
        (
            Reply("", hang_up=True),
            f"{LATER}the connection to the endpoint was lost: ",
            "cannot be reached",
        ),
    ],
)
def test_prompt_errors_drop_after_other_successes(
    endpoint: Server, reply: Reply, dropped: str, ends: str
) -> None:
    endpoint.behave = lambda _: reply
    with EndpointCompletions(config_of(endpoint)) as completions:
        asked = partial(completions.submit, ASKED, group_size=1, sampling=SAMPLING)
        with pytest.raises(RuntimeError, match=ends):  # a key without rights, perhaps
            asked().result(PATIENCE_S)
        endpoint.behave = lambda _: words("x")
        assert asked().result(PATIENCE_S).trajectories
        endpoint.behave = lambda _: reply
        (reason,) = asked().result(PATIENCE_S).dropped
        assert re.match(dropped, reason)
        # A key that was revoked meanwhile, or a server that ended, is no prompt's doing.
        for _ in range(MAX_FAILURES - 1):
            assert asked().result(PATIENCE_S).dropped
        with pytest.raises(RuntimeError, match=ends):
            asked().result(PATIENCE_S)
        endpoint.behave = lambda _: words("x")
        assert asked().result(PATIENCE_S).trajectories
        for status in (401, 402):
            endpoint.behave = lambda _, s=status: Reply('{"error": "no"}', status=s)
            with pytest.raises(RuntimeError, match=f"HTTP {status}"):
                asked().result(PATIENCE_S)


def spells(request: dict[str, Any]) -> Reply:
    """Answer correctly, except for words that contain an e."""
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


def test_eval_resumes_after_a_busy_endpoint(
    endpoint: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing completions must not count as wrong. The next start requests them again."""

    def busy(request: dict[str, Any]) -> Reply:
        full = "a" in request["messages"][-1]["content"].rpartition(":")[2]
        return Reply('{"error": {"message": "full"}}', status=503) if full else spells(request)

    there = (*RECIPE, f"run.dir={tmp_path}", f"endpoint.base_url={endpoint.url}")
    there = (*there, "endpoint.retries=0")
    table = tmp_path / "eval" / "m" / "samples.jsonl"
    endpoint.behave = busy
    assert main(["eval", *there]) == 0
    some = len(table.read_text().splitlines())
    assert 0 < some < 8 and "not all is sampled" in capsys.readouterr().out
    endpoint.behave = spells
    assert main(["eval", *there]) == 0
    assert len(table.read_text().splitlines()) == 8
    assert (tmp_path / "eval" / "m" / "results.json").exists()


@pytest.mark.parametrize(
    "override",
    [
        "endpoint.base_url=localhost",
        "endpoint.base_url=http://a:b@c/v1",
        "endpoint.model=''",
        "endpoint.api_key_env=NOT_THERE_AT_ALL",
        "eval.variants=[{name: a, thinking: with}]",
    ],
)
def test_endpoint_knobs_are_checked(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = (*RECIPE, f"run.dir={tmp_path}", "endpoint.base_url=http://localhost:1/v1")
    assert main(["eval", *there, override]) == 2
    assert re.search(r"(endpoint|eval)\.\w+", capsys.readouterr().err)


def test_endpoints_reject_program_environments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    source = {"name": "a", "source": "jsonl", "path": str(tmp_path / "tasks.jsonl")}
    source |= {"environment": {"program": "python agent.py"}}  # type: ignore[dict-item]
    recipe = tmp_path / "recipe.json"  # which is YAML, too
    recipe.write_text(json.dumps({"data": {"sources": [source]}}))
    there = ("endpoint.base_url=http://localhost:1/v1", "endpoint.model=m", f"run.dir={tmp_path}")
    assert main(["eval", str(recipe), *there]) == 2
    assert "the program of data.sources[a] needs tokens" in capsys.readouterr().err
