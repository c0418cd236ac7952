"""Runs vLLM's OpenAI-compatible server as a child process. This module imports neither vLLM nor
torch."""

import contextlib
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.rl.supervisor import EXIT_S
from keel.rollout.judge import reaper

_MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""Module that `vllm serve` runs. The command itself fails on the CPU build, because it looks for a
distribution named `vllm`."""
_OPTIONS = {"disable_log_stats": True, "disable_uvicorn_access_log": True}
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_CPU_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # saves one process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
}
_HEALTH_TIMEOUT_S = 5.0
HANG_TIMEOUT_S = 60.0  # of a server that has started and may be busy
_POLL_S = 0.2
_LOG_LINES = 30
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class VllmServer:
    """A vLLM server in a child process. `keel.rollout.judge.reaper` stops the server when this
    process exits or is killed."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        gpu: bool,
        threads: int,
        kv_cache_gib: float,
        host: str,
        log: Path,
        port: int = 0,
        key: str = "",
    ) -> None:
        """Start the server without waiting for it to respond. Raises OSError if the address can't
        be bound.

        `options` are passed to vLLM. `threads` and `kv_cache_gib` are used only on CPUs. If `port`
        is 0, a free port is picked. `key` is the API key that clients must send. If it is empty,
        `VLLM_API_KEY` from the environment is used.
        """
        env = {**os.environ, **_ENVIRONMENT}
        defaults: dict[str, Any] = dict(_OPTIONS)
        if not gpu:
            env |= {**_CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
            defaults["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
            defaults["enforce_eager"] = True  # compiling takes a minute
            defaults["distributed_executor_backend"] = "uni"
        if key:
            env["VLLM_API_KEY"] = key
        self._model, self._log = options["model"], log
        # Bound but not listening: reserves the port until the server listens on it.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((host, port))
        port = int(self._reserved.getsockname()[1])
        self._address = f"http://{host}:{port}"
        arguments = _flags({**defaults, **options, "host": host, "port": port})
        command = [sys.executable, "-m", _MODULE, *arguments]
        with log.open("ab") as output:
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the driver
                env=env,
            )

    @property
    def url(self) -> str:
        return f"{self._address}/v1"

    def wait(self, timeout_s: float) -> None:
        """Wait until the server responds to requests. Raises RuntimeError with the end of the
        server's log if it doesn't start."""
        end = time.monotonic() + timeout_s
        while not self._is_healthy():
            reason = self.ended()
            if not reason and time.monotonic() > end:
                reason = f"no answer within {timeout_s:g} s\n{self._log_excerpt()}"
            if reason:
                self.stop()
                raise RuntimeError(f"{self._model}: the server did not start: {reason}")
            time.sleep(_POLL_S)
        self._reserved.close()

    def ended(self) -> str:
        """The reason why the server exited, with the end of its log, or "" while the server is
        still running."""
        output = self._reaper.stdout
        assert output is not None
        if output.closed:
            return "it was stopped"
        if not select.select([output], [], [], 0)[0]:
            return ""
        status = output.read().decode().strip() or "unknown, its reaper was killed"
        output.close()
        return f"it ended (exit status {status})\n{self._log_excerpt()}"

    def stop(self) -> None:
        """Stop the server and its child processes."""
        output, stop_pipe = self._reaper.stdout, self._reaper.stdin
        assert output is not None and stop_pipe is not None
        self._reserved.close()
        with contextlib.suppress(BrokenPipeError):
            stop_pipe.close()
        if not output.closed:
            select.select([output], [], [], EXIT_S)
            output.close()
        self._reaper.wait(EXIT_S)

    def lost(self) -> str:
        """Why the server must be restarted (it exited or hangs), or "" if it responds."""
        end = time.monotonic() + HANG_TIMEOUT_S
        while not (reason := self.ended()) and (remaining_s := end - time.monotonic()) > 0:
            if self._is_healthy(remaining_s):
                return ""
            time.sleep(_POLL_S)
        hangs = f"its health check failed for {HANG_TIMEOUT_S:g} s"
        return reason or f"{hangs}\n{self._log_excerpt()}"

    def _is_healthy(self, timeout_s: float = _HEALTH_TIMEOUT_S) -> bool:
        try:
            with _NO_PROXY.open(f"{self._address}/health", timeout=timeout_s) as reply:
                return reply.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _log_excerpt(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except FileNotFoundError:  # removed by a clean-up of temporary files
            return ""
        return "\n".join([f"last lines of its log ({self._log}):", *lines[-_LOG_LINES:]])


def _flags(options: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, Mapping | list | tuple) else str(value)
            arguments += [f"--{flag}", text]
    return arguments
