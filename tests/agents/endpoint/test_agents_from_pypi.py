"""An unmodified agent program from PyPI, with its own loop and contexts.

It needs a separate interpreter: `KEEL_AGENTS_PYTHON` names one that has openai-agents, or
`KEEL_AGENTS_INSTALL=1` makes a virtual environment for the test.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keel.agents.endpoint.program import AgentProgram, run_program
from keel.agents.endpoint.server import Endpoint, McpTools
from keel.rl.types import Prompt, Verdict
from tests.agents.endpoint.kit import BUDGET, Policy, check_law, recorder_of
from tests.agents.episodes import asynchronous
from tests.agents.scripted import ADD, Sums

pytestmark = pytest.mark.e2e
TASK = Prompt(
    prompt_id="p", domain="d", messages=({"role": "user", "content": "How far is Rome?"},)
)


@pytest.fixture
def python(tmp_path: Path) -> str:
    if path := os.environ.get("KEEL_AGENTS_PYTHON"):
        return path
    if os.environ.get("KEEL_AGENTS_INSTALL") != "1":
        pytest.skip("no interpreter with agent programs: set KEEL_AGENTS_PYTHON or _INSTALL=1")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    installed = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run(
        [installed, "-m", "pip", "install", "-q", "openai-agents"], check=True, timeout=900
    )
    return installed


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
with open(os.environ["KEEL_VERDICT"], "w") as file:
    json.dump({"parts": {"correct": float(outputs == ["It is far.", "As before."])}}, file)
"""


@asynchronous
async def test_openai_agents(python: str, tmp_path: Path) -> None:

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

    policy = Policy(script)
    (tmp_path / "agent.py").write_text(OPENAI_AGENTS)
    program = AgentProgram(
        command=[python, "agent.py"], folder=tmp_path, env={"HOME": str(tmp_path)}
    )

    async with Endpoint() as endpoint:
        recorder = recorder_of(policy, window=60_000, tokens=20_000, timeout_s=120.0)
        address = endpoint.add(recorder, McpTools(Sums(), [ADD], budget=BUDGET))
        late = recorder.overdue(program.open_s)
        ended = await run_program(program, TASK, address, seed=5, until=late)
        (ended, finished) = ended, await endpoint.finish("p/0")
    check_law(policy, finished.segments)
    assert ended.verdict == Verdict(parts={"correct": 1.0}), (ended, finished.index.messages)
    counts = finished.counts
    assert (finished.usage.turns, len(finished.segments)) == (7, 3)
    assert (counts["rendered"], counts["extended"], counts["branched"]) == (3, 4, 0)
