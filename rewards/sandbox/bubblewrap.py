"""What every sandbox is made of, in bubblewrap's words: namespaces, a system that can only be read,
devices, a private folder, and a user that nobody else is."""

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


class IsolationError(ValueError):
    """This machine cannot isolate programs. Says why, and the cure."""


def namespaces(root: bool, *, network: bool = False) -> list[str]:
    """Of its own, without any right over them. network: whether it keeps the machine's.

    root: whether bubblewrap is started by it. It becomes the program's user inside, which takes
    capabilities and ends them (`unprivileged`).
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


PROGRAMS = ("bin", "include", "lib", "lib32", "lib64", "libexec", "libx32", "share/zoneinfo")
"""Of /usr, what programs and compilers need. Data that others keep there may hold answers."""


def system(folders: Sequence[str] = ()) -> list[str]:
    """folders: of /usr; none: all of it."""
    words = ["--ro-bind", "/usr", "/usr"]
    if folders:
        words = ["--perms", "0755", "--dir", "/usr"]
        words += made_folders(str(Path("/usr", f).parent) for f in folders if "/" in f)
        for name in folders:
            words += ["--ro-bind-try", f"/usr/{name}", f"/usr/{name}"]
    for name in ("bin", "lib", "lib64"):
        if Path(f"/{name}").is_symlink():
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        else:
            words += ["--ro-bind-try", f"/{name}", f"/{name}"]
    return words


def made_folders(folders: Iterable[str]) -> list[str]:
    """Made beforehand where the program's user must pass through: otherwise only root could."""
    words: list[str] = []
    made: set[str] = set()
    for folder in folders:
        for parent in (*reversed(Path(folder).parents[:-1]), Path(folder)):
            if str(parent) not in made:
                made.add(str(parent))
                words += ["--perms", "0755", "--dir", str(parent)]
    return words


def hidden(folders: Iterable[str]) -> list[str]:
    """Folders of those that are mounted, empty and read-only instead."""
    words: list[str] = []
    for folder in folders:
        words += ["--perms", "0555", "--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    return words


def packages(folders: Iterable[str]) -> list[str]:
    """Where Python's packages, this one with its tasks among them, lie under folders of
    libraries."""
    names = ("site-packages", "dist-packages")
    found = [
        str(path)
        for folder in folders
        for name in names
        for path in Path(folder).glob(f"python3*/{name}")
        if path.is_dir() and not path.is_symlink()
    ]
    return sorted(dict.fromkeys(found))


DEVICES = ("null", "full", "random", "urandom")


def devices(names: Sequence[str] = (*DEVICES, "zero")) -> list[str]:
    return [word for n in names for word in ("--dev-bind", f"/dev/{n}", f"/dev/{n}")]


def private(folder: str, mib: int) -> list[str]:
    return ["--perms", "1777", "--size", str(mib << 20), "--tmpfs", folder]


def unprivileged(root: bool) -> list[str]:
    """In front of the program, inside."""
    if not root:
        return []
    user = _unused_user()
    words = [tool("setpriv"), "--reuid", user, "--regid", user, "--clear-groups"]
    return [*words, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]


def _unused_user() -> str:
    """A user id that (all but certainly) nobody has, so that limits by user hold for one run."""
    spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max((tuple(map(int, span)) for span in spans), key=lambda span: span[2])
    return str(first + count // 4 + secrets.randbelow(count // 4))


def tool(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin:/usr/sbin")
    if path is None:
        raise RuntimeError(f"{name} is not installed")
    return path


def memory_file(stack: ExitStack, data: bytes) -> int:
    """A descriptor of `data` that can be read and nothing else."""
    sealed = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fd = os.memfd_create("keel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sealed)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, again)
    return again
