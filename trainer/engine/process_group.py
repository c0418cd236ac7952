"""How the ranks of the trainer find each other."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from keel.model.torch_internals import limit_all_groups


def join_ranks(
    rank: int, world_size: int, store: Store | None, *, timeout_s: float
) -> torch.device:
    """Start this process's group (NCCL between GPUs, gloo else) and return the rank's device.

    Its collectives fail after `timeout_s` instead of waiting for a dead rank for ever; see
    `limit_waits` for those of other groups.
    """
    local = int(os.environ.setdefault("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if store is None and world_size > 1:
            raise ValueError("a trainer of several ranks needs the store they meet at")
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store or dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    return device


def limit_waits(timeout_s: float) -> None:
    """Every group that this process is in by now fails after `timeout_s`, too.

    Without being told, new groups have PyTorch's 10 minutes (NCCL), whatever the one they are made
    from has, and DeepSpeed tells none of its own: a rank that waits for weights to be sent would
    end the run.
    """
    limit_all_groups(timeout_s)
