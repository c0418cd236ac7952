"""A wall clock that jumps and a disk that is slow, for the processes of one run alone: what they
ask the C library goes through `preload.c`, which is built with gcc. No root."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

BUILD_S = 60.0
SOURCE = Path(__file__).with_name("preload.c")
FORM = struct.Struct("=qqq")
"""As `struct control` has it."""


def lacking() -> str:
    """Why there can be none here; "" if there can."""
    return "" if shutil.which("gcc") else "clock jumps and slow disks need gcc"


class Preload:
    """What all processes of a run see of clock and disk."""

    def __init__(self, place: Path, folder: Path) -> None:
        """place: for the library and the file that rules it. folder: of the run; the files below
        it can be slow."""
        library, control = place / "preload.so", place / "preload.control"
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"],
            check=True,
            timeout=BUILD_S,
        )
        control.write_bytes(bytes(FORM.size))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), FORM.size)
        self.environment = {
            "LD_PRELOAD": str(library),
            "KEEL_CHAOS_CONTROL": str(control),
            "KEEL_CHAOS_FOLDER": f"{folder}/",
        }

    @property
    def ahead_s(self) -> float:
        """Of the machine's wall clock."""
        return self._read()[0] / 1e9

    def jump(self, seconds: float) -> None:
        """Back, if less than 0."""
        ahead, write, sync = self._read()
        self._write(ahead + round(seconds * 1e9), write, sync)

    def slow(self, *, write_s: float, sync_s: float) -> None:
        """What a write takes longer, and what fsync and rename do; 0: nothing."""
        self._write(self._read()[0], round(write_s * 1e6), round(sync_s * 1e6))

    def _read(self) -> tuple[int, int, int]:
        ahead, write, sync = FORM.unpack(self._control)
        return ahead, write, sync

    def _write(self, *values: int) -> None:
        # In aligned words of 8 bytes: nobody reads half of one.
        for index, value in enumerate(values):
            self._control[8 * index : 8 * index + 8] = struct.pack("=q", value)
