"""`keel watch`: serve the page for running runs. It can be reached only from this machine."""

from __future__ import annotations

import hmac
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from keel.commands.report.folders import Chunks, Known, RunData, read_folder
from keel.commands.report.page import name_apart, page, state
from keel.configs.schema import ConfigError

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
"""Host names that requests may use. Any other name belongs to a foreign page whose DNS entry points
to this machine."""
_TYPES = {"": "text/html; charset=utf-8", "data": "application/json"}


class Follower:
    """Keeps the data of run folders up to date by reading a folder again when its contents
    change."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Read the folders for the first time. Raises ConfigError if one of them contains no
        run."""
        self._folders = [Path(folder) for folder in folders]
        self._lock = Lock()
        self._mark = ""
        self._runs: list[tuple[RunData, Chunks]] = []
        self._known: Known = {}
        self.runs()

    def runs(self) -> tuple[list[tuple[RunData, Chunks]], str]:
        """Return the current runs and a version string. The string changes whenever the runs
        change."""
        with self._lock:
            if (mark := self._stamp()) != self._mark:
                self._runs = [read_folder(folder, self._known) for folder in self._folders]
                name_apart([run for run, _ in self._runs])
                self._mark = mark
            return self._runs, self._mark

    def _stamp(self) -> str:
        stamps: list[str] = []
        for folder in self._folders:
            for path in (folder, *sorted(folder.glob("*")), folder / "trajectories"):
                with suppress(OSError):  # it may go while we look; the next look sees that
                    of = path.stat()
                    stamps.append(f"{path.name} {of.st_mtime_ns} {of.st_size}")
        return str(hash(tuple(stamps)))


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, follower: Follower, port: int) -> None:
        """Listen on `port`, or on any free port if it is 0. Raises ConfigError if the port is in
        use."""
        self.follower = follower
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {error}") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors from connections that the browser has closed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/?token={self.token}"


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests. `/` returns the page, `/data` returns everything on it except
    trajectories, and `/chunk` returns one chunk of trajectories."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        host = self.headers.get("Host", "").rpartition(":")[0]
        token = query.get("token", "").encode()
        if host not in NAMES or not hmac.compare_digest(token, self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, b"Open the address that `keel watch` has printed.")
            return
        try:
            self._answer(split.path.strip("/"), query)
        except ConfigError as error:  # the folder has gone meanwhile
            self._send(HTTPStatus.NOT_FOUND, str(error).encode(errors="replace"))

    def _answer(self, what: str, query: dict[str, str]) -> None:
        runs, mark = self.server.follower.runs()
        if what == "":
            self._send(HTTPStatus.OK, page(runs, live=True).encode(errors="replace"), _TYPES[""])
        elif what == "data" and self.headers.get("If-None-Match") == mark:
            self._send(HTTPStatus.NOT_MODIFIED, b"", mark=mark)
        elif what == "data":
            self._send(HTTPStatus.OK, state(runs, live=True).encode(), _TYPES["data"], mark=mark)
        elif what == "chunk" and (data := chunk(runs, query)) is not None:
            self._send(HTTPStatus.OK, data, "application/octet-stream")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"There is nothing of this name.")

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain", mark: str = ""
    ) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("ETag", mark),
        ):
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        pass


def chunk(runs: Sequence[tuple[RunData, Chunks]], query: dict[str, str]) -> bytes | None:
    number = query.get("run", "")
    if not number.isdecimal() or int(number) >= len(runs):
        return None
    try:
        return runs[int(number)][1][query.get("chunk", "")].data()
    except (KeyError, OSError):  # none of this name, or it has gone since
        return None


def watch(folders: Sequence[str], port: int) -> None:
    """Serve the page until Ctrl-C. Raises ConfigError if a folder or the port cannot be used."""
    with Server(Follower(folders), port) as server:
        print(
            f"{server.url}\nCtrl-C ends it. Seen from this machine alone; over SSH: ssh -L "
            f"{server.server_port}:{HOST}:{server.server_port} …",
            flush=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
