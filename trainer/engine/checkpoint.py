"""Saves and loads the trainer's part of a checkpoint: optimizer state, random state and progress.

    optimizer/…          master weights and Adam moments (`keel.trainer.engine.optimizer_state`)
    random_rank_0.pt …   random state of each rank
    trainer.json         progress and layout

A checkpoint can be loaded on another layout. The model's weights are its rounded master weights.
Nothing is pickled, so loading a checkpoint runs no code.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from keel.trainer.engine.deepspeed_internals import DeepSpeedEngine, trainable, whole_shape
from keel.trainer.engine.expert_parallel import ExpertLayers
from keel.trainer.engine.optimizer_state import OptimizerState
from keel.trainer.run.checkpoint import PROGRESS, SaveError
from keel.trainer.run.manifest import Entry, seal

OPTIMIZER = "optimizer"
T = TypeVar("T")


class Checkpoints:
    """Writes and reads one rank's part of a checkpoint. All ranks must call each method
    together."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        adam: torch.optim.Optimizer,
        model: nn.Module,
        experts: ExpertLayers,
        *,
        stage: int,
        device: torch.device,
    ) -> None:
        runs = {name: experts.runs(name, whole_shape(p)) for name, p in trainable(model)}
        self._device = device
        self._optimizer = OptimizerState(engine, adam, model, runs, stage=stage)

    def save(self, folder: Path, progress: Mapping[str, Any]) -> dict[str, Entry]:
        """Write `progress` (JSON values) and this rank's state, and return the files. If any rank
        could not write, all raise `SaveError`."""
        rank, sealed, failure = dist.get_rank(), dict[str, Entry](), ""
        shares = _all_gather(self._optimizer.share())
        try:
            files = self._optimizer.write(folder / OPTIMIZER, shares)
            state = {"cpu": torch.get_rng_state()}
            if self._device.type == "cuda":
                state["cuda"] = torch.cuda.get_rng_state(self._device)
            content = io.BytesIO()
            torch.save(state, content)  # to memory, since its file errors give no reason
            files.append(folder / f"random_rank_{rank}.pt")
            files[-1].write_bytes(content.getbuffer())
            if rank == 0:
                files.append(folder / PROGRESS)
                files[-1].write_text(json.dumps(progress) + "\n")
            sealed = seal(folder, [os.path.relpath(path, folder) for path in files])
        except OSError as error:
            failure = f"trainer rank {rank}: {error}"
        if failures := [text for text in _all_gather(failure) if text]:
            raise SaveError("; ".join(failures))
        return sealed

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore the state and return `progress`. Raises ValueError if the checkpoint is from
        another model."""
        progress = json.loads((folder / PROGRESS).read_text())
        shares = _all_gather(self._optimizer.share())
        try:
            self._optimizer.read(folder / OPTIMIZER, shares)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"checkpoint {folder}: {error}") from error
        path = folder / f"random_rank_{dist.get_rank()}.pt"
        if path.exists():  # not if this run has more ranks
            state = torch.load(path, weights_only=True)
            torch.set_rng_state(state["cpu"])
            if self._device.type == "cuda" and "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self._device)
        return progress


def _all_gather(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
