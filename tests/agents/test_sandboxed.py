"""Environments in their sandbox: attacks, visibility, clean-up."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import ForkServerClient, ProcessEnvironment
from keel.agents.env_process.launch import EnvSandbox
from keel.agents.env_runtime.processes import descendants
from keel.agents.types import EnvironmentLost
from keel.rl.types import Verdict
from tests.agents.episodes import HERE, TASK, asynchronous, program, use
from tests.agents.sandboxes import MINE, attackers_in, sleeping, wrap_of
from tests.waiting import PATIENCE_S, wait_for

PROCESSES, FILES_MIB, MEMORY_MIB = 24, 8, 300
# Python sets LC_CTYPE itself if there is no locale.
GIVEN = ["HOME", "LANG", "LC_ALL", "LC_CTYPE", "PATH", "PWD", "TMPDIR", "TZ", "USER"]
GIVEN += ["OMP_NUM_THREADS", *(f"PYTHON{name}" for name in ["HASHSEED", "NOUSERSITE", "UTF8"])]
GIVEN += ["PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "MINE"]
WAYS = pytest.mark.parametrize("way", ["started", "forked"])
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def small() -> EnvSandbox:
    return wrap_of(memory_mib=MEMORY_MIB, processes=PROCESSES, files_mib=FILES_MIB)


@WAYS
@asynchronous
async def test_attacks_fail(
    small: EnvSandbox, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2hunter2")
    listener = socket.socket(socket.AF_UNIX)
    name = f"keel-test-{os.getpid()}"
    listener.bind("\0" + name)
    listener.listen()
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "one").touch()
    outside = [str(tmp_path / "trajectories"), str(HERE.parents[1] / ".git"), "/etc/ssh", "/home"]
    outside += ["/run", "/sys", "/var", str(HERE.parent / "rewards")]

    async with attackers_in(small, way) as attacker:
        environment = await attacker()

        async def tried(tool: str, **arguments: Any) -> Any:
            result = await use(environment, tool, **arguments)
            assert not result.failed, result.text
            return result.text

        text = await tried("attempts", secret="hunter2hunter2", abstract=name, outside=outside)
        report = json.loads(text)
        assert set(report.pop("environment")) <= set(GIVEN)
        # The results differ if Keel runs as root.
        assert report.pop("first killed") in ("", "PermissionError 1")
        assert report.pop("root") in ("OSError 22", "PermissionError 1")
        assert report == {
            "secret": False,
            "internet": "OSError 95",
            "netlink": "OSError 95",
            "local": "",
            "abstract": "ConnectionRefusedError 111",
            "seen": [],
            "processes": [1, 2],
            "written": [],
            "ended first": "1000",  # the first to go when the machine is out of memory
            "limits": "ValueError",
            "memory": "MemoryError",
            "files": "OSError 24",
            **dict.fromkeys(("unshare", "ptrace", "memfd_create", "mount", "chroot"), 1),
        }
        assert await tried("write_to_its_parent") == "PermissionError"
        sizes = [int(await tried("fill", folder=one)) for one in ("/tmp", "/dev/shm")]
        assert sizes == [FILES_MIB, FILES_MIB]
        assert PROCESSES - 4 <= int(await tried("fork_bomb")) < PROCESSES
        wait_for(lambda: len(sleeping(1001)) >= PROCESSES - 4)
        assert await environment.verdict((), "stop") == Verdict(parts={"correct": 1.0})
        await environment.close()
        assert not sleeping(1001)
    listener.close()


@WAYS
@asynchronous
async def test_no_process_outlives_an_episode(small: EnvSandbox, way: str) -> None:
    async with attackers_in(small, way) as attacker:
        for how in ("close", "crash", "hang"):
            environment = await attacker()
            assert (await use(environment, "flee")).text == "gone"
            wait_for(lambda: len(sleeping(1000)) == 2)
            assert environment._process is not None
            inside = descendants(environment._process.pid)
            assert len(inside) >= 3 + (way == "started")
            if how != "close":
                with pytest.raises(EnvironmentLost, match="SIGSEGV" if how == "crash" else "0.2 s"):
                    await use(environment, how, 0.2 if how == "hang" else PATIENCE_S)
            await environment.close()
            # Not even zombies: PID 1 of this machine may not reap.
            assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]


@WAYS
@asynchronous
async def test_memory_limit_covers_all_processes(small: EnvSandbox, way: str) -> None:
    async with attackers_in(small, way) as attacker:
        environment = await attacker()
        with pytest.raises(EnvironmentLost, match=f"out of memory.* {MEMORY_MIB}"):
            await use(environment, "memory_bomb")
        await environment.close()


@asynchronous
async def test_forked_siblings_are_isolated(small: EnvSandbox) -> None:
    async with attackers_in(small, "forked") as attacker:
        one, other = await attacker(), await attacker()
        for each in (one, other):
            traces = json.loads((await use(each, "leave", word="trace")).text)
            assert traces == ["", "1", "2"]  # an abstract socket, and two processes
        await use(one, "kill_all")
        with pytest.raises(EnvironmentLost):
            await use(one, "crash")
        assert (await use(other, "write_to_its_parent")).text == "PermissionError"
        await one.close()
        assert await other.verdict((), "stop") == Verdict(parts={"correct": 1.0})
        await other.close()


def test_sandbox_dies_with_keel(small: EnvSandbox) -> None:
    code = (
        "import asyncio, os, signal\n"
        "from tests.agents import sandboxes as t\n"
        "from tests.agents.episodes import use\n"
        "async def play():\n"
        "    async with t.attackers_in(t.wrap_of(), 'started') as attacker:\n"
        "        await use(await attacker(), 'flee')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(play())\n"
    )
    env = {**os.environ, "MINE": MINE}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], timeout=PATIENCE_S)
    assert done.returncode == -9
    wait_for(lambda: not sleeping(1000))


@asynchronous
async def test_folder_permissions(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("env", "data", "out", "env/run")}
    for folder in (tmp_path, *folders.values()):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        (folder / "file").write_text(folder.name)
    (tmp_path / "env" / "linked").symlink_to(tmp_path / "data")
    (tmp_path / "alone.py").write_text(
        "import os\n"
        "def read(path: str) -> str:\n    return open(path + '/file').read()\n"
        "def write(path: str) -> str:\n    open(path + '/mine', 'w').write('x'); return 'ok'\n"
        "def look(path: str) -> list:\n    return os.listdir(path)\n"
    )
    (folders["env"] / "solved").mkdir()
    (folders["env"] / "solved" / "file").write_text("the answers")
    hidden = (folders["env/run"], folders["env"] / "solved" / "file")
    (folders["data"] / "large").write_bytes(bytes(2 * FILES_MIB << 20))  # would not fit in a copy
    wrap = wrap_of(writable=(folders["out"],), hidden=hidden, files_mib=FILES_MIB)
    options = {"kind": "functions", "folder": folders["env"], "readable": (folders["data"],)}

    spec = program(str(tmp_path / "alone.py"), sandbox=wrap, **options)
    parent = ForkServerClient(spec)
    environment = ProcessEnvironment(spec, fork_server=parent)
    await environment.open(TASK, seed=3)
    assert parent.disabled_reason == "the environment has folders in /tmp"

    async def answer(tool: str, path: Path | str) -> str:
        return (await use(environment, tool, path=str(path))).text

    assert await answer("read", ".") == "env"
    assert await answer("read", folders["data"]) == await answer("read", "linked") == "data"
    assert await answer("write", folders["out"]) == "ok"
    assert await answer("look", folders["env/run"]) == "[]"
    for closed in (".", folders["data"], folders["env/run"]):
        assert "Read-only" in await answer("write", closed)
    assert "No such file" in await answer("read", tmp_path)
    assert "Permission" in await answer("read", "solved")
    await environment.close()
    await parent.close()
    assert (folders["out"] / "mine").read_text() == "x"
