"""Runs untrusted programs in sandboxes.

`bubblewrap` runs each program in separate namespaces. The program has no network and cannot see
other processes. It sees a read-only system without our files, and a private folder that is deleted
after the run. CPU time, wall time, memory, processes, files and output are limited.
`keel.rewards.sandbox.seccomp` blocks system calls that would bypass the limits.

Sources, inputs and the seccomp filter are passed as memory files. Nothing is written outside the
sandbox, so there is nothing to clean up. The sandbox ends when this process ends. If this process
runs as root, the program runs under an unused user ID. Otherwise it runs in a user namespace.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from keel.rewards.sandbox import bubblewrap
from keel.rewards.sandbox.bubblewrap import TMP, IsolationError
from keel.rewards.sandbox.processes import reap, subreaper
from keel.rewards.sandbox.seccomp import seccomp_filter
from keel.rewards.sandbox.watch import FIRST_PROCESS, GRACE_S, Limits, SandboxOutcome, Watch

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
    """The Python interpreter that programs use: the one under this process's environment."""

    executable: str
    parts: tuple[str, ...]
    """Files and folders to mount besides `bubblewrap.PROGRAMS`."""
    hidden: tuple[str, ...]
    """Package folders inside the mounted folders, which may contain tasks with answers."""


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
    mounted = [str(path) for path in (*libraries, *shared, Path("/lib"), Path("/lib64"))]
    hidden = {os.path.realpath(path): path for path in bubblewrap.package_folders(mounted)}
    return _Python(str(executable), tuple(parts), tuple(hidden))


class Sandbox:
    """Runs programs under one kind of isolation. Create it with `open_sandbox`."""

    def __init__(self, isolation: str) -> None:
        self._isolated = isolation == "bubblewrap"
        self._python = _python()
        self._root = os.geteuid() == 0
        self._filter = seccomp_filter(platform.machine(), counted=True) if self._isolated else b""

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
        """Run `command` in an empty, writable folder and return the outcome.

        `files` are executable and in a read-only folder. In `command`, `{box}` stands for that
        folder and `{python}` for the Python interpreter. If `lines` is set, the run ends after that
        many lines of output; the wall-time limit then applies to each line. `within_s` limits the
        wall time of the whole run. Raises RuntimeError if the sandbox itself fails.
        """
        with ExitStack() as stack:
            started, env, folder = time.monotonic(), dict(_ENVIRONMENT), None
            status, status_end = _pipe(stack)
            alive, alive_end = _pipe(stack)
            fds: list[int] = []
            if self._isolated:
                stack.enter_context(subreaper())
                fds += [status_end.fileno(), alive_end.fileno()]

                def share(data: bytes) -> str:
                    fds.append(bubblewrap.memory_file(stack, data))
                    return str(fds[-1])

                box, start = _BOX, self._bwrap_command(files, stdin, limits, share)
                start += ["--json-status-fd", str(fds[0]), "--sync-fd", str(fds[1]), "--"]
                start += bubblewrap.unprivileged(self._root)
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
            watch = Watch(process, status.fileno(), alive.fileno(), limits, lines)
            outcome = watch.outcome(started, within_s)
            if self._isolated:
                first = FIRST_PROCESS.search(bytes(watch.received[status.fileno()]))
                if first is None and outcome.status == "exited":
                    message = outcome.stderr.decode(errors="replace").strip()
                    raise RuntimeError(f"bubblewrap did not start the program: {message}")
                if first is not None and not reap(int(first[1]), GRACE_S):
                    raise RuntimeError(f"a sandbox is still alive {GRACE_S:g} s after its end")
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
        """Build the bubblewrap command. `share` passes data and returns the file descriptor."""
        python = self._python
        words = [bubblewrap.tool("bwrap"), *bubblewrap.namespaces(self._root)]
        words += bubblewrap.system(bubblewrap.PROGRAMS)
        parents = [str(Path(part).parent) for part in python.parts]
        words += bubblewrap.make_folders(("/etc", "/dev", _BOX, *parents))
        words += bubblewrap.SYSTEM_FILES
        for part in python.parts:
            words += ["--ro-bind", part, part]
        for name in python.hidden:
            words += ["--perms", "0555", "--size", "4096", "--tmpfs", name, "--remount-ro", name]
        # Without /dev/zero: a shared mapping of it is memory that counts for no process.
        words += bubblewrap.devices(bubblewrap.DEVICES)
        # A copy, since there is no /proc for the usual symbolic link.
        words += ["--perms", "0444", "--file", share(stdin), "/dev/stdin"]
        for name, content in files.items():
            words += ["--perms", "0555", "--file", share(content), f"{_BOX}/{name}"]
        words += bubblewrap.private_folder(TMP, limits.files_mib)
        return [*words, "--remount-ro", "/", "--chdir", TMP, "--seccomp", share(self._filter)]


@lru_cache(maxsize=2)
def open_sandbox(isolation: str) -> Sandbox:
    """Return a sandbox that a probe could not break out of on this machine. Raises IsolationError
    if this machine does not support `isolation`."""
    if isolation not in _ISOLATIONS:
        raise IsolationError(f"{_KNOB} = {isolation!r} must be one of {', '.join(_ISOLATIONS)}")
    failure = f"{_KNOB} = {isolation!r} does not work here"
    try:
        sandbox, isolated = Sandbox(isolation), isolation == "bubblewrap"
        source = bubblewrap.probe(network="none", processes=4, strict=True) if isolated else ""
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
