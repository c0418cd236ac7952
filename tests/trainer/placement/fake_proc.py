"""A machine whose processes and clock do what a test says."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from keel.model.ray_timeouts import NAME
from keel.trainer.placement import hang_detector as looks
from keel.trainer.placement.hang_detector import POLL_S, HangDetector, NodeHealth

START = "this"
"""The start whose actors are looked at."""
RAYLET = 100


class Machine:
    """Its /proc, with a raylet; `ended` are the processes that a look has killed."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self.now, self.ended = root, 0.0, list[int]()
        (root / "stat").write_text("btime 0\n")
        patch.setattr(psutil, "PROCFS_PATH", str(root))
        patch.setattr(looks, "kill", self._end)
        self.add(RAYLET, below=0)

    def looker(self, hang_timeout_s: float, **rays: int) -> HangDetector:
        return HangDetector(
            RAYLET, rays, start=START, hang_timeout_s=hang_timeout_s, clock=lambda: self.now
        )

    def look(self, looker: HangDetector, seconds: float = POLL_S) -> NodeHealth:
        """So long after the last."""
        self.now += seconds
        return looker.poll()

    def add(
        self, pid: int, name: str = "", *, below: int = RAYLET, start: str = START, begun: int = 1
    ) -> None:
        """A process with a thread. name: with a mark; begun: clock ticks after boot."""
        fields = ["S", str(below), *["0"] * 17, str(begun), *["0"] * 30]
        self.threads(pid, pid)
        (self._root / f"{pid}/stat").write_text(f"{pid} (it) {' '.join(fields)}")
        (self._root / f"{pid}/task/{pid}/children").write_text("")
        self.mark(pid, name, start)
        if below:
            self.list_below(below, pid)

    def mark(self, pid: int, name: str, start: str = START) -> None:
        mark = f"{NAME}={start}/{name}\0" if name else "HOME=/\0"
        (self._root / f"{pid}/environ").write_text(mark)

    def list_below(self, pid: int, *children: int) -> None:
        """Those that the kernel names besides."""
        path = self._root / f"{pid}/task/{pid}/children"
        path.write_text(path.read_text() + "".join(f"{child} " for child in children))

    def list_none_below(self, pid: int) -> None:
        (self._root / f"{pid}/task/{pid}/children").write_text("")

    def threads(
        self, pid: int, *numbers: int, state: str = "S (sleeping)", tracer: int = 0, at: str = "1"
    ) -> None:
        """What they are at. at: how often each was given a processor; "": that is not counted."""
        for number in numbers:
            folder = self._root / f"{pid}/task/{number}"
            folder.mkdir(parents=True, exist_ok=True)
            counted = f"voluntary_ctxt_switches:\t{at}\nnonvoluntary_ctxt_switches:\t0\n"
            said = f"Name:\tit\nState:\t{state}\nTracerPid:\t{tracer}\n"
            (folder / "status").write_text(said + (counted if at else ""))

    def remove(self, pid: int) -> None:
        shutil.rmtree(self._root / str(pid))

    def _end(self, processes: list[psutil.Process]) -> str:
        for process in processes:
            self.ended.append(process.pid)
            self.remove(process.pid)
        return ""
