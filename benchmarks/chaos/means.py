"""Tools for faults of the run folder's disk and of the clock.

A small tmpfs can be filled up (needs root). `preload.c` intercepts C library calls of a run's
processes for clock jumps and a slow disk (needs gcc).
"""

import errno
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SIZE_MIB = 512
"""Several times the size of the run folder."""
MOUNT_S = 20.0
BALLAST = "ballast"


def disk_unavailable() -> str:
    """Reason why no disk can be mounted here; empty if one can."""
    if os.geteuid() or not shutil.which("mount"):
        return "a full disk needs root, to mount a small file system"
    return ""


class Disk:
    def __init__(self, place: Path) -> None:
        self.place = place

    def fill(self) -> None:
        """Write a file until the disk is full."""
        with (self.place / BALLAST).open("ab", buffering=0) as file:
            block = bytes(2**20)
            while block:
                try:
                    file.write(block)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    block = block[: len(block) // 2]

    def free(self) -> None:
        (self.place / BALLAST).unlink(missing_ok=True)


@contextmanager
def small_disk(place: Path) -> Iterator[Disk]:
    """Mount a small disk at `place`; on exit, copy its content back and unmount it."""
    place.mkdir(parents=True)
    _call("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "keel-chaos", str(place))
    disk = Disk(place)
    try:
        yield disk
    finally:
        disk.free()
        kept = place.with_name(f"{place.name}.kept")
        shutil.copytree(place, kept, symlinks=True)
        _call("umount", "--lazy", str(place))
        place.rmdir()
        kept.rename(place)


def _call(*words: str) -> None:
    subprocess.run(words, check=True, timeout=MOUNT_S)


BUILD_S = 60.0
SOURCE = Path(__file__).with_name("preload.c")
LAYOUT = struct.Struct("=qqq")
"""Layout of `struct control`."""


def preload_unavailable() -> str:
    """Reason why the library cannot be built here; empty if it can."""
    return "" if shutil.which("gcc") else "clock jumps and slow disks need gcc"


class Preload:
    """Controls the clock and disk of all processes of a run."""

    def __init__(self, place: Path, folder: Path) -> None:
        """Build the library in `place`; `folder` is the run folder, the only one slowed down."""
        library, control = place / "preload.so", place / "preload.control"
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"],
            check=True,
            timeout=BUILD_S,
        )
        control.write_bytes(bytes(LAYOUT.size))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), LAYOUT.size)
        self.environment = {
            "LD_PRELOAD": str(library),
            "KEEL_CHAOS_CONTROL": str(control),
            "KEEL_CHAOS_FOLDER": f"{folder}/",
        }

    @property
    def ahead_s(self) -> float:
        """Seconds by which the run's wall clock is ahead of the machine's."""
        return self._read()[0] / 1e9

    def jump(self, seconds: float) -> None:
        """Move the wall clock by `seconds`, which may be negative."""
        ahead, write, sync = self._read()
        self._write(ahead + round(seconds * 1e9), write, sync)

    def slow(self, *, write_s: float, sync_s: float) -> None:
        """Delay every write by `write_s`, and every fsync and rename by `sync_s`."""
        self._write(self._read()[0], round(write_s * 1e6), round(sync_s * 1e6))

    def _read(self) -> tuple[int, int, int]:
        ahead, write, sync = LAYOUT.unpack(self._control)
        return ahead, write, sync

    def _write(self, *values: int) -> None:
        # Aligned 8-byte words cannot be read half-written.
        for index, value in enumerate(values):
            self._control[8 * index : 8 * index + 8] = struct.pack("=q", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Fault tools of this machine."""

    preload: Preload | None = None
    disk: Disk | None = None
