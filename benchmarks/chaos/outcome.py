"""What came of a run with faults: kept as it is seen, in numbers, beside the same run without, and
what of it is wrong."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import Fault, due
from benchmarks.chaos.memory import course
from benchmarks.chaos.run import Run
from benchmarks.common.revision import commit
from keel.trainer.run.interrupt import PREEMPTED

SAME = ("reward/mean", "grad_norm", "kl/ref", "length/mean", "mismatch/logp_abs")
"""Metrics that are compared with those of the run without faults, where they are there."""
LEDGER = ("lost", "twice")


@dataclass(slots=True, kw_only=True)
class Record:
    """What is seen of a run, in files of `out` as soon as it is there."""

    out: Path
    faults: list[Fault] = field(default_factory=list[Fault])
    sizes: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    late: list[int] = field(default_factory=list[int])
    """Exit statuses of a run that ended when nothing was done to it."""
    status: int | None = None
    """With which it ended at last: 0, or what it was told to end with after `--minutes`."""
    broken_off: str = "an error of this benchmark"
    """Why nobody looked any further; "" once the run has been seen to its end."""

    def suffered(self, fault: Fault) -> None:
        self.faults.append(fault)
        add_line(self.out / "faults.jsonl", asdict(fault))

    def measured(self, size: dict[str, float]) -> None:
        self.sizes.append(size)
        add_line(self.out / "memory.jsonl", size)


def add_line(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(content) + "\n")


def summary(run: Run, record: Record, asked: Mapping[str, Any]) -> dict[str, Any]:
    """asked: seed, steps, every, nodes and minutes, as the command has them."""
    groups: dict[str, list[Fault]] = defaultdict(list)
    for fault in record.faults:
        groups[fault.name].append(fault)
    lines = run.steps()
    return {
        "commit": commit(),
        "asked": dict(asked),
        "faults": len(record.faults),
        "starts": run.starts,
        "broken off": record.broken_off,
        "status": record.status,
        "last step": run.last(),
        "by fault": {
            name: {
                "number": len(some),
                "said_s": most([one.said_s for one in some]),
                "trains_s": most([one.again_s for one in some]),
                "gone_s": most([one.gone_s for one in some]),
                "away_s": most([one.away_s for one in some]),
                "statuses": dict(Counter(str(ends(one)) for one in some)),
                "processes left": sum(one.left for one in some),
            }
            for name, some in sorted(groups.items())
        },
        "not due": not_due(record.faults, asked["nodes"]),
        "flips": {
            "number": sum(bool(one.flipped) for one in record.faults),
            "not named": [one.flipped for one in record.faults if one.flipped and not one.named],
        },
        "ended late": record.late,
        "steps, each once": [line["step"] for line in lines] == list(range(len(lines))),
        "ledger": {name: sum(line.get(f"ledger/{name}", 0.0) for line in lines) for name in LEDGER},
        "steps without a ledger": [
            line["step"]
            for line in lines
            if line["step"] and any(f"ledger/{name}" not in line for name in LEDGER)
        ],
        "memory": course(record.sizes),
    }


def ends(fault: Fault) -> str:
    return ", ".join(map(str, fault.statuses)) or "none"


def not_due(faults: Sequence[Fault], nodes: int) -> list[str]:
    """A line for each fault that led to what it must not lead to. Status 0 is the run's last, and
    whether it was due is seen by its last step."""
    found: list[str] = []
    for index, fault in enumerate(faults):
        may = due(fault, faults[:index], nodes)
        went_on = fault.again_s is not None and not fault.statuses
        if (went_on and None not in may) or set(fault.statuses) - {0, *may}:
            came = "the run went on" if went_on else f"status {ends(fault)}"
            wanted = " or ".join("none" if one is None else str(int(one)) for one in may)
            found.append(f"{fault.name} after step {fault.step}: {came}; due is status {wanted}")
    return found


def most(values: Sequence[float | None]) -> dict[str, float] | None:
    there = [value for value in values if value is not None]
    return {"median": statistics.median(there), "most": max(there)} if there else None


def compared(first: Path, second: Path, faults: Sequence[Fault]) -> dict[str, Any]:
    """Steps whose metrics are the same in two run folders. faults: of the first; where a reward
    worker was killed, a score may be lost, and from that step on nothing has to be the same."""

    def read(folder: Path) -> dict[int, dict[str, float]]:
        path = folder / "metrics.jsonl"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return {line["step"]: line for line in lines}

    one, other = read(first), read(second)
    both = sorted(one.keys() & other.keys() - {0})
    names = [name for name in SAME if any(name in one[step] for step in both)]
    gaps = {step: gap(one[step], other[step]) for step in both}
    killed = [fault.step for fault in faults if fault.name == "kill reward worker"]
    lost = [s for s in both if one[s].get("reward/error", 0) and any(at < s for at in killed)]
    due_same = [step for step in both if not lost or step < lost[0]]
    last = both[-max(1, len(both) // 4) :]
    return {
        "metrics": names,
        "steps": len(both),
        "equal steps": sum(not size for size in gaps.values()),
        "different, and not due": [step for step in due_same if gaps[step]],
        "first lost score": lost[0] if lost else None,
        "largest difference": max(gaps.values(), default=0.0),
        "reward/mean, last quarter": [
            statistics.fmean(run[step].get("reward/mean", math.nan) for step in last)
            for run in (one, other)
            if last
        ],
    }


def gap(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The largest between metrics of a step; inf: of one that only one of them has, or of none."""
    names = [name for name in SAME if name in one or name in other]
    some = [abs(one.get(name, math.inf) - other.get(name, -math.inf)) for name in names]
    return max(some, default=math.inf)


def wrong(found: Mapping[str, Any]) -> list[str]:
    """A line for each check of a `summary` that has failed."""
    asked, lines = found["asked"], list[str]()
    status, last, steps = found["status"], found["last step"], asked["steps"]
    if why := found["broken off"]:
        lines.append(f"broken off: {why}")
    elif status not in (0, PREEMPTED) or (status == 0 and last != steps):
        lines.append(f"the run ended with status {status} after step {last} of {steps}")
    if asked["every"] and not found["faults"]:
        lines.append("no fault was done to the run")
    lines += found["not due"]
    lines += [f"{name}: nobody said that it is damaged" for name in found["flips"]["not named"]]
    lines += [f"ended with status {status}, of no fault" for status in found["ended late"]]
    lines += [
        f"{name}: {some['processes left']} processes left"
        for name, some in found["by fault"].items()
        if some["processes left"]
    ]
    lines += [f"left at the end: {words}" for words in found["left at the end"]]
    if not found["steps, each once"]:
        lines.append("metrics.jsonl does not have each step once")
    lines += [f"prompts {name}: {sum_:g}" for name, sum_ in found["ledger"].items() if sum_]
    if without := found["steps without a ledger"]:
        lines.append(f"{len(without)} steps without a ledger, from step {without[0]} on")
    return lines + wrong_beside(found.get("reference"), last)


def wrong_beside(reference: Mapping[str, Any] | None, last: int) -> list[str]:
    """The same of a comparison with the run without faults. last: step of the one with."""
    if reference is None:
        return []
    if why := reference.get("failed"):
        return [f"the run without faults {why}"]
    lines: list[str] = []
    if different := reference["different, and not due"]:
        count, steps = len(different), reference["steps"]
        lines.append(
            f"{count} of {steps} steps are not those of the run without faults, the first is step "
            f"{different[0]}"
        )
    if reference["steps"] < (last if "failed" in reference else 1):
        lines.append(f"the run without faults has {reference['steps']} of the {last} steps")
    return lines
