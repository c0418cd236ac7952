"""Runs untrusted programs in sandboxes.

`bubblewrap` runs each program in separate namespaces. The program has no network access and cannot
see other processes. It sees a read-only system without our files, and a private folder that is
deleted after the run. CPU time, wall time, memory, processes, files and output are limited.
`keel.rewards.sandbox.bubblewrap` blocks system calls that would bypass the limits.

Sources, inputs and the seccomp filter are passed as memory files. Nothing is written outside the
sandbox, so there is nothing to clean up. The sandbox ends when this process ends. If this process
runs as root, the program runs under an unused user ID. Otherwise, it runs in a user namespace.
"""

import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from keel.rewards.sandbox import bubblewrap
from keel.rewards.sandbox.bubblewrap import TMP, IsolationError, seccomp_filter
from keel.rewards.sandbox.processes import adopt_orphans, measure_processes, reap
from keel.rl.supervisor import KILL_S, kill_tree

_FIRST_PROCESS = re.compile(rb'"child-pid": (\d+)')  # in bubblewrap's status
_Status = Literal["exited", "time", "memory", "output"]

_POLL_S = 0.05
_MAX_FILES = 16_384  # in the private folder. Even an empty one takes a KiB of kernel memory.
_MAX_OUTPUT = 64 << 20
_MAX_LIMIT = 1 << 24  # of each limit, against overflows in the kernel. For memory, it is 16 TiB.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits for a single program run."""

    time_s: float = 2.0  # CPU seconds of all processes. The wall-time limit is 2 · time_s + 1.
    memory_mib: int = 512  # limit on each address space, and on all resident memory together
    processes: int = 8
    files_mib: int = 64
    output_kib: int = 1024  # limit on standard output and error, or on each counted line

    def __post_init__(self) -> None:
        for name in ("time_s", "memory_mib", "processes", "files_mib", "output_kib"):
            value, least = getattr(self, name), 0 if name == "time_s" else 1
            if not least <= value <= _MAX_LIMIT or not value:
                raise ValueError(
                    f"sandbox limits: {name} = {value} must be positive and at most {_MAX_LIMIT}"
                )

    @property
    def wall_s(self) -> float:
        return 2 * self.time_s + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOutcome:
    status: _Status  # `exited`, or the name of the limit that the run exceeded
    exit_code: int  # the exit status, or 128 + n after signal n, if the status is `exited`
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.status == "exited" and self.exit_code == 0

    def why(self) -> str:
        """Return a short reason for the failure, or "" if the run succeeded. It may quote the
        program's output."""
        if self.status != "exited":
            return f"over its limit of {self.status}"
        if self.exit_code == 0:
            return ""
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        quote = f": {lines[-1][:200]}" if lines else ""
        if self.exit_code > 128 and self.exit_code - 128 in set(signal.Signals):
            return f"ended by {signal.Signals(self.exit_code - 128).name}{quote}"
        return f"exit status {self.exit_code}{quote}"


class _RunMonitor:
    """Reads a program's output and kills the run if it exceeds a limit. If `lines` is set, the run
    ends after that many lines of output."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        fds: Sequence[int],
        limits: Limits,
        lines: int,
        deadline: float,
    ) -> None:
        """Prepare to monitor a process. `fds` contains bubblewrap's status pipe and a pipe kept
        open by the first process in the sandbox."""
        assert process.stdout is not None and process.stderr is not None
        self._process, self._limits, self._lines = process, limits, lines
        self._out, self._err = process.stdout.fileno(), process.stderr.fileno()
        self._status_fd = fds[0]
        self._received = {fd: bytearray() for fd in (self._out, self._err, *fds)}
        self._last_deadline = deadline
        self._deadline = min(time.monotonic() + limits.wall_s, deadline)
        self._status: _Status = "exited"
        self._killed_deadline = math.inf
        self._counted_output = 0  # bytes of output up to the last counted line
        self._line_count = 0
        self._max_output = max(_MAX_OUTPUT, limits.output_kib << 10)
        self._ignore_output = False

    def outcome(self) -> SandboxOutcome:
        try:
            with selectors.DefaultSelector() as selector:
                self._listen(selector)
        finally:
            self._kill()
            code = self._process.wait(KILL_S)
        return SandboxOutcome(
            status=self._status,
            exit_code=code if code >= 0 else 128 - code,
            stdout=bytes(self._received[self._out]),
            stderr=bytes(self._received[self._err]),
        )

    def first_process(self) -> int:
        """Return the PID of the first process in the sandbox, or 0 if it hasn't started yet."""
        match = _FIRST_PROCESS.search(bytes(self._received[self._status_fd]))
        return int(match[1]) if match else 0

    def _listen(self, selector: selectors.BaseSelector) -> None:
        next_poll = time.monotonic() + _POLL_S
        for fd in self._received:
            selector.register(fd, selectors.EVENT_READ)
        # Until the last process inside has exited, which ends the first one too.
        while selector.get_map():
            now = time.monotonic()
            if now >= self._killed_deadline:
                raise RuntimeError(f"a sandbox is still alive {KILL_S:g} s after its end")
            # The program may have exited in time while this process was not scheduled.
            if now >= self._deadline and self._process.poll() is None:
                self._end("time")
            elif now >= next_poll:
                self._poll()
                next_poll = now + _POLL_S
            until = min(self._deadline, next_poll, self._killed_deadline)
            for key, _ in selector.select(max(0.0, until - now)):
                if data := os.read(key.fd, 1 << 16):
                    self._receive(key.fd, data)
                else:
                    selector.unregister(key.fd)

    def _receive(self, fd: int, data: bytes) -> None:
        if self._ignore_output and fd != self._status_fd:  # the PID in the status is still needed
            return
        received = self._received[fd]
        received += data
        if self._lines and fd == self._out and b"\n" in data:
            self._deadline = min(time.monotonic() + self._limits.wall_s, self._last_deadline)
            self._counted_output = received.rfind(b"\n") + 1 + len(self._received[self._err])
            self._line_count += data.count(b"\n")
            if self._line_count >= self._lines:
                self._end("exited")
                return
        total = len(self._received[self._out]) + len(self._received[self._err])
        uncounted = total - self._counted_output
        if uncounted > self._limits.output_kib << 10 or len(received) > self._max_output:
            self._end("output")

    def _poll(self) -> None:
        if self._killed_deadline < math.inf:
            return
        if self._process.poll() is not None:  # a leftover process still holds its output
            self._deadline, self._killed_deadline = math.inf, time.monotonic() + KILL_S
            self._kill()
            return
        try:
            used = measure_processes(self._process.pid)
        except OSError:  # out of open files or memory, which is not the run's fault
            return
        # The files in the private folder. Until that is mounted, it is the machine's own folder.
        files, first = 0, self.first_process()
        with suppress(OSError):
            if first:
                stats = os.statvfs(f"/proc/{first}/root{TMP}")
                if stats.f_blocks * stats.f_frsize == self._limits.files_mib << 20:
                    files = stats.f_files - stats.f_ffree
        if used.resident > self._limits.memory_mib << 20 or files > _MAX_FILES:
            self._end("memory")
        elif used.cpu_s > self._limits.time_s * max(self._lines, 1):
            self._end("time")

    def _end(self, status: _Status) -> None:
        self._status, self._ignore_output = status, True
        self._deadline, self._killed_deadline = math.inf, time.monotonic() + KILL_S
        # Killing bubblewrap while it starts would leave a process that waits forever.
        kill_tree(self._process)

    def _kill(self) -> None:
        # The outer process and its group; those inside a sandbox die with it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


# --- Sandboxes ---

_ISOLATIONS = ("bubblewrap", "none-i-trust-the-answers")

_BOX = "/box"
_KNOB = "rewards.code.isolation"
_CURE = (
    f"Install bubblewrap (`apt-get install bubblewrap`), or set {_KNOB}: none-i-trust-the-answers "
    "if completions may do anything on this machine that you may"
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": TMP,
    "TMPDIR": TMP,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # the same completion gets the same reward
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
}


class _Python(NamedTuple):
    """The interpreter for sandboxed programs: the base Python of this process's environment."""

    executable: str
    parts: tuple[str, ...]  # files and folders to mount in addition to `bubblewrap.PROGRAMS`
    hidden: tuple[str, ...]  # package folders to hide, because they may contain tasks with answers


def _python() -> _Python:
    prefix = Path(sys.base_prefix).resolve()
    executable = prefix / f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = [prefix / "lib", prefix / "lib64"]
    shared = [Path("/usr", folder) for folder in bubblewrap.PROGRAMS]
    parts = [
        str(path)
        for path in (executable, *libraries)
        if path.exists() and not any(path.is_relative_to(folder) for folder in shared)
    ]
    mounted = (*libraries, *shared, Path("/lib"), Path("/lib64"))
    packages = (path for folder in mounted for path in folder.glob("python3*/*-packages"))
    hidden = {os.path.realpath(p) for p in packages if p.is_dir() and not p.is_symlink()}
    return _Python(str(executable), tuple(parts), tuple(sorted(hidden)))


class Sandbox:
    """Runs programs under a given kind of isolation. Construct it with `open_sandbox`."""

    def __init__(self, isolation: str) -> None:
        self._isolated = isolation == "bubblewrap"
        self._python = _python()
        self._root = os.geteuid() == 0
        self._filter = seccomp_filter(counted=True) if self._isolated else b""

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes],
        stdin: bytes = b"",
        limits: Limits,
        lines: int = 0,
        within_s: float = math.inf,
    ) -> SandboxOutcome:
        """Run `command` in an empty, writable folder and return its output. Raises RuntimeError if
        the sandbox itself fails.

        `files` are placed in the read-only folder `{box}` and are executable. `{python}` stands for
        the Python interpreter. If `lines` is set, the run ends after that many lines of output, and
        the wall-time limit applies to each line. `within_s` limits the wall time of the whole run.
        """
        with ExitStack() as stack:
            started, env, folder = time.monotonic(), dict(_ENVIRONMENT), None
            status, status_end = _pipe(stack)
            alive, alive_end = _pipe(stack)
            fds: list[int] = []
            if self._isolated:
                stack.enter_context(adopt_orphans())
                fds += [status_end.fileno(), alive_end.fileno()]

                def share(data: bytes) -> str:
                    fds.append(bubblewrap.memory_file(stack, data))
                    return str(fds[-1])

                box, start = _BOX, self._bwrap_command(files, stdin, limits, share)
                start += ["--json-status-fd", str(fds[0]), "--sync-fd", str(fds[1]), "--"]
                start += bubblewrap.drop_privileges_args(self._root)
            else:
                root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keel-")))
                box, folder = str(root / "box"), root / "tmp"
                folder.mkdir()
                (root / "box").mkdir()
                for name, content in files.items():
                    (root / "box" / name).write_bytes(content)
                    (root / "box" / name).chmod(0o555)
                env["HOME"] = str(folder)
                # Dies with this process, as a sandbox does.
                start = [bubblewrap.tool("setpriv"), "--pdeathsig", "KILL", "--"]
            words = [
                word.replace("{box}", box).replace("{python}", self._python.executable)
                for word in command
            ]
            process = stack.enter_context(
                subprocess.Popen(
                    [*start, *self._limit_command(limits, max(lines, 1)), *words],
                    cwd=folder,
                    env=env,
                    stdin=bubblewrap.memory_file(stack, stdin),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=fds,
                    start_new_session=True,
                )
            )
            status_end.close()
            alive_end.close()
            watched = (status.fileno(), alive.fileno())
            watch = _RunMonitor(process, watched, limits, lines, started + within_s)
            outcome = watch.outcome()
            if self._isolated:
                first = watch.first_process()
                if not first and outcome.status == "exited":
                    message = outcome.stderr.decode(errors="replace").strip()
                    raise RuntimeError(f"bubblewrap did not start the program: {message}")
                if first and not reap(first):
                    raise RuntimeError(f"a sandbox is still alive {KILL_S:g} s after its end")
            return outcome

    def _limit_command(self, limits: Limits, lines: int) -> list[str]:
        memory = limits.memory_mib << 20
        words = [
            bubblewrap.tool("prlimit"),
            # A backstop: the watch counts all processes together.
            f"--cpu={math.ceil(limits.time_s * lines) + 1}",
            f"--fsize={limits.files_mib << 20}",
            "--nofile=64",
            "--core=0",
            f"--stack={min(memory // 2, 64 << 20)}",
            f"--as={memory}",
        ]
        if self._isolated:  # outside, it would count this user's other processes
            # The first process of a user namespace counts too.
            words.append(f"--nproc={limits.processes + (not self._root)}")
        return [*words, "--"]

    def _bwrap_command(
        self,
        files: Mapping[str, bytes],
        stdin: bytes,
        limits: Limits,
        share: Callable[[bytes], str],
    ) -> list[str]:
        python = self._python
        words = [bubblewrap.tool("bwrap"), *bubblewrap.namespace_args(self._root)]
        words += bubblewrap.system_args(bubblewrap.PROGRAMS)
        parents = [str(Path(part).parent) for part in python.parts]
        words += bubblewrap.folder_args(("/etc", "/dev", _BOX, *parents))
        words += bubblewrap.SYSTEM_FILES
        for part in python.parts:
            words += ["--ro-bind", part, part]
        for name in python.hidden:
            words += ["--perms", "0555", "--size", "4096", "--tmpfs", name, "--remount-ro", name]
        # Without /dev/zero: a shared mapping of it is memory that counts for no process.
        words += bubblewrap.device_args(bubblewrap.DEVICES)
        # A copy, since there is no /proc for the usual symbolic link.
        words += ["--perms", "0444", "--file", share(stdin), "/dev/stdin"]
        for name, content in files.items():
            words += ["--perms", "0555", "--file", share(content), f"{_BOX}/{name}"]
        words += bubblewrap.private_folder_args(TMP, limits.files_mib)
        return [*words, "--remount-ro", "/", "--chdir", TMP, "--seccomp", share(self._filter)]


@lru_cache(maxsize=2)
def open_sandbox(isolation: str) -> Sandbox:
    """Create a sandbox and check that a probe can't break out of it. Raises IsolationError if this
    machine doesn't support `isolation`."""
    if isolation not in _ISOLATIONS:
        raise IsolationError(f"{_KNOB} = {isolation!r} must be one of {', '.join(_ISOLATIONS)}")
    failure = f"{_KNOB} = {isolation!r} does not work here"
    isolated = isolation == "bubblewrap"
    if isolated:
        bubblewrap.check_machine(f"{_KNOB} = {isolation!r}")
    try:
        sandbox = Sandbox(isolation)
        source = bubblewrap.probe_code(network="none", processes=4, strict=True) if isolated else ""
        outcome = sandbox.run(
            ["{python}", "-S", "{box}/probe.py"],
            files={"probe.py": source.encode()},
            limits=Limits(time_s=10.0, processes=4),
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise IsolationError(f"{failure}: {error}. {_CURE}") from error
    if not outcome.ok or (isolated and outcome.stdout != b"isolated"):
        message = outcome.stdout.decode(errors="replace") or outcome.why()
        raise IsolationError(f"{failure}: {message}. {_CURE}")
    return sandbox


def _pipe(stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    read, write = os.pipe()
    return (
        stack.enter_context(open(read, "rb", buffering=0)),
        stack.enter_context(open(write, "wb", buffering=0)),
    )
