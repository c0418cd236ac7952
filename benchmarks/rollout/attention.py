"""Attention of a decoding step: vLLM's, and Keel's that reads a group's prompt once.

    python -m benchmarks.rollout.attention --out DIR [--sweep tiles]

bfloat16, CUDA graphs; each row is halfway through its completion. A line for each shape:
milliseconds a layer of both, the keys and values that the rows have (and those that are left when a
group's prompt counts once) over that time in GB/s, and how far Keel's is from vLLM's. `--sweep`:
with other tiles, or other ways to slice rows, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import fa_utils

from benchmarks.common.revision import commit
from keel.rollout.fastpath.cascade import kernels, plan

FLASH: Any = fa_utils
"""Has what is wanted of it on GPUs alone."""
PAGE = 16
CALLS, ROUNDS = 8, 5
SPLITS = 32
"""Of vLLM's kernel in a CUDA graph, at most: its default."""
TILES = tuple(itertools.product((16, 32, 64), (2, 3), (2, 4), (16, 32)))
SLICES = tuple(itertools.product((256, 512, 1024), (1, 2, 4), (512, 1024, 2048)))
WHERE = {
    "TOKENS": kernels,
    "STAGES": kernels,
    "WARPS": kernels,
    "QUERIES": plan,
    "PARTS": plan,
    "LONGER": plan,
    "SLICE": kernels,
}
"""What can be swept: first a tile, then how rows are sliced."""


@dataclass(frozen=True)
class Case:
    name: str
    groups: int
    group: int
    prompt: int
    own: int
    """Tokens that a row has sampled."""
    queries: int = 16
    keys: int = 8
    size: int = 128

    @property
    def rows(self) -> int:
        return self.groups * self.group

    def bytes(self, prompts: int) -> int:
        tokens = prompts * self.prompt + self.rows * self.own
        return tokens * self.keys * self.size * 4


CASES = (
    Case("peers", 16, 8, 128, 512),
    Case("draw 1", 4, 16, 160, 576),
    Case("draw 2", 16, 8, 800, 224),
    Case("draw 3", 4, 16, 544, 704),
    Case("draw 4", 16, 16, 256, 256),
    Case("draw 10", 4, 8, 512, 960),
    Case("draw 12", 8, 4, 576, 768),
    Case("30b-a3b", 8, 8, 128, 960, queries=32, keys=4),
    Case("agents", 8, 8, 6000, 2000, queries=32, keys=8),
    Case("no group", 64, 1, 544, 704),
    Case("own 3", 64, 1, 0, 704),
    Case("own 4", 256, 1, 0, 256),
    Case("tail", 3, 2, 544, 8000),
)


class Step:
    """Inputs of a layer, in caches that follow one another so that none is in the GPU's own."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        whole, own = case.prompt // PAGE, -(-(case.prompt % PAGE + case.own) // PAGE)
        count = case.groups * whole + case.rows * own
        order = torch.randperm(count, generator=generator).to(torch.int32)
        table = torch.zeros(case.rows, whole + own + 8, dtype=torch.int32)
        for row in range(case.rows):
            group, at = row // case.group, case.groups * whole + row * own
            table[row, :whole] = order[group * whole : (group + 1) * whole]
            table[row, whole : whole + own] = order[at : at + own]
        self.case, self.table = case, table.cuda()
        self.lengths = torch.full((case.rows,), case.prompt + case.own, dtype=torch.int32).cuda()
        small = {"dtype": torch.bfloat16, "device": "cuda"}
        self.caches = [
            torch.randn(count, case.keys, PAGE, 2 * case.size, **small).transpose(1, 2)
            for _ in range(2)
        ]
        self.query = torch.randn(case.rows, case.queries, case.size, **small)
        self.out = torch.empty_like(self.query)
        self.starts = torch.arange(case.rows + 1, dtype=torch.int32, device="cuda")

    def theirs(self) -> Callable[[int], None]:
        case, longest = self.case, self.table.shape[1] * PAGE
        version = FLASH.get_flash_attn_version()
        schedule: Tensor | None = None
        if version == 3:
            schedule = FLASH.get_scheduler_metadata(
                batch_size=case.rows,
                max_seqlen_q=1,
                max_seqlen_k=longest,
                num_heads_q=case.queries,
                num_heads_kv=case.keys,
                headdim=case.size,
                cache_seqlens=self.lengths,
                cu_seqlens_q=self.starts,
                page_size=PAGE,
                causal=True,
                num_splits=SPLITS,
            )

        def run(call: int) -> None:
            key, value = self.caches[call % 2].split(case.size, dim=-1)
            FLASH.flash_attn_varlen_func(
                q=self.query,
                k=key,
                v=value,
                out=self.out,
                cu_seqlens_q=self.starts,
                max_seqlen_q=1,
                seqused_k=self.lengths,
                max_seqlen_k=longest,
                softmax_scale=case.size**-0.5,
                causal=True,
                block_table=self.table,
                scheduler_metadata=schedule,
                fa_version=version,
                num_splits=SPLITS,
            )

        return run

    def ours(self) -> Callable[[int], None]:
        case = self.case
        heads = plan.Heads(case.queries, case.keys, case.size, PAGE)
        scratch = plan.Scratch(heads, case.rows, torch.device("cuda"))

        def run(call: int) -> None:
            key, value = self.caches[call % 2].split(case.size, dim=-1)
            if call == 0:
                plan.plan(scratch, self.table, self.lengths)
            args = (self.table, self.lengths, case.size**-0.5, self.out)
            kernels.attend(scratch, self.query, key, value, *args)

        return run


def timed(run: Callable[[int], None]) -> float:
    """Milliseconds of a call, in a CUDA graph of some."""
    for call in range(2):
        run(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            run(call)
    found: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / CALLS)
    return min(found)


def measure(case: Case, sweep: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    step = Step(case)
    theirs, ours = step.theirs(), step.ours()
    theirs(0)
    wanted = step.out.float()
    ours(0)
    off = (step.out.float() - wanted).abs().max().item()
    row = {"theirs_ms": timed(theirs), "ours_ms": timed(ours), "off": off}
    row["theirs_gb_s"] = case.bytes(case.rows) / row["theirs_ms"] / 1e6
    row["ours_gb_s"] = case.bytes(case.groups) / row["ours_ms"] / 1e6
    swept: dict[str, float] = {}
    before = [getattr(module, name) for name, module in WHERE.items()]
    for values in sweep:
        for (name, module), value in zip(WHERE.items(), values, strict=True):
            setattr(module, name, value)
        try:
            swept[" ".join(map(str, values))] = timed(step.ours())
        except Exception as error:  # too much shared memory, for one
            print(f"  {values}: {type(error).__name__}", flush=True)
    for (name, module), value in zip(WHERE.items(), before, strict=True):
        setattr(module, name, value)
    return {**asdict(case), **row, "sweep": dict(sorted(swept.items(), key=lambda it: it[1])[:8])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--sweep", choices=("tiles", "slices"), help="with other ones, too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    now = tuple(getattr(module, name) for name, module in WHERE.items())
    sweep: list[tuple[int, ...]] = []
    if options.sweep == "tiles":
        sweep = [(*tile, *now[4:]) for tile in TILES]
    elif options.sweep == "slices":
        sweep = [(*now[:4], *slices) for slices in SLICES]
    for case in CASES:
        if case.name not in options.cases:
            continue
        rows.append(row := measure(case, sweep))
        made = {
            "command": " ".join(sys.argv[1:]),
            "commit": commit(),
            "device": torch.cuda.get_device_name(),
            "rows": rows,
        }
        (options.out / "attention.json").write_text(json.dumps(made, indent=1))
        print(
            f"{case.name:10s} vLLM {row['theirs_ms']:.4f} ms {row['theirs_gb_s']:,.0f} GB/s; Keel "
            f"{row['ours_ms']:.4f} ms {row['ours_gb_s']:,.0f} GB/s, off by {row['off']:.4f}; "
            f"{row['theirs_ms'] / row['ours_ms']:.2f} times as fast",
            flush=True,
        )
        for name, ms in row["sweep"].items():
            print(f"    {name}: {ms:.4f}", flush=True)


if __name__ == "__main__":
    main()
