"""Attention kernels of a packed row, forward and backward: torch's own (flash attention 2), and
FlashAttention-4's for Hopper.

    python -m benchmarks.training.attention --out DIR [--kernels torch fa4]

The second kind needs the package flash-attn-4, which the extra `gpu` has. bfloat16, causal. A line
for each kernel and row, kept in DIR/attention.json as it comes: milliseconds and TFLOP/s (of the
half of the scores that causal attention needs; a backward pass counts 2.5 forward ones), seconds of
the first call, in which kernels are compiled, whether gradients are the same twice, and how far
outputs and gradients are from plain attention in float32, where that fits. Which of the two a
trainer uses: `trainer.attention_kernels`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.revision import commit
from keel.model.layers.flash4 import check_kernels
from keel.model.layers.flash4_probe import plain

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
ROWS = (
    (16, 8, 128, 1024, 16),
    (16, 8, 128, 4096, 4),
    (16, 8, 128, 16384, 1),
    (16, 8, 128, 32768, 1),
    (16, 8, 128, 65536, 1),
    (32, 4, 128, 4096, 4),
    (14, 2, 64, 2048, 8),
)
"""Heads of queries, of keys, their width; tokens of a segment, segments."""
PLAIN = 4096
"""Longest segment that is compared with plain attention."""
ROUNDS = 3


def kernel(name: str) -> Attend:
    """(query [N, Hq, D], key and value [N, Hkv, D], offsets, longest) → [N, Hq, D]."""
    if name == "torch":
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

        def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
            found: Any = varlen_attn(
                q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0)
            )
            return found

        return attend
    from flash_attn.cute.interface import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
    )

    def attend4(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
        found = flash_attn_varlen_func(
            q, k, v, max_seqlen_q=longest, max_seqlen_k=longest, **options
        )
        return found[0] if isinstance(found, tuple) else found

    return attend4


def timed(run: Callable[[], object]) -> float:
    """Milliseconds, the shortest of some."""
    found: list[float] = []
    for _ in range(ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found[1:])


def measure(
    attend: Attend, heads: int, of_keys: int, width: int, length: int, count: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    options: Any = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = [(length * count, many, width) for many in (heads, of_keys, of_keys)]
    given = [torch.randn(shape, **options).requires_grad_() for shape in shapes]
    q, k, v = given
    slope = torch.randn(shapes[0], **options)
    offsets = torch.arange(0, length * count + 1, length, device="cuda", dtype=torch.int32)

    def forward() -> Tensor:
        return attend(q, k, v, offsets, length)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), given, slope)

    began = time.monotonic()
    backward()
    torch.cuda.synchronize()
    first = time.monotonic() - began
    with torch.no_grad():
        there = timed(forward)
    back = timed(backward) - there
    flops = 2 * length * length * count * heads * width
    once, again = backward(), backward()
    row = {
        "row": f"{heads}/{of_keys} heads of {width}, {count} × {length:,}",
        "forward_ms": there,
        "forward_tflops": flops / there / 1e9,
        "backward_ms": back,
        "backward_tflops": 2.5 * flops / back / 1e9,
        "first_s": first,
        "same_twice": [torch.equal(a, b) for a, b in zip(once, again, strict=True)],
    }
    if length <= PLAIN:
        exact = [x[:length].detach().float().requires_grad_() for x in given]
        output = plain(exact[0], exact[1], exact[2], [length])
        slopes = torch.autograd.grad(output, exact, slope[:length].float())
        pairs = [(forward().detach(), output.detach()), *zip(once, slopes, strict=True)]
        row["off"] = [float((a[:length] - b).norm() / b.norm()) for a, b in pairs]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", nargs="+", default=["torch", "fa4"], choices=["torch", "fa4"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention kernels are for GPUs, and none is here")
        return 1
    if "fa4" in options.kernels and (why := check_kernels()):
        print(f"fa4: {why}; --kernels torch goes without")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {"commit": commit(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for name in options.kernels:
        attend = kernel(name)
        for shape in ROWS:
            rows.append({"kernel": name, **measure(attend, *shape)})
            print(json.dumps(rows[-1]), flush=True)
            made = json.dumps(facts | {"rows": rows}, indent=1)
            (options.out / "attention.json").write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
