"""Imports an environment once and forks a process for each episode.

This program is started as `python start.py fork-server`. It needs Linux and Python 3.9 or later.

Standard input is a socket (SOCK_SEQPACKET) that carries JSON messages:

    → {"id": 1, "do": "load", "target": "my_env:Shop", "paths": […], "memory_mib": 2048,
       "action": null}
    ← {"id": 1, "is": {}}
    → {"id": 2, "do": "fork", "inner": {…} or null, "env": {…}, "run": null}
                              with two descriptors: the episode's channel, its standard error
    ← {"id": 2, "is": {"pid": 12}}                          with one: a pidfd of that process
    → {"id": 3, "do": "reap", "pid": 12}
    ← {"id": 3, "is": {"status": 0}}        once it has ended; negative: the signal that ended it

Instead of "is", a reply may have "cannot" (the reason why forking is unsafe or failed) or one of
the errors in start.py. A forked process then uses the protocol of start.py, or executes the code in
`run` if there is any.

`inner` contains the settings for `keel.agents.env_runtime.isolate`. If it is set, the reported
process is the first one in a PID namespace. It exits with the program's status, or with 128 plus
the number of the signal that ended the program.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import socket
import sys
from contextlib import suppress
from typing import Any, Optional, cast

from keel.agents.env_runtime.episode import failure_of, redirect_prints, serve
from keel.agents.env_runtime.errors import error_text
from keel.agents.env_runtime.isolate import Inner, isolate, unshare
from keel.agents.env_runtime.load import preload
from keel.agents.env_runtime.processes import adopt_orphans, limit_memory, protect_process

_MAX_BYTES = 1 << 16
_Reply = dict[str, Any]


class _Forker:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._files = _open_files()

    def load(self, request: _Reply) -> _Reply:
        limit_memory(request["memory_mib"])
        sys.path[:0] = request["paths"]
        random.seed(0)
        preload(request["target"], request["action"])
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

    def fork(self, request: _Reply, channel: int, stderr: int) -> Optional[int]:  # noqa: UP045
        """Fork a process. Returns None in the server and the channel in the forked process."""
        number, inner = request["id"], request["inner"]
        sys.stdout.flush()
        sys.stderr.flush()
        if inner is None:
            pid = os.fork()
            if pid:
                self._report(number, pid)
                return None
        else:
            # Makes this process reap the child of `middle`. Without a sandbox, a program's orphans
            # would collect here.
            adopt_orphans()
            middle = os.fork()
            if middle:
                os.waitpid(middle, 0)
                return None
            self._fork_isolated(number, inner, channel, stderr)
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

    def _fork_isolated(self, number: int, inner: Inner, channel: int, stderr: int) -> None:
        """Fork twice more, into new namespaces. Only the last process returns."""
        uid, gid = os.getuid(), os.getgid()
        status_read, status_write = os.pipe()
        try:
            unshare(inner)
            first = os.fork()
        except OSError as error:
            self._send({"id": number, "cannot": str(error)})
            os._exit(1)
        if first:
            os.close(status_write)
            message = os.read(status_read, _MAX_BYTES).decode()
            if message == "ready":
                self._report(number, first)
            else:
                os.waitpid(first, 0)
                self._send({"id": number, "cannot": message or "it could not be isolated"})
            os._exit(0)  # the server inherits the child
        os.close(status_read)
        try:
            isolate(inner, uid, gid)
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

    def _report(self, number: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError) as error:  # an old kernel or Python
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
            self._send({"id": number, "cannot": f"no pidfd: {error}"})
            return
        self._send({"id": number, "is": {"pid": pid}}, fd)
        os.close(fd)

    def _send(self, reply: _Reply, *fds: int) -> None:
        socket.send_fds(self._control, [json.dumps(reply).encode()], fds)

    def serve(self) -> Optional[tuple[int, Optional[str]]]:  # noqa: UP045
        """Handle requests until Keel closes the socket. In a forked process, returns its channel
        and `run`."""
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
                self._send({"id": request["id"], **reply})
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
    forked = _Forker(control).serve()
    if forked is None:
        return
    channel, run = forked
    if run is not None:
        exec(compile(run, "<run>", "exec"), {})
        return
    serve(open(channel, "rb"), open(os.dup(channel), "wb"))  # noqa: SIM115
