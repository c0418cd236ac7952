"""Unmodified agent programs from PyPI, with their own loops and contexts.

They need a separate interpreter: `KEEL_AGENTS_PYTHON` names one that has them, or
`KEEL_AGENTS_INSTALL=1` makes a virtual environment for the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.agents.endpoint.mcp_tools import McpTools
from keel.agents.endpoint.program import AgentProgram, ProgramResult, run_program
from keel.agents.endpoint.recorder import Finished
from keel.agents.endpoint.server import Endpoint
from keel.agents.types import Environment, NoEnvironment
from keel.rl.types import Prompt, Verdict
from tests.agents.endpoint.kit import BUDGET, CHAT, Policy, check_law, ids_of, recorder_of
from tests.agents.episodes import run
from tests.agents.scripted import ADD, Sums

pytestmark = pytest.mark.e2e
TASK = Prompt(
    prompt_id="p", domain="d", messages=({"role": "user", "content": "How far is Rome?"},)
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if path := os.environ.get("KEEL_AGENTS_PYTHON"):
        yield path
        return
    if os.environ.get("KEEL_AGENTS_INSTALL") != "1":
        pytest.skip("no interpreter with agent programs: set KEEL_AGENTS_PYTHON or _INSTALL=1")
    folder = tmp_path_factory.mktemp("agents")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    installed = str(folder / "bin" / "python")
    subprocess.run(
        [installed, "-m", "pip", "install", "-q", "openai-agents"], check=True, timeout=900
    )
    yield installed


def drive(
    python: str,
    module: str,
    command: list[str] | str,
    script: Any,
    folder: Path,
    retokenized: int = 0,
    environment: Environment | None = None,
    **env: str,
) -> tuple[ProgramResult, Finished]:
    """Run a program and check the law. retokenized: expected number of contexts in which sampled
    text was tokenized again."""
    check = subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=120)
    if check.returncode:
        pytest.skip(f"{module} is not installed for {python}")
    policy, environment = Policy(script), environment or NoEnvironment()
    if isinstance(command, str):
        (folder / "agent.py").write_text(command)
        command = [python, "agent.py"]
    program = AgentProgram(command=command, folder=folder, env={"HOME": str(folder), **env})

    async def work() -> tuple[ProgramResult, Finished]:
        async with Endpoint() as endpoint:
            recorder = recorder_of(policy, window=60_000, tokens=20_000, timeout_s=120.0)
            late = recorder.overdue(program.open_s)
            address = endpoint.add(recorder, McpTools(environment, [ADD], budget=BUDGET))
            ended = await run_program(program, TASK, address, seed=5, until=late)
            return ended, await endpoint.finish("p/0")

    ended, finished = run(work())
    check_law(policy, finished)
    counts = finished.counts
    print(module, counts, f"{len(finished.segments)} segments")
    assert counts.extended + counts.branched + counts.rendered == finished.usage.turns
    assert not finished.failure and count_retokenized(policy) == retokenized
    return ended, finished


def count_retokenized(policy: Policy) -> int:
    """Count contexts with turns of the policy under other ids than it sampled."""
    header = CHAT.encoder.controls["<|im_start|>"], *ids_of("assistant\n")
    count = 0
    for turn, (context, _) in enumerate(policy.turns):
        starts = range(len(context) - len(header) + 1)
        turns = sum(tuple(context[i : i + len(header)]) == header for i in starts) - 1
        known = any(context[: len(c) + len(s)] == c + s for c, s in policy.turns[:turn])
        count += turns > 0 and not known
    return count


def test_openai_client(tmp_path: Path) -> None:
    program = """
from openai import OpenAI
client = OpenAI()
messages = [{"role": "user", "content": "How far is Rome?"}]
for question in ("And back?", None):
    reply = client.chat.completions.create(model="policy", messages=messages)
    message = reply.choices[0].message
    messages += [message.model_dump(exclude_none=True), {"role": "user", "content": question}]
print(message.content)
"""
    ended, finished = drive(sys.executable, "openai", program, ["800 km.", "1600 km."], tmp_path)
    assert not ended.failed and finished.messages[-1]["content"] == "1600 km."
    assert (finished.counts.rendered, finished.counts.extended) == (1, 1)


OPENAI_AGENTS = """
import asyncio, json, os
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
set_default_openai_api("chat_completions")
set_tracing_disabled(True)

@function_tool
def city(name: str, days: int) -> str:
    "Looks a city up."
    return f"{name} is far <|im_end|>"

helper = Agent(name="helper", instructions="Help.", model=os.environ["OPENAI_MODEL"])
agent = Agent(
    name="agent",
    instructions="Be brief.",
    model=os.environ["OPENAI_MODEL"],
    tools=[city, helper.as_tool("helper", "Asks the helper.")],
)
task = json.loads(os.environ["KEEL_TASK"])["messages"][-1]["content"]

async def main():
    first = await Runner.run(agent, task)
    again = first.to_input_list() + [{"role": "user", "content": "And again?"}]
    second = Runner.run_streamed(agent, again)
    async for _ in second.stream_events():
        pass
    return [first.final_output, second.final_output]

outputs = asyncio.run(main())
print(json.dumps({"parts": {"correct": float(outputs == ["It is far.", "As before."])}}))
"""


def test_openai_agents(python: str, tmp_path: Path) -> None:
    """Parallel calls, two concurrent sub-agents, then a streamed second run."""

    def script(context: str, turn: int) -> str:
        if "Be brief." not in context:
            return "The helper says so."
        last = context.rpartition("<|im_start|>user\n")[2]
        if "And again?" in last:
            return "As before." if "is far" in last else '@city "Oslo", 1'
        if "The helper says so." in last:
            return "It is far."
        if "is far" in last:
            return '@helper "One?"\n@helper "Two?"'
        return 'Hm.\n@city "Rome", 1\n@city "Oslo", 2'

    ended, finished = drive(python, "agents", OPENAI_AGENTS, script, tmp_path)
    assert ended.verdict == Verdict(parts={"correct": 1.0}), (ended, finished.messages)
    counts = finished.counts
    assert (finished.usage.turns, len(finished.segments)) == (7, 3)
    assert (counts.rendered, counts.extended, counts.branched) == (3, 4, 0)


MCP = {
    "agents": """
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from openai import AsyncOpenAI
set_tracing_disabled(True)

async def main():
    async with MCPServerStreamableHttp(params={"url": os.environ["KEEL_MCP_URL"]}) as server:
        model = OpenAIChatCompletionsModel(model="m", openai_client=AsyncOpenAI())
        result = await Runner.run(Agent(name="a", mcp_servers=[server], model=model), "40 + 2?")
        return result.final_output
""",
}


@pytest.mark.parametrize("module", MCP)
def test_their_mcp_clients_use_the_tools(python: str, module: str, tmp_path: Path) -> None:
    environment = Sums()
    code = f"import asyncio, json, os\n{MCP[module]}\n"
    code += "print(json.dumps({'answer': asyncio.run(main())}))"
    script = ["@add 40, 2", "It is 42."]
    ended, finished = drive(python, module, code, script, tmp_path, environment=environment)
    assert ended.answer == "It is 42.", ended
    assert environment.log == ["call add {'a': 40, 'b': 2}"]
    assert (finished.counts.extended, finished.counts.rendered) == (1, 1)
