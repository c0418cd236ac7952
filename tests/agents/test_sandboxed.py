"""A host in bubblewrap, as the wiring would put it there: by a function that wraps its command."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from keel.agents.host.client import Hosted
from keel.agents.host.process import Launch
from keel.agents.types import EnvironmentLost
from keel.rewards.sandbox.sandbox import Python
from keel.rewards.sandbox.seccomp import seccomp_filter
from keel.rl.types import Verdict
from tests.agents.episodes import HERE, TASK, alive, program, run, transcript, use

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed"),
]


@contextmanager
def bubblewrapped(command: Sequence[str], *, readable: Sequence[Path]) -> Iterator[Launch]:
    python = Python.current()
    words = ["bwrap", "--die-with-parent", "--unshare-all", "--new-session", "--clearenv"]
    words += ["--setenv", "PYTHONHASHSEED", "3", "--setenv", "PATH", "/usr/bin:/bin"]
    words += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for name in ("bin", "lib", "lib64"):
        words += ["--symlink", f"usr/{name}", f"/{name}"]
    for folder in (*python.folders, *readable):
        words += ["--ro-bind", str(folder), str(folder)]
    fd = os.memfd_create("filter")
    try:
        os.write(fd, seccomp_filter(platform.machine()))
        os.lseek(fd, 0, os.SEEK_SET)
        words += ["--chdir", "/tmp", "--seccomp", str(fd), "--"]
        assert command[0] == sys.executable
        yield Launch([*words, python.executable, *command[1:]], (fd,))
    finally:
        os.close(fd)


def test_an_episode_in_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "spy.py").write_text(
        "import os, socket, subprocess\n"
        "class Spy:\n"
        "    def write(self, path: str) -> str:\n        return str(open(path, 'w').write('x'))\n"
        "    def connect(self) -> str:\n        socket.socket(); return 'connected'\n"
        "    def look(self, path: str) -> list:\n        return os.listdir(path)\n"
        "    def flee(self) -> str:\n"
        "        subprocess.Popen(['/bin/sleep', '1000.25'], start_new_session=True)\n"
        "        os._exit(7)\n"
        "    def verdict(self, messages: list) -> float:\n        return 1.0\n"
    )

    async def play() -> None:
        environment = Hosted(program("spy:Spy", folder=tmp_path, wrap=bubblewrapped))
        await environment.open(TASK, seed=3)
        assert "Read-only" in (await use(environment, "write", path=f"{tmp_path}/x")).text
        assert (await use(environment, "write", path="/tmp/x")).text == "1"
        assert "not permitted" in (await use(environment, "connect")).text
        assert "No such file" in (await use(environment, "look", path=str(HERE))).text
        assert await environment.verdict(transcript()) == Verdict(parts={"correct": 1.0})
        with pytest.raises(EnvironmentLost, match="exited with status 7"):
            await use(environment, "flee")
        await environment.close()

    run(play())
    fled = [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and b"1000.25" in _command(folder)
    ]
    assert not any(map(alive, fled))


def _command(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""
