"""Attacks on the accounting of memory and CPU time, and on files outside the sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from keel.rewards.sandbox.bubblewrap import package_folders
from keel.rewards.sandbox.processes import _descendants, usage
from keel.rewards.sandbox.sandbox import IsolationError, Sandbox, _Python, open_sandbox
from keel.rewards.sandbox.watch import Limits, SandboxOutcome
from tests.waiting import wait_for, within_some

PATIENT = Limits(time_s=100.0, memory_mib=256)
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def box() -> Sandbox:
    try:
        return open_sandbox("bubblewrap")
    except IsolationError as error:
        pytest.skip(str(error))


def run(box: Sandbox, source: str, limits: Limits = PATIENT) -> SandboxOutcome:
    command = ["{python}", "-S", "{box}/it.py"]
    return box.run(command, files={"it.py": source.encode()}, limits=limits)


def test_packages_and_data_are_hidden(box: Sandbox) -> None:
    # Keel's tasks with their tests may be installed there.
    hidden = _Python.current().hidden
    assert any(os.listdir(folder) for folder in hidden)
    source = f"""
import os
print([os.listdir(folder) for folder in {hidden!r}], os.listdir("/usr/share"))
print([name for name in ("src", "local", "games") if os.path.exists("/usr/" + name)])
for folder in {hidden!r}:
    try:
        open(folder + "/more", "w")
        print("writes there")
    except OSError:
        pass
import datetime, zoneinfo, decimal, sqlite3, ssl
"""
    ran = run(box, source)
    empty = [[] for _ in hidden]
    assert ran.ok, ran.why()
    assert ran.stdout.decode().splitlines()[1] == "[]"
    assert ran.stdout.decode() in (f"{empty} ['zoneinfo']\n[]\n", f"{empty} []\n[]\n")


def test_time_of_ignored_children_counts(box: Sandbox) -> None:
    source = """
import os, signal, time
try:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ignored")
except OSError:
    print("refused", flush=True)
while True:
    if os.fork() == 0:
        began = time.process_time()
        while time.process_time() < began + 0.02:
            pass
        os._exit(0)
    os.wait()
"""

    def check(limit_s: float) -> None:
        ran = run(box, source, replace(PATIENT, time_s=limit_s))
        assert ran.stdout == b"refused\n" and ran.status == "time"

    within_some(check, (1.0, 10.0, 60.0))


def test_uncounted_memory_is_refused(box: Sandbox) -> None:
    source = """
import ctypes, mmap, os, socket
def refused(what, *arguments):
    try:
        what(*arguments)
        print(what, "was not refused")
    except OSError:
        pass
refused(mmap.mmap, -1, 1 << 20)
refused(open, "/dev/zero", "r+b")
left, right = socket.socketpair()
refused(left.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
refused(socket.send_fds, left, [b"x"], [right.fileno()])
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(462, 0, 0, 0) == -1 and ctypes.get_errno() == 38  # mseal, of Linux 6.10
mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
import asyncio
async def main():
    await asyncio.sleep(0)
    print("works")
asyncio.run(main())
"""
    ran = run(box, source)
    assert ran.stdout == b"works\n", ran.why()


def test_a_process_without_main_thread_counts() -> None:
    source = """
import ctypes, threading, time
held = bytearray(b"x") * (90 << 20)
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    with subprocess.Popen([sys.executable, "-S", "-c", source]) as process:
        try:
            stat = Path(f"/proc/{process.pid}/stat")
            wait_for(lambda: b") Z " in stat.read_bytes())
            assert usage(process.pid).resident > 90 << 20
            assert _descendants(os.getpid())[process.pid]  # alive
        finally:
            process.kill()


def test_a_sandbox_killed_at_start_leaves_nothing(box: Sandbox) -> None:
    # In the command line of every process of the run.
    mark = f"1000.0{os.getpid()}"

    def remaining() -> list[str]:
        processes = psutil.process_iter(["cmdline"])
        lines = [" ".join(process.info["cmdline"] or ()) for process in processes]
        return [line for line in lines if mark in line]

    for number in range(40):
        within_s = number * 0.0007  # starting takes some 20 ms
        ran = box.run(["/bin/sleep", mark], files={}, limits=PATIENT, within_s=within_s)
        assert ran.status == "time"
        wait_for(lambda: not remaining(), f"the end of a run of {within_s:g} s")
    with subprocess.Popen(["/bin/sleep", mark]) as process:
        wait_for(remaining)  # control
        process.kill()


def test_empty_files_count_as_memory(box: Sandbox) -> None:
    ran = run(box, "for i in range(10**9): open(str(i), 'w').close()")
    assert ran.status == "memory"


def test_devices_and_the_first_process_stay_unchanged(box: Sandbox) -> None:
    before = os.stat("/dev/null").st_mtime_ns
    source = """
import os, resource
os.utime("/dev/null", (1, 1)) if os.stat("/dev/null").st_uid == os.getuid() else None
os.utime("/dev/null")
for what in (
    lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (9, 9)),
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    lambda: os.sched_setaffinity(1, {0}),
):
    try:
        what()
        print("was not refused")
    except OSError:
        pass
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
print("done")
"""
    ran = run(box, source)
    assert ran.stdout == b"done\n", ran.why()
    assert os.stat("/dev/null").st_mtime_ns == before


def test_total_output_is_bounded(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.rewards.sandbox.watch._MAX_OUTPUT", 4 << 20)
    source = "while True: print('x' * 1_000_000, flush=True)"
    ran = box.run(
        ["{python}", "-S", "{box}/it.py"],
        files={"it.py": source.encode()},
        limits=PATIENT,
        lines=10**6,
    )
    assert ran.status == "output" and len(ran.stdout) < 6 << 20


def test_package_folders(tmp_path: Path) -> None:
    for name in ("python3.11/site-packages", "python3/dist-packages", "python3.11/json"):
        (tmp_path / name).mkdir(parents=True)
    names = [str(Path(path).relative_to(tmp_path)) for path in package_folders([str(tmp_path)])]
    assert names == ["python3.11/site-packages", "python3/dist-packages"]
