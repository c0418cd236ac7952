"""A Triton kernel that adds gradients to their float32 sums in one pass over memory."""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# (Triton types neither launch options nor arithmetic inside kernels.)

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _add_kernel(sums, gradients, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    gradient = tl.load(gradients + at, mask=live).to(tl.float32)
    tl.store(sums + at, tl.load(sums + at, mask=live) + gradient, mask=live)


def add(sums: Tensor, gradients: Tensor) -> None:
    """Add `gradients`, which must be contiguous, to the float32 `sums` in place."""
    count = sums.numel()
    _add_kernel[(triton.cdiv(count, BLOCK),)](sums, gradients, count, BLOCK=BLOCK, num_warps=8)
