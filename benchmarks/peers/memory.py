"""Peak memory of an arm: of the whole GPU, or of its processes without a GPU."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import psutil

GIB = 2**30
OTHERS_GIB = 2.0
"""Limit for the GPU memory of other programs."""
GPU_INTERVAL_S, TREE_INTERVAL_S = 0.05, 0.5
"""Seconds between samples; reading a process tree is slower than reading a GPU."""


class PeakMemory:
    """Samples memory in a thread and keeps the maximum.

    Reads the GPU's memory if there is a GPU, otherwise the resident memory of the processes below
    `pid()`.
    """

    def __init__(self, pid: Callable[[], int | None], gpu_ids: str = "") -> None:
        gpu = gpu_reader(gpu_ids)
        self._read = gpu or tree_reader(pid)
        self._interval_s = GPU_INTERVAL_S if gpu else TREE_INTERVAL_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)
        self.before = gpu() if gpu else 0.0
        """Bytes in use by other programs before the arm started."""
        self.peak = self.before

    @property
    def gib(self) -> float:
        """Peak in GiB above the memory in use at the start."""
        return (self.peak - self.before) / GIB

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.peak = max(self.peak, self._read())


def _gpu(gpu: str = "") -> tuple[Any, Any] | None:
    """Return NVML and the handle of a GPU (default: the first visible one), if any."""
    try:
        import pynvml  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    nvml: Any = pynvml
    gpu = gpu or first_gpu()
    try:
        nvml.nvmlInit()
        if gpu.isdecimal():
            return nvml, nvml.nvmlDeviceGetHandleByIndex(int(gpu))
        return nvml, nvml.nvmlDeviceGetHandleByUUID(gpu)
    except nvml.NVMLError:
        return None


def gpu_reader(gpu_ids: str = "") -> Callable[[], float] | None:
    """Return a function that reads the bytes in use on GPUs ("0" or "0,1"); None without a GPU.

    Creates no CUDA context in this process.
    """
    gpus = [gpu for each in gpu_ids.split(",") if (gpu := _gpu(each)) is not None]
    if not gpus:
        return None
    return lambda: float(sum(nvml.nvmlDeviceGetMemoryInfo(handle).used for nvml, handle in gpus))


def first_gpu() -> str:
    """Index or UUID of the first visible GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


def gpu_name() -> str:
    """Name of the first GPU; empty without one."""
    return str(gpu[0].nvmlDeviceGetName(gpu[1])) if (gpu := _gpu()) else ""


def tree_reader(pid: Callable[[], int | None]) -> Callable[[], float]:
    """Return a function that sums the resident bytes of a process and its descendants.

    Shared pages count once per process.
    """

    def read() -> float:
        total, number = 0.0, pid()
        with suppress(psutil.Error):
            root = psutil.Process(number) if number else None
            for process in [root, *root.children(recursive=True)] if root else []:
                with suppress(psutil.Error):
                    total += process.memory_info().rss
        return total

    return read


def check_alone(read: Callable[[], float], *, timeout_s: float = 30.0) -> None:
    """Raise SystemExit if other programs keep using the GPU's memory."""
    if not settled(read, OTHERS_GIB * GIB, timeout_s=timeout_s):
        raise SystemExit(
            f"other programs use {read() / GIB:.1f} GiB of GPU {first_gpu()}, which would distort "
            "the measurement. End them or choose another GPU with CUDA_VISIBLE_DEVICES."
        )


def settled(read: Callable[[], float], target: float, *, timeout_s: float = 30.0) -> bool:
    """Wait until at most `target` bytes (plus 256 MiB) are in use; return False on timeout.

    An exited process takes a moment to release its memory.
    """
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if read() <= target + 2**28:
            return True
        time.sleep(0.25)
    return False
