"""Imports an environment once and forks a process for each episode.

It is started as `python start.py fork_server:main` and needs Linux and Python 3.9 or later.

Standard input is a socket (SOCK_SEQPACKET) that carries JSON messages, one at a time:

    → {"do": "load", "target": "my_env:Shop", "kind": "auto", "arguments": {"action": null},
       "paths": […], "memory_mib": 2048}
    ← {"is": {}}
    → {"do": "fork", "isolation": {…} or null, "env": {…}, "run": null}
                              with two descriptors: the episode's channel, its standard error
    ← {"is": {"pid": 12}}                                   with one: a pidfd of that process
    → {"do": "reap", "pid": 12}
    ← {"is": {"status": 0}}                 once it has ended; negative: the signal that ended it

Instead of "is", a reply may have "cannot" (the reason why forking is unsafe or failed) or one of
the errors in server.py. A forked process then uses the protocol of server.py, or executes the code
in `run` if there is any.

`isolation` has the settings of the sandbox: own_network, files_mib (the size of /tmp and of
/dev/shm), processes and filter (base64). If it is set, the reported process is the first one in a
PID namespace. It exits with the program's status, or with 128 plus the number of the signal that
ended the program.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import json
import os
import random
import resource
import shutil
import socket
import sys
from contextlib import suppress
from typing import Any, Optional, cast

from keel.agents.env_runtime.processes import adopt_orphans, limit_memory, protect_process
from keel.agents.env_runtime.server import failure_of, preload, redirect_prints, serve
from keel.agents.env_runtime.tool_objects import error_text

_MAX_BYTES = 1 << 16
_Data = dict[str, Any]


class _ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._files = _open_files()

    def load(self, request: _Data) -> _Data:
        limit_memory(request["memory_mib"])
        sys.path[:0] = request["paths"]
        random.seed(0)
        preload(request)
        if reason := self._shared_state():
            return {"cannot": f"importing it {reason}"}
        with suppress(OSError, ValueError):  # forked processes count towards this limit
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
        gc.collect()
        gc.freeze()  # later collections do not copy shared pages
        return {"is": {}}

    def _shared_state(self) -> str:
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            return f"starts {threads - 1} thread(s)"
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            if file.read().split():
                return "starts a process"
        if opened := sorted(_open_files() - self._files):
            return f"opens {opened[0][1]}"
        with open("/proc/self/maps") as file:
            for line in file:
                permissions, name = line.split()[1], line.rstrip().rpartition(" ")[2]
                if permissions.startswith("rw") and permissions.endswith("s"):
                    return f"maps shared memory ({name})"
        return ""

    def fork(self, request: _Data, channel: int, stderr: int) -> Optional[int]:  # noqa: UP045
        isolation = request["isolation"]
        with open("/proc/self/mountinfo", "rb") as file:
            mounts = [line.split()[4] for line in file]
        # A private /tmp would hold a copy of these folders.
        if isolation is not None and any(one.startswith(b"/tmp/") for one in mounts):
            self._send({"cannot": "the environment has folders in /tmp"})
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        if isolation is None:
            pid = os.fork()
            if pid:
                self._report(pid)
                return None
        else:
            # Makes this process reap the child of `middle`. Without a sandbox, a program's orphans
            # would collect here.
            adopt_orphans()
            middle = os.fork()
            if middle:
                os.waitpid(middle, 0)
                return None
            self._fork_isolated(isolation, channel, stderr)
        self._control.close()
        protect_process()
        os.setsid()
        os.dup2(stderr, 2)
        os.dup2(2, 1)
        os.close(stderr)
        os.environ.update(request["env"])
        if "tempfile" in sys.modules:
            cast(Any, sys.modules["tempfile"]).tempdir = None  # look it up again
        return channel

    def _fork_isolated(self, isolation: _Data, channel: int, stderr: int) -> None:
        """Fork twice more to enter new namespaces. Only returns in the last child process."""
        uid, gid = os.getuid(), os.getgid()
        status_read, status_write = os.pipe()
        try:
            _unshare(isolation)
            first = os.fork()
        except OSError as error:
            self._send({"cannot": str(error)})
            os._exit(1)
        if first:
            os.close(status_write)
            message = os.read(status_read, _MAX_BYTES).decode()
            if message == "ready":
                self._report(first)
            else:
                os.waitpid(first, 0)
                self._send({"cannot": message or "it could not be isolated"})
            os._exit(0)  # the server inherits the child
        os.close(status_read)
        try:
            _isolate(isolation, uid, gid)
            program = os.fork()
        except Exception as error:
            os.write(status_write, error_text(error).encode()[: _MAX_BYTES // 2])
            os._exit(1)
        if program:  # this is the init process of the PID namespace
            os.write(status_write, b"ready")
            for fd in (status_write, channel, stderr, self._control.fileno()):
                os.close(fd)
            while True:
                pid, status = os.wait()
                if pid == program:
                    code = os.waitstatus_to_exitcode(status)
                    os._exit(128 - code if code < 0 else code)
        os.close(status_write)

    def _report(self, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, 9)
            self._send({"cannot": f"no pidfd: {error}"})
            return
        self._send({"is": {"pid": pid}}, fd)
        os.close(fd)

    def _send(self, reply: _Data, *fds: int) -> None:
        socket.send_fds(self._control, [json.dumps(reply).encode()], fds)

    def serve(self) -> Optional[tuple[int, Optional[str]]]:  # noqa: UP045
        """Handle requests until the socket closes. If a request forks the process, returns in the
        child, with its channel and the code it should run."""
        while True:
            line, fds, _, _ = socket.recv_fds(self._control, _MAX_BYTES, 2)
            if not line:
                return None
            for fd in fds:  # processes that the environment starts must not reach Keel
                os.set_inheritable(fd, False)
            request = json.loads(line)
            try:
                if request["do"] == "fork":
                    channel = self.fork(request, *fds)
                    if channel is not None:
                        return channel, request["run"]
                    reply = None
                elif request["do"] == "reap":
                    status = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
                    reply = {"is": {"status": status}}
                else:
                    reply = self.load(request)
            except Exception as error:
                reply = failure_of(error)
                if request["do"] == "fork":  # a limit of the machine, met by this episode alone
                    reply = {"cannot": error_text(error)}
            if reply is not None:
                self._send(reply)
            sys.stdout.flush()
            sys.stderr.flush()
            for fd in fds:
                os.close(fd)


def _open_files() -> set[tuple[int, str]]:
    files: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of this listing
            files.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return files


def main() -> None:
    protect_process()
    control = socket.socket(fileno=os.dup(0))
    redirect_prints()
    forked = _ForkServer(control).serve()
    if forked is None:
        return
    channel, run = forked
    if run is not None:
        exec(compile(run, "<run>", "exec"), {})
        return
    serve(open(channel, "rb"), open(os.dup(channel), "wb"))  # noqa: SIM115


# Isolates a forked process in the same way as bubblewrap isolates a process that it starts. The
# process keeps the mounts of the sandbox in which it runs. Two user namespaces are nested: the
# process is root in the outer one, because mounting pseudo-terminals requires it, and the original
# user in the inner one. See user_namespaces(7), pid_namespaces(7) and seccomp(2).
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_SET_DUMPABLE, _SET_SECCOMP, _NO_NEW_PRIVILEGES = 4, 22, 38
_FILTER_MODE = 2
_CAPABILITIES_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def _unshare(isolation: _Data) -> None:
    """Enter new namespaces. The next child process becomes the first process (PID 1) in them."""
    uid, gid = os.getuid(), os.getgid()
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # or the maps are not writable
    flags = _NEW_USER | _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS
    if isolation["own_network"]:
        flags |= _NEW_NETWORK
    _check(_libc.unshare(flags), "unshare")
    _map_user((0, uid), (0, gid))


def _isolate(isolation: _Data, uid: int, gid: int) -> None:
    """Set up private mounts and drop all privileges. Must run as the first process in the new
    namespaces."""
    size = b"mode=1777,size=%d" % (isolation["files_mib"] << 20)
    _mount_private_tmp(size)
    _mount(b"tmpfs", b"/dev/shm", _NOSUID | _NODEV, size)
    terminals = b"newinstance,ptmxmode=0666,mode=620"
    _mount(b"devpts", b"/dev/pts", _NOSUID | _NOEXEC, terminals)
    _mount(b"proc", b"/proc", _NOSUID | _NODEV | _NOEXEC, None)
    _check(_libc.unshare(_NEW_USER), "unshare")
    _map_user((uid, 0), (gid, 0))
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    program = base64.b64decode(isolation["filter"])
    rules = _Filter(len(program) // 8, program)
    _check(_libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.byref(rules), 0, 0), "seccomp")
    # The first process of a user namespace counts too.
    resource.setrlimit(resource.RLIMIT_NPROC, (isolation["processes"] + 1,) * 2)


def _mount_private_tmp(options: bytes) -> None:
    """Mount a private /tmp that keeps the files created during the import."""
    previous = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    _mount(b"tmpfs", b"/tmp", _NOSUID | _NODEV, options)
    shutil.copytree(f"/proc/self/fd/{previous}", "/tmp", symlinks=True, dirs_exist_ok=True)
    os.close(previous)


def _map_user(uid: tuple[int, int], gid: tuple[int, int]) -> None:
    users, groups = (f"{inside} {outside} 1" for inside, outside in (uid, gid))
    for name, line in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _mount(kind: bytes, where: bytes, flags: int, data: Optional[bytes]) -> None:  # noqa: UP045
    _check(_libc.mount(kind, where, kind, flags, data), f"mount {kind.decode()}")


def _check(result: int, operation: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")
