"""Runs a program that nobody vouches for.

`bubblewrap` gives it namespaces of its own: no network, no view of other processes, a read-only
system without our files, a private folder that is gone afterwards. Limits on CPU and wall time,
memory, processes, files and output hold it; `keel.rewards.sandbox.seccomp` closes the ways round
them. Nothing is written outside: sources, inputs and the filter travel as memory files, so that
there is nothing to clean up however this process ends, and the sandbox ends with it.

Started by root, the program gets a user id that nobody else has; by anyone else, a user namespace.
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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal, cast, get_args

from keel.rewards.sandbox.bubblewrap import (
    DEVICES,
    PROGRAMS,
    SYSTEM_FILES,
    TMP,
    IsolationError,
    devices,
    hidden,
    made_folders,
    memory_file,
    namespaces,
    packages,
    private,
    system,
    tool,
    unprivileged,
)
from keel.rewards.sandbox.processes import reap, subreaper
from keel.rewards.sandbox.seccomp import seccomp_filter
from keel.rewards.sandbox.watch import FIRST_PROCESS, GRACE_S, Limits, Outcome, Watch

Isolation = Literal["bubblewrap", "none-i-trust-the-answers"]

BOX = "/box"
_KNOB = "rewards.code.isolation"
_CURE = (
    f"install bubblewrap (`apt-get install bubblewrap`), or set {_KNOB}: none-i-trust-the-answers "
    "if every completion may do on this machine whatever you may"
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


@dataclass(frozen=True, slots=True)
class Python:
    """The interpreter inside: the one that this process's environment was made from."""

    executable: str
    parts: tuple[str, ...]
    """What it needs beyond what all programs do."""
    hidden: tuple[str, ...]
    """Other people's packages in what is mounted: tasks with their answers may lie there."""

    @staticmethod
    def current() -> Python:
        prefix = Path(sys.base_prefix).resolve()
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        executable = prefix / "bin" / name
        libraries = [prefix / "lib", prefix / "lib64"]
        shared = [Path("/usr", folder) for folder in PROGRAMS]
        needed = [
            str(path)
            for path in (executable, *libraries)
            if path.exists() and not any(path.is_relative_to(folder) for folder in shared)
        ]
        mounted = [str(path) for path in (*libraries, *shared, Path("/lib"), Path("/lib64"))]
        found = {os.path.realpath(path): path for path in packages(mounted)}
        return Python(str(executable), tuple(needed), tuple(found))


class Sandbox:
    """Runs programs under one kind of isolation. Made by `open_sandbox`; holds nothing open."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation: Isolation = isolation
        self._python = Python.current()
        self._isolated = isolation == "bubblewrap"
        self._root = os.geteuid() == 0
        if self._isolated:
            self._bwrap = tool("bwrap")
            self._filter = seccomp_filter(platform.machine(), counted=True)
        else:
            self._setpriv = tool("setpriv")
        self._prlimit = tool("prlimit")

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes],
        stdin: bytes = b"",
        limits: Limits,
        lines: int = 0,
        bounded: bool = True,
        within_s: float = math.inf,
    ) -> Outcome:
        """Run `command` in an empty folder that it may write to.

        In its words, `{box}` is the read-only folder of `files` (name → content, executable) and
        `{python}` the interpreter. lines: end the run after so many lines of output; the time
        limits then count from line to line (wall) and for all of them (CPU). bounded: whether to
        limit address space, which some run times reserve by the terabyte. within_s: wall time that
        the caller has left.

        Raises RuntimeError if the sandbox itself fails.
        """
        with ExitStack() as stack:
            box, folder = BOX, None
            if not self._isolated:
                root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keel-")))
                box, folder = str(root / "box"), root / "tmp"
                _write(root, files)
            words = [
                word.replace("{box}", box).replace("{python}", self._python.executable)
                for word in command
            ]
            words = [*self._limited(limits, max(lines, 1), bounded), *words]
            if self._isolated:
                stack.enter_context(subreaper())
            started = time.monotonic()
            status, status_end = _pipe(stack)
            alive, alive_end = _pipe(stack)
            passed = [status_end.fileno(), alive_end.fileno()]
            if self._isolated:

                def give(data: bytes) -> str:
                    passed.append(memory_file(stack, data))
                    return str(passed[-1])

                words = [
                    *self._wrapped(files, stdin, limits, give),
                    *("--json-status-fd", str(passed[0]), "--sync-fd", str(passed[1]), "--"),
                    *unprivileged(self._root),
                    *words,
                ]
            else:  # it dies with this process, as what bubblewrap starts does
                words = [self._setpriv, "--pdeathsig", "KILL", "--", *words]
            process = stack.enter_context(
                subprocess.Popen(
                    words,
                    cwd=folder,
                    env=_ENVIRONMENT if folder is None else {**_ENVIRONMENT, "HOME": str(folder)},
                    stdin=memory_file(stack, stdin),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=passed if self._isolated else (),
                    start_new_session=True,
                )
            )
            status_end.close()
            alive_end.close()
            watch = Watch(process, status.fileno(), alive.fileno(), limits, lines)
            outcome = watch.outcome(started, within_s)
            if self._isolated:
                self._reap(bytes(watch.heard[status.fileno()]), outcome)
            return outcome

    @staticmethod
    def _reap(status: bytes, outcome: Outcome) -> None:
        first = FIRST_PROCESS.search(status)
        if first is None:
            if outcome.status == "exited":
                said = outcome.stderr.decode(errors="replace").strip()
                raise RuntimeError(f"bubblewrap did not start the program: {said}")
        elif not reap(int(first[1]), GRACE_S):
            raise RuntimeError(f"a sandbox is still alive {GRACE_S:g} s after its end")

    def _limited(self, limits: Limits, times: int, bounded: bool) -> list[str]:
        memory = limits.memory_mib << 20
        words = [
            self._prlimit,
            # A backstop: the watch looks at all processes together.
            f"--cpu={math.ceil(limits.time_s * times) + 1}",
            f"--fsize={limits.files_mib << 20}",
            "--nofile=64",
            "--core=0",
            f"--stack={min(memory // 2, 64 << 20)}",
        ]
        if bounded:
            words.append(f"--as={memory}")
        if self._isolated:  # outside, it would count everything else that this user runs
            # In a user namespace, its first process counts too.
            words.append(f"--nproc={limits.processes + (not self._root)}")
        return [*words, "--"]

    def _wrapped(
        self, files: Mapping[str, bytes], stdin: bytes, limits: Limits, give: Callable[[bytes], str]
    ) -> list[str]:
        words = [self._bwrap, *namespaces(self._root), *system(PROGRAMS)]
        above = [str(Path(part).parent) for part in self._python.parts]
        words += made_folders(("/etc", "/dev", BOX, *above))
        words += SYSTEM_FILES
        for part in self._python.parts:
            words += ["--ro-bind", part, part]
        words += hidden(self._python.hidden)
        # Without /dev/zero: mapped as shared, it is memory that no process has.
        words += devices(DEVICES)
        # A copy, because there is no /proc for the usual link to lead to.
        words += ["--perms", "0444", "--file", give(stdin), "/dev/stdin"]
        for name, content in files.items():
            words += ["--perms", "0555", "--file", give(content), f"{BOX}/{name}"]
        words += private(TMP, limits.files_mib)
        words += ["--remount-ro", "/", "--chdir", TMP, "--seccomp", give(self._filter)]
        return words


@lru_cache(maxsize=2)
def open_sandbox(isolation: str) -> Sandbox:
    """A sandbox that was tried out: a program in it has looked for ways out.

    Raises IsolationError where this machine cannot give `isolation`.
    """
    if isolation not in get_args(Isolation):
        known = ", ".join(get_args(Isolation))
        raise IsolationError(f"{_KNOB} = {isolation!r}: there are {known}")
    try:
        sandbox = Sandbox(cast(Isolation, isolation))
        probe = _PROBE if sandbox.isolation == "bubblewrap" else b""
        found = sandbox.run(
            ["{python}", "-S", "{box}/probe.py"],
            files={"probe.py": probe},
            limits=Limits(time_s=10.0, processes=4),
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise IsolationError(f"{_KNOB} = {isolation!r} does not work here: {error}; {_CURE}") from (
            error
        )
    if not found.ok or (probe and found.stdout != b"isolated"):
        said = found.stdout.decode(errors="replace") or found.why()
        raise IsolationError(f"{_KNOB} = {isolation!r} does not work here: {said}; {_CURE}")
    return sandbox


def _pipe(stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    read, write = os.pipe()
    return (
        stack.enter_context(open(read, "rb", buffering=0)),
        stack.enter_context(open(write, "wb", buffering=0)),
    )


def _write(root: Path, files: Mapping[str, bytes]) -> None:
    for name in ("box", "tmp"):
        (root / name).mkdir()
    for name, content in files.items():
        (root / "box" / name).write_bytes(content)
        (root / "box" / name).chmod(0o555)


_PROBE = b"""
import os
ways = ["is root"] if os.getuid() == 0 else []
if os.path.exists("/proc/self"):
    ways.append("sees processes")
for folder in ("/", "/box", "/dev", "/etc", "/usr", "/usr/lib"):
    try:
        open(folder + "/probe", "w")
        ways.append("writes to " + folder)
    except OSError:
        pass
open("/tmp/probe", "w").close()
try:
    import socket
    socket.socket()
    ways.append("opens sockets")
except OSError:
    pass
try:
    os.memfd_create("probe")
    ways.append("has memory that is not counted")
except OSError:
    pass
held = os.pipe()
try:
    for _ in range(8):
        if os.fork() == 0:
            os.read(held[0], 1)
    ways.append("starts processes without limit")
except OSError:
    pass
os.write(1, ("a program in it " + ", ".join(ways)).encode() if ways else b"isolated")
os._exit(0)
"""
