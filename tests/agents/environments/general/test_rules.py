"""Checks of an author's code, and folders of environments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_runtime.errors import InvalidEnvironment
from keel.agents.env_runtime.tool_objects import Object, methods_of
from keel.agents.environments.general.environment import General
from keel.agents.environments.general.folder import SHIPPED, folders
from keel.agents.environments.general.parts import answer_of
from keel.agents.environments.general.rules import Part, function, parsed


@pytest.mark.parametrize(
    ("part", "source", "reason"),
    [
        ("solve", "import math", "imports nothing"),
        ("solve", "class A: pass", "a class"),
        ("solve", "tools.price.__wrapped__", "'__wrapped__'"),
        ("solve", "def __getattr__(name): pass", "'__getattr__'"),
        ("solve", "f(__builtins__=1)", "'__builtins__'"),
        ("solve", "f'{tools.__class__}'", "'__class__'"),
        ("tools", "import os.path", "imports os.path"),
        ("tools", "from . import x", "imports ."),
        ("tools", "from subprocess import run", "imports subprocess"),
        ("tools", "async def f(): pass", "asynchronous"),
        ("tools", "def f():\n    global database", "global"),
        ("tools", "import random\nrandom._os", "'_os'"),
        ("tools", "database.execute('select CURRENT_DATE')", "CURRENT_DATE"),
        ("tools", "database.execute('select date()')", "date()"),
        ("tools", "database.execute('select date(?)', ('now',))", "now"),
        ("tools", "database.execute(\"select strftime('%Y')\")", "strftime('%Y')"),
        ("tools", "datetime.utcnow()", "'utcnow'"),
        ("verify", "def f(a, b):\n    from random import random", "imports random"),
        ("tools", "def f(): pass\ndef f(): pass", "line 1: f is defined twice"),
        ("verify", "(", "is no Python"),
        ("verify", "\0", "is no Python"),
        ("verify", "-" * 100_000 + "1", "is no Python"),
    ],
)
def test_forbidden_code_is_refused(part: Part, source: str, reason: str) -> None:
    with pytest.raises(InvalidEnvironment, match=re.escape(reason)):
        parsed(source, part)


def test_a_function_includes_its_imports() -> None:
    source = (
        "import json\n\ndef verify_0(a, b): pass\n\nfrom math import *\ndef verify_1(a, b): pass"
    )
    module, node = function(source, "verify", "verify_1")
    assert node.name == "verify_1" and len(module.body) == 2
    with pytest.raises(
        InvalidEnvironment, match=r"no function 'verify_2'; it has verify_0, verify_1"
    ):
        function(source, "verify", "verify_2")
    for extra, reason in (("x = 1", "one function"), ("@f\ndef verify_2(): pass", "a decorator")):
        with pytest.raises(InvalidEnvironment, match=reason):
            function(f"{source}\n{extra}", "verify", "verify_0")


def test_folders_by_name_and_by_path(tmp_path: Path) -> None:
    (trip,) = folders(["trip_planning"])
    assert trip.path == SHIPPED / "trip_planning" and len(trip.tasks()) == 3
    assert folders([str(SHIPPED)]) == folders(["shipped"]) and len(folders(["shipped"])) == 3
    with pytest.raises(ValueError, match=r"no folder of tasks.*meeting_rooms, order_filling"):
        folders(["trip_planing"])
    (tmp_path / "task.json").write_text('{"tasks": [{"question": "?"}]}')
    with pytest.raises(ValueError, match=r"task\.json: KeyError\('tools'\)"):
        folders([str(tmp_path)])[0].tasks()


def test_tasks_are_numbered_across_folders() -> None:
    environment = General(["order_filling", "trip_planning"])
    named = environment._named  # `opening` would fork a process
    assert named({"prompt_id": "x/2"}) == (environment._folders[0], 2)
    assert named({"prompt_id": "x/5"}) == (environment._folders[1], 2)
    assert named({"prompt_id": "x/5", "reward": {"general": {"task": 0}}})[1] == 0
    with pytest.raises(ValueError, match=r"no task 6: the folders have 6 \(set `size`\)"):
        named({"prompt_id": "x/6"})
    with pytest.raises(ValueError, match="does not end with a number"):
        named({"prompt_id": "x"})


def test_answers_are_parsed_as_json_or_text() -> None:
    assert answer_of('{"a": [1, 2.5]}') == {"a": [1, 2.5]}
    for text in ("NaN", "[1e999]", '"\\ud83d"', "1" * 60_000, "[" * 100_000, "Kesek Inn", ""):
        assert answer_of(text) == text  # can be sent to a verifier
    assert answer_of("\ud83d") == "?"
    assert answer_of(json.dumps("x")) == "x"


def test_the_task_can_decide_the_tools() -> None:
    class Later:
        done = False

        def opening(self, task: Any) -> str:
            self.offered = [
                {"name": task["prompt_id"], "description": "", "parameters": {"type": "object"}}
            ]
            return "Go."

        def call(self, name: str, arguments: dict[str, Any]) -> Any:
            return [name, arguments]

    later = Later()
    environment = Object(later, methods_of(later))
    assert [tool["name"] for tool in environment.opening({"prompt_id": "f"}, 0)["tools"]] == ["f"]
    assert environment.call("f", {"x": 1})["text"] == '["f", {"x": 1}]'
