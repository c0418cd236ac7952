"""Agent programs as processes: their input, their end, their verdict, their sandbox."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.agents.endpoint.mcp_tools import McpTools
from keel.agents.endpoint.program import (
    AgentProgram,
    ProgramResult,
    _parse_result,
    command_of,
    run_program,
)
from keel.agents.endpoint.recorder import TrajectoryRecorder
from keel.agents.endpoint.server import Endpoint
from keel.agents.types import NoEnvironment, Unscored
from keel.rewards.sandbox.environments import runtime
from keel.rl.types import Prompt, Verdict
from tests.agents.endpoint.kit import BUDGET, Policy, check_law, recorder_of
from tests.agents.episodes import alive, run
from tests.agents.sandboxes import wrap_of
from tests.agents.scripted import ADD
from tests.waiting import LIMITS_S, PATIENCE_S, wait_for, within_some

pytestmark = pytest.mark.e2e

TASK = Prompt(
    prompt_id="p",
    domain="d",
    messages=({"role": "system", "content": "s"}, {"role": "user", "content": "Say {a}!"}),
    reward={"answer": "secret"},
)
LOOP = """
import json, os, sys, urllib.request
messages = json.loads(os.environ["KEEL_TASK"])["messages"]
for turn in range(3):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "Go on."}]
print("last:", message["content"])
"""


def drive(
    code: str,
    *arguments: str,
    policy: Policy | None = None,
    within_s: float = PATIENCE_S,
    **settings: Any,
) -> tuple[ProgramResult, TrajectoryRecorder]:
    """Run `python -c code arguments` to its end."""
    command = [sys.executable, "-S", "-c", code, *arguments]
    program = AgentProgram(**{"command": command, **settings})

    async def late() -> str:
        await asyncio.sleep(within_s)
        return f"did not end within {within_s:g} s"

    async def work() -> tuple[ProgramResult, TrajectoryRecorder]:
        async with Endpoint() as endpoint:
            tools = McpTools(NoEnvironment(), [ADD], budget=BUDGET)
            address = endpoint.add(recorder_of(policy or Policy(["a", "b", "c"])), tools)
            ended = await run_program(program, TASK, address, seed=5, until=late())
            return ended, await endpoint.finish("p/0")

    return run(work())


def test_program_is_recorded_and_gives_a_verdict() -> None:
    policy = Policy(["one", "two", "three"])
    write = "open(os.environ['KEEL_VERDICT'], 'w').write('{\"parts\": {\"correct\": 0.5}}')"
    ended, finished = drive(LOOP + write, policy=policy)
    assert ended.verdict == Verdict(parts={"correct": 0.5}), ended
    assert ended.output == "last: three"
    check_law(policy, finished.segments)
    assert (finished.usage.turns, len(finished.segments)) == (3, 1)


def test_program_gets_the_task_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import json, os, sys\n"
        "print(json.dumps({'parts': {}, 'facts': {'argv': sys.argv[1:],"
        " 'file': open(sys.argv[2]).read(), 'task': os.environ.get('KEEL_TASK'),"
        " 'from': json.load(open(os.environ['KEEL_TASK_FILE'])), 'env': dict(os.environ)}}))"
    )
    monkeypatch.setenv("KEEL_TEST_SECRET", "no")
    words = ("{prompt}", "{prompt_file}", "--x={prompt}")
    ended, _ = drive(code, *words, env={"OPENAI_MODEL": "gpt-9"})
    assert isinstance(ended.verdict, Verdict), ended
    facts = ended.verdict.facts
    assert (facts["argv"][0], facts["argv"][2]) == ("Say {a}!", "--x=Say {a}!")
    assert facts["file"] == "Say {a}!"
    assert json.loads(facts["task"]) == facts["from"] and "reward" not in facts["from"]
    assert facts["env"]["OPENAI_MODEL"] == "gpt-9" and "KEEL_TEST_SECRET" not in facts["env"]
    assert facts["env"]["KEEL_SEED"] == "5"
    assert not Path(facts["env"]["TMPDIR"]).exists()
    assert facts["env"]["HOME"] == facts["env"]["TMPDIR"], "no home is shared"


GOOD = 'print(\'{"parts": {"correct": 1.0}}\')'


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"{GOOD}\nraise ValueError('out of cheese')", "status 1.*out of cheese"),
        (f"{GOOD}\nimport os\nos.kill(os.getpid(), 11)", "signal 11"),
        (f"{GOOD}\nimport time\ntime.sleep(1000)", "within .*correct"),
    ],
)
def test_failure_is_described_with_last_output(code: str, reason: str) -> None:
    def check(limit_s: float) -> None:
        ended, _ = drive(code, within_s=limit_s)
        assert re.search(f"(?s){reason}", ended.describe(AgentProgram(command=["a"])))

    within_some(check, LIMITS_S if "sleep" in code else (PATIENCE_S,))


@pytest.mark.parametrize(
    ("reply", "verdict", "answer"),
    [
        ({"last": '{"parts": {"correct": 7}}'}, Unscored, None),
        ({"last": "", "verdict": "yes"}, Unscored, None),
        ({"last": "done 3"}, type(None), None),
        ({"last": '{"answer": 42}'}, type(None), "42"),
    ],
)
def test_verdicts_and_answers_are_parsed(reply: Any, verdict: type, answer: str | None) -> None:
    parsed = _parse_result(AgentProgram(command=["a"]), reply)
    assert (type(parsed[0]), parsed[1]) == (verdict, answer)


def test_function_runs_in_its_own_process(tmp_path: Path) -> None:
    prints = """print('{"parts": {"correct": 1.0}}')"""  # which may be the policy's words
    code = f"def answers(task):\n    {prints}\n    return task['messages'][0]['content'] + '!'\n"
    (tmp_path / "my_agent.py").write_text(code)
    command = command_of("my_agent:answers", python=sys.executable, folder=tmp_path)
    ended, _ = drive("", command=command, folder=tmp_path)
    assert (ended.failed, ended.answer, ended.verdict) == ("", "s!", None)


@pytest.mark.parametrize("end", ["", "import time; time.sleep(1000)"])
def test_descendants_are_killed(end: str, tmp_path: Path) -> None:
    """One child holds the output open, the other has left its session and lost its parent."""
    code = (
        "import os, subprocess\n"
        "one = subprocess.Popen(['sleep', '3000'])\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    two = subprocess.Popen(['sleep', '3000'], start_new_session=True)\n"
        f"    open({str(tmp_path / 'pids')!r}, 'w').write(f'{{one.pid}} {{two.pid}}')\n"
        "    os._exit(0)\n"
        f"os.wait()\n{end}\n"
    )

    def check(limit_s: float) -> None:
        ended, _ = drive(code, within_s=limit_s)
        assert bool(ended.failed) is bool(end)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        wait_for(lambda: not any(map(alive, pids)))

    within_some(check, (1.5, 10.0, 60.0) if end else (PATIENCE_S,))


def test_sandbox_reaches_only_its_endpoint() -> None:
    policy = Policy(["one", "two", "three"])
    spy = (
        "import socket\n"
        "facts = {}\n"
        "for name, at in {'machine': sys.argv[1], 'world': '192.0.2.1:80'}.items():\n"
        "    try:\n"
        "        socket.create_connection((at.split(':')[0], int(at.split(':')[-1])), 5)\n"
        "    except OSError as error:\n"
        "        facts[name] = type(error).__name__\n"
        'ping = b\'{"id": 7, "method": "ping"}\'\n'
        "answer = urllib.request.urlopen(os.environ['KEEL_MCP_URL'], ping)\n"
        "facts['tools'] = json.load(answer)['id']\n"
        "print(json.dumps({'parts': {'correct': 1}, 'facts': facts}))"
    )
    wrap = wrap_of(network="loopback")
    # A service of this machine, at an address where the sandbox's endpoint has no port.
    with socket.create_server(("127.0.0.2", 0)) as service:
        place = f"127.0.0.2:{service.getsockname()[1]}"
        paths = runtime(sys.executable).paths
        ended, finished = drive(LOOP + spy, place, wrap=wrap, readable=paths, policy=policy)
    facts = {"machine": "ConnectionRefusedError", "world": "OSError", "tools": 7}
    assert ended.verdict == Verdict(parts={"correct": 1.0}, facts=facts), ended
    check_law(policy, finished.segments)
    assert finished.usage.turns == 3
