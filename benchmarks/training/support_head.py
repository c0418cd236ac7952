"""Forward and backward of the support head against a chunked full head, in one run on one GPU.

    python -m benchmarks.training.support_head                    # every configuration
    python -m benchmarks.training.support_head --only 151936x2048 --sets 8
    python -m benchmarks.training.support_head --sweep            # tilings of each kernel, instead

The two heads alternate, and each figure is a median over rounds. *step* makes the plan from kept
ids on the device and offsets on the host, then runs forward and backward; *reuse* keeps the plan,
as all passes over a micro-batch after the first do. *call* is the public function from index
tensors on the host with all its checks, which in training run while the GPU is busy with the
network. No figure hides the host: the GPU is idle when each begins.
*memory* is the peak above what was allocated before the step, gradients included. Errors are
against a dense softmax in float64 over a sample of tokens that alone carry gradient.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.common.revision import commit
from benchmarks.common.synthetic import draw_sets
from keel.model.head import kernels
from keel.model.head import plan as support_plan
from keel.model.head.gpu import fused_head
from keel.model.head.kernels import HeadShape, Tiling
from keel.model.head.plan import SupportPlan, build_plan
from keel.model.logprobs import support_logprobs

SHAPES = ((151_936, 2048), (151_936, 1024), (262_144, 640))
SETS = (8, 64, 512)
FULL_CHUNK = 4096
"""Tokens whose logits the full head holds at once."""


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
    call_ms: float
    memory_gib: float
    full_ms: float
    full_gib: float
    logp_error: float
    hidden_error: float
    weight_error: float


def make_inputs(tokens: int, vocabulary: int, d: int, mean: int, pool: int | None = None) -> Inputs:
    device = torch.device("cuda")
    ids, offsets, targets = draw_sets(tokens, pool or vocabulary, mean, device)
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


def public_step(inputs: Inputs, host: tuple[Tensor, Tensor, Tensor]) -> None:
    inputs.clear()
    (-support_logprobs(inputs.hidden, inputs.weight, *host).mean()).backward()


def full_step(inputs: Inputs) -> None:
    """log π(target) over the whole vocabulary, `FULL_CHUNK` tokens at a time."""
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


def errors(inputs: Inputs, sample: int = 256) -> tuple[float, float, float]:
    """max |Δ logp|, and ‖Δ‖/‖exact‖ of the gradients of hidden and weight."""
    tokens, device = len(inputs.targets), inputs.weight.device
    rows = torch.randperm(tokens, device=device)[:sample]
    grad = torch.zeros(tokens, device=device)
    grad[rows] = torch.randn(sample, device=device)
    inputs.clear()
    plan = inputs.plan()
    logp, _ = fused_head(inputs.hidden, inputs.weight, inputs.targets, plan)
    logp.backward(grad)
    got_hidden, got_weight = inputs.hidden.grad, inputs.weight.grad
    assert got_hidden is not None and got_weight is not None

    kept = torch.zeros((sample, inputs.weight.shape[0]), dtype=torch.bool, device=device)
    for index, row in enumerate(rows.tolist()):
        first, last = inputs.host_offsets[row], inputs.host_offsets[row + 1]
        kept[index, inputs.ids[first:last].long() if last > first else slice(None)] = True
    hidden, weight = inputs.hidden.detach()[rows].double(), inputs.weight.detach().double()
    log_p = (hidden @ weight.t()).masked_fill_(~kept, float("-inf")).log_softmax(-1)
    target = inputs.targets[rows, None]
    exact = log_p.gather(1, target)[:, 0]
    coefficient = -log_p.exp()
    coefficient.scatter_add_(1, target, torch.ones_like(target, dtype=torch.float64))
    coefficient *= grad[rows, None].double()
    want_hidden, want_weight = coefficient @ weight, coefficient.t() @ hidden
    others = torch.ones(tokens, dtype=torch.bool, device=device)
    others[rows] = False
    assert not got_hidden[others].any(), "a token without gradient got one"
    return (
        float((logp.detach()[rows].double() - exact).abs().max()),
        float((got_hidden[rows].double() - want_hidden).norm() / want_hidden.norm()),
        float((got_weight.double() - want_weight).norm() / want_weight.norm()),
    )


def measure(tokens: int, vocabulary: int, d: int, mean: int, pool: int | None, rounds: int) -> Row:
    inputs = make_inputs(tokens, vocabulary, d, mean, pool)
    plan = inputs.plan()
    host = (inputs.targets.cpu(), inputs.ids.cpu(), inputs.host_offsets)
    accuracy = errors(inputs)
    torch.cuda.empty_cache()
    runs: dict[str, Callable[[], None]] = {
        "step": lambda: support_step(inputs),
        "reuse": lambda: support_step(inputs, plan),
        "call": lambda: public_step(inputs, host),
        "full": lambda: full_step(inputs),
    }
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()  # untimed, so that each starts with its own code warm on the host
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
        call_ms=median["call"],
        memory_gib=extra_gib(inputs, runs["step"]),
        full_ms=median["full"],
        full_gib=extra_gib(inputs, runs["full"]),
        logp_error=accuracy[0],
        hidden_error=accuracy[1],
        weight_error=accuracy[2],
    )


def table(rows: list[Row]) -> str:
    lines = [
        "| V | d | mean set | plan | step ms | reuse ms | call ms | GiB | full ms | full GiB "
        "| full/step | logp error | hidden grad | weight grad |",
        "|" + "---|" * 14,
    ]
    for row in rows:
        lines.append(
            f"| {row.vocabulary} | {row.d} | {row.mean_set:.1f} | {row.plans} | {row.step_ms:.2f} "
            f"| {row.reuse_ms:.2f} | {row.call_ms:.1f} | {row.memory_gib:.2f} "
            f"| {row.full_ms:.1f} | {row.full_gib:.1f} "
            f"| {row.full_ms / row.step_ms:.1f} | {row.logp_error:.1e} | {row.hidden_error:.1e} "
            f"| {row.weight_error:.1e} |"
        )
    return "\n".join(lines)


def sweep(tokens: int, vocabulary: int, d: int, mean: int) -> Iterator[str]:
    """Milliseconds of each kernel under each tiling, best first."""
    inputs = make_inputs(tokens, vocabulary, d, mean)
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    plan = inputs.plan()
    count = plan.ids.numel()
    z = torch.empty(count, device="cuda")
    logp, entropy, lse = torch.empty((3, tokens), device="cuda").unbind(0)
    ones = torch.ones(tokens, device="cuda")
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
    shape, name = HeadShape(), f"V={vocabulary} d={d} E={count}"

    def logits(tiling: Tiling) -> None:
        kernels.gather_logits(
            z, hidden, weight, None, plan.token, plan.ids, (0, count), shape, tiling
        )

    def spans() -> None:
        kernels.span_statistics(logp, entropy, lse, z, plan.ids, plan.offsets, inputs.targets)

    def coefficients() -> Tensor:
        return kernels.logit_coefficients(z, plan.ids, plan.token, inputs.targets, lse, ones, shape)

    def time(run: Callable[[], object]) -> float:
        median: Any = triton.testing.do_bench(run, warmup=5, rep=30, return_mode="median")
        return float(median)

    logits(kernels.LOGITS)
    spans()
    c = coefficients()
    yield f"{name} plan {time(inputs.plan):.3f}  spans {time(spans):.3f}"
    yield f"{name} coefficients {time(coefficients):.3f}"
    transposing = time(lambda: kernels.transpose_entries(plan.ids, plan.token, vocabulary))
    yield f"{name} transpose {transposing:.3f}"
    tilings = [
        Tiling(entries, columns, warps)
        for warps in (1, 2, 4)
        for columns in (256, 512, 1024, 2048)
        for entries in (2, 4, 8, 16)
        if 1024 * warps <= entries * columns <= 4096 * warps and columns >= 256 * warps
    ]
    tried: dict[str, Callable[[Tiling], None]] = {
        "logits": logits,
        "hidden": lambda t: kernels.hidden_gradient(
            grad_hidden, c, weight, plan.ids, plan.offsets, t
        ),
        "weight": lambda t: kernels.weight_gradient(
            grad_weight, None, c, hidden, plan.transposed, t
        ),
    }
    for kernel, run in tried.items():
        found = sorted((time(lambda r=run, t=t: r(t)), tuple(t)) for t in tilings)
        best = "  ".join(f"{ms:.3f} {tiling}" for ms, tiling in found[:6])
        yield f"{name} {kernel}: {best}  worst {found[-1][0]:.3f} {found[-1][1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--only", help="one head, as VxD")
    parser.add_argument("--sets", type=int, nargs="*", help="mean set sizes; 0: no truncation")
    parser.add_argument("--pool", type=int, help="draw kept ids from the first so many ids")
    parser.add_argument("--force", choices=("gather", "union"), help="overrule the cost rule")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sweep", action="store_true", help="time each kernel's tilings instead")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    if args.force:
        support_plan.UNION_FLOOR = 1
        support_plan.union_is_cheaper = lambda *_: args.force == "union"
    heads = SHAPES
    if args.only:
        vocabulary, _, d = args.only.partition("x")
        heads = ((int(vocabulary), int(d)),)
    print(
        f"commit {commit()}; {torch.cuda.get_device_name()}; torch "
        f"{torch.__version__}; triton {triton.__version__}; T={args.tokens}; bfloat16; "
        f"median of {args.rounds} rounds{'; ids from ' + str(args.pool) if args.pool else ''}"
        f"{'; ' + args.force + ' forced' if args.force else ''}",
        flush=True,
    )
    rows = []
    for vocabulary, d in heads:
        for mean in args.sets or (*SETS, 0):
            if args.sweep:
                for line in sweep(args.tokens, vocabulary, d, mean):
                    print(line, flush=True)
                continue
            rows.append(measure(args.tokens, vocabulary, d, mean, args.pool, args.rounds))
            print(table(rows).splitlines()[-1], flush=True)
            if args.json:
                args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if rows:
        print(table(rows))


if __name__ == "__main__":
    main()
