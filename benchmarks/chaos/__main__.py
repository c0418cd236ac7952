"""A run with faults drawn by seed, beside the same run without: what the faults cost, and whether
anything is lost.

    python -m benchmarks.chaos --out chaos --seed 0 --steps 200 --every 3 [knob=value …]
    python -m benchmarks.chaos --out disk --only slow full --steps 60
    python -m benchmarks.chaos --out cut --nodes 2 --only node --steps 300 --every 20
    python -m benchmarks.chaos --out soak --every 0 --steps 500

Every few steps something is done to the run:

- one of its processes is killed, stopped for good, or stopped for a moment (SIGKILL; SIGSTOP;
  SIGSTOP and SIGCONT), the driver, engines, ranks, reward workers and Ray's own among them; or the
  driver is told to end (SIGTERM, SIGUSR1);
- a bit of the newest checkpoint is flipped while the run is down; a rank can write no file for a
  while; the disk under the run folder is full for a while (root) or slow (gcc);
- the wall clock of all its processes jumps by an hour, ahead or back (gcc);
- with `--nodes 2` the second node of its cluster is cut off for seconds or minutes (root), and the
  first node's Ray is left alone.

`--only` takes actions (`kill`), what they are done to (`engine`), or both (`"kill engine"`).
`--every 0` does nothing: a soak. Whenever the run has ended it is started again by the same
command, as a scheduler would. After `--minutes` it is told to end (SIGTERM), whatever step it has
come to. Linux, and psutil; what lacks here is said, and left out.

Printed at the end, and kept in `faults.jsonl`, `memory.jsonl`, `memory.png` and `summary.json`:
seconds until the run said something and trained again, exit statuses, processes left, the ledger's
sums, memory and open files of each role over the steps, and in how many steps the metrics are those
of the run without faults (`--no-reference`; `--against`: one that is there).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos import disk, preload, second_node
from benchmarks.chaos.faults import GONE_S, Fault, Kind, Means, chosen, suffer
from benchmarks.chaos.memory import keep, memory, plot
from benchmarks.chaos.outcome import compared, summary
from benchmarks.chaos.run import Run, marked, until, words_of
from keel.trainer.run.interrupt import PREEMPTED

FROZEN_S = 10
"""`run.frozen_after_s`"""
QUIET = 5
"""Steps between two looks at the memory of a run to which nothing is done."""
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


def chaos(
    out: Path,
    knobs: Sequence[str],
    *,
    seed: int,
    steps: int,
    every: int,
    nodes: int = 1,
    only: Sequence[str] = (),
    minutes: float = 0,
) -> dict[str, Any]:
    with ExitStack() as stack:
        means = prepared(stack, out)
        kinds = chosen(only, means.kinds(nodes)) if every else []
        environment = means.preload.environment if means.preload else {}
        cluster = stack.enter_context(second_node.two_nodes(environment)) if nodes > 1 else None
        folder = out / "disk" / "run"
        log = out / "log.txt"
        run = Run(folder, knobs, steps, log, environment=environment, cluster=cluster)
        stack.callback(killed, run)
        end = time.monotonic() + 60 * minutes if minutes else math.inf
        faults, sizes, late = suffered(run, means, kinds, random.Random(seed), every, out, end)
        found = summary(run, faults, sizes)
        time.sleep(5)  # for what ends by itself
        left = [words_of(process) for process in [*marked(folder), *run.own_on_second()]]
    keep(sizes, out / "memory.jsonl")
    plot(sizes, [fault.step for fault in faults], out / "memory.png")
    return found | {"ended late": late, "left at the end": left}


def prepared(stack: ExitStack, out: Path) -> Means:
    """What there can be here; the rest is said."""
    for why in filter(None, (preload.lacking(), disk.lacking())):
        print(f"left out: {why}", flush=True)
    place = out / "disk"
    return Means(
        disk=None if disk.lacking() else stack.enter_context(disk.small_disk(place)),
        preload=None if preload.lacking() else preload.Preload(out, place),
    )


def suffered(
    run: Run,
    means: Means,
    kinds: Sequence[Kind],
    draw: random.Random,
    every: int,
    out: Path,
    end: float,
) -> tuple[list[Fault], list[dict[str, float]], list[int]]:
    """The faults until the run is done, memory between them, and statuses with which it has ended
    at other times. end: when no more is done to it, by the monotonic clock."""
    faults: list[Fault] = []
    sizes: list[dict[str, float]] = []
    late: list[int] = []
    bag: list[Kind] = []
    while time.monotonic() < end:
        due = run.last() + (draw.randint(1, 2 * every - 1) if every else QUIET)
        until(lambda: run.ended() or run.last() >= due, f"step {due}")  # noqa: B023
        if run.ended() and run.process.returncode == 0:
            return faults, sizes, late
        if run.ended():  # of a fault before, after all
            status = run.process.returncode
            print(f"ended late: status {status}: {run.said(0)[-3:]}", flush=True)
            late.append(status)
            run.start()
            continue
        sizes.append(memory(run))
        if not kinds:
            continue
        if not bag:  # every kind once before one comes again
            bag = draw.sample(kinds, len(kinds))
        fault = Fault(*bag.pop(), step=run.last())
        time.sleep(draw.uniform(0, 2))
        if suffer(run, fault, draw, means):
            faults.append(fault)
            with (out / "faults.jsonl").open("a") as file:
                file.write(json.dumps(asdict(fault)) + "\n")
            times = f"said {seconds(fault.said_s)} trains {seconds(fault.again_s)}"
            what = f"{len(faults):3d} step {fault.step:4d} {fault.action:<12} {fault.kind:<13}"
            print(f"{what} {times} status {fault.status}", flush=True)
    run.process.terminate()
    status = run.process.wait(timeout=GONE_S)
    print(f"told to end after step {run.last()}: status {status}", flush=True)
    return faults, sizes, late + [status] * (status not in (0, PREEMPTED))


def killed(run: Run) -> None:
    for process in run.own():
        with suppress(psutil.Error):
            process.kill()


def seconds(value: float | None) -> str:
    return "   –  " if value is None else f"{value:5.1f}s"


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument(
        "--every", type=int, default=3, help="steps from fault to fault, on average; 0: a soak"
    )
    options.add_argument("--only", nargs="+", default=(), metavar="KIND", help="of faults")
    options.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    options.add_argument("--minutes", type=float, default=0, help="until the run is told to end")
    options.add_argument("--no-reference", action="store_true")
    options.add_argument("--against", type=Path, help="folder of a run, to be compared with")
    options.add_argument("knob", nargs="*")
    given = options.parse_args()
    if given.nodes > 1 and (why := second_node.lacking()):
        options.error(f"--nodes 2: {why}")
    (out := given.out.resolve()).mkdir(parents=True)
    own = [word for word in (*given.knob, *given.only) if "=" in word]
    only = [word for word in given.only if "=" not in word]
    knobs = [*RECIPE, f"model.embedded.cache_dir={out / 'cache'}", *own]
    how = {name: getattr(given, name) for name in ("seed", "steps", "every", "nodes", "minutes")}
    found = chaos(out, knobs, only=only, **how)
    if given.against:
        found["reference"] = compared(out / "disk" / "run", given.against)
    elif not given.no_reference:
        log = out / "reference.txt"
        whole = Run(out / "reference", knobs, given.steps, log, environment={})
        if status := whole.process.wait(timeout=given.steps * 60):
            raise RuntimeError(f"the run without faults ended with status {status}")
        found["reference"] = compared(out / "disk" / "run", out / "reference")
    (out / "summary.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    left = [some["processes left"] for some in found["by fault"].values()]
    wrong = [*found["ledger"].values(), *left, found["left at the end"]]
    wrong += [found["unexpected statuses"], found["ended late"]]
    return 1 if any(wrong) or not found["steps, each once"] else 0


if __name__ == "__main__":
    sys.exit(main())
