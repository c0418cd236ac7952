"""Ray workers forked from a server that has loaded their libraries.

Ray runs this file in place of its own `setup_worker.py`. It asks the server for a worker, and both
end together.
"""

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

SERVER = "KEEL_TEST_RAY_WORKERS"
"""Environment variable with the path of the server's socket."""
LIBRARIES = (
    "deepspeed",
    "transformers.conversion_mapping",
    "transformers.integrations.flash_attention",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)


@contextmanager
def worker_server() -> Iterator[str]:
    """Start a server and yield the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="keel-") as folder:
        address = f"{folder}/socket"
        cpu = {SERVER: address, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        with subprocess.Popen(
            [sys.executable, "-m", "tests.ray_workers", "serve"],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **cpu},
            stdin=subprocess.PIPE,  # the server ends with it
            stdout=subprocess.PIPE,
        ) as server:
            assert server.stdout and server.stdout.readline()
            yield address


def serve() -> None:
    """Fork a worker for each connection until standard input ends."""
    from keel.model.imports import heavy_imports, not_found  # noqa: PLC0415

    # Ray's library reads the environment of its worker when it is loaded.
    with heavy_imports(), not_found("ray", "mlflow"):
        for library in LIBRARIES:
            with suppress(ImportError):  # such as vLLM's worker for CPUs, in its build for GPUs
                import_module(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[SERVER])
        listener.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                become_worker(connection)
            connection.close()


def become_worker(connection: socket.socket) -> None:
    size, files, _, _ = socket.recv_fds(connection, 8, 2)
    with connection.makefile("rb") as stream:
        arguments, environment, folder = json.loads(stream.read(int.from_bytes(size, "big")))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)

    def end_with_client() -> None:
        connection.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_client, daemon=True).start()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    os._exit(0)


def ask() -> None:
    """Ask the server for the worker that Ray wants, and wait for its end."""
    parser = ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, arguments = parser.parse_known_args()
    context = json.loads(known.serialized_runtime_env_context)
    environment = {**os.environ, **context.get("env_vars", {})}
    request = json.dumps([arguments, environment, os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SERVER])
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [1, 2])
        connection.sendall(request)
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        ask()
