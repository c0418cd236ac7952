"""Sandboxes of programs and environments: limits, isolation and accounting."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from keel.rewards.sandbox import processes
from keel.rewards.sandbox import sandbox as module
from keel.rewards.sandbox.environments import environment_sandbox, find_runtime
from keel.rewards.sandbox.processes import (
    _MemoryLimiter,
    _ProcessUsage,
    measure_processes,
)
from keel.rewards.sandbox.sandbox import (
    IsolationError,
    Limits,
    Sandbox,
    SandboxOutcome,
    _python,
    open_sandbox,
)
from keel.rl.supervisor import _descendants
from tests.waiting import PATIENCE_S, wait_for, within_some

NO_ISOLATION = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
HALF = """
for word in "$@"; do
  shift
  case "$before $word" in
    *--seccomp | --seccomp* | *--unshare-net) ;;
    *) set -- "$@" "$word" ;;
  esac
  before=$word
done
exec {bwrap} "$@"
"""


needs_bubblewrap = pytest.mark.usefixtures("box")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):

    def put(script: str) -> None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


@pytest.mark.parametrize(
    "script",
    ["exit 3", NO_ISOLATION],
)
def test_isolation_of_environments_is_probed(script: str, stand_in) -> None:
    stand_in(script)
    with pytest.raises(IsolationError, match=r"agents\.isolation"):
        environment_sandbox("bubblewrap", processes=8)


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    problem = "does not work here: sandboxes need x86_64, and this machine is aarch64"
    with pytest.raises(IsolationError, match=rf"^agents\.isolation {problem}$"):
        environment_sandbox("bubblewrap")
    open_sandbox.cache_clear()
    with pytest.raises(IsolationError, match=rf"^rewards\.code\.isolation = .* {problem}$"):
        open_sandbox("bubblewrap")


@needs_bubblewrap
def test_partial_isolation_is_refused(stand_in) -> None:
    stand_in(HALF.format(bwrap=shutil.which("bwrap")))
    with pytest.raises(IsolationError, match="sockets"):
        environment_sandbox("bubblewrap")


def test_a_reused_pid_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    excess = _ProcessUsage(resident=65 << 20, cpu_s=0.0, processes=2)
    monkeypatch.setattr(processes, "measure_processes", lambda pid, include_root: excess)
    monkeypatch.setattr(processes, "_kill_sandbox", lambda pid, inside: pids.append(pid))
    own = os.getpid()
    for exited, killed in ((True, []), (False, [own])):
        limiter = _MemoryLimiter()
        limiter._thread = threading.current_thread()  # polled by hand
        monkeypatch.setattr(processes, "_has_exited", lambda pidfd, within_s, it=exited: it)
        release = limiter.add(own, 64, inside=False)
        limiter._poll(next(iter(limiter._limits)))
        assert pids == killed and bool(release()) is bool(killed) and release() == ""


ROOT = Path(__file__).parents[3]
TRUSTING = "none-i-trust-the-answers"
PATIENT = Limits(time_s=100.0, memory_mib=256)
QUICK = replace(PATIENT, time_s=1.0)
ATTACKS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("attacks.yaml").read_text())
pytestmark = pytest.mark.e2e


def run(
    box: Sandbox, source: str, limits: Limits = PATIENT, stdin: bytes = b"", lines: int = 0
) -> SandboxOutcome:
    command, files = ["{python}", "-S", "{box}/it.py"], {"it.py": source.encode()}
    return box.run(command, files=files, stdin=stdin, limits=limits, lines=lines)


@pytest.fixture(params=["bubblewrap", TRUSTING])
def either(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "bubblewrap":
        return request.getfixturevalue("box")
    return open_sandbox(request.param)


def test_input_and_output(either: Sandbox) -> None:
    ran = run(either, "import sys; print(input(), 'é'); sys.stderr.write('b')", stdin=b"a")
    assert (ran.stdout, ran.stderr) == ("a é\n".encode(), b"b")
    assert ran.ok and ran.why() == ""
    large = b"x" * 500_000
    echo = "import sys; sys.stdout.write(sys.stdin.read())"
    assert run(either, echo, stdin=large).stdout == large


def test_failures_are_described(either: Sandbox) -> None:
    ran = run(either, "raise ValueError('no')")
    assert not ran.ok and "ValueError: no" in ran.why()
    killed = run(either, "import os; os.kill(os.getpid(), 9)")
    assert not killed.ok and "SIGKILL" in killed.why()


def test_limits(either: Sandbox) -> None:
    assert run(either, "while True: pass", limits=QUICK).status == "time"
    assert run(either, "while True: print('x' * 9999)").status == "output"
    assert "MemoryError" in run(either, "bytearray(10**9)").why()
    fill = "open('f', 'wb').write(bytes(3 << 20))"
    assert "File too large" in run(either, fill, limits=replace(PATIENT, files_mib=2)).why()


def test_wall_time_is_limited(box: Sandbox) -> None:
    brief = Limits(time_s=0.01)
    started = time.monotonic()
    assert run(box, "import time; time.sleep(1000)", limits=brief).status == "time"
    assert brief.wall_s <= time.monotonic() - started


def test_leftover_processes_are_killed(either: Sandbox) -> None:
    # The child keeps the output open.
    source = "import os, time\nif os.fork() == 0: time.sleep(1000)\nprint('done')"
    ran = run(either, source)
    assert ran.ok and ran.stdout == b"done\n"


def test_a_run_ends_after_its_lines(either: Sandbox) -> None:
    source = "import time\nfor i in range(9): print(i, flush=True)\ntime.sleep(1000)"
    ran = run(either, source, lines=3)
    assert ran.status == "exited" and ran.stdout.startswith(b"0\n1\n2\n")


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused(box: Sandbox, name: str) -> None:
    before = os.stat("/dev/null").st_mtime_ns
    hidden = _python().hidden
    assert any(os.listdir(folder) for folder in hidden)
    ran = run(box, f"HIDDEN = {hidden!r}; ROOT = {str(ROOT)!r}\n{ATTACKS[name]}")
    assert ran.stdout == b"done\n", ran.why()
    assert os.stat("/dev/null").st_mtime_ns == before


def test_the_environment_is_ours(box: Sandbox) -> None:
    ran = run(box, "import os; print(sorted(os.environ))")
    assert str(sorted([*module._ENVIRONMENT, "PWD"])) in ran.stdout.decode()


def test_processes_and_total_memory_are_limited(box: Sandbox) -> None:
    source = """
import os, time
made = 0
try:
    for _ in range(50):
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except OSError:
    print(made, flush=True)
"""
    few = replace(PATIENT, processes=4)
    assert int(run(box, source, limits=few).stdout) in (3, 4)
    together = (
        "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(90 << 20); time.sleep(1000)"
    )
    assert run(box, together, limits=PATIENT).status == "memory"


def test_the_sandbox_dies_with_its_parent(box: Sandbox) -> None:
    mark = f"9{os.getpid()}"  # a unique sleep
    code = (
        "from keel.rewards.sandbox.sandbox import open_sandbox;"
        "from keel.rewards.sandbox.sandbox import Limits;"
        "open_sandbox('bubblewrap')"
        f".run(['/bin/sleep', '{mark}'], files={{}}, limits=Limits(time_s=1000))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        wait_for(lambda: sleeping(mark))
        process.send_signal(signal.SIGALRM)  # as a reward worker's deadline does
        process.wait(PATIENCE_S)
    wait_for(lambda: not sleeping(mark))


def sleeping(mark: str) -> bool:
    """Return whether a process has `mark` in its command line."""
    processes = psutil.process_iter(["cmdline"])
    return any(mark in word for process in processes for word in process.info["cmdline"] or ())


@pytest.mark.parametrize("script", ["exit 1", NO_ISOLATION])
def test_isolation_is_probed(script: str, stand_in) -> None:
    stand_in(script)
    open_sandbox.cache_clear()
    with pytest.raises(IsolationError):
        open_sandbox("bubblewrap")
    open_sandbox.cache_clear()


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
            assert measure_processes(process.pid).resident > 90 << 20
            assert _descendants(os.getpid())[process.pid]  # alive
        finally:
            process.kill()


def test_a_sandbox_killed_at_start_leaves_nothing(box: Sandbox) -> None:
    # Every process of the run has it in its command line.
    mark = f"1000.0{os.getpid()}"
    for number in range(20):
        within_s = number * 0.0014  # starting takes some 20 ms
        ran = box.run(["/bin/sleep", mark], files={}, limits=PATIENT, within_s=within_s)
        assert ran.status == "time"
        wait_for(lambda: not sleeping(mark), f"the end of a run of {within_s:g} s")


def test_empty_files_count_as_memory(box: Sandbox) -> None:
    ran = run(box, "for i in range(10**9): open(str(i), 'w').close()")
    assert ran.status == "memory"


def test_total_output_is_bounded(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.rewards.sandbox.sandbox._MAX_OUTPUT", 4 << 20)
    source = "while True: print('x' * 1_000_000, flush=True)"
    ran = run(box, source, lines=10**6)
    assert ran.status == "output" and len(ran.stdout) < 6 << 20


def test_an_interpreter_is_mounted_without_the_folders_of_its_links(tmp_path: Path) -> None:
    base, local, venv, copied = (tmp_path / name for name in ("base", "local", "venv", "copied"))
    for folder in (base, local, venv, copied):
        (folder / "bin").mkdir(parents=True)
        (folder / "share").mkdir()
    (base / "bin/python3.12").write_bytes(b"\x7fELF")
    shutil.copymode(sys.executable, base / "bin/python3.12")
    (local / "bin/python3.12").symlink_to(base / "bin/python3.12")
    (venv / "bin/python").symlink_to(local / "bin/python3.12")
    (venv / "pyvenv.cfg").write_text("version = 3.12")
    shutil.copy(base / "bin/python3.12", copied / "bin/python3.12")
    (copied / "pyvenv.cfg").write_text(f"home = {local / 'bin'}\nversion = 3.12")
    for program in (local / "bin/python3.12", venv / "bin/python", copied / "bin/python3.12"):
        paths = find_runtime(str(program)).paths
        assert {program, base / "bin/python3.12", base / "share"} <= {*paths}
        assert not {local, local / "bin", local / "share"} & {*paths}
        own = program.parent.parent / "pyvenv.cfg"
        assert (own in paths) == own.exists()


@pytest.mark.e2e
def test_a_script_is_asked_for_its_interpreter(tmp_path: Path) -> None:
    shim = tmp_path / "python3"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    asked, direct = find_runtime(str(shim)), find_runtime(sys.executable)
    assert asked.executable == direct.executable
    assert {*direct.paths} <= {*asked.paths}
