"""Runs an agent program and reports how it ended. It is started as `python start.py drive:main` and
supports Python 3.9 or later.

The request is one line of JSON on standard input, and the result is one line on standard output.
The program's output goes to standard error. In a sandbox without a network, the endpoint is a
unix socket. Connections to a loopback port in the sandbox are then forwarded to it.

    → {"command": ["my-agent", "--task", "{prompt}"], "env": {…}, "prompt": "…", "task": {…},
       "socket": "/…/keel.sock" or null, "memory_mib": 2048 or null}
    ← {"failed": "" or how, "verdict": "text of the file KEEL_VERDICT" or null}

After the result, this process waits to be killed, so that the program's descendants can still be
found below it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

from keel.agents.env_runtime.processes import adopt_orphans, die_with_parent, limit_memory
from keel.agents.env_runtime.server import take_channel

_MAX_BYTES = 1 << 20
_MAX_ENV_BYTES = 100_000
"""Maximum size of KEEL_TASK in bytes. Linux allows 131071 bytes per variable."""
_URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "KEEL_MCP_URL")


def _forward_port(path: str) -> int:
    """Open a loopback port that forwards connections to the unix socket at `path`, and return the
    port number."""
    import asyncio  # noqa: PLC0415  (only a sandbox without a network needs it)

    async def pump(source: Any, target: Any) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
        target.write_eof()

    async def serve(reader: Any, writer: Any) -> None:
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(path)
            writers.append(far_writer)
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        except OSError as error:  # otherwise one side has closed
            if len(writers) == 1:
                print(f"the endpoint {path} cannot be reached: {error}", file=sys.stderr)
        finally:
            for one in writers:
                one.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, sock=listener)
        await server.serve_forever()

    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    return listener.getsockname()[1]


def _run(request: dict[str, Any]) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="keel-")
    task = json.dumps(request["task"])
    paths = {name: os.path.join(folder, name) for name in ("prompt", "task", "verdict")}
    for name, text in (("prompt", request["prompt"]), ("task", task)):
        with open(paths[name], "w", encoding="utf-8") as file:
            file.write(text)
    env = {**os.environ, **request["env"]}
    env.update(KEEL_TASK_FILE=paths["task"], KEEL_VERDICT=paths["verdict"])
    if len(task.encode()) <= _MAX_ENV_BYTES:
        env["KEEL_TASK"] = task
    if request["socket"] is not None:
        try:
            port = _forward_port(request["socket"])
        except OSError as error:
            return {"failed": f"could not be run: no socket can be opened here ({error})"}
        for name in [name for name in _URLS if name in env]:
            path = request["env"][name].split("/", 3)[3]
            env[name] = f"http://127.0.0.1:{port}/{path}"
    command: list[str] = [
        word.replace("{prompt}", request["prompt"])
        if "{prompt}" in word
        else word.replace("{prompt_file}", paths["prompt"])
        for word in request["command"]
    ]
    limit_memory(request["memory_mib"])
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=env,
            preexec_fn=die_with_parent,
        )
    except (OSError, ValueError) as error:
        return {"failed": f"could not be run: cannot run {command[0]}: {error}"}
    pid = status = -1
    while pid != process.pid:  # also reaps orphans: the sandbox limits the processes
        pid, status = os.waitpid(-1, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    failed = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
    verdict = None
    with suppress(OSError), open(paths["verdict"], "rb") as file:
        verdict = file.read(_MAX_BYTES).decode(errors="replace")
    return {"failed": failed if code else "", "verdict": verdict}


def main() -> None:
    die_with_parent()
    adopt_orphans()  # to be found and killed
    requests, replies = take_channel()
    result = _run(json.loads(requests.readline()))
    replies.write(json.dumps(result).encode() + b"\n")
    replies.flush()
    requests.readline()
