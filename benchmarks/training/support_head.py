"""Forward and backward of the support head compared with a chunked full head, on one GPU.

    python -m benchmarks.training.support_head --rounds 3

The two heads alternate, and each figure is a median over rounds. *step* builds the plan from kept
ids on the device and offsets on the host, then runs forward and backward; *reuse* keeps the plan,
as later passes over a micro-batch do. The GPU is idle when a measurement begins, so host time is
included. *GiB* is the peak memory of the step, gradients included.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common import arguments, run_facts
from benchmarks.synthetic import draw_sets
from keel.model.head.cpu import LogitTransform
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
    logp, _ = fused_head(
        inputs.hidden, inputs.weight, inputs.targets, plan, transform=LogitTransform()
    )
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


def milliseconds(run: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return 1e3 * (time.perf_counter() - began)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def extra_gib(inputs: Inputs, run: Callable[[], None]) -> float:
    inputs.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(tokens: int, vocabulary: int, d: int, mean: int, rounds: int) -> str:
    """Return a line of the table."""
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
    step, reuse, full = (statistics.median(values) for values in times.values())
    gib, full_gib = (extra_gib(inputs, runs[name]) for name in ("step", "full"))
    return (
        f"| {vocabulary} | {d} | {len(inputs.ids) / tokens:.1f} | {step:.2f} "
        f"| {reuse:.2f} | {gib:.2f} | {full:.1f} | {full_gib:.1f} | {full / step:.1f} |"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    print(", ".join(f"{name} {value}" for name, value in run_facts().items()), flush=True)
    names = "V | d | mean set | step ms | reuse ms | GiB | full ms | full GiB | full/step"
    print(f"| {names} |\n|" + "---|" * 9)
    for vocabulary, d in SHAPES:
        for mean in SETS:
            print(measure(TOKENS, vocabulary, d, mean, options.rounds), flush=True)


if __name__ == "__main__":
    main()
