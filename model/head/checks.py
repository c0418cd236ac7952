"""What the support head refuses, with the argument and the row in the message."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITMAP_COST = 16
"""Bytes of bitmap for each pair up to which marking beats sorting when looking for repeats."""


def check_shapes(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    bias: Tensor | None,
    temperature: float,
) -> None:
    """Everything that needs no look at the values."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}, must be finite and above 0")
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(f"hidden must be floats [T, d], is {_described(hidden)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"weight must be [V, d] with the d = {hidden.shape[1]} of hidden, is "
            f"{_described(weight)}"
        )
    if weight.dtype != hidden.dtype or weight.device != hidden.device:
        raise ValueError(
            f"weight is {_described(weight)}, must have the dtype and device of hidden, "
            f"{_described(hidden)}"
        )
    tokens = len(hidden)
    for name, tensor, length in (
        ("targets", targets, tokens),
        ("kept_ids", kept_ids, None),
        ("kept_offsets", kept_offsets, tokens + 1),
    ):
        if tensor.ndim != 1 or tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
            raise ValueError(f"{name} must be integers in one dimension, is {_described(tensor)}")
        if length is not None and len(tensor) != length:
            raise ValueError(
                f"{name} has {len(tensor)} entries, must have {length} for the {tokens} rows "
                "of hidden"
            )
    if bias is not None and (
        bias.shape != weight.shape[:1]
        or not bias.is_floating_point()
        or bias.device != weight.device
    ):
        raise ValueError(
            f"bias must be floats [V = {len(weight)}] on {weight.device}, is {_described(bias)}"
        )


def check_values(targets: Tensor, kept_ids: Tensor, offsets: NDArray[np.int64], vocab: int) -> None:
    """Ids and targets in range, each target once in its sampling mask, no id twice in one.

    Runs where the tensors are, with one wait for the answer if that is an accelerator.
    """
    if offsets[0] != 0 or offsets[-1] != len(kept_ids):
        raise ValueError(
            f"kept_offsets must run from 0 to the {len(kept_ids)} entries of kept_ids, runs "
            f"from {offsets[0]} to {offsets[-1]}"
        )
    sizes = np.diff(offsets)
    if (sizes < 0).any():
        row = int(np.flatnonzero(sizes < 0)[0])
        raise ValueError(
            f"kept_offsets must not decrease, but row {row} runs from {offsets[row]} to "
            f"{offsets[row + 1]}"
        )
    if not len(targets) or (
        targets.device.type == kept_ids.device.type == "cpu"
        and _all_is_well(targets.numpy(), kept_ids.numpy(), offsets, sizes, vocab)
    ):
        return
    device = targets.device
    kept_ids = kept_ids.to(device).long()
    spans = torch.from_numpy(sizes).to(device)
    rows = torch.arange(len(targets), device=device).repeat_interleave(
        spans, output_size=len(kept_ids)
    )
    at_target = kept_ids == targets.index_select(0, rows)
    found = torch.zeros_like(spans).index_add_(0, rows, at_target.long())
    target_fault = (targets < 0) | (targets >= vocab)
    id_fault = (kept_ids < 0) | (kept_ids >= vocab)
    member_fault = (found == 0) & (spans > 0)
    faults = torch.stack([target_fault.any(), id_fault.any(), member_fault.any()]).tolist()
    if faults[0]:
        row = int(target_fault.nonzero()[0])
        raise ValueError(f"targets: row {row} is {int(targets[row])}, outside [0, {vocab})")
    if faults[1]:
        at = int(id_fault.nonzero()[0])
        raise ValueError(
            f"kept_ids: row {int(rows[at])} holds {int(kept_ids[at])}, outside [0, {vocab})"
        )
    if faults[2]:
        row = int(member_fault.nonzero()[0])
        raise ValueError(
            f"targets: row {row} is {int(targets[row])}, which is not in its sampling mask of "
            f"{int(spans[row])} ids: sampling masks and tokens are out of step"
        )
    repeated = _repeated_row(rows, kept_ids, len(targets), vocab)
    if repeated is not None:
        raise ValueError(f"kept_ids: row {repeated} holds an id twice")


def _all_is_well(
    targets: NDArray[np.integer],
    ids: NDArray[np.integer],
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    vocab: int,
) -> bool:
    """The usual answer in a few passes over narrow integers, since it keeps the host from starting
    kernels. False: look closer, and say where.

    Where no mask holds an id twice, each has its target if there are as many hits as masks."""
    if ids.dtype not in (np.int32, np.int64) or targets.min() < 0 or targets.max() >= vocab:
        return False
    if not len(ids):
        return True
    if ids.min() < 0 or ids.max() >= vocab:
        return False
    hits = np.repeat(targets.astype(ids.dtype), sizes) == ids
    if np.count_nonzero(hits) != np.count_nonzero(sizes):
        return False
    rises = ids[1:] > ids[:-1]
    starts = offsets[:-1][sizes > 0][1:]
    rises[starts - 1] = True
    if rises.all():
        return True
    keys = np.repeat(np.arange(len(sizes), dtype=np.int64) * vocab, sizes) + ids
    keys.sort()
    return bool((keys[1:] != keys[:-1]).all())


def _repeated_row(rows: Tensor, ids: Tensor, tokens: int, vocab: int) -> int | None:
    """A row that holds an id twice."""
    keys = rows * vocab + ids
    if bool((keys[1:] > keys[:-1]).all()):  # ids ascend in every set, as recorders often write them
        return None
    if tokens * vocab <= _BITMAP_COST * len(keys):
        seen = torch.zeros(tokens * vocab, dtype=torch.bool, device=keys.device)
        if int(seen.index_fill_(0, keys, True).sum()) == len(keys):
            return None
    keys = keys.sort().values
    twice = keys[1:] == keys[:-1]
    return int(keys[1:][twice][0]) // vocab if bool(twice.any()) else None


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
