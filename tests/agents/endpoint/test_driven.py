"""Episodes that a program drives, its tools over MCP, and its process and sandbox."""

import asyncio
import json
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from keel.agents.endpoint.program import (
    AgentProgram,
    _ProgramResult,
    resolve_command,
    run_program,
)
from keel.agents.endpoint.recorder import TrajectoryRecorder
from keel.agents.endpoint.requests import read_request
from keel.agents.endpoint.server import Endpoint, McpTools
from keel.agents.episode import EpisodeSettings
from keel.agents.runner import EpisodeRunner
from keel.agents.types import NoEnvironment
from keel.rewards.sandbox.environments import find_runtime
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import ENVIRONMENT, Group, Prompt, Purpose, Verdict
from tests.agents.endpoint import kit
from tests.agents.endpoint.kit import check_law, recorder_of
from tests.agents.episodes import alive, asynchronous, held, more, run
from tests.agents.sandboxes import wrap_of
from tests.agents.scripted import ADD, BUDGET, CHAT, Policy, Sums
from tests.waiting import LIMITS_S, PATIENCE_S, wait_for, within_some

pytestmark = pytest.mark.e2e

# Plain sockets: importing an HTTP library would take longer than the rest of a program's life.
ASK = """
import json, os, socket, sys, time
task = json.loads(os.environ["KEEL_TASK"])
messages = list(task["messages"])
def post(url, body, until=None):
    host, _, path = url.removeprefix("http://").partition("/")
    body = json.dumps(body).encode()
    head = f"POST /{path} HTTP/1.0\\r\\nContent-Length: {len(body)}\\r\\n"
    head += f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n\\r\\n"
    with socket.create_connection(host.split(":")) as link, link.makefile("rb") as reply:
        link.sendall(head.encode() + body)
        while until:  # leave without the answer once that file exists
            if os.path.exists(until):
                return None, None
            time.sleep(0.01)
        head, _, text = reply.read().partition(b"\\r\\n\\r\\n")
    return head.split()[1] == b"200", json.loads(text)
def ask(answer="Go on.", **fields):
    body = {"messages": messages, **fields}
    fine, reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    if not fine:
        raise SystemExit(reply["error"]["message"])
    message = reply["choices"][0]["message"]
    messages.extend([message, {"role": "user", "content": answer}])
    return message["content"]
def tell(**result):
    with open(os.environ["KEEL_VERDICT"], "w") as file:
        json.dump(result, file)
"""
ENDS = {
    "asks": "ask(); ask(); print('done')",
    "answers": "ask(); tell(answer='forty-two')",
    "judges": "ask(); tell(parts={'correct': 0.5}, facts={'n': 1})",
    "continues": "while True: ask()",
    "continues, judged": "tell(parts={'correct': 0})\nwhile True: ask()",
    "crashes": "ask(); raise KeyError('no such city')",
    "is refused": "ask(); ask(guided_json={})",
    "never asks": "print('nothing to do')",
    "is missing": "",
}


def task(name: str, kind: str = "answer") -> Prompt:
    return Prompt(
        prompt_id=f"{name}/1",
        domain="d",
        messages=({"role": "user", "content": "Sum."},),
        environment=name,
        thinking=False,
        reward={"kind": kind},
    )


def played(
    runner: EpisodeRunner,
    name: str,
    kind: str = "answer",
    *,
    size: int = 1,
    purpose: Purpose = "train",
) -> Group:
    return runner.submit(task(name, kind), group_size=size, purpose=purpose).result(PATIENCE_S)


@contextmanager
def running(
    policy: Any,
    programs: dict[str, str],
    environment: Callable[[], Any] = NoEnvironment,
    *,
    seconds: float = PATIENCE_S,
    **settings: Any,
) -> Iterator[EpisodeRunner]:
    """Run programs, and assert that no process, thread or file is left."""
    before = held()
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        with EpisodeRunner(
            {
                name: EpisodeSettings(
                    environment=lambda _: environment(),
                    chat=CHAT,
                    budget=replace(BUDGET, turns=4, timeout_s=seconds),
                    program=AgentProgram(
                        command=[sys.executable, "-S", "-c", ASK + code] if code else ["no-agent"],
                        **{"open_s": PATIENCE_S, **settings},
                    ),
                )
                for name, code in programs.items()
            },
            submit_turn=policy if callable(policy) else policy.submit,
            seed=1,
            most_open=lambda: 64,
        ) as runner:
            yield runner
        assert not os.listdir(folder)
    assert not any(t.name == "keel-agents" for t in threading.enumerate())
    wait_for(lambda: not more(held(), before), "the end of all processes")


def test_each_end_gives_a_trajectory_or_reason() -> None:
    policy = Policy(lambda _, turn: f"word {turn}", seconds=0.0)
    with running(policy, ENDS) as runner:
        groups = {
            name: played(runner, name, ENVIRONMENT if "judge" in name else "answer")
            for name in ENDS
        }
        groups["no verdict"] = played(runner, "asks", ENVIRONMENT, purpose="eval")
    done = {name: group.trajectories[0] for name, group in groups.items() if group.trajectories}
    assert {name: (t.finish_reason, t.usage and t.usage.turns) for name, t in done.items()} == {
        "asks": ("stop", 2),
        "answers": ("stop", 1),
        "judges": ("stop", 1),
        "continues": ("turns", 4),
        "continues, judged": ("turns", 4),
        "crashes": ("crash", 1),
        "is refused": ("crash", 1),
    }
    contents = [message["content"] for message in done["asks"].messages]
    assert contents == ["Sum.", "word 0", "Go on.", "word 1"]
    assert done["answers"].messages[-1]["content"] == "forty-two"
    assert done["judges"].verdict == Verdict(parts={"correct": 0.5}, facts={"n": 1})
    assert done["continues, judged"].verdict == Verdict(parts={"correct": 0.0})
    assert done["asks"].verdict == Verdict(parts={})
    verdict = done["crashes"].verdict
    assert verdict is not None and verdict.parts == {"correct": 0.0}
    assert "no such city" in verdict.facts["crash"]
    usage = done["asks"].usage
    assert usage is not None and (usage.contexts_rendered, usage.contexts_extended) == (1, 1)
    assert done["asks"].dialogues[0].messages == done["asks"].messages
    reasons = {name: group.dropped[0] for name, group in groups.items() if group.dropped}
    assert reasons.keys() == {"never asks", "no verdict", "is missing"}
    assert "nothing to do" in reasons["never asks"] and "no-agent" in reasons["is missing"]


def test_endpoint_failure_drops_the_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Policy(["word"]), {"p": ENDS["crashes"]}, drop_failures=True) as runner:
        assert "no such city" in played(runner, "p").dropped[0]
    policy = Policy(["word"])

    def read(body: Any) -> Any:
        if len(policy.requests) == 1:
            raise OSError("no memory")
        return read_request(body)

    monkeypatch.setattr("keel.agents.endpoint.server.read_request", read)
    with running(policy, {"p": "ask(); ask()"}) as runner:
        group = played(runner, "p")
    assert not group.trajectories and "no memory" in group.dropped[0]


def test_hanging_programs_meet_their_deadlines() -> None:
    with running(Policy(["word"]), {"p": "ask(); time.sleep(1000)"}, seconds=1.5) as runner:
        (trajectory,) = played(runner, "p").trajectories
    assert (trajectory.finish_reason, trajectory.sampled_tokens > 0) == ("deadline", True)
    with running(Policy([]), {"p": "time.sleep(1000)"}, open_s=0.3) as runner:
        assert "0.3 s" in played(runner, "p").dropped[0]


def test_siblings_share_a_seed_and_are_recorded_exactly() -> None:
    policy = Policy(lambda _, turn: f"word {turn}")
    code = "ask(); ask(); tell(parts={}, facts={'s': os.environ['KEEL_SEED']})"
    with running(policy, {"p": code}) as runner:
        group = played(runner, "p", size=3, purpose="eval")
    assert [t.sibling for t in group.trajectories] == [0, 1, 2]
    assert len({t.verdict.facts["s"] for t in group.trajectories if t.verdict}) == 1
    assert len({request.seed for request in policy.requests}) == 6
    check_law(policy, [segment for t in group.trajectories for segment in t.segments])
    assert all(len(trajectory.segments) == 1 for trajectory in group.trajectories)


def test_environment_opens_the_task_and_grades() -> None:
    environments: list[Sums] = []

    def make() -> Sums:
        environments.append(Sums(fails="verdict" if len(environments) == 2 else ""))
        return environments[-1]

    code = (
        "assert task['tools'][0]['function']['name'] == 'add'; ask(); "
        "tell(answer=ANSWER, parts={'correct': 0})"
    )
    programs = {str(n): code.replace("ANSWER", f"'{n}'") for n in (42, 41, 40)}
    with running(Policy(["41"]), programs, make, judges=False) as runner:
        right, wrong, lost = (played(runner, name, ENVIRONMENT) for name in programs)
    verdicts = [group.trajectories[0].verdict for group in (right, wrong)]
    assert verdicts == [Verdict(parts={"correct": 1.0}), Verdict(parts={"correct": 0.0})]
    assert lost.dropped == ("environment, at verdict: ended with SIGSEGV",)
    assert all(environment.log[-2:] == ["verdict stop", "close"] for environment in environments)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancelled_group_leaves_nothing(how: str) -> None:
    futures: list[Future[TurnResult]] = []
    begun = threading.Event()

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        futures.append(Future())
        begun.set()
        return futures[-1]

    with running(turns, {"p": "ask()"}) as runner:
        group = runner.submit(task("p"), group_size=2, purpose="train")
        assert begun.wait(PATIENCE_S)
        if how == "cancel":
            assert group.cancel()
    with pytest.raises(CancelledError):
        group.result(PATIENCE_S)
    assert all(future.cancelled() for future in futures)


CALL = """
def call(name, until=None, **arguments):
    params = {"name": name, "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    return post(os.environ["KEEL_MCP_URL"], body, until)[1]
"""


@asynchronous
async def test_mcp_client_lists_and_calls_tools() -> None:
    from mcp import Client  # noqa: PLC0415  (takes a second)

    environment = Sums()

    async with Endpoint() as endpoint:
        tools = McpTools(environment, [ADD], budget=kit.BUDGET)
        address = endpoint.add(recorder_of(Policy(["a"])), tools)
        async with Client(address.tools_url) as client:
            (tool,) = (await client.list_tools()).tools
            results = [await client.call_tool("add", {"a": 40, "b": 2})]
            results.append(await client.call_tool("sub", {}))
        assert (tool.name, tool.input_schema["required"]) == ("add", ["a", "b"])
        await endpoint.finish("p/0")
        (right, wrong) = results
    assert (right.content[0].text, right.is_error) == ("42", False)
    assert (wrong.content[0].text, wrong.is_error) == ("no tool sub", True)
    assert environment.log[0] == "call add {'a': 40, 'b': 2}"


def test_program_uses_tools_until_one_ends_the_task() -> None:
    environments: list[Sums] = []

    def make() -> Sums:
        environments.append(Sums(grade=Verdict(parts={"correct": 0.5})))
        return environments[-1]

    programs = {
        "calls": CALL + "ask(call('add', a=1, b=2)['result']['content'][0]['text']); ask()",
        "ends": CALL + "ask(); call('add', a=98, b=1); print(call('add', a=1, b=1)); ask()",
    }
    with running(Policy(["a", "b"]), programs, make, judges=False) as runner:
        calls, ends = (played(runner, name, ENVIRONMENT).trajectories[0] for name in programs)
    assert [m["content"] for m in calls.messages] == ["Sum.", "a", "3", "b"]
    assert [t.verdict for t in (calls, ends)] == [Verdict(parts={"correct": 0.5})] * 2
    assert (ends.finish_reason, ends.usage and ends.usage.turns) == ("stop", 1)
    logs = [line for environment in environments for line in environment.log]
    assert "call add {'a': 98, 'b': 1}" in logs and "call add {'a': 1, 'b': 1}" not in logs
    assert all(environment.log[-1] == "close" for environment in environments)


def test_calls_beyond_the_budget_fail() -> None:
    environment = Sums()
    tools = McpTools(environment, [ADD], budget=replace(kit.BUDGET, calls=1))
    params = {"name": "add", "arguments": {"a": 1, "b": 2}}
    body = json.dumps({"id": 1, "method": "tools/call", "params": params}).encode()
    answers = [run(tools.answer(body)) for _ in range(2)]
    assert [answer["result"]["isError"] for answer in answers] == [False, True]
    assert len(environment.log) == 1


TASK = Prompt(
    prompt_id="p",
    domain="d",
    messages=({"role": "system", "content": "s"}, {"role": "user", "content": "Say {a}!"}),
    reward={"answer": "secret"},
)


def drive(
    code: str,
    *arguments: str,
    policy: Policy | None = None,
    within_s: float = PATIENCE_S,
    task: Prompt = TASK,
    **settings: Any,
) -> tuple[_ProgramResult, TrajectoryRecorder]:
    command = [sys.executable, "-S", "-c", code, *arguments]
    program = AgentProgram(**{"command": command, **settings})

    async def late() -> str:
        await asyncio.sleep(within_s)
        return f"did not end within {within_s:g} s"

    async def work() -> tuple[_ProgramResult, TrajectoryRecorder]:
        async with Endpoint() as endpoint:
            tools = McpTools(NoEnvironment(), [ADD], budget=kit.BUDGET)
            address = endpoint.add(recorder_of(policy or Policy(["a", "b", "c"])), tools)
            ended = await run_program(program, task, address, seed=5, until=late())
            return ended, await endpoint.finish("p/0")

    return run(work())


def test_program_gets_the_task_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import json, os, sys\n"
        "json.dump({'parts': {}, 'facts': {'argv': sys.argv[1:],"
        " 'file': open(sys.argv[2]).read(), 'task': os.environ.get('KEEL_TASK'),"
        " 'from': json.load(open(os.environ['KEEL_TASK_FILE'])), 'env': dict(os.environ)}},"
        " open(os.environ['KEEL_VERDICT'], 'w'))"
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


def test_function_runs_in_its_own_process(tmp_path: Path) -> None:
    code = "def answers(task):\n    return task['messages'][0]['content'] + '!'\n"
    (tmp_path / "my_agent.py").write_text(code)
    command = resolve_command("my_agent:answers", python=sys.executable, folder=tmp_path)
    ended, _ = drive("", command=command, folder=tmp_path)
    assert (ended.failed, ended.answer, ended.verdict) == ("", "s!", None)
    for result, parts in (
        ("numpy.bool_(True)", {"correct": 1.0}),
        ("fractions.Fraction(1, 2)", {"correct": 0.5}),
        ("({'correct': 0.5, 'style': 1}, {})", {"correct": 0.5, "style": 1.0}),
        ("[1, 2]", None),
        ("('abc', {})", None),
    ):
        code = f"import fractions, numpy\ndef answers(task):\n    return {result}\n"
        (tmp_path / "my_agent.py").write_text(code)
        ended, _ = drive("", command=command, folder=tmp_path)
        assert bool(ended.failed) is (parts is None), (result, ended)
        assert ended.verdict == (parts and Verdict(parts=parts)), (result, ended)
    (tmp_path / "my_agent.py").write_text("answers = 3")
    ended, _ = drive("", command=command, folder=tmp_path)
    assert ended.failed and ended.output.endswith("my_agent:answers is not a function")


@pytest.mark.parametrize("end", ["", "import time; time.sleep(1000)"])
def test_descendants_are_killed(end: str, tmp_path: Path) -> None:
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
        "ask(); ask(); ask()\n"
        "facts = {}\n"
        "for name, at in {'machine': sys.argv[1], 'world': '192.0.2.1:80'}.items():\n"
        "    try:\n"
        "        socket.create_connection((at.split(':')[0], int(at.split(':')[-1])), 5)\n"
        "    except OSError as error:\n"
        "        facts[name] = type(error).__name__\n"
        "_, pong = post(os.environ['KEEL_MCP_URL'], {'id': 7, 'method': 'ping'})\n"
        "tell(parts={'correct': 1}, facts={**facts, 'tools': pong['id']})"
    )
    wrap = wrap_of(network="loopback")
    # A service of this machine, at an address where the sandbox's endpoint has no port.
    with socket.create_server(("127.0.0.2", 0)) as service:
        place = f"127.0.0.2:{service.getsockname()[1]}"
        paths = find_runtime(sys.executable).paths
        ended, finished = drive(ASK + spy, place, sandbox=wrap, readable=paths, policy=policy)
    facts = {"machine": "ConnectionRefusedError", "world": "OSError", "tools": 7}
    assert ended.verdict == Verdict(parts={"correct": 1.0}, facts=facts), ended
    check_law(policy, finished.segments)
    assert finished.usage.turns == 3
