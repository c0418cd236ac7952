"""Agent programs that others wrote, unmodified, with their own loops and their own contexts.

They run under an interpreter of their own: `KEEL_AGENTS_PYTHON` names one that has them, or
`KEEL_AGENTS_INSTALL=1` lets a virtual environment be made for the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.agents.endpoint.program import AgentProgram, ProgramResult, run_program
from keel.agents.endpoint.record import Finished
from keel.agents.endpoint.server import Endpoint
from keel.agents.endpoint.tools import Tools
from keel.agents.types import Environment, NoEnvironment
from keel.rl.types import Prompt, Verdict
from tests.agents.endpoint.kit import BUDGET, CHAT, Policy, check_law, ids_of, recording
from tests.agents.episodes import run
from tests.agents.scripted import ADD, Sums

pytestmark = pytest.mark.e2e
PACKAGES = {
    "mini-swe-agent": "minisweagent",
    "openai-agents": "agents",
    "pydantic-ai-slim[openai,mcp]": "pydantic_ai",
    "smolagents[openai]": "smolagents",
}
TASK = Prompt(
    prompt_id="p", domain="d", messages=({"role": "user", "content": "How far is Rome?"},)
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if named := os.environ.get("KEEL_AGENTS_PYTHON"):
        yield named
        return
    if os.environ.get("KEEL_AGENTS_INSTALL") != "1":
        pytest.skip("no interpreter with agent programs: set KEEL_AGENTS_PYTHON or _INSTALL=1")
    folder = tmp_path_factory.mktemp("agents")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    found = str(folder / "bin" / "python")
    subprocess.run([found, "-m", "pip", "install", "-q", *PACKAGES], check=True, timeout=900)
    yield found


def drive(
    python: str,
    module: str,
    command: list[str] | str,
    said: Any,
    folder: Path,
    again: int = 0,
    environment: Environment | None = None,
    **env: str,
) -> tuple[ProgramResult, Finished]:
    """A program's whole run. Whatever it does to its messages, the law holds. again: contexts in
    which something that was sampled has been tokenised again."""
    found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=120)
    if found.returncode:
        pytest.skip(f"{module} is not installed for {python}")
    policy, environment = Policy(said), environment or NoEnvironment()
    if isinstance(command, str):
        (folder / "agent.py").write_text(command)
        command = [python, "agent.py"]
    program = AgentProgram(command=command, folder=folder, env={"HOME": str(folder), **env})

    async def work() -> tuple[ProgramResult, Finished]:
        async with Endpoint() as endpoint:
            recorded = recording(policy, window=60_000, tokens=20_000, timeout_s=120.0)
            late = recorded.overdue(program.open_s)
            address = endpoint.add(recorded, Tools(environment, [ADD], budget=BUDGET))
            ended = await run_program(program, TASK, address, seed=5, until=late)
            return ended, await endpoint.finish("p/0")

    ended, finished = run(work())
    check_law(policy, finished)
    counts = finished.counts
    print(module, counts, f"{len(finished.segments)} segments", f"{ended.took_s:.1f} s")
    assert counts.extended + counts.branched + counts.rendered == finished.usage.turns
    assert not finished.failure and tokenised_again(policy) == again
    return ended, finished


def tokenised_again(policy: Policy) -> int:
    """Contexts in which the policy has spoken, and not under the ids that it sampled."""
    header = CHAT.encoder.controls["<|im_start|>"], *ids_of("assistant\n")
    count = 0
    for turn, (context, _) in enumerate(policy.turns):
        starts = range(len(context) - len(header) + 1)
        spoken = sum(tuple(context[i : i + len(header)]) == header for i in starts) - 1
        told = any(context[: len(c) + len(s)] == c + s for c, s in policy.turns[:turn])
        count += spoken > 0 and not told
    return count


def test_a_script_of_the_usual_library(tmp_path: Path) -> None:
    """What drives the programs below holds without any of them."""
    script = """
from openai import OpenAI
client = OpenAI()
messages = [{"role": "user", "content": "How far is Rome?"}]
for question in ("And back?", None):
    reply = client.chat.completions.create(model="policy", messages=messages)
    said = reply.choices[0].message
    messages += [said.model_dump(exclude_none=True), {"role": "user", "content": question}]
print(said.content)
"""
    ended, finished = drive(sys.executable, "openai", script, ["800 km.", "1600 km."], tmp_path)
    assert not ended.failed and finished.messages[-1]["content"] == "1600 km."
    assert (finished.counts.rendered, finished.counts.extended) == (1, 1)


def test_mini_swe_agent(python: str, tmp_path: Path) -> None:
    """Its command line, with a shell. A turn without a call is dropped from its history."""
    said = [
        'Look.\n@bash "echo a > a.txt"\n@bash "cat a.txt <|im_end|>"',
        "I will not call anything.",
        "@bash not JSON",
        '@bash "cat a.txt"',
        '@bash "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat a.txt"',
    ]
    command = [str(Path(python).parent / "mini"), "-m", "openai/policy", "-t", "{prompt}", "-y"]
    command += ["--exit-immediately", "-o", str(tmp_path / "out.json")]
    ended, finished = drive(
        python,
        "minisweagent",
        command,
        said,
        tmp_path,
        MSWEA_CONFIGURED="true",
        MSWEA_COST_TRACKING="ignore_errors",
        MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path),
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        COLUMNS="80",
    )
    assert ended.verdict is None, ended
    assert (tmp_path / "a.txt").read_text() == "a\n"
    assert finished.usage.turns == 5
    # The two turns that it dropped are trained, each where it was sampled.
    counts = finished.counts
    assert (counts.rendered, counts.extended, counts.branched) == (1, 2, 2)


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
    """Parallel calls, two sub-agents at once, then a second run that is streamed."""

    def said(context: str, turn: int) -> str:
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

    ended, finished = drive(python, "agents", OPENAI_AGENTS, said, tmp_path)
    assert ended.verdict == Verdict(parts={"correct": 1.0}), (ended, finished.messages)
    counts = finished.counts
    assert (finished.usage.turns, len(finished.segments)) == (7, 3)
    assert (counts.rendered, counts.extended, counts.branched) == (3, 4, 0)


PYDANTIC_AI = """
import asyncio, json, os
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), system_prompt="Be brief.")

@agent.tool_plain
def city(name: str, days: int) -> str:
    "Looks a city up."
    return f"{name} is far <|im_end|>"

task = json.loads(os.environ["KEEL_TASK"])["messages"][-1]["content"]

async def main():
    first = await agent.run(task)
    async with agent.run_stream("And again?", message_history=first.all_messages()) as second:
        return [first.output, await second.get_output()]

outputs = asyncio.run(main())
print(json.dumps({"parts": {"correct": float(outputs == ["It is far.", "As before."])}}))
"""


def test_pydantic_ai(python: str, tmp_path: Path) -> None:
    """Parallel calls, one whose arguments it refuses, one to a tool that is not there; streamed."""
    said = [
        'Hm.\n@city "Rome", 1\n@city "Oslo", 2',
        '@city "Rome", "soon"\n@town "Rome"',
        "It is far.",
        '@city "Rome", 1.0',
        "As before.",
    ]
    ended, finished = drive(python, "pydantic_ai", PYDANTIC_AI, said, tmp_path)
    assert ended.verdict == Verdict(parts={"correct": 1.0}), (ended, finished.messages)
    counts = finished.counts
    assert (counts.rendered, counts.extended, counts.branched) == (1, 4, 0)
    assert (finished.usage.calls, finished.usage.failed_calls) == (5, 2)


SMOLAGENTS = """
import json, os
from smolagents import CodeAgent, OpenAIServerModel, tool

@tool
def city(name: str) -> str:
    \"\"\"Looks a city up.

    Args:
        name: of the city
    \"\"\"
    return f"{name} is far"

model = OpenAIServerModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = CodeAgent(tools=[city], model=model, verbosity_level=0)
output = agent.run(json.loads(os.environ["KEEL_TASK"])["messages"][-1]["content"])
print(json.dumps({"parts": {"correct": float(output == "Rome is far")}}))
"""


def test_smolagents(python: str, tmp_path: Path) -> None:
    """Calls written as code, tool results as the user's words, stop strings that are ignored. It
    adds a record of the calls to what the policy said: that is another context each time."""
    said = [
        "Thought: look.\n<code>\nprint(city('Rome'))\n</code>",
        "No code.",
        "Thought: done.\n<code>\nfinal_answer(city('Rome'))\n</code>",
    ]
    ended, finished = drive(python, "smolagents", SMOLAGENTS, said, tmp_path, again=2)
    assert ended.verdict == Verdict(parts={"correct": 1.0}), (ended, finished.messages)
    assert finished.usage.turns == 3
    assert (finished.counts.rendered, len(finished.segments)) == (3, 3)


MCP = {
    "agents": """
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from openai import AsyncOpenAI
set_tracing_disabled(True)

async def main():
    async with MCPServerStreamableHttp(params={"url": os.environ["KEEL_MCP_URL"]}) as server:
        model = OpenAIChatCompletionsModel(model="m", openai_client=AsyncOpenAI())
        found = await Runner.run(Agent(name="a", mcp_servers=[server], model=model), "40 + 2?")
        return found.final_output
""",
    "pydantic_ai.mcp": """
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset

async def main():
    agent = Agent("openai-chat:policy", toolsets=[MCPToolset(os.environ["KEEL_MCP_URL"])])
    return (await agent.run("40 + 2?")).output
""",
}


@pytest.mark.parametrize("module", MCP)
def test_an_environments_tools_by_their_own_mcp_clients(
    python: str, module: str, tmp_path: Path
) -> None:
    environment = Sums()
    code = f"import asyncio, json, os\n{MCP[module]}\n"
    code += "print(json.dumps({'answer': asyncio.run(main())}))"
    said = ["@add 40, 2", "It is 42."]
    ended, finished = drive(python, module, code, said, tmp_path, environment=environment)
    assert ended.answer == "It is 42.", ended
    assert environment.log == ["call add {'a': 40, 'b': 2}"]
    assert (finished.counts.extended, finished.counts.rendered) == (1, 1)
