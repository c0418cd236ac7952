"""vLLM's OpenAI-compatible server as a process that ends with its owner. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keel.configs.schema import JudgeConfig
from keel.rollout.judge import reaper

MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""What `vllm serve` runs for one server. The command itself fails on the CPU build, which looks
for a distribution of the name `vllm`."""
GIB = 2**30
ASK_S = 5.0
"""Longest wait for one reply of `/health`."""
PAUSE_S = 0.2
STOP_S = 30.0
"""Longest wait for the server to end."""
LOG_LINES = 15
LOG_BYTES = 262_144
_ERROR = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR \S+ \S+ \[[^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)\b: .+)"
)
"""An exception's own line, bare or as vLLM's processes log it."""


class JudgeProcess:
    """A server of `config.model` in a process of its own, with a guard
    (`keel.rollout.judge.reaper`) that ends it when this process ends in any way."""

    def __init__(self, config: JudgeConfig, *, gpu: bool, host: str, key: str, log: Path) -> None:
        """Starts it. host: address to listen at; key: what clients have to send as their API key;
        log: where its output goes."""
        self._name, self._host, self._log = config.model, host, log
        # Bound and not listening, it keeps others off the port until the server listens there.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((host, 0))
        self._number = int(self._port.getsockname()[1])
        server = [sys.executable, "-m", MODULE, *arguments(config, gpu=gpu)]
        address = ["--host", host, "--port", str(self._number)]
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, *server, *address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the driver
                env={**os.environ, **environment(config, gpu=gpu), "VLLM_API_KEY": key},
            )

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._number}/v1"

    def wait(self, deadline_s: float) -> None:
        """Until it answers. Raises RuntimeError with the end of its log if it does not."""
        end = time.monotonic() + deadline_s
        while not self._healthy():
            why = self.ended()
            if not why and time.monotonic() > end:
                why = (
                    f"no answer within rewards.judge.server.startup_deadline_s = {deadline_s:g}\n"
                    f"{log_excerpt(self._log)}"
                )
            if why:
                self.stop()
                raise RuntimeError(
                    f"rewards.judge.model = {self._name!r}: its server did not start: {why}"
                )
            time.sleep(PAUSE_S)
        self._port.close()

    def ended(self) -> str:
        """Why it is no more, with the end of its log; "" while it runs."""
        output = self._guard.stdout
        assert output is not None
        if output.closed:
            return "it was stopped"
        if not select.select([output], [], [], 0)[0]:
            return ""
        status = output.read().decode().strip() or "none, its guard was killed"
        output.close()
        return f"it ended (exit status {status})\n{log_excerpt(self._log)}"

    def stop(self) -> None:
        """End it and everything it has started."""
        output, order = self._guard.stdout, self._guard.stdin
        assert output is not None and order is not None
        self._port.close()
        with contextlib.suppress(BrokenPipeError):
            order.close()
        if not output.closed:
            select.select([output], [], [], STOP_S)
            output.close()
        self._guard.wait()

    def _healthy(self) -> bool:
        # http.client knows no proxies, and this request must not go to one.
        connection = http.client.HTTPConnection(self._host, self._number, timeout=ASK_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def arguments(config: JudgeConfig, *, gpu: bool) -> list[str]:
    """Command-line arguments of the server, without its address."""
    server = config.server
    options: dict[str, Any] = {
        "model": config.model,
        "served_model_name": config.model,
        "dtype": server.dtype,
        "max_num_seqs": config.max_concurrent,
        # A weak judge would rather write white space for ever than the next brace.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
    }
    if server.max_model_len:
        options["max_model_len"] = server.max_model_len
    if gpu:
        options |= {
            "gpu_memory_utilization": server.gpu_memory_utilization,
            "tensor_parallel_size": server.tensor_parallel,
        }
    else:
        options |= {
            "kv_cache_memory_bytes": int(server.kv_cache_gib * GIB),
            "enforce_eager": True,  # compiling takes a minute
            "distributed_executor_backend": "uni",
        }
    given = {**options, **server.options}.items()
    return [word for name, value in given for word in _flag(name, value)]


def _flag(name: str, value: Any) -> Iterator[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
    else:
        yield f"--{flag}"
        yield json.dumps(value) if isinstance(value, (Mapping, list, tuple)) else str(value)


def environment(config: JudgeConfig, *, gpu: bool) -> dict[str, str]:
    """What the server's environment has besides its parent's."""
    common = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if gpu:
        return common
    return {
        **common,
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton
        # Allows the engine to compute in its own process, in place of a third one.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.server.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def log_excerpt(log: Path) -> str:
    """The first error in the log's last part, which is the cause of the others, and its end."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    cause = next((found[1] for line in lines if (found := _ERROR.search(line))), "")
    last = [f"last lines of its log ({log}):", *lines[-LOG_LINES:]]
    return "\n".join([f"first error: {cause}", *last] if cause else last)
