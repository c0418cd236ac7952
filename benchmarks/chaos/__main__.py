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

Kept as they come in `faults.jsonl` and `memory.jsonl`; printed and kept in `memory.png` and
`summary.json` at the end, or when it is broken off: seconds until the run said something and
trained again, exit statuses, processes left, the ledger's sums, memory and open files of each role
over the steps, and in how many steps the metrics are those of the run without faults
(`--no-reference`; `--against`: one that is there).

Exit status 0: each fault led to what it may lead to (`faults.ENDS`), a flipped bit was named, the
run came to its last step, each step is there once, no prompt was lost, and the metrics are those of
the run without. What is not so has a line at the end, and in the summary.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos import disk, preload, second_node
from benchmarks.chaos.faults import GONE_S, Fault, Kind, Means, chosen, kinds, suffer
from benchmarks.chaos.memory import memory, plot
from benchmarks.chaos.outcome import Record, compared, ends, summary, wrong
from benchmarks.chaos.run import Refused, Run, marked, until, words_of

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
    record: Record, knobs: Sequence[str], there: Sequence[Kind], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The run with faults of the kinds that are `there`, and its summary, which is written whatever
    breaks it off. asked: as `summary` has it."""
    out, folder = record.out, record.out / "disk" / "run"
    with ExitStack() as stack:
        means = prepared(stack, out)
        environment = means.preload.environment if means.preload else {}
        two = asked["nodes"] > 1
        cluster = stack.enter_context(second_node.two_nodes(environment)) if two else None
        log = out / "log.txt"
        run = Run(folder, knobs, asked["steps"], log, environment=environment, cluster=cluster)
        stack.callback(killed, run)
        left: list[str] = []
        try:
            suffered(run, means, there, asked, record)
            record.broken_off = ""
            time.sleep(5)  # for what ends by itself
            left = [words_of(process) for process in [*marked(folder), *run.own_on_second()]]
        except (TimeoutError, Refused) as error:
            record.broken_off = str(error)
        except KeyboardInterrupt:
            record.broken_off = "Ctrl-C"
        finally:
            found = summary(run, record, asked) | {"left at the end": left}
            write(out, found)
    if record.sizes:
        plot(record.sizes, [fault.step for fault in record.faults], out / "memory.png")
    return found


def write(out: Path, found: dict[str, Any]) -> None:
    found["wrong"] = wrong(found)
    (out / "summary.json").write_text(json.dumps(found, indent=1))


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
    run: Run, means: Means, there: Sequence[Kind], asked: Mapping[str, Any], record: Record
) -> None:
    """Faults until the run is done, and memory between them. After `minutes` no more is done to it,
    and it is told to end. Raises TimeoutError where it does not get on."""
    every, draw = asked["every"], random.Random(asked["seed"])
    end = time.monotonic() + 60 * asked["minutes"] if asked["minutes"] else math.inf
    bag: list[Kind] = []
    while time.monotonic() < end:
        due = run.last() + (draw.randint(1, 2 * every - 1) if every else QUIET)
        until(lambda: run.ended() or run.last() >= due, f"step {due}")  # noqa: B023
        if run.ended() and run.process.returncode == 0:
            record.status = 0
            return
        if run.ended():  # of a fault before, after all
            status = int(run.process.returncode)
            print(f"ended late: status {status}: {run.said(0)[-3:]}", flush=True)
            record.late.append(status)
            run.start()
            continue
        record.measured(memory(run))
        if not there:
            continue
        if not bag:  # every kind once before one comes again
            bag = draw.sample(there, len(there))
        fault = Fault(*bag.pop(), step=run.last())
        time.sleep(draw.uniform(0, 2))
        struck = True
        try:
            struck = suffer(run, fault, draw, means)
        finally:
            if struck:
                record.suffered(fault)
                times = f"said {seconds(fault.said_s)} trains {seconds(fault.again_s)}"
                what = f"{fault.step:4d} {fault.action:<12} {fault.kind:<13}"
                count = len(record.faults)
                print(f"{count:3d} step {what} {times} status {ends(fault)}", flush=True)
    run.process.terminate()
    try:
        record.status = int(run.process.wait(timeout=GONE_S))
    except psutil.TimeoutExpired:
        raise TimeoutError(f"told to end, and still there after {GONE_S:g} s") from None
    print(f"told to end after step {run.last()}: status {record.status}", flush=True)


def without_faults(out: Path, knobs: Sequence[str], steps: int) -> str:
    """The same run, undisturbed, in `out`/reference. What went wrong, if anything did."""
    run = Run(out / "reference", knobs, steps, out / "reference.txt", environment={})
    try:
        status = run.process.wait(timeout=steps * 60)
    except psutil.TimeoutExpired:
        return f"was not done after {steps} minutes, at step {run.last()}"
    finally:
        killed(run)
    return f"ended with status {int(status)}" if status else ""


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
    own = [word for word in (*given.knob, *given.only) if "=" in word]
    only = [word for word in given.only if "=" not in word]
    possible = kinds(given.nodes, preloaded=not preload.lacking(), on_disk=not disk.lacking())
    try:
        there = chosen(only, possible)
    except ValueError as error:
        options.error(str(error))
    if given.against and not (given.against / "metrics.jsonl").exists():
        options.error(f"--against {given.against}: no run has left its metrics there")
    out: Path = given.out.resolve()
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        options.error(f"--out {given.out}: is there already; choose another folder")
    knobs = [*RECIPE, f"model.embedded.cache_dir={out / 'cache'}", *own]
    record = Record(out=out)
    asked = {name: getattr(given, name) for name in ("seed", "steps", "every", "nodes", "minutes")}
    found = chaos(record, knobs, there if given.every else (), asked)
    ran = out / "disk" / "run"
    if given.against:
        found["reference"] = compared(ran, given.against, record.faults)
    elif not (given.no_reference or record.broken_off):
        failed = without_faults(out, knobs, given.steps)
        found["reference"] = compared(ran, out / "reference", record.faults) | {"failed": failed}
    write(out, found)
    print(json.dumps(found, indent=1))
    for line in found["wrong"]:
        print(f"WRONG: {line}")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
