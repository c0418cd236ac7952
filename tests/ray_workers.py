"""Ray workers forked from a server that has loaded their libraries.

Ray runs this file in place of its own `setup_worker.py`. It asks the server for a worker, and both
end together.
"""

import errno
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from argparse import ArgumentParser
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

SERVER = "KEEL_TEST_RAY_WORKERS"
"""Environment variable with the path of the server's socket."""
WAITING = ["sh", "-c", "read end", "forked"]
"""Command of the process that Ray started, which waits for the end of the worker. Its last argument
is the worker's process id."""
LIBRARIES = (
    "deepspeed",
    "transformers.conversion_mapping",
    "transformers.integrations.flash_attention",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)


def serve(session: int) -> None:
    """Fork a worker for each connection until the process `session` ends. If the session has a
    server already, only wait until it is ready."""
    address = os.environ[SERVER]
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            wait_until_ready(address)
            print("ready", flush=True)
            return
        raise OSError(
            f"cannot serve Ray workers at {address}: {error}. If it is too long, set a shorter "
            "--basetemp"
        ) from error
    listener.listen()
    from keel.model.imports import heavy_imports, not_found  # noqa: PLC0415

    # Ray's library reads the environment of its worker when it is loaded.
    with heavy_imports(), not_found("ray", "mlflow"):
        for library in LIBRARIES:
            with suppress(ImportError):  # such as vLLM's worker for CPUs, in its build for GPUs
                import_module(library)
    # This module must find Ray, too.
    if (executor := sys.modules.get("vllm.v1.executor")) and hasattr(executor, "ray_utils"):
        del executor.ray_utils, sys.modules["vllm.v1.executor.ray_utils"]
    print("ready", flush=True)
    end = os.pidfd_open(session)
    workers: dict[int, socket.socket] = {}
    """Connection to the client of each worker, by the worker's file descriptor."""
    while end not in (
        ready := select.select([end, listener, *workers, *workers.values()], [], [])[0]
    ):
        for worker, client in [*workers.items()]:
            if worker in ready:
                os.waitid(os.P_PIDFD, worker, os.WEXITED)
                os.close(worker)
                workers.pop(worker).close()
            elif client in ready:
                signal.pidfd_send_signal(worker, signal.SIGKILL)
        if listener in ready:
            client, _ = listener.accept()
            size, files, _, _ = socket.recv_fds(client, 8, 2)
            with client.makefile("rb") as stream:
                request = stream.read(int.from_bytes(size, "big"))
            if request and (pid := os.fork()) == 0:
                for inherited in (listener, client, *workers.values()):
                    inherited.close()
                become_worker(request, files)
            if request:
                workers[os.pidfd_open(pid)] = client
                with suppress(OSError):
                    client.sendall(str(pid).encode())
            else:  # from `wait_until_ready`
                client.close()
            for file in files:
                os.close(file)
    for worker in workers:
        signal.pidfd_send_signal(worker, signal.SIGKILL)


def wait_until_ready(address: str) -> None:
    """Wait until the server answers an empty request by closing the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        while connection.connect_ex(address) == errno.ECONNREFUSED:  # bound, but not listening yet
            time.sleep(0.01)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def become_worker(request: bytes, files: list[int]) -> NoReturn:
    arguments, environment, folder, blocked = json.loads(request)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    os._exit(0)


def ask() -> NoReturn:
    """Ask the server for the worker that Ray wants, and wait for its end."""
    parser = ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, arguments = parser.parse_known_args()
    context = json.loads(known.serialized_runtime_env_context)
    environment = {**os.environ, **context.get("env_vars", {})}
    blocked = [*signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    request = json.dumps([arguments, environment, os.getcwd(), blocked]).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[SERVER])
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], [1, 2])
    connection.sendall(request)
    worker = connection.recv(20).decode()
    os.dup2(connection.fileno(), 0)
    os.execvp(WAITING[0], [*WAITING, worker])


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
    else:
        ask()
