"""Speed and memory of the trainer: real steps of `TrainerEngine` with random weights.

    python -m benchmarks.training --out DIR                     # one GPU, under 3 minutes
    python -m benchmarks.training --out DIR --replay            # cost of routes and masks
    python -m benchmarks.training --out DIR --long 1,2          # 32k and 64k tokens per GPU
    python -m benchmarks.training --out DIR --small --long 1,2  # smoke test on a CPU

The load is packed trajectories of one length with recorded routes (evenly drawn) and sampling masks
of 8 ids on average. A step is forward, backward and optimizer, including host work; each figure is
the median of `--rounds` steps after one warm-up step. `measure.step_flops` defines the model FLOPs;
MFU is relative to 989 TFLOP/s per GPU (`full`: with a head over the whole vocabulary). `fit` and
`fit t` are the memory and time estimates of `keel check` divided by the measurement.

Rows are appended to DIR/*.jsonl during the run and collected in DIR/training.json at the end, which
replaces earlier ones. The exit status is 0 if every case was measured.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import arguments, commit, worker_process
from benchmarks.training.cases import LONG, MIXTURES, SHAPES, Case, long, one_gpu, replays

GRACE_S = 30
"""Seconds that a process may exceed its time limit before it is killed."""


@dataclass
class Group:
    """Processes that start together, one per rank."""

    name: str
    ranks: int
    cases: list[Case]


def measure_group(
    group: Group, gpus: Sequence[str], options: argparse.Namespace, seconds: float
) -> None:
    """Run a group until it is done, a rank fails or the time is over."""
    from benchmarks.training.measure import Job, run  # noqa: PLC0415  (takes seconds to import)

    out: Path = options.out
    store, rows = out / f"store-{group.name}", out / f"{group.name}.jsonl"
    store.unlink(missing_ok=True)
    ranks: list[Future[None]] = []
    with ExitStack() as stack:
        for rank in range(group.ranks):
            variables = {
                "OMP_WAIT_POLICY": "PASSIVE",
                "NCCL_NVLS_ENABLE": "0",
                "TOKENIZERS_PARALLELISM": "false",
                **os.environ,
                "LOCAL_RANK": "0",
                "CUDA_VISIBLE_DEVICES": gpus[rank] if gpus else "",
                **({} if gpus else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}),
            }
            log = out / f"log-{group.name}-{rank}.txt"
            process = stack.enter_context(worker_process(variables, log))
            job = Job(
                cases=group.cases,
                rank=rank,
                ranks=group.ranks,
                store=str(store),
                rows=str(rows),
                seconds=seconds - GRACE_S,
                rounds=options.rounds,
                small=options.small,
            )
            ranks.append(process.submit(run, job))
        done, running = wait(ranks, timeout=seconds, return_when=FIRST_EXCEPTION)
        errors = [repr(error) for rank in done if (error := rank.exception())]
        if errors or running:
            print(f"{group.name}: {'; '.join(errors) or 'out of time'}", flush=True)


def not_measured(groups: Sequence[Group], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each case without a measurement."""
    lines: list[str] = []
    for group in groups:
        for case in group.cases:
            own = [row for row in rows if row["case"] == asdict(case)]
            if not any("seconds" in row for row in own):
                why = [row.get("failed") or row.get("skipped") for row in own]
                lines.append(f"{case}: {why[0] if why else f'no row: log-{group.name}-*.txt'}")
    return lines


def groups_of(options: argparse.Namespace) -> list[Group]:
    shapes: list[str] = options.shapes.split(",") if options.shapes else []
    unit = 64 if options.small else 1024
    if options.long:
        numbers = map(int, options.long.split(","))
        return [Group(f"long-{n}", n, list(long(shapes or LONG, n, unit))) for n in numbers]
    if options.replay:
        return [Group("replay", 1, list(replays(shapes or MIXTURES, unit)))]
    return [Group("one", 1, list(one_gpu(shapes or list(SHAPES), unit)))]


def measure(options: argparse.Namespace) -> list[str]:
    """Measure all cases and return a line for each failure."""
    available = 0 if options.small else torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = (visible.split(",") if visible else [str(i) for i in range(available)])[:available]
    groups = groups_of(options)
    options.out.mkdir(parents=True, exist_ok=True)
    for group in groups:
        (options.out / f"{group.name}.jsonl").unlink(missing_ok=True)
    seconds = options.seconds / len(groups)
    for group in groups:
        if gpus and len(gpus) < group.ranks:
            print(f"{group.name}: needs {group.ranks} GPUs; {len(gpus)} are available")
            continue
        measure_group(group, gpus, options, seconds)
    rows: list[dict[str, Any]] = []
    for group in groups:
        path = options.out / f"{group.name}.jsonl"
        rows += map(json.loads, path.read_text().splitlines() if path.exists() else ())
    if any("seconds" in row for row in rows):
        content = {"commit": commit(), "rows": rows}
        (options.out / "training.json").write_text(json.dumps(content, indent=1))
    show(rows)
    return not_measured(groups, rows)


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'case':58} {'s':>7} {'tok/s/GPU':>10} {'MFU':>6} {'full':>6} {'GiB':>6} "
        f"{'fit':>5} {'fit t':>5}"
    )
    for row in rows:
        if "seconds" not in row:
            print(f"{row['name']:58} {row.get('failed') or row.get('skipped')}")
            continue
        print(
            f"{row['name']:58} {row['seconds']:7.3f} {row['tokens_per_second_per_gpu']:10,.0f} "
            f"{row['mfu']:6.1%} {row['mfu_with_full_head']:6.1%} {row['gpu_gib']:6.1f} "
            f"{row['memory_estimate_ratio'] or 0:5.2f} {row['time_estimate_ratio']:5.2f}"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="use tiny models on the CPU")
    parser.add_argument("--shapes", default="", help=f"some of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--long", default="", help="GPU counts for long trajectories, such as 1,2")
    parser.add_argument("--replay", action="store_true", help="cost of routes and masks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=180, help="time limit for everything")
    options = parser.parse_args()
    if not options.small and not torch.cuda.is_available():
        parser.error("no GPU is available; use --small for a smoke test on a CPU")
    options.out = options.out.resolve()
    lines = measure(options)
    for line in lines:
        print(f"not measured: {line}")
    sys.exit(int(bool(lines)))


if __name__ == "__main__":
    main()
