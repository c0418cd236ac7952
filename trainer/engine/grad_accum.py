"""DeepSpeed's optimizer for bfloat16 with less to move while gradients add up.

It makes a float32 copy of every gradient and adds that: 18 bytes a parameter and micro-batch, where
reading the gradient and adding to its sum takes 10. The sums are the same to the bit.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

PARAMETERS = ["self", "lp", "group_idx", "param_idx", "clear_lp_grads"]
"""Of the method that is replaced, in DeepSpeed 0.19."""
LARGE = 2**16
"""Numbers; for fewer, PyTorch's slower kernel is the quicker one to start."""


class SummingOptimizer(BF16_Optimizer):
    @torch.no_grad()
    def _update_hp_grad(
        self, lp: Any, group_idx: int, param_idx: int, clear_lp_grads: bool
    ) -> None:
        gradient: Tensor | None = lp.grad
        total: Tensor = self.fp32_groups_gradients[group_idx][param_idx]
        if (
            gradient is None
            or gradient.numel() != total.numel()
            or not (gradient.is_contiguous() and total.is_contiguous())
            or clear_lp_grads
            or self.autoep_folding_tp_group is not None
        ):
            super()._update_hp_grad(lp, group_idx, param_idx, clear_lp_grads)
            return
        if total.is_cuda and total.numel() >= LARGE:
            from keel.trainer.engine.grad_kernels import add  # noqa: PLC0415  (Triton exists on GPU machines)

            add(total, gradient)
        else:
            total.add_(gradient.view(total.shape))
        lp._hp_grad = total
        self.fp32_groups_has_gradients[group_idx][param_idx] = True


def sum_in_one_pass(optimizer: Any) -> None:
    """Have a `BF16_Optimizer` be a `SummingOptimizer`; another one stays as it is."""
    method = BF16_Optimizer._update_hp_grad
    if (
        type(optimizer) is BF16_Optimizer
        and list(inspect.signature(method).parameters) == PARAMETERS
    ):
        optimizer.__class__ = SummingOptimizer
