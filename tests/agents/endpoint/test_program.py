"""Programs as processes: what they are told, how they end, and what they are worth."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.endpoint.program import AgentProgram, ProgramResult, command_of, run_program
from keel.agents.endpoint.record import Finished
from keel.agents.endpoint.server import Endpoint
from keel.agents.endpoint.tools import Tools
from keel.agents.env_runtime.call import call
from keel.agents.env_runtime.errors import InvalidEnvironment, error_text
from keel.agents.types import NoEnvironment, Unscored
from keel.rewards.sandbox.runtime import runtime
from keel.rl.types import Prompt, Verdict
from tests.agents.endpoint.kit import BUDGET, Policy, check_law, recording
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
        said = json.load(answer)["choices"][0]["message"]
    messages += [said, {"role": "user", "content": "Go on."}]
print("said", said["content"])
"""


def drive(
    code: str,
    *arguments: str,
    task: Prompt = TASK,
    policy: Policy | None = None,
    within_s: float = PATIENCE_S,
    **more: Any,
) -> tuple[ProgramResult, Finished]:
    """Run `python -c code arguments` to its end."""
    program = AgentProgram(**{"command": [sys.executable, "-S", "-c", code, *arguments], **more})

    async def late() -> str:
        await asyncio.sleep(within_s)
        return f"did not end within {within_s:g} s"

    async def work() -> tuple[ProgramResult, Finished]:
        async with Endpoint() as endpoint:
            tools = Tools(NoEnvironment(), [ADD], budget=BUDGET)
            address = endpoint.add(recording(policy or Policy(["a", "b", "c"])), tools)
            ended = await run_program(program, task, address, seed=5, until=late())
            return ended, await endpoint.finish("p/0")

    return run(work())


def test_a_program_finds_its_trajectory_by_the_environment() -> None:
    policy = Policy(["one", "two", "three"])
    tell = "open(os.environ['KEEL_VERDICT'], 'w').write('{\"parts\": {\"correct\": 0.5}}')"
    ended, finished = drive(LOOP + tell, policy=policy)
    assert ended.verdict == Verdict(parts={"correct": 0.5}), ended
    assert ended.words == "said three"
    check_law(policy, finished)
    assert (finished.usage.turns, len(finished.segments)) == (3, 1)


def test_what_a_program_is_told() -> None:
    code = (
        "import json, os, sys\n"
        "print(json.dumps({'parts': {}, 'facts': {'argv': sys.argv[1:],"
        " 'file': open(sys.argv[2]).read(), 'task': os.environ.get('KEEL_TASK'),"
        " 'from': json.load(open(os.environ['KEEL_TASK_FILE'])), 'env': dict(os.environ)}}))"
    )
    words = ("{prompt}", "{prompt_file}", "--x={prompt}")
    os.environ["KEEL_TEST_SECRET"] = "no"
    try:
        ended, _ = drive(code, *words, env={"OPENAI_MODEL": "gpt-9"})
    finally:
        del os.environ["KEEL_TEST_SECRET"]
    assert isinstance(ended.verdict, Verdict), ended
    facts = ended.verdict.facts
    # A prompt that holds braces is a prompt.
    assert (facts["argv"][0], facts["argv"][2]) == ("Say {a}!", "--x=Say {a}!")
    assert facts["file"] == "Say {a}!"
    assert json.loads(facts["task"]) == facts["from"] and "reward" not in facts["from"]
    assert facts["env"]["OPENAI_MODEL"] == "gpt-9" and "KEEL_TEST_SECRET" not in facts["env"]
    assert facts["env"]["KEEL_SEED"] == "5"
    assert not Path(facts["env"]["TMPDIR"]).exists()
    assert facts["env"]["HOME"] == facts["env"]["TMPDIR"], "no home is shared"


def test_a_task_that_no_environment_variable_holds_is_in_its_file() -> None:
    code = (
        "import json, os, sys\n"
        "task = json.load(open(os.environ['KEEL_TASK_FILE']))\n"
        "print(json.dumps({'parts': {}, 'facts': {'reward': task['reward'],"
        " 'long': len(open(sys.argv[1]).read()), 'there': 'KEEL_TASK' in os.environ}}))"
    )
    long = replace(TASK, messages=({"role": "user", "content": "é" * 90_000},))
    ended, _ = drive(code, "{prompt_file}", task=long, tells_reward=True)
    facts = {"reward": {"answer": "secret"}, "long": 90_000, "there": False}
    assert ended.verdict == Verdict(parts={}, facts=facts), ended


GOOD = 'print(\'{"parts": {"correct": 1.0}}\')'


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"{GOOD}\nraise ValueError('out of cheese')", "exited with status 1.*out of cheese"),
        (f"{GOOD}\nimport os\nos.kill(os.getpid(), 11)", "was ended by signal 11"),
        (f"{GOOD}\nimport time\ntime.sleep(1000)", "did not end within .*correct"),
    ],
)
def test_how_a_program_failed_is_said_with_its_last_words(code: str, reason: str) -> None:
    hangs = "sleep" in code

    def said(limit_s: float) -> None:
        ended, _ = drive(code, within_s=limit_s)
        assert re.search(f"(?s){reason}", ended.why(AgentProgram(command=["a"])))
        assert ended.timed_out is hangs

    within_some(said, LIMITS_S if hangs else (PATIENCE_S,))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ('print(\'{"parts": {"correct": 7}}\')', "must be a number from 0 to 1"),
        ("import os\nopen(os.environ['KEEL_VERDICT'], 'w').write('yes')", "wrote no verdict"),
    ],
)
def test_a_verdict_that_is_none(code: str, reason: str) -> None:
    ended, _ = drive(code)
    assert isinstance(ended.verdict, Unscored) and re.search(reason, ended.verdict.reason)
    assert not ended.failed


def test_a_program_that_says_nothing_leaves_it_to_the_recipe() -> None:
    assert drive("print('done', 3)")[0].verdict is None
    assert drive("print(3)")[0].verdict is None
    assert drive(GOOD, judges=False)[0].verdict is None
    ended, _ = drive("print('{\"answer\": 42}')")
    assert (ended.verdict, ended.answer) == (None, "42")


def test_a_program_that_is_not_there() -> None:
    ended, _ = drive("", command=["no-such-agent", "{prompt}"])
    assert "could not be run: cannot run no-such-agent" in ended.failed
    ended, _ = drive("", python="/no/such/python")
    assert "could not be run" in ended.failed and "/no/such/python" in ended.failed
    with pytest.raises(ValueError, match="command is empty"):
        AgentProgram(command=[])
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        AgentProgram(command=["a"], env={"OPENAI_API_KEY": "mine"})


def test_what_a_recipe_names_is_a_command_or_a_function(tmp_path: Path) -> None:
    def command(program: str) -> list[str]:
        return command_of(program, python=sys.executable, folder=tmp_path)

    (tmp_path / "agent.sh").write_text("#!/bin/sh\n")
    assert command("sh -c 'a b' {prompt}")[1:] == ["-c", "a b", "{prompt}"]
    assert Path(command("sh")[0]).is_absolute()
    assert command(f"{Path(sys.executable).name} x.py")[0] == sys.executable  # beside `python`
    for missing in ("no-such-agent", "./agent.sh", "/tmp"):
        with pytest.raises(ValueError, match=f"no command {missing} .*name it by its path"):
            command(missing)
    (tmp_path / "agent.sh").chmod(0o755)
    for name in ("./agent.sh", "agent.sh", str(tmp_path / "agent.sh")):
        assert command(f"{name} -v") == [str(tmp_path / "agent.sh"), "-v"]
    assert command("my/agent.py:solve")[-2:] == ["call", "my/agent.py:solve"]


FUNCTIONS = """
import os
from textwrap import dedent
def answers(task): return task["messages"][0]["content"] + "!"
def scores(prompt, seed, more=1): return {"correct": 1.0, "seed": seed / 10}, {"prompt": prompt}
async def counts(whatever): return whatever["prompt_id"] == "p"
def silent(): pass
def prints(): print('{"answer": "it", "parts": {"correct": 1.0}}')
def breaks(task): raise KeyError("no such key")
def wants(problem, tools): return "it"
def every(**told): return " ".join(sorted(told))
def lacks(task): import a_package_that_nobody_has
number = 3
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("answers", {"answer": "s!"}),
        ("scores", {"parts": {"correct": 1.0, "seed": 0.5}, "facts": {"prompt": "Say {a}!"}}),
        ("counts", {"parts": {"correct": 1.0}, "facts": {}}),
        ("silent", None),
        ("breaks", "KeyError: 'no such key'"),
        (
            "wants",
            "wants has the parameters `problem` and `tools`, and may have: task, prompt, seed",
        ),
        ("every", {"answer": "prompt seed task"}),
        ("lacks", "No module named 'a_package_that_nobody_has'"),
        ("number", "number is no function"),
        ("nothing", "has no 'nothing'; it has os, dedent, answers"),
    ],
)
def test_what_a_function_is_told_and_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: Any
) -> None:
    (tmp_path / "my_agent.py").write_text(FUNCTIONS)
    (tmp_path / "task").write_text(
        json.dumps({"prompt_id": "p", "messages": [dict(m) for m in TASK.messages]})
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for key, value in {"TASK_FILE": "task", "VERDICT": "verdict", "SEED": "5"}.items():
        monkeypatch.setenv(f"KEEL_{key}", value)
    if isinstance(said, str):
        with pytest.raises((InvalidEnvironment, KeyError, ImportError)) as caught:
            call(f"my_agent.py:{name}")
        assert said in error_text(caught.value)
    else:
        call(f"my_agent.py:{name}")
        found = tmp_path / "verdict"
        assert (json.loads(found.read_text()) if found.exists() else None) == said


def test_a_function_is_called_in_its_own_process(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(FUNCTIONS)

    def ended(name: str) -> ProgramResult:
        command = command_of(f"my_agent:{name}", python=sys.executable, folder=tmp_path)
        return drive("", command=command, folder=tmp_path)[0]

    assert ended("answers").answer == "s!"
    shown = ended("prints")  # which may be the policy's words
    assert (shown.failed, shown.answer, shown.verdict) == ("", None, None)
    assert "has no 'nothing'" in (gone := ended("nothing")).words and gone.failed


@pytest.mark.parametrize("end", ["", "import time; time.sleep(1000)"])
def test_nothing_that_it_started_is_left(end: str, tmp_path: Path) -> None:
    """Neither what holds its output open, nor what left its session and lost its parent."""
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

    def left(limit_s: float) -> None:
        ended, _ = drive(code, within_s=limit_s)
        assert bool(ended.failed) is bool(end)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        wait_for(lambda: not any(map(alive, pids)))

    within_some(left, (1.5, 10.0, 60.0) if end else (PATIENCE_S,))


def test_one_that_is_given_up_while_it_is_ended_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its engine failed, say, and then a sibling's, which cancels it."""
    program = AgentProgram(command=[sys.executable, "-c", "import time; time.sleep(1000)"])

    async def work() -> None:
        ending = asyncio.Event()

        async def late() -> str:
            while not list(folder.glob("keel-*/keel-*/*")):  # it has begun
                await asyncio.sleep(0.01)
            ending.set()
            return "was ended"

        async with Endpoint() as endpoint:
            address = endpoint.add(recording(Policy(["a"])))
            task = asyncio.create_task(run_program(program, TASK, address, seed=5, until=late()))
            await ending.wait()
            for _ in range(4):  # until it waits for the end of the processes
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(PATIENCE_S):
            while list(folder.iterdir()):
                await asyncio.sleep(0.01)

    with tempfile.TemporaryDirectory() as name:  # a socket's path is short, and tmp_path's is not
        folder = Path(name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        run(work())


def test_a_sandbox_without_a_network_reaches_its_endpoint_and_nothing_else() -> None:
    policy = Policy(["one", "two", "three"])
    spy = (
        "import socket\n"
        "found = {}\n"
        "for name, at in {'machine': sys.argv[1], 'world': '192.0.2.1:80'}.items():\n"
        "    try:\n"
        "        socket.create_connection((at.split(':')[0], int(at.split(':')[-1])), 5)\n"
        "    except OSError as error:\n"
        "        found[name] = type(error).__name__\n"
        'ping = b\'{"id": 7, "method": "ping"}\'\n'
        "answer = urllib.request.urlopen(os.environ['KEEL_MCP_URL'], ping)\n"
        "found['tools'] = json.load(answer)['id']\n"
        "print(json.dumps({'parts': {'correct': 1}, 'facts': found}))"
    )
    # A service of this machine's, at an address where the endpoint in the sandbox has no port.
    with socket.create_server(("127.0.0.2", 0)) as other:
        ended, finished = drive(
            LOOP + spy,
            f"127.0.0.2:{other.getsockname()[1]}",
            wrap=wrap_of(network="loopback"),
            readable=runtime(sys.executable).paths,
            policy=policy,
        )
    facts = {"machine": "ConnectionRefusedError", "world": "OSError", "tools": 7}
    assert ended.verdict == Verdict(parts={"correct": 1.0}, facts=facts), ended
    check_law(policy, finished)
    assert finished.usage.turns == 3


def test_a_function_in_the_sandbox(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "my_agent.py").write_text(FUNCTIONS)
    command = command_of("my_agent:scores", python=sys.executable, folder=tmp_path)
    ended, _ = drive("", command=command, folder=tmp_path, wrap=wrap_of(network="loopback"))
    assert isinstance(ended.verdict, Verdict) and ended.verdict.parts["seed"] == 0.5, ended
