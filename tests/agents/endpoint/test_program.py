"""Agent programs as processes: their input, their end, their verdict, their sandbox."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.endpoint.mcp_tools import McpTools
from keel.agents.endpoint.program import AgentProgram, ProgramResult, command_of, run_program
from keel.agents.endpoint.recorder import Finished
from keel.agents.endpoint.server import Endpoint
from keel.agents.env_runtime import drive as drive_module
from keel.agents.env_runtime.episode import call_function
from keel.agents.env_runtime.errors import InvalidEnvironment, error_text
from keel.agents.types import NoEnvironment, Unscored
from keel.rewards.sandbox.runtime import runtime
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
    task: Prompt = TASK,
    policy: Policy | None = None,
    within_s: float = PATIENCE_S,
    **settings: Any,
) -> tuple[ProgramResult, Finished]:
    """Run `python -c code arguments` to its end."""
    command = [sys.executable, "-S", "-c", code, *arguments]
    program = AgentProgram(**{"command": command, **settings})

    async def late() -> str:
        await asyncio.sleep(within_s)
        return f"did not end within {within_s:g} s"

    async def work() -> tuple[ProgramResult, Finished]:
        async with Endpoint() as endpoint:
            tools = McpTools(NoEnvironment(), [ADD], budget=BUDGET)
            address = endpoint.add(recorder_of(policy or Policy(["a", "b", "c"])), tools)
            ended = await run_program(program, task, address, seed=5, until=late())
            return ended, await endpoint.finish("p/0")

    return run(work())


def test_program_is_recorded_and_gives_a_verdict() -> None:
    policy = Policy(["one", "two", "three"])
    write = "open(os.environ['KEEL_VERDICT'], 'w').write('{\"parts\": {\"correct\": 0.5}}')"
    ended, finished = drive(LOOP + write, policy=policy)
    assert ended.verdict == Verdict(parts={"correct": 0.5}), ended
    assert ended.output == "last: three"
    check_law(policy, finished)
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


def test_long_task_is_passed_in_a_file() -> None:
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
        (f"{GOOD}\nraise ValueError('out of cheese')", "status 1.*out of cheese"),
        (f"{GOOD}\nimport os\nos.kill(os.getpid(), 11)", "signal 11"),
        (f"{GOOD}\nimport time\ntime.sleep(1000)", "within .*correct"),
    ],
)
def test_failure_is_described_with_last_output(code: str, reason: str) -> None:
    hangs = "sleep" in code

    def check(limit_s: float) -> None:
        ended, _ = drive(code, within_s=limit_s)
        assert re.search(f"(?s){reason}", ended.describe(AgentProgram(command=["a"])))
        assert ended.timed_out is hangs

    within_some(check, LIMITS_S if hangs else (PATIENCE_S,))


def test_verdicts_and_answers_are_parsed() -> None:
    for code in (
        'print(\'{"parts": {"correct": 7}}\')',
        "import os\nopen(os.environ['KEEL_VERDICT'], 'w').write('yes')",
    ):
        ended, _ = drive(code)
        assert isinstance(ended.verdict, Unscored) and not ended.failed
    assert drive("print('done', 3)")[0].verdict is None
    assert drive("print(3)")[0].verdict is None
    assert drive(GOOD, judges=False)[0].verdict is None
    ended, _ = drive("print('{\"answer\": 42}')")
    assert (ended.verdict, ended.answer) == (None, "42")


def test_missing_program_and_invalid_settings() -> None:
    assert "no-such-agent" in drive("", command=["no-such-agent", "{prompt}"])[0].failed
    assert "/no/such/python" in drive("", python="/no/such/python")[0].failed
    with pytest.raises(ValueError, match="command"):
        AgentProgram(command=[])
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        AgentProgram(command=["a"], env={"OPENAI_API_KEY": "mine"})


def test_recipe_names_a_command_or_function(tmp_path: Path) -> None:
    def command(program: str) -> list[str]:
        return command_of(program, python=sys.executable, folder=tmp_path)

    (tmp_path / "agent.sh").write_text("#!/bin/sh\n")
    assert command("sh -c 'a b' {prompt}")[1:] == ["-c", "a b", "{prompt}"]
    assert Path(command("sh")[0]).is_absolute()
    assert command(f"{Path(sys.executable).name} x.py")[0] == sys.executable
    for missing in ("no-such-agent", "./agent.sh", "/tmp"):
        with pytest.raises(ValueError, match=missing):
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
def every(**values): return " ".join(sorted(values))
number = 3
"""


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("answers", {"answer": "s!"}),
        ("scores", {"parts": {"correct": 1.0, "seed": 0.5}, "facts": {"prompt": "Say {a}!"}}),
        ("counts", {"parts": {"correct": 1.0}, "facts": {}}),
        ("silent", None),
        ("breaks", "KeyError: 'no such key'"),
        ("wants", "`problem` and `tools`"),
        ("every", {"answer": "prompt seed task"}),
        ("number", "number"),
        ("nothing", "os, dedent, answers"),
    ],
)
def test_function_arguments_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, outcome: Any
) -> None:
    (tmp_path / "my_agent.py").write_text(FUNCTIONS)
    described = {"prompt_id": "p", "messages": [dict(m) for m in TASK.messages]}
    (tmp_path / "task").write_text(json.dumps(described))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for key, value in {"TASK_FILE": "task", "VERDICT": "verdict", "SEED": "5"}.items():
        monkeypatch.setenv(f"KEEL_{key}", value)
    if isinstance(outcome, str):
        with pytest.raises((InvalidEnvironment, KeyError)) as caught:
            call_function(f"my_agent.py:{name}")
        assert outcome in error_text(caught.value)
    else:
        call_function(f"my_agent.py:{name}")
        written = tmp_path / "verdict"
        assert (json.loads(written.read_text()) if written.exists() else None) == outcome


def test_function_runs_in_its_own_process(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(FUNCTIONS)

    def run_function(name: str) -> ProgramResult:
        command = command_of(f"my_agent:{name}", python=sys.executable, folder=tmp_path)
        return drive("", command=command, folder=tmp_path)[0]

    assert run_function("answers").answer == "s!"
    printed = run_function("prints")  # prints may be the policy's words
    assert (printed.failed, printed.answer, printed.verdict) == ("", None, None)
    missing = run_function("nothing")
    assert "'nothing'" in missing.output and missing.failed


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


def test_cancellation_during_shutdown_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = AgentProgram(command=[sys.executable, "-c", "import time; time.sleep(1000)"])

    async def work() -> None:
        ending = asyncio.Event()

        async def late() -> str:
            while not list(folder.glob("keel-*/keel-*/*")):  # until the program runs
                await asyncio.sleep(0.01)
            ending.set()
            return "was ended"

        async with Endpoint() as endpoint:
            address = endpoint.add(recorder_of(Policy(["a"])))
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

    with tempfile.TemporaryDirectory() as name:  # tmp_path would be too long for a socket
        folder = Path(name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        run(work())


def test_sandbox_reaches_only_its_endpoint(tmp_path: Path) -> None:
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
    check_law(policy, finished)
    assert finished.usage.turns == 3

    tmp_path.chmod(0o755)
    (tmp_path / "my_agent.py").write_text(FUNCTIONS)
    command = command_of("my_agent:scores", python=sys.executable, folder=tmp_path)
    ended, _ = drive("", command=command, folder=tmp_path, wrap=wrap)
    assert isinstance(ended.verdict, Verdict) and ended.verdict.parts["seed"] == 0.5, ended


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """Serve an echo on a unix socket."""
    path = os.path.relpath(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer(near: socket.socket) -> None:
            with near, suppress(OSError):
                while data := near.recv(100):
                    near.sendall(data)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    near = listener.accept()[0]
                    threading.Thread(target=answer, args=(near,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield path


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def test_excess_forwarded_connections_wait(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_module, "_MAX_CONNECTIONS", 2)
    port = drive_module._forward(echo)
    first, second = connect(port), connect(port)
    for one in (first, second):
        one.sendall(b"here")
        assert one.recv(4) == b"here"
    with second, connect(port) as third:
        third.sendall(b"now")
        third.settimeout(0.2)
        with pytest.raises(TimeoutError):
            third.recv(3)
        first.close()
        third.settimeout(PATIENCE_S)
        assert third.recv(3) == b"now"


@pytest.mark.parametrize("resource", ["files", "threads"])
def test_forwarding_survives_exhaustion(
    echo: str, monkeypatch: pytest.MonkeyPatch, resource: str
) -> None:
    failures = [1, 1, 1]
    accept, thread = socket.socket.accept, threading.Thread

    def no_files(listener: socket.socket) -> Any:
        if failures and threading.current_thread().name == "forwarding":
            failures.pop()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    class NoThreads(thread):
        def start(self) -> None:
            if failures and threading.current_thread().name == "forwarding":
                failures.pop()
                raise RuntimeError("can't start new thread")
            super().start()

    if resource == "files":
        monkeypatch.setattr(socket.socket, "accept", no_files)
    else:
        monkeypatch.setattr(threading, "Thread", NoThreads)
    port = drive_module._forward(echo)
    for _ in range(4):
        with connect(port) as one, suppress(ConnectionError):
            one.sendall(b"here")
            if one.recv(4) == b"here":
                break
    else:
        raise AssertionError("no connection is forwarded any more")
    assert not failures
