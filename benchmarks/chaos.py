"""A run with faults drawn by seed, beside the same run without: what the faults cost, and whether
anything is lost.

    python -m benchmarks.chaos --out chaos --seed 0 --steps 200 --every 3 [knob=value …]

Every few steps one process of the run is killed, stopped for good, or stopped for a moment
(SIGKILL; SIGSTOP; SIGSTOP and SIGCONT), the driver, engines, ranks, reward workers and Ray's own
among them; or the driver is told to end (SIGTERM, SIGUSR1), or a bit of the newest checkpoint is
flipped while the run is down, or a rank can write no file for a while. Whenever the run has ended
it is started again by the same command, as a scheduler would. Linux, and psutil.

Printed at the end, and kept in `faults.jsonl` and `summary.json`: seconds until the run said
something and trained again, exit statuses, processes left, the ledger's sums, memory over the
steps, and in how many steps the metrics are those of the run without faults (`--no-reference`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.common.revision import commit
from keel.trainer.cluster.processes import gone
from keel.trainer.run.interrupt import PREEMPTED

KINDS = {
    "engine": "ray::RolloutWorker",
    "rank": "ray::TrainerWorker",
    "reward worker": "keel.rewards.workers.worker",
    "raylet": "/raylet",
    "gcs": "gcs_server",
}
"""Kind of process → what stands in its command line."""
OURS = ("keel", "ray::", *KINDS.values())
DEADLINE_S, GONE_S, MOMENT_S, SETTLED_S = 600.0, 90.0, 8.0, 4.0
"""Longest waits for a step and for a run to be gone; of a moment; until all is well."""
EXPECTED = (None, 0, 1, -signal.SIGKILL, PREEMPTED)
FROZEN_S = 10
"""`run.frozen_after_s`"""
SAME = ("reward/mean", "grad_norm", "kl/ref", "length/mean", "mismatch/logp_abs")
"""Metrics that are compared with those of the run without faults, where they are there."""
RECIPE = (
    "quickstart",
    "run.checkpoint_every=5",
    "run.keep_checkpoints=3",
    f"run.frozen_after_s={FROZEN_S}",
    "run.max_restarts=1000",
    "run.eval_every=0",
    "model.embedded.cold_start.steps=20",
    "data.sources[spelling].size=2000",
    "data.sources[spiral].size=2000",
    "data.sources[spelling].holdout=32",
    "data.sources[spiral].holdout=32",
    "rollout.engines=2",
    "trainer.ranks=2",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=4",
)

Action = Literal["kill", "freeze", "moment", "end", "flip", "unwritable"]
FAULTS: tuple[tuple[Action, str], ...] = (
    *(("kill", kind) for kind in (*KINDS, "driver")),
    *(("freeze", kind) for kind in ("engine", "rank", "reward worker", "raylet", "gcs")),
    *(("moment", kind) for kind in (*KINDS, "driver")),
    ("end", "driver"),
    ("flip", "driver"),
    ("unwritable", "rank"),
)


@dataclass(slots=True)
class Fault:
    action: Action
    kind: str
    step: int
    """The last one that was trained before it."""
    said_s: float | None = None
    """Until the run's next line that is no step's; None: it said nothing until it trained."""
    again_s: float | None = None
    """Until a step was trained again."""
    status: int | None = None
    """Exit status where the run ended of it; negative: a signal."""
    left: int = 0
    """Processes that were still there `GONE_S` after the run had ended."""
    words: list[str] = field(default_factory=list[str])


class Run:
    """One run, started as often as it ends."""

    def __init__(self, folder: Path, knobs: Sequence[str], steps: int, log: Path) -> None:
        self.folder = folder
        self._command = [sys.executable, "-m", "keel.trainer.cli", "train", *knobs]
        self._command += [f"run.dir={folder}", f"run.steps={steps}"]
        self._log, self.starts = log, 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        with self._log.open("a") as log:
            self.process = psutil.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def ended(self) -> bool:
        return self.process.poll() is not None

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last(self) -> tuple[int, float]:
        """Step and time of the newest line."""
        lines = self.steps()
        return (int(lines[-1]["step"]), float(lines[-1]["time"])) if lines else (0, 0.0)

    def said(self, since: int) -> list[str]:
        text = self._log.read_bytes()[since:].decode(errors="replace")
        return [line for line in text.splitlines() if line and not line.startswith("step ")]

    def position(self) -> int:
        return self._log.stat().st_size

    def below(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def of(self, kind: str) -> list[psutil.Process]:
        if kind == "driver":
            return [self.process]
        return [one for one in self.below() if KINDS[kind] in words_of(one)]


def words_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def until(ready: Callable[[], Any], what: str) -> None:
    """Raises TimeoutError naming `what`."""
    end = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {DEADLINE_S:g} s for {what}")
        time.sleep(0.05)


def strike(run: Run, fault: Fault, draw: random.Random) -> psutil.Process | None:
    """The process that was struck, if there is one of the kind."""
    found = run.of(fault.kind)
    if not found:
        return None
    victim = draw.choice(found)
    with suppress(psutil.NoSuchProcess):
        if fault.action in ("kill", "flip"):
            victim.kill()
        elif fault.action == "freeze":
            victim.suspend()
        elif fault.action == "moment":
            victim.suspend()
            time.sleep(draw.uniform(0.5, MOMENT_S))
            victim.resume()
        elif fault.action == "end":
            victim.send_signal(draw.choice([signal.SIGTERM, signal.SIGUSR1]))
        else:  # as on a full disk: what it writes past this many bytes fails
            before = victim.rlimit(resource.RLIMIT_FSIZE)
            victim.rlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
            time.sleep(2 * MOMENT_S)
            victim.rlimit(resource.RLIMIT_FSIZE, before)
        return victim
    return None


def flip(folder: Path, draw: random.Random) -> str:
    """A bit of the newest checkpoint; the file's name."""
    steps = sorted((folder / "checkpoints").glob("step_*"))
    files = [path for path in steps[-1].rglob("*") if path.is_file()] if steps else []
    if not files:
        return ""
    path = draw.choice(files)
    data = bytearray(path.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    return str(path.relative_to(folder))


def suffer(run: Run, fault: Fault, draw: random.Random) -> bool:
    """One fault, until a step is trained after it, or the run is done."""
    below, since = run.below(), run.position()
    began = time.time()
    if (victim := strike(run, fault, draw)) is None:
        return False

    up = began

    def trained() -> float:
        """Seconds until the first step since then, if that is no chance; else 0."""
        times = [line["time"] for line in run.steps() if line["time"] > up]
        waits = fault.action == "freeze" and not gone(victim)  # until it is ended
        return 0.0 if waits or not times or times[-1] < up + SETTLED_S else times[0] - began

    while not (again_s := trained()):
        if fault.said_s is None and run.said(since):
            fault.said_s = time.time() - began
        if run.ended():
            fault.status = run.process.returncode
            if fault.status == 0:
                break
            _, alive = psutil.wait_procs(below, timeout=GONE_S)
            fault.left = len(alive)
            for process in alive:  # or the next start would have less of the machine
                print(f"left: {words_of(process)}", flush=True)
                process.kill()
            if fault.action == "flip":
                fault.words.append(f"flipped: {flip(run.folder, draw)}")
            up = time.time()
            run.start()
        if time.time() - began > DEADLINE_S:
            raise TimeoutError(f"no step in {DEADLINE_S:g} s of {fault}: {run.said(since)[-5:]}")
        time.sleep(0.05)
    fault.again_s = again_s or None
    fault.words += run.said(since)[:8]
    return True


def memory(run: Run) -> dict[str, float]:
    """MiB of each kind, of its largest process (`Pss`), with the driver's files and what is in
    shared memory."""
    found: dict[str, float] = {"step": run.last()[0]}
    for kind in ("driver", *KINDS):
        sizes: list[float] = []
        for process in run.of(kind):
            with suppress(psutil.Error, OSError):
                sizes.append(process.memory_full_info().pss / 2**20)
                if kind == "driver":
                    found["driver's files"] = process.num_fds()
        if sizes:
            found[kind] = max(sizes)
    found["/dev/shm"] = psutil.disk_usage("/dev/shm").used / 2**20
    return found


def chaos(out: Path, knobs: Sequence[str], *, seed: int, steps: int, every: int) -> dict[str, Any]:
    draw = random.Random(seed)
    before = {process.pid for process in psutil.process_iter()}
    run = Run(out / "run", knobs, steps, out / "log.txt")
    faults: list[Fault] = []
    sizes: list[dict[str, float]] = []
    bag: list[tuple[Action, str]] = []
    late: list[int] = []
    try:
        while True:
            due = run.last()[0] + draw.randint(1, 2 * every - 1)
            until(lambda: run.ended() or run.last()[0] >= due, f"step {due}")  # noqa: B023
            if run.ended() and run.process.returncode == 0:
                break
            if run.ended():  # of a fault before, after all
                print(
                    f"ended late: status {run.process.returncode}: {run.said(0)[-3:]}", flush=True
                )
                late.append(run.process.returncode)
                run.start()
                continue
            sizes.append(memory(run))
            if not bag:  # every kind once before one comes again
                bag = draw.sample(FAULTS, len(FAULTS))
            fault = Fault(*bag.pop(), step=run.last()[0])
            time.sleep(draw.uniform(0, 2))
            if suffer(run, fault, draw):
                faults.append(fault)
                with (out / "faults.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(fault)) + "\n")
                times = f"said {seconds(fault.said_s)} trains {seconds(fault.again_s)}"
                what = f"{len(faults):3d} step {fault.step:4d} {fault.action:<10} {fault.kind:<13}"
                print(f"{what} {times} status {fault.status}", flush=True)
    finally:
        for process in run.below():
            with suppress(psutil.Error):
                process.kill()
    time.sleep(5)  # for what ends by itself
    new = [words_of(one) for one in psutil.process_iter() if one.pid not in before]
    left = [words for words in new if any(part in words for part in OURS)]
    return summary(run, faults, sizes) | {"ended late": late, "left at the end": left}


def seconds(value: float | None) -> str:
    return "   –  " if value is None else f"{value:5.1f}s"


def summary(run: Run, faults: Sequence[Fault], sizes: Sequence[dict[str, float]]) -> dict[str, Any]:
    groups: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        groups[f"{fault.action} {fault.kind}"].append(fault)
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
        "memory": sizes,
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


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument(
        "--every", type=int, default=3, help="steps from fault to fault, on average"
    )
    options.add_argument("--no-reference", action="store_true")
    options.add_argument("knob", nargs="*")
    given = options.parse_args()
    (out := given.out.resolve()).mkdir(parents=True)
    knobs = [*RECIPE, f"model.embedded.cache_dir={out / 'cache'}", *given.knob]
    found = chaos(out, knobs, seed=given.seed, steps=given.steps, every=given.every)
    if not given.no_reference:
        whole = Run(out / "reference", knobs, given.steps, out / "reference.txt")
        if status := whole.process.wait(timeout=given.steps * 60):
            raise RuntimeError(f"the run without faults ended with status {status}")
        found["reference"] = compared(out / "run", out / "reference")
    (out / "summary.json").write_text(json.dumps(found, indent=1))
    print(json.dumps({name: what for name, what in found.items() if name != "memory"}, indent=1))
    wrong = [*found["ledger"].values(), found["left at the end"], found["unexpected statuses"]]
    return 1 if any(wrong) or not found["steps, each once"] else 0


if __name__ == "__main__":
    sys.exit(main())
