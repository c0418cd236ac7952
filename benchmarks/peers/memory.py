"""Peak memory of an arm, watched from outside: the whole GPU's, or without one its processes'."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import psutil

GIB = 2**30
OTHERS_GIB = 2.0
"""Of a GPU, that others may have."""
EVERY_S = 0.05
SLOW_EVERY_S = 0.5
"""Between two looks at a tree of processes, which cost more."""


class PeakMemory:
    """While open, samples a reading in bytes in a thread."""

    def __init__(self, read: Callable[[], float], every_s: float) -> None:
        self._read, self._every_s = read, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)
        self.before = self._read()
        """In use at the start, by whatever else there is."""
        self.peak = self.before
        self.samples = 0

    @property
    def gib(self) -> float:
        """Peak over what was in use before, in GiB."""
        return (self.peak - self.before) / GIB

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.peak = max(self.peak, self._read())
            self.samples += 1


def gpu_reader() -> Callable[[], float] | None:
    """Bytes in use on the first GPU by all processes, without a CUDA context here; None where there
    is none."""
    try:
        import pynvml  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _used if _used() else None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        handle = _handle(nvml)
    except nvml.NVMLError:
        return None
    return lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used)


def gpu_processes() -> dict[int, float]:
    """GiB on the first GPU by process id, where the driver says it."""
    try:
        import pynvml  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    nvml: Any = pynvml
    try:
        handle = _handle(nvml)
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return {}
    return {each.pid: (each.usedGpuMemory or 0) / GIB for each in found}


def note_processes(most: dict[str, float]) -> None:
    """Largest GPU memory of each process, by its name and number."""
    for pid, gib in gpu_processes().items():
        try:
            name = f"{' '.join(psutil.Process(pid).cmdline())[:60]} ({pid})"
        except psutil.Error:
            name = str(pid)
        most[name] = max(most.get(name, 0.0), gib)


def _handle(nvml: Any) -> Any:
    gpu = first_gpu()
    if gpu.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return nvml.nvmlDeviceGetHandleByUUID(gpu)


def first_gpu() -> str:
    """The driver's number or UUID of the first GPU that programs started here see."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


def gpu_name() -> str:
    """Of the first GPU, with its driver's version; empty without one."""
    return _nvidia_smi("name,driver_version")


def gpu_size() -> float:
    """Bytes that the first GPU has; 0 without one."""
    return _bytes("memory.total")


def _used() -> float:
    return _bytes("memory.used")


def _bytes(query: str) -> float:
    try:
        return float(_nvidia_smi(query)) * 2**20
    except ValueError:
        return 0.0


def _nvidia_smi(query: str) -> str:
    """One line about the first GPU; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    command += ["-i", first_gpu()]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return made.stdout.strip()


def tree_reader(pid: Callable[[], int | None]) -> Callable[[], float]:
    """Resident bytes of a process and all below it; shared pages count once for each."""

    def read() -> float:
        number = pid()
        if number is None:
            return 0.0
        try:
            root = psutil.Process(number)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            return 0.0
        total = 0.0
        for each in family:
            try:
                total += each.memory_info().rss
            except psutil.Error:
                continue
        return total

    return read


def check_alone(read: Callable[[], float], *, deadline_s: float = 30.0) -> None:
    """Raise SystemExit if others have a part of the GPU and do not give it back: peaks and times
    would not be an arm's own."""
    if not settled(read, OTHERS_GIB * GIB, deadline_s=deadline_s):
        raise SystemExit(
            f"{read() / GIB:.1f} GiB of GPU {first_gpu()} are in use, by none of the arms, whose "
            "peaks and times would not be their own: end what has them, or name another GPU in "
            "CUDA_VISIBLE_DEVICES"
        )


def settled(read: Callable[[], float], target: float, *, deadline_s: float = 30.0) -> bool:
    """Wait until no more than `target` bytes (and 256 MiB) are in use: an arm that has ended takes
    a moment to give its memory back."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if read() <= target + 2**28:
            return True
        time.sleep(0.25)
    return False
