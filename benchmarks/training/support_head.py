"""Forward and backward of the support head compared with a chunked full head, on one GPU.

    python -m benchmarks.training.support_head --rounds 3

The two heads alternate, and each figure is a median over rounds. *step* builds the plan from kept
ids on the device and offsets on the host, then runs forward and backward; *reuse* keeps the plan,
as later passes over a micro-batch do. The GPU is idle when a measurement begins, so host time is
included. *GiB* is the peak memory of the step, gradients included.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common import arguments, run_facts
from benchmarks.synthetic import draw_sets
from keel.model.head.gpu import SupportPlan, build_plan, fused_head

SHAPES = ((151_936, 2048), (151_936, 1024), (262_144, 640))
SETS = (8, 64, 512, 0)
"""Mean mask sizes; 0: no truncation."""
TOKENS = 32_768
FULL_CHUNK = 4096
"""Tokens per chunk of the full head."""


@dataclass
class Inputs:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    ids: Tensor
    host_offsets: Tensor

    def plan(self) -> SupportPlan:
        vocabulary, d = self.weight.shape
        return build_plan(
            self.ids, self.host_offsets, vocabulary=vocabulary, d=d, device=self.weight.device
        )

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None


@dataclass
class Row:
    vocabulary: int
    d: int
    mean_set: float
    plans: str
    step_ms: float
    reuse_ms: float
    memory_gib: float
    full_ms: float
    full_gib: float


def make_inputs(tokens: int, vocabulary: int, d: int, mean: int) -> Inputs:
    device = torch.device("cuda")
    ids, offsets, targets = draw_sets(tokens, vocabulary, mean, device)
    return Inputs(
        hidden=torch.randn(tokens, d, device=device).bfloat16().requires_grad_(),
        weight=(torch.randn(vocabulary, d, device=device) * 0.02).bfloat16().requires_grad_(),
        targets=targets,
        ids=ids,
        host_offsets=offsets.cpu(),
    )


def support_step(inputs: Inputs, plan: SupportPlan | None = None) -> None:
    inputs.clear()
    plan = plan or inputs.plan()
    logp, _ = fused_head(inputs.hidden, inputs.weight, inputs.targets, plan)
    (-logp.mean()).backward()


def full_step(inputs: Inputs) -> None:
    """Compute log π(target) over the whole vocabulary, `FULL_CHUNK` tokens at a time."""
    inputs.clear()
    tokens = len(inputs.targets)
    for first in range(0, tokens, FULL_CHUNK):
        part = slice(first, first + FULL_CHUNK)
        logits = (inputs.hidden[part] @ inputs.weight.t()).float()
        logp = logits.gather(1, inputs.targets[part, None])[:, 0] - logits.logsumexp(-1)
        (-logp.sum() / tokens).backward()


def milliseconds(run: Callable[[], None]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def extra_gib(inputs: Inputs, run: Callable[[], None]) -> float:
    inputs.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(tokens: int, vocabulary: int, d: int, mean: int, rounds: int) -> Row:
    inputs = make_inputs(tokens, vocabulary, d, mean)
    plan = inputs.plan()
    runs: dict[str, Callable[[], None]] = {
        "step": lambda: support_step(inputs),
        "reuse": lambda: support_step(inputs, plan),
        "full": lambda: full_step(inputs),
    }
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()  # untimed, so that each starts with warm host caches
            times[name].append(milliseconds(run))
    median = {name: statistics.median(values) for name, values in times.items()}
    chunks = {"union" if chunk.union is not None else "gather" for chunk in plan.chunks}
    return Row(
        vocabulary=vocabulary,
        d=d,
        mean_set=len(inputs.ids) / tokens,
        plans="+".join(sorted(chunks)) if mean else "full",
        step_ms=median["step"],
        reuse_ms=median["reuse"],
        memory_gib=extra_gib(inputs, runs["step"]),
        full_ms=median["full"],
        full_gib=extra_gib(inputs, runs["full"]),
    )


def table(rows: Sequence[Row]) -> str:
    head = "| V | d | mean set | plan | step ms | reuse ms | GiB | full ms | full GiB | full/step |"
    lines = [head, "|" + "---|" * 10]
    lines += [
        f"| {row.vocabulary} | {row.d} | {row.mean_set:.1f} | {row.plans} | {row.step_ms:.2f} "
        f"| {row.reuse_ms:.2f} | {row.memory_gib:.2f} | {row.full_ms:.1f} | {row.full_gib:.1f} "
        f"| {row.full_ms / row.step_ms:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    facts = {**run_facts(), "tokens": TOKENS, "rounds": options.rounds}
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    rows: list[Row] = []
    for vocabulary, d in SHAPES:
        for mean in SETS:
            rows.append(measure(TOKENS, vocabulary, d, mean, options.rounds))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
