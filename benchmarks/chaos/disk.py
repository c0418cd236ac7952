"""Small tmpfs for a run folder that can be filled up; needs root."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_MIB = 512
"""Several times the size of the run folder."""
MOUNT_S = 20.0
BALLAST = "ballast"


def unavailable() -> str:
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
