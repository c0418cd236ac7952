"""Runs an author's code in forked processes inside the sandbox.

These processes can open no files, start no processes and write only to their channel. The messages
that they send are untrusted.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, cast

from keel.agents.env_runtime.episode import protect_process
from keel.agents.env_runtime.errors import InvalidEnvironment, error_text

MEMORY_MIB = 512
MOST_BYTES = 4 << 20
"""Size limit for a message."""
Message = dict[str, Any]


class ChildEnded(Exception):
    """A child has exited, timed out or sent an invalid message."""


class Channel:
    """One end of a connection that carries JSON lines."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._heard = end, b""

    def send(self, message: Message) -> None:
        """Send a message.

        Raises ChildEnded if the other end is closed, and ValueError if the message is not JSON.
        """
        line = json.dumps(message, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            self._end.sendall(line)
        except OSError as error:
            raise ChildEnded("its process ended") from error

    def receive(self, within_s: float | None = None) -> Message:
        """Receive a message.

        Raises ChildEnded on a timeout or if the message is invalid.
        """
        until = None if within_s is None else time.monotonic() + within_s
        while b"\n" not in self._heard:
            remaining = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._end], [], [], remaining)[0]:
                raise ChildEnded(f"it did not end within {within_s:g} s")
            data = self._end.recv(1 << 16)
            self._heard += data
            if not data or len(self._heard) > MOST_BYTES:
                raise ChildEnded("its message is too large" if data else "its process ended")
        line, _, self._heard = self._heard.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ChildEnded("it sent an invalid message")
        return cast(Message, message)


class Child(Channel):
    """A forked process that calls `run` with its channel.

    `run` must call `shut` before it runs any untrusted code. Errors are sent as {"refused": text}
    or {"raised": text}.
    """

    def __init__(self, run: Callable[[Channel], None]) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            _child(theirs, run)
        theirs.close()
        super().__init__(ours)

    def ask(self, message: Message, within_s: float | None = None) -> Any:
        """Send a request and return its result.

        Raises ChildEnded, InvalidEnvironment, or AuthorCodeFailed if the author's code raises an
        error.
        """
        self.send(message)
        return self.answer(within_s)

    def answer(self, within_s: float | None = None) -> Any:
        reply = self.receive(within_s)
        if "refused" in reply:
            raise InvalidEnvironment(str(reply["refused"]))
        if "raised" in reply:
            raise AuthorCodeFailed(str(reply["raised"]))
        return reply.get("is")

    def end(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._end.close()
            self.pid = 0


class AuthorCodeFailed(Exception):
    """The author's code raised an error."""


def _child(end: socket.socket, run: Callable[[Channel], None]) -> NoReturn:
    channel = Channel(end)
    try:
        protect_process()
        # These include the parent's channels, which the child must not write to.
        os.closerange(3, end.fileno())
        os.closerange(end.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        run(channel)
    except BaseException as error:
        with suppress(BaseException):
            kind = "refused" if isinstance(error, InvalidEnvironment) else "raised"
            channel.send({kind: error_text(error) if kind == "raised" else str(error)})
    finally:
        os._exit(0)


def serve(channel: Channel, answer: Callable[[Message], Any]) -> None:
    """Answer requests until the other end is closed."""
    while True:
        try:
            request = channel.receive()
        except ChildEnded:
            return
        try:
            reply: Message = {"is": answer(request)}
            channel.send(reply)
        except ChildEnded:
            return
        except InvalidEnvironment as error:
            channel.send({"refused": str(error)})
        except (Exception, SystemExit) as error:
            channel.send({"raised": error_text(error)})


def shut(memory_mib: int = MEMORY_MIB) -> None:
    """Forbid this process to open files, start processes or exceed a memory limit."""
    address_space = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit_bytes = memory_mib << 20
    if address_space != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, address_space)
    for limit, value in (
        (resource.RLIMIT_AS, limit_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))
