"""A sandbox's connections to the endpoint: however many a program opens, the next one that it has
room for gets through."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_runtime import drive
from tests.waiting import PATIENCE_S


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """A server on a unix socket, which says what it is told."""
    path = os.path.relpath(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def answer(near: socket.socket) -> None:
            with near, suppress(OSError):
                while said := near.recv(100):
                    near.sendall(said)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    near = listening.accept()[0]
                    threading.Thread(target=answer, args=(near,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield path


def opened(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def test_those_beyond_the_most_wait_until_others_close(
    echo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "MOST_CONNECTIONS", 2)
    port = drive.pass_on(echo)
    first, second = opened(port), opened(port)
    for one in (first, second):
        one.sendall(b"here")
        assert one.recv(4) == b"here"
    with second, opened(port) as third:
        third.sendall(b"now")
        third.settimeout(0.2)
        with pytest.raises(TimeoutError):
            third.recv(3)
        first.close()
        third.settimeout(PATIENCE_S)
        assert third.recv(3) == b"now"


@pytest.mark.parametrize("out_of", ["files", "threads"])
def test_what_the_system_has_no_room_for_ends_only_itself(
    echo: str, monkeypatch: pytest.MonkeyPatch, out_of: str
) -> None:
    failures = [1, 1, 1]
    accept, thread = socket.socket.accept, threading.Thread

    def no_files(listening: socket.socket) -> Any:
        if failures and threading.current_thread().name == "passing on":
            failures.pop()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listening)

    class NoThreads(thread):
        def start(self) -> None:
            if failures and threading.current_thread().name == "passing on":
                failures.pop()
                raise RuntimeError("can't start new thread")
            super().start()

    if out_of == "files":
        monkeypatch.setattr(socket.socket, "accept", no_files)
    else:
        monkeypatch.setattr(threading, "Thread", NoThreads)
    port = drive.pass_on(echo)
    for _ in range(4):
        with opened(port) as one, suppress(ConnectionError):
            one.sendall(b"here")
            if one.recv(4) == b"here":
                break
    else:
        raise AssertionError("nobody gets through any more")
    assert not failures
