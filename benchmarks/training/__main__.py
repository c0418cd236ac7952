"""The trainer's speed and memory: real steps of `TrainerEngine`, with random weights.

    python -m benchmarks.training --out DIR                     # one GPU, under 3 minutes
    python -m benchmarks.training --out DIR --profile           # and where a step's time goes
    python -m benchmarks.training --out DIR --ranks 1,2,4       # the same step on 1, 2 and 4 GPUs
    python -m benchmarks.training --out DIR --peers             # the steps of benchmarks/peers
    python -m benchmarks.training --out DIR --long 1,2          # trajectories of 32k and 64k a GPU
    python -m benchmarks.training --out DIR --offload 1,2,3     # the optimizer in host memory
    python -m benchmarks.training --out DIR --small --ranks 1,2 # on a CPU, to see that it runs

Packed trajectories of one length, recorded routes (drawn evenly, as a model sends its tokens that
was trained to) and sampling masks of 8 ids on average: what Keel trains with. A step is forward,
backward and optimizer with the host's work in it; a figure is the median of `--rounds` steps after
one that does not count. What counts as the model's work is said in `measure.step_flops`;
the utilisation (MFU) is against 989 TFLOP/s a GPU. `full`: with a whole head, `ref`: with the
reference policy's forward pass. `fit` and `fit t` are what trainer/planning/memory.py and
trainer/planning/step_time.py say, divided by what was measured.

Every row is in DIR/*.jsonl as soon as it is there, all of them in DIR/training.json at the end.
Those of an earlier call are kept beside them (training.1.json). Exit status 0: every case has been
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.revision import commit
from benchmarks.training.cases import (
    SHAPES,
    SPREAD,
    Case,
    long,
    offloaded,
    on_ranks,
    one_gpu,
    peers,
)
from benchmarks.training.measured import Measured

ROOT = Path(__file__).parents[2]
PARTS = ("reference", "forward", "loss", "backward", "optimizer", "between")
LONG = "qwen3-1.7b"
GRACE_S = 30
"""Longer than a process is told to take, it may take this before it is ended."""


@dataclass
class Group:
    """Processes that are started together: one for each rank."""

    name: str
    ranks: int
    cases: list[Case]


def start(
    group: Group, gpus: Sequence[str], options: argparse.Namespace, seconds: float
) -> list[subprocess.Popen[bytes]]:
    from benchmarks.training.measure import Job  # noqa: PLC0415  (takes seconds to import)

    out: Path = options.out
    store, rows = out / f"store-{group.name}", out / f"{group.name}.jsonl"
    store.unlink(missing_ok=True)
    processes = []
    for rank in range(group.ranks):
        job = out / f"job-{group.name}-{rank}.json"
        Job(
            cases=group.cases,
            rank=rank,
            ranks=group.ranks,
            store=str(store),
            rows=str(rows),
            seconds=seconds,
            rounds=options.rounds,
            profile=options.profile,
            small=options.small,
            stock=options.stock,
        ).write(job)
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "NCCL_NVLS_ENABLE": "0",
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            "LOCAL_RANK": "0",
            "CUDA_VISIBLE_DEVICES": gpus[rank] if gpus else "",
            **({} if gpus else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}),
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        }
        with open(out / f"log-{group.name}-{rank}.txt", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--job", str(job)],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                )
            )
    return processes


def wait(groups: dict[str, list[subprocess.Popen[bytes]]], seconds: float) -> None:
    """Until all have ended. Ends those that take longer, and those whose peer has failed."""
    end = time.monotonic() + seconds
    running = dict(groups)
    while running:
        for name, processes in list(running.items()):
            codes = [process.poll() for process in processes]
            failed = any(code not in (None, 0) for code in codes)
            if failed or time.monotonic() > end:
                why = f"exit codes {codes}" if failed else f"not done after {seconds:.0f} s"
                print(f"{name}: {why}", flush=True)
                for process in processes:
                    process.kill()
                    process.wait(timeout=30)
                del running[name]
            elif all(code == 0 for code in codes):
                del running[name]
        if running:
            time.sleep(0.2)


def waves(groups: list[Group], gpus: int) -> list[list[Group]]:
    """Groups that run at the same time, each on GPUs of its own."""
    found: list[list[Group]] = []
    for group in sorted(groups, key=lambda group: -group.ranks):
        free = [wave for wave in found if sum(g.ranks for g in wave) + group.ranks <= gpus]
        free[0].append(group) if free else found.append([group])
    return found


def put_aside(path: Path) -> None:
    """Under the first name that is free, such as training.1.json."""
    if path.exists():
        names = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in count(1))
        path.rename(next(name for name in names if not name.exists()))


def not_measured(groups: Sequence[Group], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each case without seconds."""
    found: list[str] = []
    for group in groups:
        for case in group.cases:
            own = [row for row in rows if row["case"] == asdict(case)]
            if not any("seconds" in row for row in own):
                why = [row.get("failed") or row.get("skipped") for row in own]
                found.append(f"{case}: {why[0] if why else f'no row: log-{group.name}-*.txt'}")
    return found


def measure(options: argparse.Namespace) -> list[str]:
    """Returns a line for each case that was not measured."""
    there = 0 if options.small else torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = (visible.split(",") if visible else [str(i) for i in range(there)])[:there]
    shapes = options.shapes.split(",") if options.shapes else None
    small = options.small
    if options.ranks:
        groups = [
            Group(f"ranks-{n}", n, list(on_ranks(shapes or SPREAD, n, small=small)))
            for n in map(int, options.ranks.split(","))
        ]
    elif options.long:
        groups = [
            Group(f"long-{n}", n, list(long((shapes or [LONG])[0], n, small=small)))
            for n in map(int, options.long.split(","))
        ]
    elif options.offload:
        groups = [
            Group(f"offload-{n}", 1, list(offloaded((shapes or [LONG])[0], n, small=small)))
            for n in map(int, options.offload.split(","))
        ]
    elif options.peers:
        groups = [Group("peers", 1, list(peers(small=small)))]
    else:
        groups = [Group("one", 1, list(one_gpu(shapes or list(SHAPES), small=small)))]
    options.out.mkdir(parents=True, exist_ok=True)
    for group in groups:
        put_aside(options.out / f"{group.name}.jsonl")
    plan = waves(groups, there or 2)
    seconds = options.seconds / len(plan)
    for wave in plan:
        started: dict[str, list[subprocess.Popen[bytes]]] = {}
        for group in wave:
            taken = sum(len(processes) for processes in started.values())
            mine = gpus[taken : taken + group.ranks]
            if gpus and len(mine) < group.ranks:
                print(f"{group.name}: {len(gpus)} GPUs are too few")
                continue
            started[group.name] = start(group, mine, options, seconds - GRACE_S)
        wait(started, seconds)
    rows: list[dict[str, Any]] = []
    for group in groups:
        path = options.out / f"{group.name}.jsonl"
        rows += map(json.loads, path.read_text().splitlines() if path.exists() else ())
    if any("seconds" in row for row in rows):
        put_aside(options.out / "training.json")
        made = {"commit": commit(), "rows": rows}
        (options.out / "training.json").write_text(json.dumps(made, indent=1))
    show(rows)
    return not_measured(groups, rows)


def show(rows: list[dict[str, Any]]) -> None:
    alone = {
        (row["case"]["shape"], row["case"]["zero_stage"]): row["seconds"]
        for row in rows
        if row["case"]["ranks"] == 1 and "seconds" in row
    }
    print(
        f"{'case':58} {'s':>7} {'tok/s/GPU':>10} {'MFU':>6} {'full':>6} {'ref':>6} {'GiB':>6} "
        f"{'fit':>5} {'fit t':>5}  {', '.join(PARTS)} (ms)  speedup"
    )
    for row in rows:
        if "seconds" not in row:
            print(f"{row['name']:58} {row.get('failed') or row.get('skipped')}")
            continue
        parts = [1e3 * row["parts"].get(name, 0) for name in PARTS]
        case = row["case"]
        base = alone.get((case["shape"], case["zero_stage"])) or alone.get((case["shape"], 1))
        speedup = f"{base / row['seconds']:.2f}" if base and case["ranks"] > 1 else ""
        print(
            f"{row['name']:58} {row['seconds']:7.3f} {row['tokens_per_second_per_gpu']:10,.0f} "
            f"{row['mfu']:6.1%} {row['mfu_with_full_head']:6.1%} "
            f"{row['mfu_with_reference']:6.1%} {row['memory']['gpu_gib']:6.1f} "
            f"{row['memory_estimate_ratio'] or 0:5.2f} {row['time_estimate_ratio']:5.2f}  "
            + ", ".join(f"{part:.0f}" for part in parts)
            + f"  {speedup}"
        )
        if found := row.get("profile"):
            print(
                f"    profile of {found['micro_batches']} micro-batches: {found['seconds']:.3f} s, "
                f"GPU busy {found['gpu_busy']:.0%} ({found['gpu_seconds']:.3f} s), host "
                f"{found['host_seconds']:.3f} s of work and {found['host_wait_seconds']:.3f} s of "
                f"waits, {found['kernels']} kernels, {found['launches']} launches, {found['waits']}"
            )
    print("\nFor MEASURED in benchmarks/training/measured.py:")
    for row in rows:
        if "seconds" in row:
            measured = Measured(
                case=Case(**row["case"]),
                seconds=row["seconds"],
                gib=row["memory"]["gpu_gib"],
                stock=row["stock"],
            )
            print(f"    {measured.line()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--shapes", default="", help=f"of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--ranks", default="", help="such as 1,2,4: strong scaling instead")
    parser.add_argument("--long", default="", help="such as 1,2: long trajectories over so many")
    parser.add_argument(
        "--offload", default="", help="such as 1,2,3: the optimizer in host memory, at ZeRO stages"
    )
    parser.add_argument("--peers", action="store_true", help="with a reference policy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--stock", action="store_true", help="norms and experts of transformers")
    parser.add_argument("--seconds", type=float, default=180, help="for everything")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        from benchmarks.training.measure import Job, run  # noqa: PLC0415

        run(Job.read(options.job))
        return
    if options.out is None:
        parser.error("--out is needed")
    if not options.small and not torch.cuda.is_available():
        parser.error("no GPU is here (--small runs on a CPU, to see that it runs)")
    options.out = options.out.resolve()
    lacking = measure(options)
    for line in lacking:
        print(f"not measured: {line}")
    sys.exit(int(bool(lacking)))


if __name__ == "__main__":
    main()
