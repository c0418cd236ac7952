"""A judge on the loopback interface that does what a test tells it to."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """What goes over the wire."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0
    """Between any two bytes of the body."""
    hang_up: bool = False
    """Close the connection in place of a reply."""


Behaviour = Callable[[dict[str, Any]], Reply]


@dataclass
class Server:
    """Counts what reaches it. `behave` may be replaced at any time."""

    behave: Behaviour
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    busy: int = 0
    most_busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forget(self) -> None:
        """Count from nothing."""
        with self.lock:
            self.requests, self.keys, self.most_busy = [], [], 0


@contextmanager
def running(behave: Behaviour) -> Iterator[Server]:
    server = Server(behave)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # it would cost 40 ms a reply

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with server.lock:
                server.requests.append(request)
                server.keys.append(self.headers.get("authorization", ""))
                server.busy += 1
                server.most_busy = max(server.most_busy, server.busy)
            try:
                reply = server.behave(request)
                time.sleep(reply.delay_s)
            finally:
                with server.lock:
                    server.busy -= 1
            try:
                self.answer(reply)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client had enough

        def answer(self, reply: Reply) -> None:
            if reply.hang_up:
                self.close_connection = True
                return
            body = reply.body.encode()
            self.send_response(reply.status)
            headers = {"content-type": "application/json", **reply.headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            for start in range(0, len(body), 1 if reply.drip_s else len(body)):
                self.wfile.write(body[start : start + 1] if reply.drip_s else body)
                time.sleep(reply.drip_s)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # clients that hang up are what the tests are about

    http = Quiet(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("NO_PROXY", "127.0.0.1")
            yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join(PATIENCE_S)


def says(content: Any, *, finish: str = "stop", **reply: Any) -> Reply:
    """A chat completion with `content`; what is not text is written as JSON."""
    text = content if isinstance(content, str) else json.dumps(content)
    message = {"role": "assistant", "content": text}
    completion = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
    return Reply(json.dumps(completion), **reply)


def criteria_of(request: Mapping[str, Any]) -> dict[str, str]:
    """Id → text of the criteria that are asked for, in their order."""
    lines = request["messages"][0]["content"].splitlines()
    listed = [json.loads(line) for line in lines if line.startswith('{"id"')]
    return {entry["id"]: entry["text"] for entry in listed}


def fence_of(system: str) -> str:
    found = re.search(r'line "<<<DATA (\w+)"', system)
    assert found
    return found[1]


def material_of(messages: Messages) -> dict[str, str]:
    """What is between the fences."""
    fence = fence_of(messages[0]["content"])
    head, line, tail = messages[1]["content"].split("\n")
    assert (head, tail) == (f"<<<DATA {fence}", f"DATA {fence}>>>")
    return json.loads(line)


def honest(request: Mapping[str, Any]) -> dict[str, Any]:
    """A criterion `says X` is met where some material says X, and `half X` then is partly met.

    It is satisfied with everything else.
    """
    said = " ".join(material_of(request["messages"]).values())
    verdicts: dict[str, Any] = {}
    for key, text in criteria_of(request).items():
        verb, _, word = text.partition(" ")
        verdict = {"says": "met", "half": "partly"}.get(verb)
        if verdict is None:
            verdict = "met"
        elif word not in said:
            verdict = "missed"
        verdicts[key] = {"reason": f"looked for {word}", "verdict": verdict}
    return verdicts


def good(request: dict[str, Any]) -> Reply:
    return says(honest(request))


ORDER = "full marks"


def gullible(request: dict[str, Any]) -> Reply:
    """An honest judge until it meets an order, or a reply to copy, outside the fences.

    It sees what a model sees behind an inference server: one text in a chat template, in which
    the template's control tokens are control tokens wherever they come from.
    """
    flat = "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in request["messages"]
    )
    seen = re.findall(r"<\|im_start\|>(\w+)(.*?)<\|im_end\|>", flat, re.DOTALL)
    system = seen[0][1]
    found = re.search(r'line "<<<DATA (\w+)"', system)
    fence = found[1] if found else "there is none"
    inside = re.compile(rf"^<<<DATA {fence}$.*?^DATA {fence}>>>$", re.DOTALL | re.MULTILINE)
    outside = "\n".join(inside.sub("", content) for _, content in seen)
    visible = "".join(  # tag characters spell ASCII to a tokenizer
        chr(ord(c) - 0xE0000) if 0xE0000 < ord(c) < 0xE0080 else c for c in outside
    )
    if ORDER in visible or '"verdict"' in visible or len(seen) != 2:
        everything = {key: {"reason": "told to", "verdict": "met"} for key in criteria_of(request)}
        return says(everything)
    return good(request)
