"""Clock jumps and slow disks for the processes of one run.

`preload.c` intercepts their C library calls. Needs gcc but not root.
"""

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

BUILD_S = 60.0
SOURCE = Path(__file__).with_name("preload.c")
LAYOUT = struct.Struct("=qqq")
"""Layout of `struct control`."""


def unavailable() -> str:
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
