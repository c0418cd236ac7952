"""The process that loads an environment's program once and forks a process for each episode:
`python start.py parent`, any Python from 3.9 on Linux.

JSON messages over the socket (SOCK_SEQPACKET) that is standard input:

    → {"id": 1, "do": "load", "target": "my_env:Shop", "paths": […], "memory_mib": 2048,
       "action": null}
    ← {"id": 1, "is": {}}
    → {"id": 2, "do": "fork", "inner": {…} or null, "env": {…}, "run": null}
                              with two descriptors: the episode's channel, its standard error
    ← {"id": 2, "is": {"pid": 12}}                          with one: a pidfd of that process
    → {"id": 3, "do": "reap", "pid": 12}
    ← {"id": 3, "is": {"status": 0}}        once it has ended; below 0: the signal that ended it

In place of "is": "cannot" (forking would not be safe here, and why), and what start.py says. A
forked process then speaks as start.py does; `run` is code that it runs instead.

inner: `keel.agents.env_runtime.isolate`. The process that is told of is then the first of its own
namespace, and ends with the status of the program, 128 and the signal where one ended it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import resource
import socket
import sys
from contextlib import suppress
from typing import Any, Optional, cast

from keel.agents.env_runtime.episode import limit_memory, serve, stand_alone
from keel.agents.env_runtime.errors import InvalidEnvironment, error_location, error_text
from keel.agents.env_runtime.isolate import Inner, leave_namespaces, shut
from keel.agents.env_runtime.load import preload

MOST_BYTES = 1 << 16
Reply = dict[str, Any]


class Parent:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._files = _open_files()

    def load(self, request: Reply) -> Reply:
        limit_memory(request["memory_mib"])
        sys.path[:0] = request["paths"]
        random.seed(0)
        preload(request["target"], request["action"])
        if why := self._shared():
            return {"cannot": why}
        with suppress(OSError, ValueError):  # its children count among its own from here on
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
        gc.collect()
        gc.freeze()  # so that collecting garbage copies none of it
        return {"is": {}}

    def _shared(self) -> str:
        """What two processes would have in common that were forked now; "" if nothing."""
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            return f"importing it starts {threads - 1} thread(s)"
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            if file.read().split():
                return "importing it starts a process"
        if more := sorted(_open_files() - self._files):
            return f"importing it opens {more[0][1]}"
        with open("/proc/self/maps") as file:
            for line in file:
                words = line.split(None, 5)
                if words[1].startswith("rw") and words[1].endswith("s"):
                    return f"importing it maps shared memory ({(words[5:] or ['?'])[0].strip()})"
        return ""

    def fork(self, request: Reply, channel: int, words: int) -> Optional[int]:  # noqa: UP045
        """In the parent, None and a message; in the forked process, the channel."""
        number, inner = request["id"], request["inner"]
        sys.stdout.flush()
        sys.stderr.flush()
        if inner is None:
            pid = os.fork()
            if pid:
                self._tell(number, pid)
                return None
        else:
            # What `between` leaves is for this process to reap (PR_SET_CHILD_SUBREAPER). Without a
            # sandbox, what a program leaves would become its child, too, and stay for good.
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
            between = os.fork()
            if between:
                os.waitpid(between, 0)
                return None
            self._apart(number, inner, channel, words)
        self._control.close()
        stand_alone()
        os.setsid()
        os.dup2(words, 2)
        os.dup2(2, 1)
        os.close(words)
        os.environ.update(request["env"])
        if "tempfile" in sys.modules:
            cast(Any, sys.modules["tempfile"]).tempdir = None  # found anew
        return channel

    def _apart(self, number: int, inner: Inner, channel: int, words: int) -> None:
        """Forks twice more; only the last, which the episode lives in, returns."""
        uid, gid = os.getuid(), os.getgid()
        ready, say = os.pipe()
        try:
            leave_namespaces(inner)
            first = os.fork()
        except OSError as error:
            self._send({"id": number, "cannot": str(error)})
            os._exit(1)
        if first:
            os.close(say)
            complaint = os.read(ready, MOST_BYTES).decode()
            if complaint == "ready":
                self._tell(number, first)
            else:
                os.waitpid(first, 0)  # it has ended, and nobody would ask for it
                self._send({"id": number, "cannot": complaint or "it could not be isolated"})
            os._exit(0)  # its child is the parent's then
        os.close(ready)
        try:
            shut(inner, uid, gid)
            program = os.fork()
        except Exception as error:
            os.write(say, error_text(error).encode()[: MOST_BYTES // 2])
            os._exit(1)
        if program:
            os.write(say, b"ready")
            for fd in (say, channel, words, self._control.fileno()):
                os.close(fd)
            while True:
                pid, status = os.wait()
                if pid == program:
                    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
                    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else code)
        os.close(say)

    def _tell(self, number: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError) as error:  # an old kernel, or Python
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
            self._send({"id": number, "cannot": f"no pidfd: {error}"})
            return
        self._send({"id": number, "is": {"pid": pid}}, fd)
        os.close(fd)

    def _send(self, reply: Reply, *fds: int) -> None:
        socket.send_fds(self._control, [json.dumps(reply).encode()], fds)

    def serve(self) -> Optional[tuple[int, Optional[str]]]:  # noqa: UP045
        """Until Keel is gone. In a forked process, its channel and what it is to run instead."""
        while True:
            line, fds, _, _ = socket.recv_fds(self._control, MOST_BYTES, 2)
            for fd in fds:  # a process that the environment starts is not to answer Keel
                os.set_inheritable(fd, False)
            if not line:
                return None
            request = json.loads(line)
            number = request["id"]
            try:
                if request["do"] == "fork":
                    channel = self.fork(request, *fds)
                    if channel is not None:
                        return channel, request["run"]
                elif request["do"] == "reap":
                    status = os.waitpid(request["pid"], 0)[1]
                    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else status >> 8
                    self._send({"id": number, "is": {"status": code}})
                else:
                    self._send({"id": number, **self.load(request)})
            except MemoryError:
                self._send({"id": number, "memory": True})
            except InvalidEnvironment as error:
                self._send({"id": number, "refused": str(error)})
            except Exception as error:
                if request["do"] == "fork":  # the machine's limits: of this episode alone
                    self._send({"id": number, "cannot": error_text(error)})
                else:
                    self._send(
                        {"id": number, "raised": error_text(error), "at": error_location(error)}
                    )
            sys.stdout.flush()
            sys.stderr.flush()
            for fd in fds:
                os.close(fd)


def _open_files() -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed them
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def main() -> None:
    stand_alone()
    control = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    os.close(nowhere)
    forked = Parent(control).serve()
    if forked is None:
        return
    channel, run = forked
    if run is not None:
        exec(compile(run, "<run>", "exec"), {})
        return
    serve(open(channel, "rb"), open(os.dup(channel), "wb"))  # noqa: SIM115
