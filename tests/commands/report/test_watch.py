"""`keel watch`: access control and updates."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.commands.report import folders
from keel.commands.report.shape import ReportGroup, listed
from keel.commands.report.watch import HOST, Follower, Server, chunk
from keel.configs.schema import ConfigError
from tests.commands.report.runs import group_of, write_evaluation, write_run, write_step


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


@pytest.mark.parametrize("port", [-1, 65536])
def test_invalid_port_is_refused(port: int, folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--port {port}: must be from 1 to 65535, or 0 for an"):
        Server(Follower([str(folder)]), port)


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


def test_late_evaluation_and_resume_are_shown(server: Server, folder: Path) -> None:
    write_step(folder, 3, [], **{"eval/sums/pass@1": 0.5})
    (run,) = json.loads(get(server, "/data?token={token}")[1])["runs"]
    assert run["steps"] == [0, 1, 2, 3]
    assert run["metrics"]["eval/sums/pass@1"] == {"at": [0, 3], "values": [0.25, 0.5]}
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    (run,) = json.loads(get(server, "/data?token={token}")[1])["runs"]
    assert run["steps"] == [0, 1]


def test_trajectory_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(group: Any, step: int, chunk: str, line: int) -> ReportGroup:
        read.append(chunk)
        return listed(group, step, chunk, line)

    monkeypatch.setattr(folders, "listed", counted)
    follower = Follower([str(folder)])
    first, second, third = sorted(set(read))
    read.clear()
    write_step(folder, 4, [group_of("new", ["a"], [1])])
    (run, chunks) = follower.runs()[0][0]
    assert read == ["step_000004.tokens.jsonl.gz"] and {group.step for group in run.groups} == {
        1,
        2,
        3,
        4,
    }
    read.clear()
    path = folder / "trajectories" / second
    path.write_bytes((folder / "trajectories" / max(chunks)).read_bytes())
    write_step(folder, 5, [])
    (run, chunks) = follower.runs()[0][0]
    assert read == [second] and [g.prompt for g in run.groups if g.chunk == second] == ["new"]
    (folder / "trajectories" / first).unlink()
    runs = [(run, chunks)]
    assert chunk(runs, {"run": "0", "chunk": first}) is None
    assert chunk(runs, {"run": "0", "chunk": third})


def test_evaluation_is_followed(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path / "eval", prompts=25) / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    follower = Follower([str(path.parent)])
    with path.open("ab") as file:
        file.write(lines[0].replace(b"sums/0", b"sums/new") + lines[1][:-9])  # one being written
    run, chunks = follower.runs()[0][0]
    assert [group.prompt for group in run.groups[24:]] == ["sums/24", "sums/new"]
    assert "26 prompts" in run.summary["pass@1 sums"]
    group = run.groups[25]
    there = gzip.decompress(chunks[group.chunk].data()).splitlines()
    assert json.loads(there[group.line])["prompt"] == "sums/new" and len(there) == 6
    path.unlink()
    assert chunk([(run, chunks)], {"run": "0", "chunk": group.chunk}) is None


def test_closed_tab_causes_no_traceback(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, shut = threading.Event(), server.shutdown_request

    def told(request: Any) -> None:
        shut(request)
        ended.set()

    monkeypatch.setattr(server, "shutdown_request", told)
    with socket.create_connection((HOST, server.server_port)) as tab:
        host = f"Host: {HOST}:{server.server_port}"
        tab.sendall(f"GET /?token={server.token} HTTP/1.1\r\n{host}\r\n\r\n".encode())
        tab.recv(1)  # of megabytes, more than a socket holds; and then it is reset
        tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert ended.wait(300)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "path",
    [
        "/chunk?token={token}&run=0&chunk=../config.yaml",
        "/chunk?token={token}&run=7&chunk=step_000001.tokens.jsonl.gz",
        "/chunk?token={token}&run=-1&chunk=step_000001.tokens.jsonl.gz",
        "/chunk?token={token}",
        "/config.yaml?token={token}",
        "/../../etc/passwd?token={token}",
    ],
)
def test_it_has_nothing_else(server: Server, path: str) -> None:
    assert get(server, path)[0] == 404


def test_used_port_is_named(server: Server, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"--port {server.server_port}: Address already in use"):
        Server(Follower([str(folder)]), server.server_port)
