"""A server in its own process, which a test can stop or let hang. Its answer to every POST is the
chat completion `--model`. Like vLLM, it has `/health`; `/hang` makes it hang."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(1000 * (self.path == "/hang"))
        self.answer("")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": options.model}
        self.answer(json.dumps({"choices": [{"index": 0, "message": message}]}))

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def process_of(text: str) -> Iterator[tuple[str, int]]:
    """Yield the URL of a server and its process id."""
    command = [sys.executable, "-m", __name__, "--model", text]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1", process.pid
        finally:
            process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options, _ = parser.parse_known_args()
    server = HTTPServer((options.host, options.port), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
