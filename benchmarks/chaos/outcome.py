"""What came of a run with faults: in numbers, and beside the same run without."""

from __future__ import annotations

import json
import signal
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.memory import course
from benchmarks.chaos.run import Run
from benchmarks.common.revision import commit
from keel.trainer.run.interrupt import PREEMPTED

EXPECTED = (None, 0, 1, -signal.SIGKILL, PREEMPTED)
SAME = ("reward/mean", "grad_norm", "kl/ref", "length/mean", "mismatch/logp_abs")
"""Metrics that are compared with those of the run without faults, where they are there."""


def summary(run: Run, faults: Sequence[Fault], sizes: Sequence[dict[str, float]]) -> dict[str, Any]:
    groups: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        groups[fault.name].append(fault)
    lines = run.steps()
    return {
        "commit": commit(),
        "faults": len(faults),
        "starts": run.starts,
        "by fault": {
            name: {
                "number": len(some),
                "said_s": most([one.said_s for one in some]),
                "trains_s": most([one.again_s for one in some]),
                "gone_s": most([one.gone_s for one in some]),
                "away_s": most([one.away_s for one in some]),
                "statuses": dict(Counter(str(one.status) for one in some)),
                "processes left": sum(one.left for one in some),
            }
            for name, some in sorted(groups.items())
        },
        "steps, each once": [line["step"] for line in lines] == list(range(len(lines))),
        "ledger": {
            name: sum(line.get(f"ledger/{name}", 0.0) for line in lines)
            for name in ("lost", "twice")
        },
        "unexpected statuses": sorted({s for f in faults if (s := f.status) not in EXPECTED and s}),
        "memory": course(sizes),
    }


def most(values: Sequence[float | None]) -> dict[str, float] | None:
    there = [value for value in values if value is not None]
    return {"median": statistics.median(there), "most": max(there)} if there else None


def compared(first: Path, second: Path) -> dict[str, Any]:
    """Steps whose metrics are the same in two run folders."""

    def read(folder: Path) -> dict[int, dict[str, float]]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line for line in lines}

    one, other = read(first), read(second)
    both = sorted(one.keys() & other.keys() - {0})
    names = [name for name in SAME if any(name in one[step] for step in both)]
    gaps = [
        max(abs(one[step][name] - other[step][name]) for name in names if name in one[step])
        for step in both
    ]
    return {
        "metrics": names,
        "steps": len(both),
        "equal steps": sum(gap == 0 for gap in gaps),
        "largest difference": max(gaps, default=0.0),
        "reward/mean, last quarter": [
            statistics.fmean(run[step]["reward/mean"] for step in both[-max(1, len(both) // 4) :])
            for run in (one, other)
        ],
    }
