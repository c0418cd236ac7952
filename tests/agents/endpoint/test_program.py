"""Programs as processes: what they are told, how they end, and what they are worth."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.endpoint.program import AgentProgram, Ended, run_program
from keel.agents.endpoint.server import Endpoint
from keel.agents.endpoint.types import Finished
from keel.agents.host.process import Bare, Launch
from keel.agents.types import Unscored
from keel.rewards.sandbox.sandbox import Python
from keel.rl.types import Prompt, Verdict
from tests.agents.endpoint.kit import Policy, check_law, recording
from tests.agents.episodes import alive, run

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
    with urllib.request.urlopen(request, timeout=20) as answer:
        said = json.load(answer)["choices"][0]["message"]
    messages += [said, {"role": "user", "content": "Go on."}]
print("said", said["content"])
"""


def drive(
    code: str, *arguments: str, task: Prompt = TASK, policy: Policy | None = None, **more: Any
) -> tuple[Ended, Finished]:
    """Run `python -c code arguments` to its end."""
    program = AgentProgram(
        **{"command": [sys.executable, "-c", code, *arguments], "deadline_s": 20.0, **more}
    )

    async def work() -> tuple[Ended, Finished]:
        async with Endpoint() as endpoint:
            address = endpoint.add(recording(policy or Policy(["a", "b", "c"])))
            ended = await run_program(program, task, address, seed=5)
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
        (f"{GOOD}\nraise ValueError('out of cheese')", "status 1.*out of cheese"),
        (f"{GOOD}\nimport os\nos.kill(os.getpid(), 11)", "signal 11"),
        (f"{GOOD}\nimport time\ntime.sleep(60)", "did not end within 1 s"),
        ('print(\'{"parts": {"correct": 7}}\')', "must be a number from 0 to 1"),
        ("import os\nopen(os.environ['KEEL_VERDICT'], 'w').write('yes')", "wrote no verdict"),
    ],
)
def test_a_program_that_fails_has_no_score(code: str, reason: str) -> None:
    ended, _ = drive(code, deadline_s=1.0 if "sleep" in code else 20.0)
    assert isinstance(ended.verdict, Unscored)
    assert re.search(f"(?s){reason}", ended.verdict.reason)
    assert ended.timed_out is ("sleep" in code)


def test_a_program_that_says_nothing_leaves_it_to_the_recipe() -> None:
    assert drive("print('done', 3)")[0].verdict is None
    assert drive("print(3)")[0].verdict is None
    assert drive(GOOD, judges=False)[0].verdict is None


def test_a_program_that_is_not_there() -> None:
    ended, _ = drive("", command=["no-such-agent", "{prompt}"])
    assert (
        isinstance(ended.verdict, Unscored) and "cannot run no-such-agent" in ended.verdict.reason
    )
    ended, _ = drive("", python="/no/such/python")
    assert isinstance(ended.verdict, Unscored) and "/no/such/python" in ended.verdict.reason
    with pytest.raises(ValueError, match="command is empty"):
        AgentProgram(command=[], deadline_s=1.0)
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        AgentProgram(command=["a"], deadline_s=1.0, env={"OPENAI_API_KEY": "mine"})
    with pytest.raises(ValueError, match="deadline_s"):
        AgentProgram(command=["a"], deadline_s=float("inf"))


@pytest.mark.parametrize("end", ["", "import time; time.sleep(60)"])
def test_nothing_that_it_started_is_left(end: str, tmp_path: Path) -> None:
    """Neither what holds its output open, nor what left its session and lost its parent."""
    code = (
        "import os, subprocess\n"
        "one = subprocess.Popen(['sleep', '300'])\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    two = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"    open({str(tmp_path / 'pids')!r}, 'w').write(f'{{one.pid}} {{two.pid}}')\n"
        "    os._exit(0)\n"
        f"os.wait()\n{end}\n"
    )
    ended, _ = drive(code, deadline_s=1.5)
    assert isinstance(ended.verdict, Unscored) is bool(end)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    until = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(pids) == 2 and not any(map(alive, pids))


@contextmanager
def without_a_network(command: Sequence[str], *, readable: Sequence[Path]) -> Iterator[Launch]:
    """As the wiring would: namespaces of its own, and no environment variable of ours."""
    python = Python.current()
    words = ["bwrap", "--die-with-parent", "--unshare-all", "--new-session", "--clearenv"]
    words += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for name in ("bin", "lib", "lib64"):
        words += ["--symlink", f"usr/{name}", f"/{name}"]
    for folder in (*python.folders, *readable):
        words += ["--ro-bind", str(folder), str(folder)]
    yield Bare([*words, "--chdir", "/tmp", "--", python.executable, *command[1:]])


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
def test_a_sandbox_without_a_network_reaches_its_endpoint_and_nothing_else() -> None:
    policy = Policy(["one", "two", "three"])
    spy = (
        "import socket\n"
        "others = [line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]]\n"
        "print(json.dumps({'parts': {'correct': 1}, 'facts': {'devices': others}}))"
    )
    executable = Python.current().executable
    ended, finished = drive(
        "", command=[executable, "-c", LOOP + spy], wrap=without_a_network, policy=policy
    )
    assert ended.verdict == Verdict(parts={"correct": 1.0}, facts={"devices": ["lo"]}), ended
    check_law(policy, finished)
    assert finished.usage.turns == 3
