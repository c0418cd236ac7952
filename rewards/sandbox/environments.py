"""Runs environments in sandboxes. Each episode has its own process tree, which communicates over a
channel.

These sandboxes work like those for programs in completions, with a few differences. An environment
can read its interpreter and the folders that it is given. It may open Unix sockets, which Jupyter
kernels need, and has network access if requested. It has a private /proc and pseudo-terminals if
bubblewrap can mount them on this machine.

The first process in a sandbox is a shell that reaps orphaned processes. When the shell exits, all
other processes in the sandbox are killed. The outer process exits last.
"""

import base64
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from keel.rewards.sandbox import bubblewrap
from keel.rewards.sandbox.bubblewrap import (
    TMP,
    IsolationError,
    folder_args,
    private_folder_args,
    seccomp_filter,
    tool,
)
from keel.rewards.sandbox.processes import MEMORY_LIMITER

_ISOLATIONS = ("bubblewrap", "none-i-trust-the-environments")
Network = Literal["none", "loopback", "host"]  # `loopback` is private

_OPEN_FILES = 1024
_PROBE_TIMEOUT_S = 30.0
_LANGUAGE_FILES = ("/etc/maven", "/etc/php", *map(str, Path("/etc").glob("java-*")))
"""Debian's configuration files for Java, Maven and PHP, which do not work without them."""
_NETWORK_FILES = ("hosts", "nsswitch.conf", "resolv.conf", "ssl", "pki", "ca-certificates")
_RESERVED = tuple(map(Path, ("/", "/dev", "/proc", TMP)))
_INSTALL = "Install bubblewrap (`apt-get install bubblewrap`)"
_CURE = (
    f"{_INSTALL}, or set {{knob}}: none-i-trust-the-environments if environments and the policy in "
    "them may do anything on this machine that you may"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSandbox:
    """Creates sandboxes for environments. Construct it with `environment_sandbox`."""

    network: Network = "none"  # with `host`, environments can also reach this machine's services
    memory_mib: int | None = 4096  # limit on an episode's resident memory, and on address spaces
    processes: int = 128  # maximum number of processes and threads
    files_mib: int = 256  # size of the private /tmp and of /dev/shm. Both are kept in memory.
    writable: Sequence[Path] = ()  # folders on this machine that all episodes can modify
    hidden: Sequence[Path] = ()  # files and folders that environments cannot see
    mounts: bool = True  # mount a private /proc and pseudo-terminals, which some containers forbid

    def __post_init__(self) -> None:
        for folder in self.writable:
            if not folder.is_dir():
                raise ValueError(f"environment sandbox: writable folder {folder} does not exist")
            if os.geteuid() == 0 and not _others_have_mode(folder, 0o7):
                raise ValueError(
                    f"environment sandbox: {folder} is not writable by others, but under root an "
                    f"environment runs as another user: chmod o+rwx {folder}"
                )

    @property
    def fork_isolation(self) -> Mapping[str, Any] | None:
        """Return the settings that isolate a forked process the way a sandbox would, or None if
        this machine doesn't allow mounts."""
        if not self.mounts:
            return None
        return {
            "own_network": self.network != "host",
            "files_mib": self.files_mib,
            "processes": self.processes,
            "filter": base64.b64encode(self._seccomp()).decode(),
        }

    @property
    def probe(self) -> str:
        return bubblewrap.probe_code(network=self.network, processes=self.processes, strict=False)

    def limit_memory(self, pid: int, *, inside: bool) -> Callable[[], str]:
        return MEMORY_LIMITER.add(pid, self.memory_mib, inside=inside)

    def _seccomp(self, *, forks: bool = False) -> bytes:
        internet = () if self.network == "none" else (socket.AF_INET, socket.AF_INET6)
        # What a process needs to move its children into new namespaces.
        permitted = ("mount", "unshare") if forks else ()
        return seccomp_filter(sockets=(socket.AF_UNIX, *internet), permitted=permitted)

    @contextmanager
    def __call__(
        self, command: Sequence[str], *, readable: Sequence[Path], forks: bool = False
    ) -> Generator[tuple[Sequence[str], Mapping[str, str], Sequence[int]]]:
        """Prepare a sandbox for a command line. Yields the command line that starts it, its
        environment variables and the file descriptors to pass. Set `forks` for a process that forks
        children and isolates them using `fork_isolation`. Raises FileNotFoundError if the program
        doesn't exist, and PermissionError if the user inside the sandbox can't read or write a
        folder."""
        root = os.geteuid() == 0
        host = self.network == "host"
        program = find_runtime(command[0])
        # If the machine runs out of memory, the kernel kills an episode before an engine.
        words = [tool("choom"), "-n", "1000", "--", tool("bwrap"), "--as-pid-1"]
        words += [*bubblewrap.namespace_args(root, network=host), *bubblewrap.system_args()]
        words += private_folder_args(TMP, self.files_mib)
        words += folder_args(["/etc"]) + bubblewrap.SYSTEM_FILES
        for path in _LANGUAGE_FILES:
            words += ["--ro-bind-try", path, path]
        if host:
            for name in _NETWORK_FILES:
                words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        words += self._mount_folders([*program.paths, *readable], root)
        mount_proc = ""
        if forks and root:
            # A /proc mounted by root's bubblewrap is partly covered, so nested namespaces could not
            # mount theirs. The program's user can write to none of what would be covered.
            words += ["--cap-add", "CAP_SYS_ADMIN", *folder_args(["/proc"])]
            mount_proc = "mount -t proc -o nosuid,nodev,noexec proc /proc && "
        elif self.mounts:
            words += ["--proc", "/proc"]
        if self.mounts:
            words += ["--dev", "/dev", *private_folder_args("/dev/shm", self.files_mib)]
            words += ["--remount-ro", "/dev"]
        else:
            words += [
                *folder_args(["/dev"]),
                *bubblewrap.device_args(),
                "--symlink",
                TMP,
                "/dev/shm",
            ]
        with ExitStack() as stack:
            fd = bubblewrap.memory_file(stack, self._seccomp(forks=forks))
            words += ["--remount-ro", "/", "--seccomp", str(fd), "--"]
            words += ["/bin/sh", "-c", mount_proc + '"$@"; exit $?', "sh"]
            words += bubblewrap.drop_privileges_args(root)
            words += [tool("prlimit"), "--core=0", f"--nofile={_OPEN_FILES}"]
            if self.memory_mib is not None:
                words.append(f"--as={self.memory_mib << 20}")
            # The first process of a user namespace counts too. Forked children count here and have
            # the same limit, so the forking parent's (with a colon: the soft one only) can be
            # raised.
            words += [f"--nproc={self.processes + (not root)}{':' * forks}", "--"]
            words += [program.executable, *command[1:]]
            env = {
                "HOME": TMP,
                "TMPDIR": TMP,
                "USER": "sandbox",
                "PATH": f"{Path(program.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            }
            yield words, env, (fd,)

    def _mount_folders(self, readable: Sequence[Path], root: bool) -> list[str]:
        """Return the bubblewrap arguments that mount the readable and writable folders and cover
        the hidden ones. Where folders are nested, the innermost one takes precedence."""
        binds: dict[Path, str] = {}
        for path in _with_link_targets(readable):
            if path in _RESERVED:
                raise PermissionError(
                    f"a sandboxed environment cannot read {path}; name a folder within it"
                )
            if not path.exists():
                raise FileNotFoundError(f"the environment's readable folder {path} does not exist")
            if root and not _others_have_mode(path, 0o5 if path.is_dir() else 0o4):
                raise PermissionError(
                    f"{path} is readable by its owner only, but under root a sandboxed environment "
                    f"runs as another user: chmod -R o+rX {path}"
                )
            if not path.is_relative_to("/usr"):
                binds[path] = "--ro-bind"
        binds.update(dict.fromkeys(_with_link_targets(self.writable), "--bind"))
        hidden = _with_link_targets(self.hidden)
        words, last, mounted = list[str](), list[str](), set[Path]()
        for path in sorted({*binds, *hidden}, key=lambda path: len(path.parts)):
            above = next((p for p in path.parents if p in binds or p in hidden), None)
            if path in hidden:
                if _is_reached_through_link(path, mounted):
                    continue  # its target is hidden under its real name
                # All of /usr is mounted too.
                visible = above in binds or (above is None and path.is_relative_to("/usr"))
                if visible and path.is_dir():
                    words += ["--perms", "0555", "--tmpfs", str(path)]
                    last += ["--remount-ro", str(path)]
                elif visible and path.is_file() and path == path.resolve():
                    words += ["--ro-bind", os.devnull, str(path)]
            elif above not in binds or binds[above] != binds[path]:
                folder = path if path.is_dir() else path.parent
                if above not in binds:
                    words += folder_args([str(folder)])
                words += [binds[path], str(path), str(path)]
                mounted.add(path)
        return words + last


def environment_sandbox(
    isolation: str, *, knob: str = "agents.isolation", **settings: Any
) -> EnvironmentSandbox | None:
    """Create an `EnvironmentSandbox` and test it on this machine. Returns None if isolation is
    turned off.

    `settings` are the fields of `EnvironmentSandbox`. `knob` is the setting to name in error
    messages, or "" if isolation can't be turned off. Raises IsolationError if this machine doesn't
    support isolation, and ValueError if a setting is invalid.
    """
    if isolation not in _ISOLATIONS:
        raise IsolationError(f"{knob} = {isolation!r} must be one of {', '.join(_ISOLATIONS)}")
    if isolation != "bubblewrap":
        return None
    bubblewrap.check_machine(knob or repr(isolation))
    sandbox = EnvironmentSandbox(**settings)
    problem = _probe_problem(sandbox)
    if problem.startswith("bwrap"):  # it may not mount /proc in this container
        sandbox = EnvironmentSandbox(**settings, mounts=False)
        problem = _probe_problem(sandbox)
    if not problem:
        return sandbox
    cure = _CURE.format(knob=knob) if knob else _INSTALL
    raise IsolationError(f"{knob or isolation!r} does not work here: {problem}. {cure}")


def _is_reached_through_link(path: Path, mounted: Set[Path]) -> bool:
    for folder in (path, *path.parents):
        if folder in mounted:
            return False
        if folder.is_symlink():
            return any(parent in mounted for parent in folder.parents)
    return False


def _with_link_targets(paths: Sequence[Path]) -> list[Path]:
    absolute = [Path(os.path.abspath(path)) for path in paths]
    return list(dict.fromkeys(name for path in absolute for name in (path, path.resolve())))


def _others_have_mode(path: Path, mode: int) -> bool:
    return path.stat().st_mode & mode == mode


def _probe_problem(sandbox: EnvironmentSandbox) -> str:
    try:
        command = (sys.executable, "-I", "-S", "-c", sandbox.probe)
        with sandbox(command, readable=()) as (words, env, fds):
            done = subprocess.run(
                words,
                env=env,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
                start_new_session=True,
            )
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0 and done.stdout == b"isolated":
        return ""
    message = (done.stdout or done.stderr).decode(errors="replace").strip()
    return message or f"exit status {done.returncode}"


_QUERY = (
    "import json, sys;"
    "print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"
)
_QUERY_TIMEOUT_S = 30.0
_PARTS = ("bin", "lib", "lib64", "share", "ssl", "pyvenv.cfg")  # the rest may be unrelated files
_MAX_LINKS = 40
_PYTHON = re.compile(r"python[0-9.]*t?")
_BASE = re.compile(r"(?m)^\s*(?:home|executable)\s*=\s*(\S.*?)\s*$")  # in pyvenv.cfg


class _Runtime(NamedTuple):
    executable: str  # absolute, with the links by which Python recognizes a virtual environment
    paths: tuple[Path, ...]  # the files that it reads outside /usr, and the links to them


@lru_cache(maxsize=64)
def find_runtime(program: str) -> _Runtime:
    """Find the files an executable needs. It can be a Python interpreter or a script with a `#!`
    line. Raises FileNotFoundError if the program doesn't exist."""
    executable = shutil.which(program)
    if executable is None:
        raise FileNotFoundError(f"there is no program {program}")
    path = Path(executable).absolute()
    with path.open("rb") as file:
        first = file.readline(512)
    script = first.startswith(b"#!")
    if _PYTHON.fullmatch(path.name):
        return _shim_runtime(path) if script else _python_runtime(path)
    paths = tuple(_link_chain(path))
    if script:
        words = shlex.split(first[2:].decode(errors="replace"))
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        if words:
            paths += find_runtime(words[0]).paths
    return _Runtime(str(path), paths)


def _python_runtime(path: Path) -> _Runtime:
    """Find the files of an interpreter and, if it belongs to a virtual environment, those of the
    environment. Folders that only hold a link to the interpreter aren't included: `~/.local/bin`
    may do so, and the rest of `~/.local` is private."""
    links = [path, *_link_chain(path)]
    prefixes: list[Path] = []
    for venv in dict.fromkeys(link.parent.parent for link in links):
        settings = venv / "pyvenv.cfg"
        if settings.is_file():
            prefixes.append(venv)
            # Named there, because the interpreter may be a copy.
            for base in _BASE.findall(settings.read_text(errors="replace")):
                names = [Path(base, name) for name in ("", path.name, "python3", "python")]
                found = [name for name in names if name.is_file()]
                links += [link for name in found[:1] for link in (name, *_link_chain(name))]
    for link in links:
        # A prefix may also be reached through a link to a folder.
        prefix = link.parent.parent
        if prefix.resolve() == link.resolve().parent.parent:
            prefixes.append(prefix)
    parts = [prefix / name for prefix in dict.fromkeys(prefixes) if prefix.name for name in _PARTS]
    paths = [link for part in (*parts, *links) if part.exists() for link in _link_chain(part)]
    return _Runtime(str(path), tuple(dict.fromkeys(paths)))


def _shim_runtime(path: Path) -> _Runtime:
    """Return the interpreter that a script starts, such as a script of pyenv, asdf or nix, by
    running it."""
    # Without `site`: nothing from the environment runs outside the sandbox.
    command = [str(path), "-I", "-S", "-c", _QUERY]
    env = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
        executable, *prefixes = map(Path, json.loads(done.stdout))
    except (subprocess.SubprocessError, ValueError) as error:
        raise FileNotFoundError(f"{path} is no Python interpreter: {error}") from error
    parts = [prefix / name for prefix in dict.fromkeys(prefixes) for name in _PARTS]
    paths = [link for part in parts if part.exists() for link in _link_chain(part)]
    return _Runtime(
        str(executable), tuple(dict.fromkeys([*paths, *_python_runtime(executable).paths]))
    )


def _link_chain(path: Path) -> Iterator[Path]:
    """Yield a path, every symbolic link on the way to its target, and the target itself. Paths
    under /usr are skipped."""
    names, real = [path], path.resolve()
    while path.is_symlink() and len(names) < _MAX_LINKS:
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
        names.append(path)
    for name in dict.fromkeys([*names, real]):
        if not name.is_relative_to("/usr"):
            yield name
