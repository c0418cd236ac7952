"""`keel report`: write one HTML file that opens offline and never executes text from a policy.

The page holds the run's files as JSON and base64 in elements that browsers do not execute, with
every `<` escaped. Its scripts display them through `textContent` only. A Content-Security-Policy
lists the digests of Keel's own scripts, so that no injected script can run.
"""

import base64
import hashlib
import hmac
import html
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from keel.commands.report.folders import Chunks, RunData, read_folder
from keel.configs.paths import write_whole
from keel.configs.schema import ConfigError
from keel.data.results import align_columns
from keel.trainer.run.journal import cost_rows
from keel.trainer.run.trajectory_files import finite_json

_SCRIPTS = ("show.js", "curves.js", "runs.js", "tokens.js", "read.js", "main.js")
"""Script files in `commands/report/page`, in execution order."""
_MOST_BYTES = 64 * 2**20
"""Maximum size in bytes of the compressed trajectories in one page."""


def page(runs: Sequence[tuple[RunData, Chunks]], *, live: bool = False) -> str:
    """Render the report as HTML. A `live` page fetches trajectories and updates from its server."""
    from plotly.offline import get_plotlyjs  # pyright: ignore  # noqa: PLC0415  (0.3 s)

    parts = files("keel.commands.report") / "page"
    scripts = [
        str(get_plotlyjs()),
        *((parts / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    ]
    if not live:
        _thin_trajectories(runs)
    chunks = [
        f'<script type="text/plain" data-run="{number}" data-chunk="{html.escape(name)}">'
        f"{base64.b64encode(chunk.read()).decode()}</script>"
        for number, (_, some) in enumerate(runs)
        for name, chunk in some.items()
        if not live
    ]
    data = _state(runs, live=live).replace("<", "\\u003c")  # cannot end its element
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts, live=live)}">',
            '<meta name="referrer" content="no-referrer">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(', '.join(run.name for run, _ in runs))} · Keel</title>",
            f"<style>{(parts / 'report.css').read_text(encoding='utf-8')}</style></head><body>",
            (parts / "body.html").read_text(encoding="utf-8"),
            f'<script type="application/json" id="data">{data}</script>',
            *chunks,
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _state(runs: Sequence[tuple[RunData, Chunks]], *, live: bool) -> str:
    """Return all of the page's data except trajectories, as JSON."""
    plain = [run.plain() for run, _ in runs]
    return finite_json({"live": live, "written": time.time(), "runs": plain})


def _policy(scripts: Sequence[str], *, live: bool) -> str:
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    connect = "'self'" if live else "'none'"
    ours = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {ours}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _thin_trajectories(runs: Sequence[tuple[RunData, Chunks]]) -> None:
    """Keep only every n-th chunk if the total size of the chunks exceeds `_MOST_BYTES`."""
    total = sum(chunk.size for _, chunks in runs for chunk in chunks.values())
    every = -(-total // _MOST_BYTES)
    for run, chunks in runs if every > 1 else ():
        names = list(chunks)
        for at, name in enumerate(reversed(names)):  # the last stays
            if at % every:
                del chunks[name]
        run.groups = [group for group in run.groups if group.chunk in chunks]
        if len(chunks) < len(names):
            unit = "steps" if run.kind == "run" else "parts"
            run.notes.append(
                f"only {len(chunks)} of {len(names)} {unit} have trajectories in this page, to "
                f"limit its size; `keel watch {run.path}` shows all of them"
            )


def report(folders: Sequence[str], out: str | None) -> str:
    """Write the page and return a message to print. Raises ConfigError if a folder can't be
    read."""
    runs = [read_folder(Path(folder)) for folder in folders]
    _make_names_unique([run for run, _ in runs])
    path = Path(out) if out else (Path(folders[0]) if len(runs) == 1 else Path()) / "report.html"
    try:
        write_whole(path, page(runs).encode(errors="replace"))
    except OSError as error:  # also if trajectories have gone meanwhile
        raise ConfigError(f"{path}: cannot be written ({error}); --out names another") from error
    notes = [f"{run.name}: {note}" for run, _ in runs for note in run.notes]
    if len(costs := {run.name: run.costs for run, _ in runs if run.costs}) > 1:
        notes += align_columns(cost_rows(costs))
    size = path.stat().st_size / 2**20
    text = "\n".join([*notes, f"{path} ({size:.1f} MiB): open it in a browser"])
    return text.encode(errors="replace").decode()


def _make_names_unique(runs: Sequence[RunData]) -> None:
    """Rename runs that share a name, using their paths instead."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = run.path


_HOST = "127.0.0.1"
_ALLOWED_HOSTS = (_HOST, "localhost")
"""Allowed host names in requests. Any other name belongs to a foreign page whose DNS entry points
to this machine."""
_TYPES = {"": "text/html; charset=utf-8", "data": "application/json"}


class _Server(ThreadingHTTPServer):
    """Serves run folders, rereading a folder whenever its contents change."""

    daemon_threads = True

    def __init__(self, folders: Sequence[str], port: int) -> None:
        """Read the folders and listen on `port`, or on any free port if it is 0. Raises ConfigError
        if a folder contains no run, or if the port is in use."""
        self.token = secrets.token_urlsafe(24)
        self._folders = [Path(folder) for folder in folders]
        self._lock = Lock()
        self._mark = ""
        self._runs: list[tuple[RunData, Chunks]] = []
        self.runs()
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {error}") from error

    def runs(self) -> tuple[list[tuple[RunData, Chunks]], str]:
        """Return the current runs, along with a version that changes whenever the runs do."""
        with self._lock:
            stamps: list[str] = []
            for folder in self._folders:
                for path in (folder, *sorted(folder.glob("*")), folder / "trajectories"):
                    with suppress(OSError):  # it may go while we look; the next look sees that
                        of = path.stat()
                        stamps.append(f"{path.name} {of.st_mtime_ns} {of.st_size}")
            if (mark := str(hash(tuple(stamps)))) != self._mark:
                self._runs = [read_folder(folder) for folder in self._folders]
                _make_names_unique([run for run, _ in self._runs])
                self._mark = mark
            return self._runs, self._mark

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors from connections closed by the browser."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    """Handles GET requests: `/` for the page, `/data` for its data without trajectories, and
    `/chunk` for one chunk of trajectories."""

    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        host = self.headers.get("Host", "").rpartition(":")[0]
        token = query.get("token", "").encode()
        if host not in _ALLOWED_HOSTS or not hmac.compare_digest(token, self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, b"Open the address that `keel watch` printed.")
            return
        try:
            runs, mark = self.server.runs()
        except ConfigError as error:  # the folder has gone meanwhile
            self._send(HTTPStatus.NOT_FOUND, str(error).encode(errors="replace"))
            return
        what = split.path.strip("/")
        if what == "":
            self._send(HTTPStatus.OK, page(runs, live=True).encode(errors="replace"), _TYPES[""])
        elif what == "data" and self.headers.get("If-None-Match") == mark:
            self._send(HTTPStatus.NOT_MODIFIED, b"", mark=mark)
        elif what == "data":
            self._send(HTTPStatus.OK, _state(runs, live=True).encode(), _TYPES["data"], mark=mark)
        elif what == "chunk" and (data := _chunk(runs, query)) is not None:
            self._send(HTTPStatus.OK, data, "application/octet-stream")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"Not found.")

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


def _chunk(runs: Sequence[tuple[RunData, Chunks]], query: dict[str, str]) -> bytes | None:
    number = query.get("run", "")
    if not number.isdecimal() or int(number) >= len(runs):
        return None
    try:
        return runs[int(number)][1][query.get("chunk", "")].read()
    except (KeyError, OSError):  # none of this name, or it has gone since
        return None


def watch(folders: Sequence[str], port: int) -> None:
    """Serve the page until Ctrl-C. Raises ConfigError if a folder or the port can't be used."""
    with _Server(folders, port) as server:
        print(
            f"{server.url}\nCtrl-C stops it. Only this machine can open it. Over SSH: ssh -L "
            f"{server.server_port}:{_HOST}:{server.server_port} …",
            flush=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
