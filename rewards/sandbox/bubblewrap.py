"""Builds the bubblewrap arguments that all sandboxes share."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

TMP = "/tmp"
SYSTEM_FILES = [
    word
    for name in ("/etc/ld.so.cache", "/etc/alternatives")
    for word in ("--ro-bind-try", name, name)
]
PROGRAMS = ("bin", "include", "lib", "lib32", "lib64", "libexec", "libx32", "share/zoneinfo")
"""The folders in /usr that programs and compilers need. Other folders may contain answers."""
DEVICES = ("null", "full", "random", "urandom")


class IsolationError(ValueError):
    """Raised if this machine cannot isolate programs. The message names the setting and a
    solution."""


def namespaces(root: bool, *, network: bool = False) -> list[str]:
    """Return the arguments that run a program in new namespaces without capabilities.

    If `root` is set, bubblewrap itself runs as root. It then keeps the capabilities that it needs
    to switch to another user (see `unprivileged`). If `network` is set, the program can use the
    machine's network.
    """
    words = ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    if not network:
        words.append("--unshare-net")
    words += ["--cap-drop", "ALL"]
    if not root:
        return [*words, "--unshare-user"]
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        words += ["--cap-add", capability]
    return words


def system(folders: Sequence[str] = ()) -> list[str]:
    """Return the arguments that mount the given folders in /usr read-only, or all of /usr if none
    are given."""
    words = ["--ro-bind", "/usr", "/usr"]
    if folders:
        words = ["--perms", "0755", "--dir", "/usr"]
        words += make_folders(str(Path("/usr", f).parent) for f in folders if "/" in f)
        for name in folders:
            words += ["--ro-bind-try", f"/usr/{name}", f"/usr/{name}"]
    for name in ("bin", "lib", "lib64"):
        if Path(f"/{name}").is_symlink():
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        else:
            words += ["--ro-bind-try", f"/{name}", f"/{name}"]
    return words


def make_folders(folders: Iterable[str]) -> list[str]:
    """Return the arguments that create mount points explicitly. Implicit ones would be accessible
    only to root."""
    words: list[str] = []
    created: set[str] = set()
    for folder in folders:
        for parent in (*reversed(Path(folder).parents[:-1]), Path(folder)):
            if str(parent) not in created:
                created.add(str(parent))
                words += ["--perms", "0755", "--dir", str(parent)]
    return words


def devices(names: Sequence[str] = (*DEVICES, "zero")) -> list[str]:
    return [word for n in names for word in ("--dev-bind", f"/dev/{n}", f"/dev/{n}")]


def private_folder(folder: str, mib: int) -> list[str]:
    return ["--perms", "1777", "--size", str(mib << 20), "--tmpfs", folder]


def unprivileged(root: bool) -> list[str]:
    """Return a command prefix that drops the privileges of root inside the sandbox."""
    if not root:
        return []
    # A random unused user ID, so that per-user limits apply to a single run.
    spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max((tuple(map(int, span)) for span in spans), key=lambda span: span[2])
    user = str(first + count // 4 + secrets.randbelow(count // 4))
    words = [tool("setpriv"), "--reuid", user, "--regid", user, "--clear-groups"]
    return [*words, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]


def tool(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin:/usr/sbin")
    if path is None:
        raise RuntimeError(f"{name} is not installed")
    return path


def memory_file(stack: ExitStack, data: bytes) -> int:
    """Return a read-only file descriptor of a sealed memory file that contains `data`."""
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fd = os.memfd_create("keel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, read_only)
    return read_only


_PROBE = """
import ctypes, os, socket
holes = ["is root"] if os.getuid() == 0 else []
if os.path.exists("/proc/self") if STRICT else os.getpid() > 9:
    holes.append("sees processes")
for folder in ("/", "/box", "/dev", "/etc", "/usr", "/usr/lib"):
    try:
        open(folder + "/probe", "w")
        holes.append("writes to " + folder)
    except OSError:
        pass
open("/tmp/probe", "w").close()
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        socket.socket(family, socket.SOCK_RAW if family > 10 else socket.SOCK_STREAM).close()
        if family > 10 or NETWORK == "none":
            holes.append("opens sockets of " + str(family))
    except OSError:
        pass
try:
    socket.socket(socket.AF_UNIX).close()
    holes += ["opens Unix sockets"] * STRICT
except OSError:
    if not STRICT:
        raise
if NETWORK == "loopback":
    socket.create_server(("127.0.0.1", 0)).close()
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
        holes.append("has a way to other machines")
    except OSError:
        pass
try:
    os.memfd_create("probe")
    holes.append("has memory that is not counted")
except OSError:
    pass
if ctypes.CDLL(None).unshare(0x10000000) == 0:
    holes.append("makes namespaces")
held = os.pipe()
try:
    for _ in range(PROCESSES + 8):
        if os.fork() == 0:
            os.read(held[0], 1)
    holes.append("starts processes without limit")
except OSError:
    pass
os.write(1, ("a program inside " + ", ".join(holes)).encode() if holes else b"isolated")
os._exit(0)
"""


def probe(*, network: str, processes: int, strict: bool) -> str:
    """Return Python code that tries to break out of the sandbox, and prints `isolated` if it fails.
    Set `strict` for sandboxes of programs, which have no /proc and no sockets."""
    return f"STRICT, NETWORK, PROCESSES = {strict!r}, {network!r}, {processes!r}{_PROBE}"
