"""What cannot be started says why; room for many episodes."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process import os_limits as room
from keel.agents.env_process import process
from keel.agents.env_process.client import Deadlines, Hosted, Program
from keel.agents.env_process.os_limits import make_room
from tests.agents.episodes import HERE, PATIENT, TASK, run
from tests.agents.test_host import lost
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"target": "nowhere:Shop"}, "nowhere cannot be imported: ModuleNotFoundError"),
        ({"target": "nowhere:Shop"}, "looked in"),
        ({"target": "shap:Shop"}, "shap is no module; did you mean shop:Shop?"),
        ({"target": "shop:Shap"}, "shop has no 'Shap'; it has "),
        ({"target": "needs:Shop"}, "-m pip install a_package_that_nobody_has"),
        ({"target": "broken.py:Shop"}, "cannot be imported: SyntaxError"),
        ({"target": "raises:Shop"}, "RuntimeError: not today ("),
        ({"target": "raises:Shop"}, "raises.py:1 in <module>)"),
        ({"target": "hints:Bad"}, "tool use: parameter x has the type"),
        ({"target": "hints:Untyped"}, "parameter x has no type hint"),
        ({"target": "hints:Starred"}, "passed by name"),
        ({"target": "hints:Unread"}, "its type hints cannot be read: NameError"),
        ({"target": "hints:empty"}, "is no game"),
        ({"target": "shop:Shop", "arguments": {"hou": 1}}, "unexpected keyword argument 'hou'"),
        ({"target": "shop:Shop", "python": "/no/such/python"}, "cannot run /no/such/python"),
        ({"target": "shop:Shop", "python": "/bin/false"}, "exited with status 1"),
        ({"target": "shop:Shop", "python": "/bin/echo"}, ""),  # no reply, or its end: a race
        ({"target": "shop:Shop", "memory_mib": 64}, ""),
    ],
)
def test_what_cannot_be_started_says_why_and_the_cure(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    (tmp_path / "needs.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "broken.py").write_text("class Shop\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "shop.py").write_text((HERE / "shop.py").read_text())
    (tmp_path / "hints.py").write_text(
        "class Bad:\n    def use(self, x: complex): ...\n"
        "class Untyped:\n    def use(self, x): ...\n"
        "class Starred:\n    def use(self, *x: int): ...\n"
        "class Unread:\n    def use(self, x: 'Nobody'): ...\n"
        "empty = 3\n"
    )
    kind = "game" if settings["target"] == "hints:empty" else "auto"

    async def play() -> None:
        environment = Hosted(Program(folder=tmp_path, deadlines=PATIENT, kind=kind, **settings))
        error = await lost(environment.open(TASK, seed=3))
        assert why in str(error) and error.during == "open"
        await environment.close()

    if "memory_mib" in settings:
        settings["arguments"] = {"how": "memory", "at": "open"}
    run(play())


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="write module:name"):
        Program(target=":Shop")
    with pytest.raises(ValueError, match="there is no folder"):
        Program(target="shop", folder=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="arguments: is no JSON"):
        Program(target="shop", arguments={"rate": float("nan")})
    with pytest.raises(ValueError, match="at least 64"):
        Program(target="shop", memory_mib=8)
    with pytest.raises(ValueError, match="close_s = 0 must be positive"):
        Deadlines(close_s=0)


def test_room_for_many_episodes() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(600, before[1]), before[1]))
        make_room(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 812
        with pytest.raises(ValueError, match="raise"):
            make_room(1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_processes_are_said_before_the_first_episode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pids" / "job").mkdir(parents=True)
    (tmp_path / "pids" / "pids.max").write_text("max\n")
    (tmp_path / "pids" / "job" / "pids.max").write_text("400\n")
    monkeypatch.setattr(room, "_CGROUPS", tmp_path)
    monkeypatch.setattr(room, "_groups", lambda: [tmp_path / "pids" / "job", tmp_path / "pids"])
    make_room(40)
    with pytest.raises(ValueError, match=r"100 episodes .* need 556 processes, .*job.* allows 400"):
        make_room(100)


def test_an_answer_that_came_while_the_event_loop_was_busy_is_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=process.MOST_BYTES)
        with theirs:
            asked = asyncio.create_task(process.within(0.02, reader.readline()))
            await asyncio.sleep(0)
            theirs.sendall(b"here\n")
            time.sleep(0.05)  # another episode's text is tokenised
            assert await asked == b"here\n"
            monkeypatch.setattr(process, "READING_S", 0.01)
            with pytest.raises(TimeoutError):
                await process.within(0.01, reader.readline())
            given_up = asyncio.create_task(process.within(PATIENCE_S, reader.readline()))
            await asyncio.sleep(0)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            theirs.sendall(b"more\n")
            assert await process.within(PATIENCE_S, reader.readline()) == b"more\n"
        writer.close()
        await writer.wait_closed()

    run(play())
