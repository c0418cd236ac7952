"""A hub on loopback with one dataset, as far as huggingface_hub asks for it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

NAME = "owner/sums"
MAIN, CONVERTED = "main", "refs/convert/parquet"


@contextmanager
def hub(revisions: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the hub's address and its requests. revisions: revision → path → content."""
    commits = {hashlib.sha1(name.encode()).hexdigest(): name for name in revisions}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None: ...

        def _answer(self, *, body: bool) -> None:
            path = unquote(self.path.partition("?")[0])
            asked.append(path)
            found = self._content(path)
            self.send_response(404 if found is None else 200)
            if found is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            content, commit = found or (b"", "")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _content(self, path: str) -> tuple[bytes, str] | None:
            for commit, name in commits.items():
                files = revisions[name]
                api = f"/api/datasets/{NAME}"
                if path in ([api] if name == MAIN else []) + [
                    f"{api}/revision/{name}",
                    f"{api}/revision/{commit}",
                ]:
                    siblings = [{"rfilename": each} for each in files]
                    info = {"id": NAME, "sha": commit, "siblings": siblings}
                    return json.dumps(info).encode(), commit
                if path == f"{api}/tree/{commit}":
                    tree = [
                        {"type": "file", "path": each, "size": len(content), "oid": "0"}
                        for each, content in files.items()
                    ]
                    return json.dumps(tree).encode(), commit
                for revision in (name, commit):
                    start = f"/datasets/{NAME}/resolve/{revision}/"
                    if path.startswith(start) and path.removeprefix(start) in files:
                        return files[path.removeprefix(start)], commit
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, revisions: Mapping[str, Mapping[str, bytes]]
) -> Iterator[list[str]]:
    """Make it the hub of huggingface_hub; yield its requests."""
    with hub(revisions) as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield asked
