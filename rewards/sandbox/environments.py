"""Puts the process of an environment into a sandbox: as long as its episode, with a channel to it.

As programs of completions are held, and yet: it reads its interpreter and the folders that it was
given, has sockets of the file system (a Jupyter kernel needs them), a /proc and pseudo-terminals of
its own where the machine lets bubblewrap mount them, and the network where it is asked to.

The first process inside is a shell that reaps whatever the program leaves behind. When it goes all
others are killed, and only then does the outer process end: who waits for that one waits for all.
"""

from __future__ import annotations

import base64
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from keel.rewards.sandbox.bubblewrap import (
    SYSTEM_FILES,
    TMP,
    IsolationError,
    devices,
    made_folders,
    memory_file,
    namespaces,
    private,
    system,
    tool,
    unprivileged,
)
from keel.rewards.sandbox.keeper import KEEPER
from keel.rewards.sandbox.runtime import runtime
from keel.rewards.sandbox.seccomp import FORKING, LOCAL, NETWORK, seccomp_filter

EnvironmentIsolation = Literal["bubblewrap", "none-i-trust-the-environments"]
Network = Literal["none", "loopback", "host"]
"""loopback: sockets, on a network of the sandbox's own that leads nowhere."""

OPEN_FILES = 1024
PROBE_S = 30.0
_NETWORK_FILES = ("hosts", "nsswitch.conf", "resolv.conf", "ssl", "pki", "ca-certificates")
_TAKEN = tuple(map(Path, ("/", "/dev", "/proc", TMP)))
_INSTALL = "install bubblewrap (`apt-get install bubblewrap`)"
_CURE = (
    f"{_INSTALL}, or set {{knob}}: "
    "none-i-trust-the-environments if they, and what the policy does in them, may do on this "
    "machine whatever you may"
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line in its sandbox. Implements `keel.agents.env_process.process.Launch`."""

    command: Sequence[str]
    pass_fds: Sequence[int]
    env: Mapping[str, str]
    memory_mib: int | None

    def started(self, pid: int) -> Callable[[], str]:
        if self.memory_mib is None:
            return lambda: ""
        KEEPER.hold(pid, self.memory_mib)
        return partial(KEEPER.release, pid)


class Wrap(Protocol):
    def __call__(
        self, command: Sequence[str], *, readable: Sequence[Path]
    ) -> AbstractContextManager[Launch]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSandbox:
    """Made by `environment_wrap`; holds nothing open."""

    network: Network
    memory_mib: int | None
    processes: int
    files_mib: int
    writable: Sequence[Path]
    hidden: Sequence[Path]
    mounts: bool
    """Whether to mount /proc and pseudo-terminals. Some containers let nobody do that."""

    def __call__(
        self, command: Sequence[str], *, readable: Sequence[Path]
    ) -> AbstractContextManager[Launch]:
        """Raises FileNotFoundError where there is no such program, and PermissionError for what its
        user may not read or write inside."""
        return self._launch(command, readable, forking=False)

    def parent(
        self, command: Sequence[str], *, readable: Sequence[Path]
    ) -> AbstractContextManager[Launch]:
        """Of a process that forks others, which take `inner` upon themselves. It may make
        namespaces itself."""
        return self._launch(command, readable, forking=True)

    @property
    def inner(self) -> Mapping[str, Any] | None:
        """What makes a forked process as isolated as one that was started. None: that takes a /proc
        of its own."""
        if not self.mounts:
            return None
        return {
            "own_network": self.network != "host",
            "loopback": self.network == "loopback",
            "files_mib": self.files_mib,
            "processes": self.processes,
            "filter": base64.b64encode(self._rules()).decode(),
        }

    @property
    def probe(self) -> str:
        told = {"KEEL_NETWORK": self.network, "KEEL_PROCESSES": str(self.processes)}
        return f"import os\nos.environ.update({told!r})\n{_PROBE}"

    def hold(self, pid: int, *, inside: bool) -> Callable[[], str]:
        """Look at its memory from now on. inside: as of the keeper's."""
        if self.memory_mib is None:
            return lambda: ""
        KEEPER.hold(pid, self.memory_mib, inside=inside)
        return partial(KEEPER.release, pid)

    def _rules(self, *permitted: str) -> bytes:
        sockets = LOCAL if self.network == "none" else NETWORK
        return seccomp_filter(platform.machine(), sockets=sockets, permitted=permitted)

    @contextmanager
    def _launch(
        self, command: Sequence[str], readable: Sequence[Path], *, forking: bool
    ) -> Generator[Launch]:
        root = os.geteuid() == 0
        host = self.network == "host"
        needed = runtime(command[0])
        # Where the machine is out of memory, an episode ends before an engine does.
        words = [tool("choom"), "-n", "1000", "--", tool("bwrap"), "--as-pid-1"]
        words += [*namespaces(root, network=host), *system()]
        words += private(TMP, self.files_mib)
        words += made_folders(["/etc"]) + SYSTEM_FILES
        if host:
            for name in _NETWORK_FILES:
                words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        words += self._folders([*needed.paths, *readable], root)
        before = ""
        if forking and root:
            # Where root's bubblewrap mounts it, parts are covered, and no namespace in this one
            # could mount its own. Nothing that is covered is for the program's user to write to.
            words += ["--cap-add", "CAP_SYS_ADMIN", *made_folders(["/proc"])]
            before = "mount -t proc -o nosuid,nodev,noexec proc /proc && "
        elif self.mounts:
            words += ["--proc", "/proc"]
        if self.mounts:
            words += ["--dev", "/dev", *private("/dev/shm", self.files_mib)]
            words += ["--remount-ro", "/dev"]
        else:
            words += [*made_folders(["/dev"]), *devices(), "--symlink", TMP, "/dev/shm"]
        with ExitStack() as stack:
            fd = memory_file(stack, self._rules(*FORKING) if forking else self._rules())
            words += ["--remount-ro", "/", "--seccomp", str(fd), "--"]
            words += ["/bin/sh", "-c", before + '"$@"; exit $?', "sh", *unprivileged(root)]
            words += [*self._limited(root, forking), needed.executable, *command[1:]]
            where = Path(needed.executable).parent
            env = {
                "HOME": TMP,
                "TMPDIR": TMP,
                "USER": "sandbox",
                "PATH": f"{where}:/usr/local/bin:/usr/bin:/bin",
            }
            yield Launch(words, (fd,), env, None if forking else self.memory_mib)

    def _folders(self, readable: Sequence[Path], root: bool) -> list[str]:
        """The deeper one counts: a folder in another may be writable, or hidden."""
        binds: dict[Path, str] = {}
        for path in _both(readable):
            if path in _TAKEN:
                raise PermissionError(
                    f"an environment in a sandbox cannot be given {path} to read; name its folder"
                )
            if not path.exists():
                raise FileNotFoundError(f"there is no {path}, which the environment is to read")
            if root and not _others_may(path, 0o5 if path.is_dir() else 0o4):
                raise PermissionError(
                    f"{path} is for its owner alone, and where Keel runs as root an environment in "
                    f"a sandbox is a user of its own: chmod -R o+rX {path}"
                )
            if not path.is_relative_to("/usr"):
                binds[path] = "--ro-bind"
        binds.update(dict.fromkeys(_both(self.writable), "--bind"))
        hidden = _both(self.hidden)
        words, last, mounted = list[str](), list[str](), set[Path]()
        inside = sorted({*binds, *hidden}, key=lambda path: len(path.parts))
        for path in inside:
            above = next((p for p in path.parents if p in binds or p in hidden), None)
            if path in hidden:
                if _through_a_link(path, mounted):
                    continue  # what it leads to is hidden by its own name
                # All of /usr is there, too.
                seen = above in binds or (above is None and path.is_relative_to("/usr"))
                if seen and path.is_dir():
                    words += ["--perms", "0555", "--tmpfs", str(path)]
                    last += ["--remount-ro", str(path)]
                elif seen and path.is_file() and path == path.resolve():
                    words += ["--ro-bind", os.devnull, str(path)]
            elif above not in binds or binds[above] != binds[path]:
                folder = path if path.is_dir() else path.parent
                if above not in binds:
                    words += made_folders([str(folder)])
                words += [binds[path], str(path), str(path)]
                mounted.add(path)
        return words + last

    def _limited(self, root: bool, forking: bool) -> list[str]:
        words = [tool("prlimit"), "--core=0", f"--nofile={OPEN_FILES}"]
        if self.memory_mib is not None:
            words.append(f"--as={self.memory_mib << 20}")
        # In a user namespace, its first process counts too.
        # What is forked has the same limit, and counts here too: it may be raised later.
        most = f"{self.processes + (not root)}{':' * forking}"
        return [*words, f"--nproc={most}", "--"]


def environment_wrap(
    isolation: str,
    *,
    memory_mib: int | None = 4096,
    network: Network = "none",
    processes: int = 128,
    files_mib: int = 256,
    writable: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    knob: str = "agents.isolation",
) -> Wrap | None:
    """A sandbox for environments that was tried out: a program in it has looked for ways out. None
    where none is wanted.

    memory_mib: resident memory of all processes of an episode together, and address space of each;
    None: no limit. network: host is the machine's own, its local services included; loopback one of
    the sandbox's own. processes: with threads. files_mib: of the private /tmp and of /dev/shm,
    which are memory too. writable: folders of this machine that it may change, all episodes the
    same. hidden: folders and files that it must not see, though they may lie in a folder that it
    reads. knob: what sets `isolation`, for messages; empty: nothing does, it is not to be without.

    Raises IsolationError where this machine cannot give it, and ValueError for wrong limits.
    """
    known = get_args(EnvironmentIsolation)
    if isolation not in known:
        raise IsolationError(f"{knob} = {isolation!r}: there are {', '.join(known)}")
    if isolation != "bubblewrap":
        return None
    if network not in get_args(Network):
        raise ValueError(f"network = {network!r}: there are {', '.join(get_args(Network))}")
    for name, value, least in (("processes", processes, 1), ("files_mib", files_mib, 1)):
        if value < least:
            raise ValueError(f"environment sandbox: {name} = {value} must be at least {least}")
    if memory_mib is not None and memory_mib < 64:
        raise ValueError(f"environment sandbox: memory_mib = {memory_mib} must be at least 64")
    for folder in writable:
        if not folder.is_dir():
            raise ValueError(f"environment sandbox: there is no folder {folder} to write to")
        if os.geteuid() == 0 and not _others_may(folder, 0o7):
            raise ValueError(
                f"environment sandbox: {folder} is not for everybody to write to, and where Keel "
                f"runs as root an environment is a user of its own: chmod o+rwx {folder}"
            )

    def sandbox(mounts: bool) -> EnvironmentSandbox:
        return EnvironmentSandbox(
            network=network,
            memory_mib=memory_mib,
            processes=processes,
            files_mib=files_mib,
            writable=tuple(writable),
            hidden=tuple(hidden),
            mounts=mounts,
        )

    for mounts in (True, False):
        if not (complaint := _tried(sandbox(mounts))):
            return sandbox(mounts)
        if not complaint.startswith("bwrap"):
            break
    if not knob:
        raise IsolationError(f"{isolation} does not work here: {complaint}; {_INSTALL}")
    cure = _CURE.format(knob=knob)
    raise IsolationError(f"{knob} = {isolation!r} does not work here: {complaint}; {cure}")


def _through_a_link(path: Path, mounted: Set[Path]) -> bool:
    """Whether a link in a folder that is mounted leads to it."""
    for each in (path, *path.parents):
        if each in mounted:
            return False
        if each.is_symlink():
            return any(above in mounted for above in each.parents)
    return False


def _both(paths: Sequence[Path]) -> list[Path]:
    """Each by its name and by what that leads to."""
    named = [Path(os.path.abspath(path)) for path in paths]
    return list(dict.fromkeys(name for path in named for name in (path, path.resolve())))


def _others_may(path: Path, what: int) -> bool:
    return path.stat().st_mode & what == what


def _tried(sandbox: EnvironmentSandbox) -> str:
    """What a program found out that should not be; "" if nothing."""
    try:
        with sandbox((sys.executable, "-I", "-S", "-c", _PROBE), readable=()) as launch:
            ran = subprocess.run(
                launch.command,
                env={
                    **launch.env,
                    "KEEL_NETWORK": sandbox.network,
                    "KEEL_PROCESSES": str(sandbox.processes),
                },
                pass_fds=launch.pass_fds,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_S,
                start_new_session=True,
            )
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ran.returncode == 0 and ran.stdout == b"isolated":
        return ""
    said = (ran.stdout or ran.stderr).decode(errors="replace").strip()
    return said or f"exit status {ran.returncode}"


_PROBE = """
import ctypes, os, socket
ways = ["is root"] if os.getuid() == 0 else []
if os.getpid() > 9:
    ways.append("sees processes")
for folder in ("/", "/dev", "/etc", "/usr", "/usr/lib"):
    try:
        open(folder + "/probe", "w")
        ways.append("writes to " + folder)
    except OSError:
        pass
open("/tmp/probe", "w").close()
socket.socket(socket.AF_UNIX).close()
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        socket.socket(family, socket.SOCK_RAW if family > 10 else socket.SOCK_STREAM).close()
        if family > 10 or os.environ["KEEL_NETWORK"] == "none":
            ways.append("opens sockets of " + str(family))
    except OSError:
        pass
if os.environ["KEEL_NETWORK"] == "loopback":
    socket.create_server(("127.0.0.1", 0)).close()
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
        ways.append("has a way to other machines")
    except OSError:
        pass
try:
    os.memfd_create("probe")
    ways.append("has memory that is not counted")
except OSError:
    pass
if ctypes.CDLL(None).unshare(0x10000000) == 0:
    ways.append("makes namespaces")
held = os.pipe()
try:
    for _ in range(int(os.environ["KEEL_PROCESSES"]) + 8):
        if os.fork() == 0:
            os.read(held[0], 1)
    ways.append("starts processes without limit")
except OSError:
    pass
os.write(1, ("a program in it " + ", ".join(ways)).encode() if ways else b"isolated")
os._exit(0)
"""
