"""Results of a run with faults: record, summary and failed checks."""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.faults import Fault, due
from benchmarks.chaos.run import ROLES, Run
from benchmarks.common import commit
from keel.trainer.run.signals import PREEMPTED

SAME = ("reward/mean", "grad_norm", "kl/ref", "length/mean", "mismatch/logp_abs")
"""Metrics compared with the run without faults."""
MIB = 2**20


@dataclass(slots=True, kw_only=True)
class Record:
    """Observations of a run, appended to files in `out`."""

    out: Path
    faults: list[Fault] = field(default_factory=list[Fault])
    sizes: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    late: list[int] = field(default_factory=list[int])
    """Exit statuses of exits without a new fault."""
    status: int | None = None
    """Final exit status."""
    broken_off: str = "an error of this benchmark"
    """Reason for an early end of the observation; empty if it was complete."""

    def suffered(self, fault: Fault) -> None:
        self.faults.append(fault)
        _append(self.out / "faults.jsonl", asdict(fault))

    def measured(self, size: dict[str, float]) -> None:
        self.sizes.append(size)
        _append(self.out / "memory.jsonl", size)


def _append(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(content) + "\n")


def memory(run: Run) -> dict[str, float]:
    """Measure memory (MiB, Pss) and open files of the largest process of each role.

    The object store is the raylet's shared memory; /dev/shm covers the whole machine.
    """
    sizes: dict[str, float] = {"step": run.last()}
    for role in ("driver", *ROLES):
        for process in run.of(role):
            with suppress(psutil.Error, OSError):
                pss = process.memory_full_info().pss
                values = {role: pss / MIB, f"{role} (files)": process.num_fds()}
                if role == "raylet":
                    values["object store"] = shared_mib(process.pid)
                sizes |= {name: max(sizes.get(name, 0.0), v) for name, v in values.items()}
    return sizes | {"/dev/shm": psutil.disk_usage("/dev/shm").used / MIB}


def shared_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(s.split()[1]) / 1024 for s in lines if s.startswith("RssShmem:")), 0.0)


def growth(sizes: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Map each series to its first value, last value and growth per 100 steps.

    The growth is the least-squares slope over the last three quarters.
    """
    result: dict[str, dict[str, float]] = {}
    for name in sorted({name for size in sizes for name in size} - {"step"}):
        points = [(size["step"], size[name]) for size in sizes if name in size]
        late = points[len(points) // 4 :]
        flat = len({step for step, _ in late}) < 2
        slope = 0.0 if flat else statistics.linear_regression(*zip(*late, strict=True)).slope
        result[name] = {
            "first": round(points[0][1], 1),
            "last": round(points[-1][1], 1),
            "per 100 steps": round(100 * slope, 2),
        }
    return result


def summary(run: Run, record: Record, options: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise a run; `options` holds seed, steps, every and minutes of the command line."""
    groups: dict[str, list[Fault]] = defaultdict(list)
    for fault in record.faults:
        groups[fault.name].append(fault)
    lines = run.steps()
    return {
        "commit": commit(),
        "options": dict(options),
        "faults": len(record.faults),
        "starts": run.starts,
        "broken off": record.broken_off,
        "status": record.status,
        "last step": run.last(),
        "by fault": {
            name: {
                "number": len(some),
                "reported_s": spread([one.reported_s for one in some]),
                "trains_s": spread([one.again_s for one in some]),
                "gone_s": spread([one.gone_s for one in some]),
                "statuses": dict(Counter(ends(one) for one in some)),
                "processes left": sum(one.left for one in some),
            }
            for name, some in sorted(groups.items())
        },
        "not due": not_due(record.faults),
        "flips": {
            "number": sum(bool(one.flipped) for one in record.faults),
            "not named": [one.flipped for one in record.faults if one.flipped and not one.named],
        },
        "ended late": record.late,
        "steps, each once": [line["step"] for line in lines] == list(range(len(lines))),
        "memory": growth(record.sizes),
    }


def ends(fault: Fault) -> str:
    return ", ".join(map(str, fault.statuses)) or "none"


def not_due(faults: Sequence[Fault]) -> list[str]:
    """Describe each fault with an exit status that is not allowed.

    Status 0 is the end of the run and is checked by its last step.
    """
    lines: list[str] = []
    for index, fault in enumerate(faults):
        allowed = due(fault, faults[:index])
        went_on = fault.again_s is not None and not fault.statuses
        if (went_on and None not in allowed) or set(fault.statuses) - {0, *allowed}:
            result = "the run went on" if went_on else f"status {ends(fault)}"
            expected = " or ".join("none" if one is None else str(int(one)) for one in allowed)
            lines.append(f"{fault.name} after step {fault.step}: {result}, not status {expected}")
    return lines


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median and maximum of the known values."""
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "most": max(known)} if known else None


def compared(first: Path, second: Path, faults: Sequence[Fault]) -> dict[str, Any]:
    """Compare the metrics of run `first`, which had `faults`, with run `second`.

    A killed reward worker may lose a score; steps after the first lost score may differ.
    """

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
    return {
        "metrics": names,
        "steps": len(both),
        "equal steps": sum(not size for size in gaps.values()),
        "different, and not due": [step for step in due_same if gaps[step]],
        "first lost score": lost[0] if lost else None,
    }


def gap(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Largest difference between metrics of a step; infinite if only one side has a metric."""
    names = [name for name in SAME if name in one or name in other]
    gaps = [abs(one.get(name, math.inf) - other.get(name, -math.inf)) for name in names]
    return max(gaps, default=math.inf)


def wrong(results: Mapping[str, Any]) -> list[str]:
    """Describe the failed checks of a `summary`."""
    options, lines = results["options"], list[str]()
    status, last, steps = results["status"], results["last step"], options["steps"]
    if why := results["broken off"]:
        lines.append(f"broken off: {why}")
    elif status not in (0, PREEMPTED) or (status == 0 and last != steps):
        lines.append(f"the run ended with status {status} after step {last} of {steps}")
    if options["every"] and not results["faults"]:
        lines.append("no fault was done to the run")
    lines += results["not due"]
    lines += [f"{name} was not reported as damaged" for name in results["flips"]["not named"]]
    lines += [f"the run ended with status {s} without a fault" for s in results["ended late"]]
    lines += [
        f"{name}: {some['processes left']} processes left"
        for name, some in results["by fault"].items()
        if some["processes left"]
    ]
    lines += [f"left at the end: {words}" for words in results["left at the end"]]
    if not results["steps, each once"]:
        lines.append("metrics.jsonl does not have each step once")
    return lines + wrong_reference(results.get("reference"), last)


def wrong_reference(reference: Mapping[str, Any] | None, last: int) -> list[str]:
    """Describe the failed checks of a comparison; `last` is the last step of the faulty run."""
    if reference is None:
        return []
    if why := reference.get("failed"):
        return [f"the run without faults {why}"]
    lines: list[str] = []
    if different := reference["different, and not due"]:
        lines.append(
            f"{len(different)} of {reference['steps']} steps differ from the run without faults, "
            f"from step {different[0]} on"
        )
    if reference["steps"] < last:
        lines.append(f"the run without faults has {reference['steps']} of the {last} steps")
    return lines
