"""What is wrong with an environment is said before anything starts, with its cure."""

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
from keel.rollout.chat.chat import TemplateChat
from tests.agents.episodes import HERE, PATIENT, TASK, program, run
from tests.rollout.chat.families import chat_of, tokenizer_of

pytestmark = pytest.mark.e2e


def probed(
    given: Program | McpServer, chat: Chat | None = None, window: int = 4096, task: Any = TASK
) -> Probe:
    return run(probe(given, task=task, seed=3, chat=chat, window=window, thinking=True))


def complaint(given: Program | McpServer, chat: Chat | None = None, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:
        probed(given, chat, **settings)
    return str(caught.value)


def test_a_sound_environment_and_the_size_of_its_opening() -> None:
    chat = chat_of("qwen3")
    found = probed(program(), chat)
    assert found.name == "shop:Shop" and found.seconds > 0
    assert found.messages[-1]["role"] == "user" and "buy" in [tool.name for tool in found.tools]
    ids = chat.opening(found.messages, found.tools, thinking=True)
    assert found.opening_tokens == len(ids)
    assert probed(program(), chat, window=len(ids) + 1) == replace(
        found,
        seconds=pytest.approx(found.seconds, abs=3600),
        forked_s=pytest.approx(found.forked_s, abs=3600),
    )
    assert probed(program()).opening_tokens is None


def test_a_window_that_its_opening_fills() -> None:
    tokens = probed(program(), chat_of("tiny")).opening_tokens
    said = complaint(program(), chat_of("tiny"), window=tokens)
    assert f"environment shop:Shop: the opening of task p7 has {tokens} tokens" in said
    assert f"agents.window = {tokens}. Raise agents.window, offer fewer tools" in said


SOURCES = {
    "needs.py": "import a_package_that_nobody_has\n",
    "raises.py": "raise RuntimeError('not today')\n",
    "hints.py": "class Bad:\n    def use(self, x: complex): ...\n",
    "quits.py": "import os, sys\nprint('out of coins', file=sys.stderr)\nos._exit(3)\n",
    "hangs.py": "import time\ntime.sleep(1000)\n",
    "eats.py": "class Shop:\n    def opening(self): self.x = bytearray(1 << 30)\n",
    "opens.py": "class Shop:\n    def opening(self): raise KeyError('no such shop')\n",
    "lacks.py": "class Shop:\n    def opening(self): import a_package_that_nobody_has.sub\n",
    "slip.py": "class Shop:\n    def openning(self, task, seed): return 'Buy.'\n",
    "names.py": "class Shop:\n    def opening(self, prompt, rng): return 'Buy.'\n",
    "late.py": "class Shop:\n    def verdict(self, transcript, reason): return 1.0\n",
    "many.py": "def add(a: int) -> int:\n    return a\nmany = [add, add]\n",
}


@pytest.mark.parametrize(
    ("target", "why", "cure"),
    [
        ("shap", "cannot be imported: ModuleNotFoundError: No module named 'shap'", "looked in"),
        ("shap:make", "No module named 'shap'", "-m pip install shap"),
        ("lacks:Shop", "lacks.py:2 in opening", "-m pip install a_package_that_nobody_has"),
        ("needs", "No module named 'a_package_that", "-m pip install a_package_that_nobody_has"),
        ("raises", "RuntimeError: not today (", "raises.py:1 in <module>"),
        ("needs:", "cannot be imported", f"(interpreter {sys.executable}, folder "),
        ("hints:Bad", "tool use: parameter x has the type", "there are str, int, float"),
        ("hints:Good", "hints has no 'Good'", "it has Bad"),
        ("quits", "exited with status 3", "Its last words: out of coins"),
        ("hangs", "open did not end within 1 s", "raise the deadline open_s"),
        ("eats:Shop", "out of memory (memory_mib = 512)", "raise memory_mib"),
        ("opens.Shop", "opens.Shop is no module", "; write opens:Shop"),
        ("opens.shop", "opens.shop is no module", "; write opens:Shop"),
        ("opens.Cafe", "opens.Cafe is no module", "; opens is a file, not a package; it has Shop"),
        ("opns:Shop", "opns is no module", "; did you mean opens:Shop?"),
        ("opns.Shop", "opns.Shop is no module", "; did you mean opens:Shop?"),
        (
            "opns.py:Shop",
            "there is no opns.py in folder",
            "begin there; did you mean opens.py:Shop?",
        ),
        ("x/opens.py:Shop", "no x/opens.py in folder", "begin there; did you mean opens.py:Shop?"),
        ("opns:Cafe", "No module named 'opns'", "if it is a package: "),
        ("slip:Shop", "openning would be a tool of the policy", "did you mean `opening`?"),
        ("names:Shop", "opening has the parameters `prompt` and `rng`", "may have: task, seed;"),
        (
            "late:Shop",
            "verdict has the parameters `transcript` and",
            "have: messages, finish_reason",
        ),
        ("opens:Shop", "KeyError: 'no such shop' (", "Fix what its own code raised"),
    ],
)
def test_what_cannot_be_opened(tmp_path: Path, target: str, why: str, cure: str) -> None:
    for name, text in SOURCES.items():
        (tmp_path / name).write_text(text)
    deadlines = replace(PATIENT, open_s=1.0 if target == "hangs" else PATIENT.open_s)
    given = Program(target=target, folder=tmp_path, memory_mib=512, deadlines=deadlines)
    said = complaint(given)
    assert said.startswith(f"environment {target} cannot be opened for task p7: ")
    assert why in said and cure in said
    assert "no such shop" in said or "Fix what its own code raised" not in said
    assert "pip install" not in said or "is no module" not in said


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return 5.0", "the verdict's correct is 5.0, must be a number from 0 to 1"),
        ("return self.paid / 2", "has no attribute 'paid' ("),
        ("return {'bought': 1.0}", "has no part `correct`"),
        ("return None", "verdict returned None"),
        ("return 0.5", ""),
    ],
)
def test_a_verdict_that_is_none_is_warned_of(
    body: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "buys.py").write_text(
        "class Shop:\n    def opening(self): return 'Buy.'\n"
        f"    def verdict(self): {body}\n    def close(self): pass\n"
    )
    by_itself = replace(TASK, reward={"kind": "environment"})
    probed(program("buys:Shop", folder=tmp_path), task=by_itself)
    said = capsys.readouterr().err
    assert bool(said) == bool(why) and why in said
    if why:
        assert said.startswith("environment buys:Shop: no verdict right after the opening of task")
        assert "Fix `verdict`, unless" in said


@pytest.mark.parametrize("code", ["", "    def opening(self): pass\n"])
def test_a_task_that_nothing_opens(code: str, tmp_path: Path) -> None:
    (tmp_path / "buys.py").write_text(f"class Shop:\n{code}    def verdict(self): return 1\n")
    made_by = EnvironmentConfig(target="buys:Shop")
    source = SourceConfig(name="shop", source="environment", environment=made_by, size=1)
    (task,) = (item.prompt for item in load_episodes(source).items)
    given = program("buys:Shop", folder=tmp_path)
    said = complaint(given, task=task)
    assert "the policy would be told '(task shop/0)'. Give it a method `opening(self, task" in said
    assert probed(given).messages == TASK.messages  # it has a prompt of its own


def test_an_environment_that_cannot_grade_is_found_where_nothing_else_does() -> None:
    by_itself = replace(TASK, reward={"kind": "environment"})
    said = complaint(program("shop:Offers", arguments={"offered": ["one"]}), task=by_itself)
    assert "environment shop:Offers has no `verdict`" in said and "source: jsonl" in said
    given = program("shop:Offers", arguments={"offered": ["one"]})
    assert probed(given).tools[0].name == "one"  # its tasks have answers
    assert probed(program("shop:Graded", arguments={"verdict": 1}), task=by_itself).tools == ()


def test_no_such_interpreter() -> None:
    said = complaint(program(python="/no/such/python"))
    assert "cannot run /no/such/python" in said and "interpreter /no/such/python" in said


def test_tools_that_could_not_be_called(tmp_path: Path) -> None:
    """Whoever lists them: here a server, whose schemas are its own."""
    server = tmp_path / "server.py"
    server.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    if 'id' not in asked: continue\n"
        "    schema = {'type': 'object', 'properties': {'n': {'type': 'strin'}}}\n"
        "    tool = {'name': 'buy', 'inputSchema': schema}\n"
        "    info = {'name': 's', 'version': '1'}\n"
        "    version = '2025-06-18'\n"
        "    hello = {'protocolVersion': version, 'capabilities': {'tools': {}},\n"
        "             'serverInfo': info}\n"
        "    one = {'initialize': hello, 'tools/list': {'tools': [tool]}}\n"
        "    reply = {'jsonrpc': '2.0', 'id': asked['id']}\n"
        "    if asked['method'] in one: reply['result'] = one[asked['method']]\n"
        "    else: reply['error'] = {'code': -32601, 'message': 'no such method'}\n"
        "    print(json.dumps(reply), flush=True)\n"
    )
    said = complaint(McpServer(command=[sys.executable, str(server)], deadlines=PATIENT))
    assert said.startswith(f"environment {sys.executable} {server} cannot be opened for task p7: ")
    assert "tool buy: its schema is no JSON schema: 'strin' is not valid" in said


def test_a_server_that_does_not_start() -> None:
    command = [sys.executable, str(HERE / "mcp_shop.py"), "broken"]
    said = complaint(McpServer(command=command, deadlines=PATIENT))
    assert "exited with status 1" in said and "the shop is closed on Sundays" in said


def test_a_template_without_tools() -> None:
    tokenizer = tokenizer_of("qwen3")
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = before.replace("{%- if tools -%}", "{%- if false -%}")
        chat = TemplateChat(tokenizer)
    finally:
        tokenizer.chat_template = before

    class Blind:
        def opening(
            self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
        ) -> list[int]:
            return chat.opening(messages, (), thinking=thinking)

    said = complaint(program(), Blind())  # pyright: ignore[reportArgumentType]
    assert said.startswith("environment shop:Shop has tools (") and "shows none. Save the" in said


def test_a_template_that_refuses_the_opening() -> None:
    class Refuses:
        def opening(self, *_: Any, **__: Any) -> list[int]:
            raise ValueError("the template refuses system messages")

    said = complaint(program(), Refuses())  # pyright: ignore[reportArgumentType]
    assert said == (
        "environment shop:Shop: the opening of task p7 cannot be rendered: the template refuses "
        "system messages"
    )
