"""Private PyTorch APIs (2.11 to 2.13) of the model and the trainer. Only this file uses them."""

import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._C import _autograd as autograd
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed import _functional_collectives as collectives
from torch.multiprocessing.reductions import rebuild_cuda_tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy `tensor` from host memory to `device` without waiting for queued GPU work."""
    device = torch.device(device)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def next_node_number() -> int:
    """Return the sequence number of the next autograd node."""
    return autograd._get_sequence_nr()


def running_node_number() -> int | None:
    """Return the sequence number of the autograd node whose backward pass is running, or None."""
    if torch._C._current_graph_task_id() == -1:
        return None
    return torch._C._current_autograd_node()._sequence_nr()


def storage_id(storage: UntypedStorage) -> int:
    """Return an id that is the same for all tensors with the same storage."""
    return storage._cdata


def varlen_operator() -> Any:
    """Return PyTorch's operator for variable-length attention as registered with the dispatcher."""
    import torch.nn.attention.varlen  # noqa: PLC0415  (registers it)

    return torch.ops.torch_attn._varlen_attn.default


def replace_flash_kernels(module: str) -> Any:
    """Use a module's `_flash_attn_fwd` and `_flash_attn_bwd` as the kernels of PyTorch's flash
    attention. Returns a handle, whose `remove` method restores PyTorch's kernels."""
    from torch.nn.attention import _fa4  # noqa: PLC0415  (PyTorch calls it a prototype)

    return _fa4.register_flash_attention_fa4(module)


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
    """Compute the gradients of causal attention within segments, for a forward pass run by other
    kernels. `query` is [N, Hq, D], and `key` and `value` are [N, Hkv, D]. `grad` is the gradient of
    `out` [N, Hq, D], and `sums` are the logsumexps [Hq, N] float32."""
    none = torch.zeros(2, dtype=torch.uint64, device=query.device)  # random state for dropout
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), query, key, value, out, sums, offsets, offsets, longest, longest,
        0.0, True, none, none, scale=scale, window_size_left=-1, window_size_right=0,
    )  # fmt: skip


def all_to_all(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Send row j to rank j and receive row i from rank i: [n, …] → [n, …]. Unlike the version in
    `torch.distributed.nn`, this one can be both differentiated and compiled."""
    return collectives.all_to_all_single_autograd(rows, None, None, group)


def limit_all_groups(timeout_s: float) -> None:
    """Set the timeout of all process groups in this process."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def nccl_options(timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def position_of_index() -> int:
    """Return the position of the GPU index in a handle from `reduce_tensor`. Raises RuntimeError if
    the installed PyTorch has none."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    if "storage_device" not in names:
        raise RuntimeError(
            f"PyTorch {torch.__version__}: rebuild_cuda_tensor has no storage_device. "
            "Install 2.11 to 2.13"
        )
    return names.index("storage_device")


def with_local_index(handle: tuple[Any, ...], index: int | None) -> tuple[Any, ...]:
    """Replace the GPU index in a handle from `reduce_tensor` with `index`, the GPU's index within
    this process."""
    at = position_of_index()
    return (*handle[:at], index, *handle[at + 1 :])


_VARIANTS = 64
"""Maximum number of graphs per function. Different layers, rows with one token, shared prompts,
forward passes without gradient and the reference policy each need their own graph. Beyond the limit
(8 by default), PyTorch runs the function uncompiled. When that happened on one of two ranks under
ZeRO 2, gradients were wrong, probably because of their order."""


def specialise_and_recompute() -> None:
    """Configure torch.compile to treat floats such as a norm's epsilon as constants, recompute
    elementwise operations in the backward pass wherever that saves memory, and keep up to
    `_VARIANTS` graphs per function."""
    import torch._dynamo.config as dynamo  # noqa: PLC0415  (slow to load)
    import torch._functorch.config as functorch  # noqa: PLC0415

    dynamo.specialize_float = True
    dynamo.recompile_limit = _VARIANTS
    functorch.ban_recompute_used_far_apart = False
    functorch.ban_recompute_long_fusible_chains = False
    functorch.ban_recompute_materialized_backward = False
