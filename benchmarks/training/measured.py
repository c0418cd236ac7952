"""Steps that benchmarks/training/__main__.py measured on H200s, for the model of `keel check`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.training.cases import Case
from keel.trainer.planning.step_time import Rates

NOW = Rates()
BEFORE = replace(NOW, summed_bytes=NOW.gradient_bytes, packed_step_s=NOW.prepared_step_s)
"""Where all gradients went through float32 copies, and engines prepared every step anew."""
USUAL = Case(shape="", length=1024, micro_batch_tokens=16_384, step_tokens=65_536)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row of benchmarks/training/__main__.py."""

    case: Case
    seconds: float
    gib: float
    """Of the whole GPU, at most: `gpu_gib`."""
    stock: bool = False
    """Norms and experts of transformers instead of Keel's."""
    copied: bool = False
    """Before gradients were added in one pass."""
    earlier: bool = False
    """At commit 60b498b, before that as well: keys and values were repeated for every head of the
    query, and compiled layers kept results of elementwise operations."""

    def __str__(self) -> str:
        tokens = self.case.step_tokens
        more = f", {tokens:,} tokens" if tokens != USUAL.step_tokens else ""
        return f"{self.case}{more}" + ", stock" * self.stock + ", earlier" * self.earlier

    @property
    def rates(self) -> Rates:
        return BEFORE if self.copied or self.earlier else Rates()

    def line(self) -> str:
        """As a line of `MEASURED`."""
        changes = {
            field.name: getattr(self.case, field.name)
            for field in fields(Case)
            if getattr(self.case, field.name) != getattr(USUAL, field.name)
        }
        shape = changes.pop("shape")
        changes |= {name: True for name in ("stock", "copied", "earlier") if getattr(self, name)}
        more = "".join(f", {name}={value}" for name, value in changes.items())
        return f'row("{shape}", {self.seconds:.3f}, {self.gib:.1f}{more}),'


def row(
    shape: str,
    seconds: float,
    gib: float,
    *,
    stock: bool = False,
    copied: bool = False,
    earlier: bool = False,
    **changes: Any,
) -> Measured:
    """`changes`: where the case is not `USUAL`."""
    case = replace(USUAL, shape=shape, **changes)
    return Measured(
        case=case, seconds=seconds, gib=gib, stock=stock, copied=copied, earlier=earlier
    )


MEASURED = (
    row("30b-a3b-slice", 0.523, 89.8),
    row("30b-a3b-slice", 0.485, 103.6, micro_batch_tokens=32768),
    row("30b-a3b-slice", 0.592, 103.6, length=4096, micro_batch_tokens=32768),
    row("30b-a3b-slice", 0.672, 78.7, recompute=True),
    row("30b-a3b-slice", 0.452, 89.3, compiled=True),
    row("30b-a3b-slice", 0.420, 102.7, micro_batch_tokens=32768, compiled=True),
    row("qwen3-1.7b", 1.430, 69.2, copied=True),
    row("qwen3-1.7b", 1.382, 106.0, micro_batch_tokens=32768, copied=True),
    row("qwen3-1.7b", 1.655, 106.0, length=4096, micro_batch_tokens=32768, copied=True),
    row("qwen3-1.7b", 1.806, 36.1, recompute=True, copied=True),
    row("qwen3-1.7b", 1.180, 55.6, compiled=True, copied=True),
    row("moe-1.6b", 0.475, 41.6, copied=True),
    row("moe-1.6b", 0.357, 53.6, micro_batch_tokens=32768, copied=True),
    row("moe-1.6b", 0.432, 53.6, length=4096, micro_batch_tokens=32768, copied=True),
    row("moe-1.6b", 0.645, 29.6, recompute=True, copied=True),
    row("qwen3-0.6b", 0.792, 36.6, earlier=True),
    row("qwen3-0.6b", 0.755, 60.9, micro_batch_tokens=32768, earlier=True),
    row("qwen3-0.6b", 0.998, 60.8, length=4096, micro_batch_tokens=32768, earlier=True),
    row("qwen3-0.6b", 1.058, 14.6, recompute=True, earlier=True),
    row("moe-1.6b", 0.753, 47.4, stock=True, earlier=True),
    row("moe-1.6b", 0.691, 65.3, micro_batch_tokens=32768, stock=True, earlier=True),
    row("moe-1.6b", 0.767, 65.3, length=4096, micro_batch_tokens=32768, stock=True, earlier=True),
    row("moe-1.6b", 1.014, 29.9, recompute=True, stock=True, earlier=True),
    row("30b-a3b-slice", 0.940, 98.2, stock=True, earlier=True),
    row("30b-a3b-slice", 0.868, 118.1, micro_batch_tokens=32768, stock=True, earlier=True),
    row(
        "30b-a3b-slice",
        0.970,
        118.1,
        length=4096,
        micro_batch_tokens=32768,
        stock=True,
        earlier=True,
    ),
    row("30b-a3b-slice", 1.198, 81.8, recompute=True, stock=True, earlier=True),
    row("30b-a3b-slice", 0.751, 95.0, compiled=True, stock=True, earlier=True),
    row("qwen3-1.7b", 1.891, 83.9, stock=True, earlier=True),
    row("qwen3-1.7b", 2.845, 70.9, step_tokens=131072, earlier=True),
    row("qwen3-1.7b", 2.944, 75.3, step_tokens=131072, zero_stage=2, earlier=True),
    row("qwen3-1.7b", 1.475, 62.1, step_tokens=131072, ranks=2, earlier=True),
    row("qwen3-1.7b", 1.568, 64.1, step_tokens=131072, ranks=2, zero_stage=2, earlier=True),
    row("qwen3-1.7b", 0.766, 57.3, step_tokens=131072, ranks=4, earlier=True),
    row("qwen3-1.7b", 0.796, 59.6, step_tokens=131072, ranks=4, zero_stage=2, earlier=True),
)
"""H200s, torch 2.11 (CUDA 13.0). The first six at commit 32ab130 by

    python3 -m benchmarks.training --out DIR --profile --rounds 2 --seconds 110 \\
        --shapes 30b-a3b-slice

those that are `copied` at 7716cf7 by

    python3 -m benchmarks.training --out DIR --profile --rounds 2 --seconds 200 \\
        --shapes 30b-a3b-slice,moe-1.6b,qwen3-1.7b

and the earlier ones at 60b498b: those of Qwen3-0.6B with `--profile --rounds 2 --seconds 170` while
other work ran on the host's other GPUs; those that are `stock` with
`--stock --shapes moe-1.6b,30b-a3b-slice,qwen3-1.7b`, except for the compiled one: there Keel's
experts failed under transformers 5.17 and stock layers stood in. The last six, of 131,072 tokens,
with `--ranks 1,2,4 --seconds 140` on four GPUs."""
