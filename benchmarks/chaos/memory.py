"""Memory and open files over the steps, by the role of a process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.chaos.run import ROLES, Run
from benchmarks.stability.report import drawn, save_figure

MIB = 2**20
SHARED = "RssShmem:"
COLORS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
STYLES = ("-", "--", ":", "-.")
FILES = " (files)"
"""Ends the names of what is counted in files, not in MiB."""


def memory(run: Run) -> dict[str, float]:
    """MiB of each role (`Pss`) and its open files, of the largest process that has it. The object
    store is memory that the raylet shares with others; /dev/shm is the whole machine's."""
    found: dict[str, float] = {"step": run.last()}
    for role in ("driver", *ROLES):
        for process in run.of(role):
            with suppress(psutil.Error, OSError):
                size, files = process.memory_full_info().pss / MIB, process.num_fds()
                found[role] = max(found.get(role, 0.0), size)
                found[role + FILES] = max(found.get(role + FILES, 0.0), files)
                if role == "raylet":
                    found["object store"] = max(found.get("object store", 0.0), shared(process))
    found["/dev/shm"] = psutil.disk_usage("/dev/shm").used / MIB
    return found


def shared(process: psutil.Process) -> float:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(SHARED):
            return int(line.split()[1]) / 1024
    return 0.0


def course(sizes: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of each series its first and last value, and by how much it grows in 100 steps: the slope of
    a straight line through its last three quarters, without what the first steps take."""
    names = sorted({name for size in sizes for name in size} - {"step"})
    found: dict[str, dict[str, float]] = {}
    for name in names:
        points = [(size["step"], size[name]) for size in sizes if name in size]
        late = points[len(points) // 4 :]
        grows = 100 * slope(late)
        found[name] = {
            "first": round(points[0][1], 1),
            "last": round(points[-1][1], 1),
            "per 100 steps": round(grows, 2),
        }
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line of least squares; 0 for points above one another."""
    n = len(points)
    x, y = sum(p[0] for p in points) / n, sum(p[1] for p in points) / n
    spread = sum((p[0] - x) ** 2 for p in points)
    return sum((p[0] - x) * (p[1] - y) for p in points) / spread if spread else 0.0


def plot(sizes: Sequence[dict[str, float]], faults: Sequence[int], path: Path) -> None:
    """faults: the steps at which there were some."""
    figure, (above, below) = drawn(2, 1, (9, 8))
    names = list(course(sizes))
    roles = sorted({name.removesuffix(FILES) for name in names})
    looks = {role: (COLORS[i], STYLES[i % len(STYLES)]) for i, role in enumerate(roles)}
    for name in names:
        # What is trained again after a fault has another point at its step.
        points = sorted((size["step"], size[name]) for size in sizes if name in size)
        panel, role = (below if name.endswith(FILES) else above), name.removesuffix(FILES)
        color, style = looks[role]
        panel.plot(
            *zip(*points, strict=True), label=role, color=color, linestyle=style, linewidth=1
        )
    for panel, title in ((above, "MiB (log)"), (below, "open files")):
        panel.set_ylabel(title)
        panel.set_xlabel("step")
        for step in faults:
            panel.axvline(step, color="#dddddd", linewidth=0.5, zorder=0)
        panel.legend(fontsize=7, ncols=4)
    above.set_yscale("symlog")
    for panel in (above, below):
        panel.set_ylim(bottom=0)
    save_figure(figure, path)
