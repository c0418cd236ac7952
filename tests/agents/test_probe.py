"""Faults of an environment are reported before a run, with how to fix them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import Program
from keel.agents.mcp_client import McpServer
from keel.agents.probe import Probe, probe
from keel.configs.schema import SourceConfig
from keel.configs.sections.agents import EnvironmentConfig
from keel.data.procedural import load_episodes
from keel.rl.turns import Chat, Message, ToolSpec
from tests.agents.episodes import HERE, PATIENT, TASK, program, run
from tests.rollout.chat.families import chat_of

pytestmark = pytest.mark.e2e
SELF_GRADED = replace(TASK, reward={"kind": "environment"})


def probed(
    spec: Program | McpServer, chat: Chat | None = None, window: int = 4096, task: Any = TASK
) -> Probe:
    return run(probe(spec, task=task, seed=3, chat=chat, window=window, thinking=True))


def complaint(spec: Program | McpServer, chat: Any = None, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:
        probed(spec, chat, **settings)
    return str(caught.value)


def test_opening_is_counted_against_the_window() -> None:
    chat = chat_of("qwen3")
    result = probed(program(), chat)
    assert result.messages[-1]["role"] == "user" and "buy" in [tool.name for tool in result.tools]
    tokens = len(chat.opening(result.messages, result.tools, thinking=True))
    assert result.opening_tokens == tokens and result.seconds > 0
    assert probed(program(), chat, window=tokens + 1).opening_tokens == tokens
    assert "agents.window" in complaint(program(), chat, window=tokens)
    assert probed(program()).opening_tokens is None


SOURCES = {
    "needs.py": "import a_package_that_is_missing\n",
    "raises.py": "raise RuntimeError('not today')\n",
    "hints.py": "class Bad:\n    def use(self, x: complex): ...\n",
    "quits.py": "import os, sys\nprint('out of coins', file=sys.stderr)\nos._exit(3)\n",
    "hangs.py": "import time\ntime.sleep(1000)\n",
    "eats.py": "class Shop:\n    def opening(self): self.x = bytearray(1 << 30)\n",
    "opens.py": "class Shop:\n    def opening(self): raise KeyError('no such shop')\n",
    "lacks.py": "class Shop:\n    def opening(self): import a_package_that_is_missing.sub\n",
    "slip.py": "class Shop:\n    def openning(self, task, seed): return 'Buy.'\n",
    "names.py": "class Shop:\n    def opening(self, prompt, rng): return 'Buy.'\n",
    "late.py": "class Shop:\n    def verdict(self, transcript, reason): return 1.0\n",
}


@pytest.mark.parametrize(
    ("target", "reason", "cure"),
    [
        ("shap:make", "No module named 'shap'", "-m pip install shap"),
        ("lacks:Shop", "lacks.py:2 in opening", "-m pip install a_package_that_is_missing"),
        ("needs", "a_package_that_is_missing", "-m pip install a_package_that_is_missing"),
        ("raises", "RuntimeError: not today", "raises.py:1 in <module>"),
        ("needs:", "cannot be imported", f"interpreter {sys.executable}"),
        ("hints:Bad", "parameter x", "dataclass"),
        ("hints:Good", "'Good'", "Bad"),
        ("quits", "status 3", "out of coins"),
        ("hangs", "within 1 s", "open_s"),
        ("eats:Shop", "memory_mib = 512", "raise memory_mib"),
        ("opens.Shop", "opens.Shop", "write opens:Shop"),
        ("opns:Shop", "opns", "if it is a package"),
        ("opns.py:Shop", "no opns.py", "where paths begin"),
        ("slip:Shop", "openning", "`opening`"),
        ("names:Shop", "`prompt` and `rng`", "task, seed"),
        ("late:Shop", "`transcript` and `reason`", "messages, finish_reason"),
        ("opens:Shop", "KeyError: 'no such shop'", "Fix its code"),
    ],
)
def test_failed_opening_names_the_cure(tmp_path: Path, target: str, reason: str, cure: str) -> None:
    for name, text in SOURCES.items():
        (tmp_path / name).write_text(text)
    deadlines = replace(PATIENT, open_s=1.0 if target == "hangs" else PATIENT.open_s)
    message = complaint(
        Program(target=target, folder=tmp_path, memory_mib=512, deadlines=deadlines)
    )
    assert message.startswith(f"environment {target} cannot be opened for task p7: ")
    assert reason in message and cure in message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 5.0", "5.0"),
        ("return self.paid / 2", "'paid'"),
        ("return {'bought': 1.0}", "`correct`"),
        ("return None", "None"),
        ("return 0.5", ""),
    ],
)
def test_unusable_verdict_is_a_warning(
    body: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "buys.py").write_text(
        "class Shop:\n    def opening(self): return 'Buy.'\n"
        f"    def verdict(self): {body}\n    def close(self): pass\n"
    )
    probed(program("buys:Shop", folder=tmp_path), task=SELF_GRADED)
    output = capsys.readouterr().err
    assert bool(output) == bool(reason) and reason in output


@pytest.mark.parametrize("code", ["", "    def opening(self): pass\n"])
def test_task_without_an_opening_is_refused(code: str, tmp_path: Path) -> None:
    (tmp_path / "buys.py").write_text(f"class Shop:\n{code}    def verdict(self): return 1\n")
    environment = EnvironmentConfig(target="buys:Shop")
    source = SourceConfig(name="shop", source="environment", environment=environment, size=1)
    (task,) = (item.prompt for item in load_episodes(source).items)
    spec = program("buys:Shop", folder=tmp_path)
    assert "opening(self, task, seed)" in complaint(spec, task=task)
    assert probed(spec).messages == TASK.messages, "this task has a prompt"


def test_missing_verdict_needs_another_grader() -> None:
    spec = program("shop:Offers", arguments={"offered": ["one"]})
    assert "`verdict`" in complaint(spec, task=SELF_GRADED)
    assert probed(spec).tools[0].name == "one"
    assert probed(program("shop:Graded", arguments={"verdict": 1}), task=SELF_GRADED).tools == ()


def test_missing_interpreter_and_broken_servers(tmp_path: Path) -> None:
    assert "/no/such/python" in complaint(program(python="/no/such/python"))
    command = [sys.executable, str(HERE / "mcp_shop.py"), "broken"]
    assert "closed on Sundays" in complaint(McpServer(command=command, deadlines=PATIENT))
    server = tmp_path / "server.py"
    server.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    if 'id' not in request: continue\n"
        "    schema = {'type': 'object', 'properties': {'n': {'type': 'strin'}}}\n"
        "    tool = {'name': 'buy', 'inputSchema': schema}\n"
        "    info = {'name': 's', 'version': '1'}\n"
        "    version = '2025-06-18'\n"
        "    hello = {'protocolVersion': version, 'capabilities': {'tools': {}},\n"
        "             'serverInfo': info}\n"
        "    known = {'initialize': hello, 'tools/list': {'tools': [tool]}}\n"
        "    reply = {'jsonrpc': '2.0', 'id': request['id']}\n"
        "    if request['method'] in known: reply['result'] = known[request['method']]\n"
        "    else: reply['error'] = {'code': -32601, 'message': 'no such method'}\n"
        "    print(json.dumps(reply), flush=True)\n"
    )
    message = complaint(McpServer(command=[sys.executable, str(server)], deadlines=PATIENT))
    assert "tool buy" in message and "'strin'" in message


def test_unsuitable_templates_are_refused() -> None:
    chat = chat_of("qwen3")

    class Blind:
        def opening(
            self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
        ) -> list[int]:
            return chat.opening(messages, (), thinking=thinking)

    class Refuses:
        def opening(self, *_: Any, **__: Any) -> list[int]:
            raise ValueError("no system messages")

    assert "chat_template" in complaint(program(), Blind())
    assert "no system messages" in complaint(program(), Refuses())
