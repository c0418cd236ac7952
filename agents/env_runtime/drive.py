"""The process that an agent program runs under: `python drive.py`, any Python from 3.9.

One JSON line on standard input says what to run; one on standard output says how it ended. What the
program prints goes to standard error. In a sandbox without a network, the endpoint is a unix
socket: connections to a port of the sandbox's own loopback are passed on to it.

    → {"command": ["my-agent", "--task", "{prompt}"], "env": {…}, "prompt": "…", "task": {…},
       "socket": "/…/keel.sock" or null, "memory_mib": 2048 or null}
    ← {"exit": 0, "last": "its last line", "verdict": "what it wrote to $KEEL_VERDICT" or null}
       or {"cannot": "why it was not started"}

It then waits to be killed, so that whatever the program started is still below it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

MOST_LINE = 1 << 20
"""Bytes of the last line, and of a verdict, that are looked at."""
MOST_IN_ENV = 100_000
"""Bytes of KEEL_TASK: the system takes 131071 of one variable."""
MOST_CONNECTIONS = 256
"""That are passed on at once, two files and threads each; others wait."""
PAUSE_S = 0.05
URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "KEEL_MCP_URL")


def end_with_parent() -> None:
    with suppress(Exception):  # another system
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def keep_orphans() -> None:
    """What the program leaves behind becomes a child of this process, and is found and killed."""
    with suppress(Exception):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def limit_memory(mib: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mib is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = mib << 20
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def pass_on(path: str) -> int:
    """Listen on a port of the loopback, and pass connections on to the unix socket `path`."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    room = threading.Semaphore(MOST_CONNECTIONS)

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one side has gone: so does the other
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def serve(near: socket.socket) -> None:
        try:
            joined(near)
        finally:
            room.release()

    def joined(near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far:
            try:
                far.connect(path)
            except OSError as error:
                print(f"the endpoint {path} cannot be reached: {error}", file=sys.stderr)
                return
            back = threading.Thread(target=pump, args=(far, near), daemon=True)
            back.start()
            pump(near, far)
            back.join()

    def accept() -> None:
        while True:
            room.acquire()
            try:
                near, _ = listening.accept()
            except OSError:  # out of files: until some are closed, others wait
                room.release()
                time.sleep(PAUSE_S)
                continue
            try:
                threading.Thread(target=serve, args=(near,), daemon=True).start()
            except RuntimeError:  # out of threads
                near.close()
                room.release()

    threading.Thread(target=accept, daemon=True, name="passing on").start()
    return listening.getsockname()[1]


class LastLine:
    """Hears what the program prints, keeps the last line and passes all on to standard error."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._line = b""
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        rest = b""
        while data := os.read(self._pipe.fileno(), 1 << 16):
            with suppress(OSError):
                os.write(2, data)
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-MOST_LINE:]
            for line in (*lines, rest):
                if line.strip():
                    self._line = line[-MOST_LINE:]

    def text(self) -> str:
        self._thread.join(0.5)  # something that the program left may hold the pipe open
        return self._line.decode(errors="replace").strip()


def status_of(process: Any) -> int:
    """How it ended. Orphans that end before it are reaped: a sandbox has room for few processes,
    and each that nobody waits for takes a place."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def run(request: dict[str, Any]) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="keel-")
    task = json.dumps(request["task"])
    paths = {name: os.path.join(folder, name) for name in ("prompt", "task", "verdict")}
    for name, text in (("prompt", request["prompt"]), ("task", task)):
        with open(paths[name], "w", encoding="utf-8") as file:
            file.write(text)
    env = {**os.environ, **request["env"]}
    env.update(KEEL_TASK_FILE=paths["task"], KEEL_VERDICT=paths["verdict"])
    if len(task.encode()) <= MOST_IN_ENV:
        env["KEEL_TASK"] = task
    if request["socket"] is not None:
        try:
            port = pass_on(request["socket"])
        except OSError as error:
            return {
                "cannot": f"no socket can be opened here ({error}): the sandbox of a driven "
                "program must let it open sockets; without a network they reach the endpoint alone"
            }
        for name in [name for name in URLS if name in env]:
            path = request["env"][name].split("/", 3)[3]
            env[name] = f"http://127.0.0.1:{port}/{path}"
    words = {"{prompt}": request["prompt"], "{prompt_file}": paths["prompt"]}
    command: list[str] = []
    for word in request["command"]:
        for name, text in words.items():
            if name in word:
                word = word.replace(name, text)
                break
        command.append(word)
    limit_memory(request["memory_mib"])
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=env,
            preexec_fn=end_with_parent,
        )
    except (OSError, ValueError) as error:
        return {"cannot": f"cannot run {command[0]}: {error}"}
    last = LastLine(process.stdout)
    code = status_of(process)  # the deadline is the other side's, which kills
    verdict = None
    with suppress(OSError), open(paths["verdict"], "rb") as file:
        verdict = file.read(MOST_LINE).decode(errors="replace")
    return {"exit": code, "last": last.text(), "verdict": verdict}


def main() -> None:
    end_with_parent()
    keep_orphans()
    requests = open(os.dup(0), "rb")  # noqa: SIM115
    answers = open(os.dup(1), "wb")  # noqa: SIM115
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # nothing that is printed must be taken for the answer
    os.close(nowhere)
    answer = run(json.loads(requests.readline()))
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()
    requests.readline()


if __name__ == "__main__":
    main()
