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


class VllmServer:
    """A vLLM server in a child process.

    A guard (`keel.rollout.judge.reaper`) ends it when this process ends in any way."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        host: str,
        log: Path,
        port: int = 0,
        key: str = "",
    ) -> None:
        """Start it.

        name: the server's name in error messages. options: vLLM's, by their names there.
        environment: variables added to this process's. host, port: address to listen at; port 0
        takes a free one. log: receives the server's output. key: API key that clients have to send;
        empty: `VLLM_API_KEY` of the environment, if set.
        Raises OSError if the address cannot be bound.
        """
        self._name, self._host, self._log = name, host, log
        # Bound and not listening, it keeps others off the port until the server listens there.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._port.bind((host, port))
        except BaseException:
            self._port.close()
            raise
        self._number = int(self._port.getsockname()[1])
        address = {"host": host, "port": self._number}
        command = [sys.executable, "-m", MODULE, *flags({**options, **address})]
        keys = {"VLLM_API_KEY": key} if key else {}
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the driver
                env={**os.environ, **environment, **keys},
            )

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._number}/v1"

    def wait(self, timeout_s: float, knob: str = "") -> None:
        """Wait until the server answers. knob: the setting that `timeout_s` comes from. Raises
        RuntimeError with the end of the log if the server does not start."""
        end = time.monotonic() + timeout_s
        while not self._healthy():
            why = self.ended()
            if not why and time.monotonic() > end:
                why = (
                    f"no answer within {f'{knob} = ' * bool(knob)}{timeout_s:g} s\n"
                    f"{log_excerpt(self._log)}"
                )
            if why:
                self.stop()
                raise RuntimeError(f"{self._name}: its server did not start: {why}")
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


class JudgeProcess(VllmServer):
    """A vLLM server of the judge `config.model`."""

    def __init__(self, config: JudgeConfig, *, gpu: bool, host: str, key: str, log: Path) -> None:
        super().__init__(
            f"rewards.judge.model = {config.model!r}",
            options(config, gpu=gpu),
            environment(gpu=gpu, threads=config.server.threads),
            host=host,
            key=key,
            log=log,
        )


def options(config: JudgeConfig, *, gpu: bool) -> dict[str, Any]:
    """vLLM options of the judge's server, without its address."""
    server = config.server
    chosen: dict[str, Any] = {
        "model": config.model,
        "served_model_name": config.model,
        "dtype": server.dtype,
        "max_num_seqs": config.max_concurrent,
        # A weak judge would rather write white space for ever than the next brace.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    if server.max_model_len:
        chosen["max_model_len"] = server.max_model_len
    if gpu:
        chosen |= {
            "gpu_memory_utilization": server.gpu_memory_utilization,
            "tensor_parallel_size": server.tensor_parallel,
        }
    return {**common_options(gpu=gpu, kv_cache_gib=server.kv_cache_gib), **chosen, **server.options}


def common_options(*, gpu: bool, kv_cache_gib: float) -> dict[str, Any]:
    """vLLM options of every server that Keel starts. kv_cache_gib: KV cache on a CPU."""
    quiet = {"disable_log_stats": True, "disable_uvicorn_access_log": True}
    if gpu:
        return quiet
    return {
        **quiet,
        "kv_cache_memory_bytes": int(kv_cache_gib * GIB),
        "enforce_eager": True,  # compiling takes a minute
        "distributed_executor_backend": "uni",
    }


def flags(options: Mapping[str, Any]) -> list[str]:
    """Command-line arguments of vLLM's server for `options`."""
    return [word for name, value in options.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> Iterator[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
    else:
        yield f"--{flag}"
        yield json.dumps(value) if isinstance(value, (Mapping, list, tuple)) else str(value)


def environment(*, gpu: bool, threads: int) -> dict[str, str]:
    """Variables added to the server's environment. threads: CPU threads of a server without GPU."""
    common = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if gpu:
        return common
    return {
        **common,
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton
        # Allows the engine to compute in its own process, in place of a third one.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
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
