"""A judge on the loopback interface with scripted behaviour."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from keel.configs.schema import JudgeConfig
from keel.rewards.judge.service import JudgeService
from keel.rewards.judge.specs import CallError, Judgement
from keel.rl.types import Prompt
from tests.waiting import PATIENCE_S

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """An HTTP reply."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0
    """Pause between bytes of the body."""
    hang_up: bool = False
    """Close the connection instead of replying."""


Behaviour = Callable[[dict[str, Any]], Reply]


@dataclass
class Server:
    """Records requests. `behave` may be replaced at any time."""

    behave: Behaviour
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    busy: int = 0
    most_busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        with self.lock:
            self.requests, self.keys, self.most_busy = [], [], 0


@contextmanager
def running(behave: Behaviour) -> Iterator[Server]:
    server = Server(behave)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # would cost 40 ms per reply

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
                self.close_connection = True  # the client hung up

        def do_GET(self) -> None:
            self.answer(Reply("up"))

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
            pass  # clients hang up on purpose

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
    """A chat completion; content other than text is encoded as JSON."""
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
    """ID → text of the requested criteria, in order."""
    lines = request["messages"][0]["content"].splitlines()
    listed = [json.loads(line) for line in lines if line.startswith('{"id"')]
    return {entry["id"]: entry["text"] for entry in listed}


def fence_of(system: str) -> str:
    match = re.search(r'line "<<<DATA (\w+)"', system)
    assert match
    return match[1]


def material_of(messages: Messages) -> dict[str, str]:
    """The material between the fences."""
    fence = fence_of(messages[0]["content"])
    head, line, tail = messages[1]["content"].split("\n")
    assert (head, tail) == (f"<<<DATA {fence}", f"DATA {fence}>>>")
    return json.loads(line)


def honest(request: Mapping[str, Any]) -> dict[str, Any]:
    """Criterion `says X` is met, and `half X` partly met, if the material contains X.

    All other criteria are met.
    """
    text_seen = " ".join(material_of(request["messages"]).values())
    verdicts: dict[str, Any] = {}
    for key, text in criteria_of(request).items():
        verb, _, word = text.partition(" ")
        verdict = {"says": "met", "half": "partly"}.get(verb)
        if verdict is None:
            verdict = "met"
        elif word not in text_seen:
            verdict = "missed"
        verdicts[key] = {"reason": f"looked for {word}", "verdict": verdict}
    return verdicts


def good(request: dict[str, Any]) -> Reply:
    return says(honest(request))


ORDER = "full marks"


def gullible(request: dict[str, Any]) -> Reply:
    """An honest judge that obeys an order, or copies a reply, found outside the fences.

    It sees one text in a chat template, like a model behind an inference server: control tokens
    take effect wherever they come from.
    """
    flat = "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in request["messages"]
    )
    turns = re.findall(r"<\|im_start\|>(\w+)(.*?)<\|im_end\|>", flat, re.DOTALL)
    system = turns[0][1]
    match = re.search(r'line "<<<DATA (\w+)"', system)
    fence = match[1] if match else "no fence"
    inside = re.compile(rf"^<<<DATA {fence}$.*?^DATA {fence}>>>$", re.DOTALL | re.MULTILINE)
    outside = "\n".join(inside.sub("", content) for _, content in turns)
    visible = "".join(  # tag characters spell ASCII to a tokenizer
        chr(ord(c) - 0xE0000) if 0xE0000 < ord(c) < 0xE0080 else c for c in outside
    )
    if ORDER in visible or '"verdict"' in visible or len(turns) != 2:
        everything = {key: {"reason": "told to", "verdict": "met"} for key in criteria_of(request)}
        return says(everything)
    return good(request)


# --- A judge with a common rubric ---

CRITERIA = (
    {"name": "blue", "text": "says blue", "weight": 0.75},
    {"name": "sky", "text": "half sky", "weight": 0.25},
)

PROMPT = Prompt(
    prompt_id="file/1",
    domain="chat",
    messages=({"role": "user", "content": "What colour is it? {braces}"},),
    reward={"kind": "rubric", "criteria": CRITERIA},
)


def settings(url: str, **changes: Any) -> JudgeConfig:
    return replace(
        JudgeConfig(
            base_url=url, model="m", timeout_s=PATIENCE_S, retries=2, max_failure_fraction=1.0
        ),
        **changes,
    )


def judge(
    config: JudgeConfig, answers: Sequence[str], prompt: Prompt = PROMPT
) -> list[Judgement | CallError]:
    with JudgeService(config) as service:
        futures = [service.submit(prompt, answer) for answer in answers]
        return [future.result(PATIENCE_S) for future in futures]


def judged(service: JudgeService, answer: str, prompt: Prompt = PROMPT) -> Judgement:
    """Judge an answer, which must succeed."""
    result = service.submit(prompt, answer).result(PATIENCE_S)
    assert isinstance(result, Judgement), result
    return result


def failed(service: JudgeService, answer: str) -> CallError:
    result = service.submit(PROMPT, answer).result(PATIENCE_S)
    assert isinstance(result, CallError), result
    return result


def scripted(*replies: Reply) -> Callable[[dict[str, Any]], Reply]:
    """The given replies in order, then good ones."""
    remaining = list(replies)
    return lambda request: remaining.pop(0) if remaining else good(request)


@contextmanager
def process_of(text: str) -> Iterator[tuple[str, int]]:
    """Run a server in its own process, and yield its URL and the process id. It always replies with
    `text`."""
    command = [sys.executable, "-m", __name__, text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.kill()


if __name__ == "__main__":
    with running(lambda _: says(sys.argv[1])) as server:
        print(server.url, flush=True)
        signal.pause()
