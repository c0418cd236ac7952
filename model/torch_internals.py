"""All that Keel's model and trainer use of PyTorch without a public name; there is none for these
in 2.11 to 2.13. No other file of theirs names a private attribute of it."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._C import _autograd as autograd
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed import _functional_collectives as collectives
from torch.multiprocessing.reductions import rebuild_cuda_tensor

_USED: dict[Any, tuple[str, ...]] = {
    autograd: ("_get_sequence_nr",),
    torch._C: ("_current_graph_task_id", "_current_autograd_node"),
    Node: ("_sequence_nr",),
    UntypedStorage: ("_cdata",),
    distributed_c10d: ("_world", "_set_pg_timeout"),
    collectives: ("all_to_all_single_autograd",),
    torch.ops.aten: ("_flash_attention_backward",),
}


def check_torch() -> None:
    """Raise `RuntimeError` if PyTorch has moved any of it: replay and sequence parallelism would
    be wrong without."""
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in _USED.items()
        for name in names
        if not hasattr(owner, name)
    ]
    if "storage_device" not in inspect.signature(rebuild_cuda_tensor).parameters:
        missing.append("rebuild_cuda_tensor's storage_device")
    if missing:
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no {', no '.join(missing)}, which 2.11 to 2.13 have "
            "and Keel needs: install one of those"
        )


def next_node_number() -> int:
    """Autograd numbers its nodes in the order of their making: that of the next one."""
    return autograd._get_sequence_nr()


def running_node() -> int | None:
    """The number of the node whose backward pass is running; None outside of backward passes."""
    if torch._C._current_graph_task_id() == -1:
        return None
    return torch._C._current_autograd_node()._sequence_nr()


def storage_id(storage: UntypedStorage) -> int:
    """The same for all tensors that look into it, while it exists."""
    return storage._cdata


def varlen_operator() -> Any:
    """PyTorch's attention over offsets, as its dispatcher knows it."""
    import torch.nn.attention.varlen  # noqa: PLC0415  (registers it)

    return torch.ops.torch_attn._varlen_attn.default


def flash_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of causal attention inside segments, what a forward pass by other flash kernels has left: the
    gradients of query [N, Hq, D], key and value [N, Hkv, D], where `out` [N, Hq, D] has `grad`.
    sums: the logarithms [Hq, N], float32."""
    none = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the generator's, for dropout
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), query, key, value, out, sums, offsets, offsets, longest, longest,
        0.0, True, none, none, scale=scale, window_size_left=-1, window_size_right=0,
    )  # fmt: skip


def all_to_all(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Row j goes to rank j, and row i comes from rank i: [n, …] → [n, …]. Differentiable, and a
    part of a compiled graph, which the one of `torch.distributed.nn` is not."""
    return collectives.all_to_all_single_autograd(rows, None, None, group)


def limit_all_groups(timeout_s: float) -> None:
    """Every process group that this process is in by now fails after `timeout_s`."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def nccl_options(timeout: timedelta) -> Any:
    """Of a `ProcessGroupNCCL`."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def on_device(handle: tuple[Any, ...], index: int | None) -> tuple[Any, ...]:
    """What `reduce_tensor` says of a GPU's tensor, with this process's number of the GPU."""
    at = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")
    return (*handle[:at], index, *handle[at + 1 :])


VARIANTS = 64
"""Graphs of one function, at most. Layers that differ, rows of one token, shared prompts, passes
without gradient and the reference policy each have their own, and PyTorch's limit is 8. Past it a
function runs uncompiled. Where one of two ranks did, under ZeRO 2, gradients of weights of equal
size came out wrong: in all likelihood since they come in another order there."""


def specialise_and_recompute() -> None:
    """How torch.compile treats numbers, such as a norm's epsilon: as a part of the graph, and not
    as tensors that each call makes. And elementwise operations: they are computed again in the
    backward pass wherever that saves memory; GEMMs and attention never are. And how many graphs a
    function may have: `VARIANTS`."""
    import torch._dynamo.config as dynamo  # noqa: PLC0415  (slow to load)
    import torch._functorch.config as functorch  # noqa: PLC0415

    dynamo.specialize_float = True
    dynamo.recompile_limit = VARIANTS
    functorch.ban_recompute_used_far_apart = False
    functorch.ban_recompute_long_fusible_chains = False
    functorch.ban_recompute_materialized_backward = False
