"""Processes forked from servers that have preloaded their libraries.

`python -m tests.forked train …` is `keel train …` whose Ray workers are forked.
"""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from tests.ray_workers import SERVER, WAITING
from tests.ray_workers import __file__ as setup_worker

_LOADED: list[str] = []


def forked_from(*modules: str) -> ForkServerContext:
    """Return a forkserver context that preloads `modules`. Python runs a single such server, so a
    server with another first module is stopped."""
    context = get_context("forkserver")
    if _LOADED and _LOADED[0] != modules[0]:
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        server._stop()  # as Python's own tests do
    _LOADED[:] = modules
    context.set_forkserver_preload(_LOADED)
    return context


def start_worker_server(address: Path, session: int) -> None:
    """Wait for the server of Ray workers at `address`. Starts it if necessary, and it ends with the
    process `session`. Raises RuntimeError if it does not start, and TimeoutError if it takes longer
    than `PATIENCE_S`."""
    from tests.waiting import PATIENCE_S  # noqa: PLC0415  (loads pytest)

    cpu = {SERVER: str(address), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.ray_workers", "serve", str(session)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **cpu},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert server.stdout
    if not select.select([server.stdout], [], [], PATIENCE_S)[0]:
        server.kill()
        raise TimeoutError(f"waited {PATIENCE_S:g} s for the server of Ray workers at {address}")
    if not server.stdout.readline():
        raise RuntimeError("the server of Ray workers did not start: its error is printed above")


@contextmanager
def forking_ray_workers() -> Iterator[None]:
    """Fork the workers of Ray clusters that this process starts."""
    from ray._private.parameter import RayParams  # noqa: PLC0415  (slow to load)

    forking = partial(RayParams, setup_worker_path=setup_worker)
    with patch("ray._private.parameter.RayParams", forking):
        yield


def descendants(process: int) -> list[psutil.Process]:
    """Return all processes below one, with the Ray workers forked for it and those below them."""
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process).children(recursive=True)
    for each in [*below]:
        with suppress(psutil.Error):
            *command, last = each.cmdline() or [""]
            if command == WAITING:
                below += [psutil.Process(int(last)), *descendants(int(last))]
    return below


if __name__ == "__main__":
    from keel.commands.cli import main

    with forking_ray_workers():
        sys.exit(main())
