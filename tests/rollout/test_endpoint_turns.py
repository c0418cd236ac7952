"""Tests episodes with a model behind an endpoint, by running `keel filter` on tasks with tools."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keel.agents.conversation import Conversation
from keel.commands.cli import main
from keel.configs.schema import SamplingConfig
from keel.rl.turns import conversation_of
from keel.rollout.endpoint import EndpointCompletions, EndpointTurns
from tests.agents.sandboxes import wrap_of
from tests.rewards.judge.judge_server import Reply, running
from tests.rollout.test_endpoint import config_of, says, words
from tests.waiting import PATIENCE_S

ASKED = {"role": "user", "content": "Well?"}
RECIPE = """\
run: {{dir: {dir}}}
model: {{path: tiny, tiny: {{max_context: 4096}}}}
data:
  sources:
    - name: sums
      source: reasoning_gym
      task: chain_sum
      size: 3
      system_template: tools
      environment: {{target: "sums.py:Sums", folder: "{folder}"}}
rewards: {{workers: 0}}
rollout: {{sampling: {{max_tokens: 40}}}}
agents: {{window: 4000}}
algorithm: {{prompts_per_step: 2, group_size: 2}}
endpoint: {{base_url: "{url}", model: m, retries: 0}}
filter: {{samples: 2}}
"""


def called(arguments: str) -> Reply:
    function = {"name": "calculate", "arguments": arguments}
    call = {"id": "of the server", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return says(message, finish="tool_calls")


@dataclass
class Model:
    """Fake model that makes a malformed call, then a valid call, and then answers with the result.
    It answers the second sum with "no idea". While `busy` is set, requests about the first sum fail
    with status 503."""

    busy: bool = True
    sums: list[str] = field(default_factory=list[str])

    def __call__(self, request: dict[str, Any]) -> Reply:
        messages = request["messages"]
        (asked,) = (one["content"] for one in messages if one["role"] == "user")
        terms = asked.rpartition(":")[2].rpartition("=")[0].strip()
        if terms not in self.sums:
            self.sums.append(terms)
        if self.busy and terms == self.sums[0]:
            return Reply('{"error": {"message": "full"}}', status=503)
        turn = sum(one["role"] == "assistant" for one in messages)
        if terms == self.sums[1]:
            return words("no idea")
        if turn == 2:
            return words(messages[-1]["content"])
        return called("{" if turn == 0 else json.dumps({"expression": terms}))


@pytest.mark.e2e
def test_endpoints_filter_tasks_with_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrap_of()
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "tools"
    folder.mkdir()
    (folder / "sums.py").write_text(
        "class Sums:\n    def calculate(self, expression: str) -> int:\n"
        "        return sum(map(int, expression.replace('- ', '+ -').split('+')))\n"
    )
    table = tmp_path / "run/filter/pass_rates.jsonl"

    def rates() -> list[float]:
        return sorted(rate["pass_rate"] for rate in map(json.loads, table.open()))

    with running(model := Model()) as server:
        recipe.write_text(RECIPE.format(dir=tmp_path / "run", url=server.url, folder=folder))
        assert main(["filter", str(recipe)]) == 0, capsys.readouterr()
        assert rates() == [0.0, 1.0] and model.sums[0] not in table.read_text()
        model.busy = False
        server.reset()
        assert main(["filter", str(recipe)]) == 0, capsys.readouterr()
        sent = server.requests
    assert rates() == [0.0, 1.0, 1.0] and len(sent) == 6  # two episodes of three turns
    assert len((tmp_path / "run/filter/kept/sums.jsonl").read_text().splitlines()) == 2
    last = max((one["messages"] for one in sent), key=len)
    _, _, first, no_call, second, result = last
    assert [tool["function"]["name"] for tool in sent[0]["tools"]] == ["calculate"]
    assert "not a tool call" in no_call["content"]
    assert second["tool_calls"][0]["id"] == result["tool_call_id"] != first["tool_calls"][0]["id"]
    assert json.loads(second["tool_calls"][0]["function"]["arguments"])["expression"]
    assert set(result) == {"role", "content", "tool_call_id"}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thinking_is_returned_until_a_user_message(key: str) -> None:
    def thinks(request: dict[str, Any]) -> Reply:
        turn = sum(one["role"] == "assistant" for one in request["messages"])
        function = {"name": "calculate", "arguments": "{}"}
        calls = [{"id": "of the server", "type": "function", "function": function}]
        return says({"role": "assistant", key: f"Hm {turn}", "tool_calls": calls})

    with running(thinks) as server, EndpointCompletions(config_of(server)) as completions:
        turns = EndpointTurns(completions, {"eval": SamplingConfig()})
        name = conversation_of("p", "eval", 0, 0, 0)
        talk = Conversation(
            name=name, prompt_id="p", chat=turns, messages=[ASKED], tools=[], thinking=True
        )

        def speak() -> None:
            said = turns.turn(talk.request(max_tokens=50, seed=1), "eval").result(PATIENCE_S)
            (call,) = talk.append(said).calls
            talk.answer([{"role": "tool", "content": "3", "tool_call_id": call.call_id}])

        speak()
        speak()
        talk.rewrite(talk.view)
        speak()
        talk.answer([ASKED])
        speak()
        sent = [one["messages"] for one in server.requests]
    said = [[m for m in messages if m["role"] == "assistant"] for messages in sent]
    thoughts = [[message.get(key) for message in messages] for messages in said]
    assert thoughts == [[], ["Hm 0"], ["Hm 0", "Hm 1"], [None] * 3]
    assert set(said[2][0]) == {"role", "content", "tool_calls", key}
    assert len({message["tool_calls"][0]["id"] for message in said[3]}) == 3
