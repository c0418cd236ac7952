"""`keel watch`: access control and updates."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.commands.report.watch import HOST, Follower, Server
from tests.commands.report.runs import group_of, write_run, write_step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(Follower([str(folder)]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def get(server: Server, path: str, **headers: str) -> tuple[int, bytes, str]:
    """Return status, body and ETag. `{token}` in the path is replaced."""
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=60)
    try:
        connection.request("GET", path.replace("{token}", server.token), headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers["ETag"] or ""
    finally:
        connection.close()


def test_only_who_has_the_address_sees_anything(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    for path in ("/", "/data", "/chunk", "/?token=", "/?token=x", "/data?token={token}x"):
        status, body, _ = get(server, path)
        assert (status, b"keel watch" in body, b"script" in body) == (403, True, False), path
    # A page elsewhere that had its own name point here.
    status, _, _ = get(server, "/data?token={token}", Host=f"evil.example:{server.server_port}")
    assert status == 403
    status, body, _ = get(server, "/?token={token}")
    assert status == 200 and b"connect-src 'self'" in body and b"text/plain" not in body


def test_it_follows_the_run(server: Server, folder: Path) -> None:
    status, body, mark = get(server, "/data?token={token}")
    assert status == 200 and json.loads(body)["runs"][0]["steps"] == [0, 1, 2, 3]
    assert get(server, "/data?token={token}", **{"If-None-Match": mark})[:2] == (304, b"")
    write_step(folder, 4, [group_of("new", ["a", "b"], [1, 0])])
    status, body, after = get(server, "/data?token={token}", **{"If-None-Match": mark})
    assert status == 200 and after != mark
    run = json.loads(body)["runs"][0]
    assert run["steps"][-1] == 4 and run["groups"][-1]["prompt"] == "new"
    name = run["groups"][-1]["chunk"]
    status, body, _ = get(server, f"/chunk?token={{token}}&run=0&chunk={name}")
    assert status == 200 and json.loads(gzip.decompress(body))["prompt"] == "new"


@pytest.mark.parametrize(
    "path",
    [
        "/chunk?token={token}&run=0&chunk=../config.yaml",
        "/chunk?token={token}&run=7&chunk=step_000001.tokens.jsonl.gz",
        "/config.yaml?token={token}",
        "/../../etc/passwd?token={token}",
    ],
)
def test_it_has_nothing_else(server: Server, path: str) -> None:
    assert get(server, path)[0] == 404
