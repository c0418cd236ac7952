"""The cold start on a GPU, in a process of its own: its memory is free before the engines start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils.logging import disable_progress_bar

from keel.configs.schema import ConfigError
from keel.model.tiny.cold_start import Progress

START_S = 180.0
"""Longest wait, on top of the training's own limit, for imports, questions, CUDA and the disk."""
STOP_S = 30.0


def run_on_gpu(
    make: Callable[..., None],
    device: str,
    *,
    timeout_s: float,
    progress: Progress | None = None,
) -> None:
    """`make(device=…, progress=…)` in a fresh process, whose errors are raised here.

    GEMMs are in TF32, attention is computed in full, and PyTorch is asked for deterministic
    kernels: the same arguments give the same weights on one kind of GPU as far as it has them.

    Raises:
        TimeoutError: no end after `timeout_s` and `START_S`.
        RuntimeError: the process died.
    """
    # Not a fork: this process may have threads, and CUDA does not survive one.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, make, device), daemon=True)
    process.start()
    theirs.close()
    end = time.monotonic() + timeout_s + START_S
    try:
        while True:
            if not ours.poll(max(0.0, end - time.monotonic())):
                raise TimeoutError(
                    f"model.tiny.cold_start: no end on {device} after "
                    f"{timeout_s + START_S:.0f} s (max_seconds and {START_S:.0f} s to start)"
                )
            try:
                kind, content = ours.recv()
            except EOFError:
                process.join(STOP_S)
                raise RuntimeError(
                    f"model.tiny.cold_start: the process on {device} died (exit code "
                    f"{process.exitcode}); its own words are above, if it had any"
                ) from None
            if kind == "error":
                raise content
            if kind == "done":
                process.join(STOP_S)  # the GPU is free once it is gone
                return
            if progress is not None:
                progress(*content)
    finally:
        if process.is_alive():
            process.kill()
            process.join(STOP_S)


def plain(error: Exception) -> Exception:
    """The error in a form that surely survives the pipe: ours as they are, others in words."""
    if type(error) in (TimeoutError, ValueError, ConfigError):
        return error
    return RuntimeError(f"model.tiny.cold_start on a GPU: {type(error).__name__}: {error}")


def _child(parent: Connection, make: Callable[..., None], device: str) -> None:
    disable_progress_bar()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    # Read by cuBLAS when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        with _repeatable():
            make(device=device, progress=lambda *numbers: parent.send(("progress", numbers)))
    except Exception as error:  # whatever it is, the parent raises it
        parent.send(("error", plain(error)))
    else:
        parent.send(("done", None))


@contextmanager
def _repeatable() -> Iterator[None]:
    """For the rest of the process: it has nothing else to do."""
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings("ignore", message=".*deterministic")
        yield
