"""Training run with random faults, compared with the same run without faults.

    python -m benchmarks.chaos --out chaos --seed 0 --steps 200 --every 3 [knob=value …]
    python -m benchmarks.chaos --out disk --only slow full --steps 60
    python -m benchmarks.chaos --out soak --every 0 --steps 500

Every few steps the run suffers one of these faults:

- SIGKILL, SIGSTOP, or SIGSTOP followed by SIGCONT for the driver, an engine, a rank, a reward
  worker, Ray's raylet or Ray's control service; SIGTERM or SIGUSR1 for the driver;
- a flipped bit in the newest checkpoint while the run is down, or a rank that cannot write files;
- a full disk (needs root) or a slow disk (needs gcc) for the run folder;
- a jump of the wall clock by an hour for all processes of the run (needs gcc).

`--only` takes actions (`kill`), targets (`engine`) or both (`"kill engine"`). `--every 0` runs a
soak without faults. A run that ends is restarted with the same command, as a scheduler would do.
After `--minutes` it receives SIGTERM. Needs Linux and psutil; faults that this machine does not
allow are reported and skipped.

Writes faults.jsonl and memory.jsonl during the run and summary.json at the end: seconds until each
fault was reported and until training continued, exit statuses, remaining processes, memory and open
files by role, and the steps whose metrics equal the run without faults (`--no-reference` skips that
run).

The exit status is 0 if every fault had an allowed outcome (`faults.STATUSES`), flipped bits were
reported, the run reached its last step with each step recorded once, and the
metrics equal the run without faults. Each failed check is printed and in the summary.
"""

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

from benchmarks.chaos.faults import GONE_S, Fault, Kind, chosen, kinds, suffer
from benchmarks.chaos.means import (
    Means,
    Preload,
    disk_unavailable,
    preload_unavailable,
    small_disk,
)
from benchmarks.chaos.outcome import Record, compared, ends, memory, summary, wrong
from benchmarks.chaos.run import Refused, Run, marked, until, words_of
from benchmarks.common import arguments

FROZEN_S = 10
"""`run.hang_timeout_s`"""
SOAK_STEPS = 5
"""Steps between memory measurements in a soak."""
RECIPE = (
    "quickstart",
    "run.checkpoint_every=5",
    "run.keep_checkpoints=3",
    f"run.hang_timeout_s={FROZEN_S}",
    "run.max_restarts=1000",
    "run.eval_every=0",
    "model.tiny.cold_start.steps=20",
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
    record: Record, knobs: Sequence[str], possible: Sequence[Kind], limits: Mapping[str, Any]
) -> dict[str, Any]:
    """Run with faults of the `possible` kinds; write and return the summary even if interrupted."""
    out, folder = record.out, record.out / "disk" / "run"
    with ExitStack() as stack:
        means = prepared(stack, out)
        environment = means.preload.environment if means.preload else {}
        run = Run(folder, knobs, limits["steps"], out / "log.txt", environment=environment)
        stack.callback(kill_all, run)
        left: list[str] = []
        try:
            suffer_all(run, means, possible, limits, record)
            record.broken_off = ""
            time.sleep(5)  # some processes take a moment to exit
            left = [words_of(process) for process in marked(folder)]
        except (TimeoutError, Refused) as error:
            record.broken_off = str(error)
        except KeyboardInterrupt:
            record.broken_off = "Ctrl-C"
        finally:
            results = summary(run, record, limits) | {"left at the end": left}
            write(out, results)
    return results


def write(out: Path, results: dict[str, Any]) -> None:
    results["wrong"] = wrong(results)
    (out / "summary.json").write_text(json.dumps(results, indent=1))


def prepared(stack: ExitStack, out: Path) -> Means:
    """Set up the fault tools of this machine and report the missing ones."""
    for why in filter(None, (preload_unavailable(), disk_unavailable())):
        print(f"left out: {why}", flush=True)
    place = out / "disk"
    return Means(
        disk=None if disk_unavailable() else stack.enter_context(small_disk(place)),
        preload=None if preload_unavailable() else Preload(out, place),
    )


def suffer_all(
    run: Run, means: Means, possible: Sequence[Kind], limits: Mapping[str, Any], record: Record
) -> None:
    """Inject faults and measure memory until the run is done or `minutes` have passed.

    Raises TimeoutError if the run hangs.
    """
    every, draw = limits["every"], random.Random(limits["seed"])
    end = time.monotonic() + 60 * limits["minutes"] if limits["minutes"] else math.inf
    bag: list[Kind] = []
    while time.monotonic() < end:
        due = run.last() + (draw.randint(1, 2 * every - 1) if every else SOAK_STEPS)
        until(lambda: run.ended() or run.last() >= due, f"step {due}")  # noqa: B023
        if run.ended() and run.process.returncode == 0:
            record.status = 0
            return
        if run.ended():  # a late effect of an earlier fault
            status = int(run.process.returncode)
            print(f"ended late with status {status}: {run.messages(0)[-3:]}", flush=True)
            record.late.append(status)
            run.start()
            continue
        record.measured(memory(run))
        if not possible:
            continue
        if not bag:  # every kind once before a kind is repeated
            bag = draw.sample(possible, len(possible))
        fault = Fault(*bag.pop(), step=run.last())
        time.sleep(draw.uniform(0, 2))
        struck = True
        try:
            struck = suffer(run, fault, draw, means)
        finally:
            if struck:
                record.suffered(fault)
                times = f"reported {seconds(fault.reported_s)} trains {seconds(fault.again_s)}"
                what = f"{fault.step:4d} {fault.action:<12} {fault.kind:<13}"
                count = len(record.faults)
                print(f"{count:3d} step {what} {times} status {ends(fault)}", flush=True)
    run.process.terminate()
    try:
        record.status = int(run.process.wait(timeout=GONE_S))
    except psutil.TimeoutExpired:
        raise TimeoutError(f"the run did not end within {GONE_S:g} s of SIGTERM") from None
    print(f"ended after step {run.last()} with status {record.status}", flush=True)


def run_reference(out: Path, knobs: Sequence[str], steps: int) -> str:
    """Run without faults in `out`/reference; return a description of a failure, if any."""
    run = Run(out / "reference", knobs, steps, out / "reference.txt", environment={})
    try:
        status = run.process.wait(timeout=steps * 60)
    except psutil.TimeoutExpired:
        return f"was at step {run.last()} after {steps} minutes"
    finally:
        kill_all(run)
    return f"ended with status {int(status)}" if status else ""


def kill_all(run: Run) -> None:
    for process in marked(run.folder):
        with suppress(psutil.Error):
            process.kill()


def seconds(value: float | None) -> str:
    return "   –  " if value is None else f"{value:5.1f}s"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--every", type=int, default=3, help="mean number of steps between faults; 0: a soak"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="KIND", help="kinds of fault")
    parser.add_argument("--minutes", type=float, default=0, help="time limit; 0: none")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("knob", nargs="*")
    options = parser.parse_args()
    own = [word for word in (*options.knob, *options.only) if "=" in word]
    only = [word for word in options.only if "=" not in word]
    try:
        there = kinds(preloaded=not preload_unavailable(), on_disk=not disk_unavailable())
        possible = chosen(only, there)
    except ValueError as error:
        parser.error(str(error))
    out: Path = options.out.resolve()
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"--out {options.out} exists; choose another folder")
    knobs = [*RECIPE, f"model.tiny.cache_dir={out / 'cache'}", *own]
    record = Record(out=out)
    limits = {name: getattr(options, name) for name in ("seed", "steps", "every", "minutes")}
    results = chaos(record, knobs, possible if options.every else (), limits)
    folder = out / "disk" / "run"
    if not (options.no_reference or record.broken_off):
        failed = run_reference(out, knobs, options.steps)
        results["reference"] = compared(folder, out / "reference", record.faults)
        results["reference"]["failed"] = failed
    write(out, results)
    print(json.dumps(results, indent=1))
    for line in results["wrong"]:
        print(f"WRONG: {line}")
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
