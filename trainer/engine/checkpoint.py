"""What the ranks write to resume from later, exactly: weights, optimizer, random state, progress.

    optimizer/…            master weights and Adam's moments (`keel.trainer.engine.state.optimizer`)
    random_rank_0.pt …     random state of each rank
    trainer.json           progress, and what the run was laid out on

The number of ranks, the ZeRO stage and both kinds of parallelism may be others when it is read. The
weights that the model computes with are not written: they are the master weights, rounded. Nothing
is pickled: reading a checkpoint runs no code.
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

from keel.trainer.engine.deepspeed_internals import (
    KNOWN,
    DeepSpeedEngine,
    found_changed,
    whole_shape,
)
from keel.trainer.engine.expert_parallel import ExpertLayers
from keel.trainer.engine.state.optimizer import OptimizerState
from keel.trainer.engine.state.optimizer_internals import trainable
from keel.trainer.run.checkpoint import PROGRESS, SaveError
from keel.trainer.run.manifest import Entry, seal

OPTIMIZER = "optimizer"
T = TypeVar("T")


class Checkpoints:
    """Writes and reads one rank's part of a checkpoint. Every method is collective."""

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
        """Call it before the first step. `stage`: of ZeRO. Raises `RuntimeError` if DeepSpeed keeps
        its optimizer's state in another way than this release of Keel knows."""
        shapes = {name: whole_shape(parameter) for name, parameter in trainable(model)}
        runs = {name: experts.runs(name, shape) for name, shape in shapes.items()}
        self._engine, self._device = engine, device
        self._optimizer = OptimizerState(engine, adam, model, runs, stage=stage)
        if flaw := max(everyones(self._optimizer.flaw())):
            raise RuntimeError(
                found_changed(flaw, f"No checkpoint could be written: install deepspeed=={KNOWN}")
            )

    def save(self, folder: Path, progress: Mapping[str, Any]) -> dict[str, Entry]:
        """`progress`: numbers of the run and what it was laid out on, for JSON. Returns what this
        rank wrote, on the disk. Raises `SaveError` on all ranks if one of them could not write."""
        rank, sealed, failure = dist.get_rank(), dict[str, Entry](), ""
        shares = everyones(self._optimizer.share())
        if blind := [other for other, sees in enumerate(everyones(folder.is_dir())) if not sees]:
            raise RuntimeError(
                f"trainer rank {blind[0]} does not see {folder}: run.dir must be on a file system "
                "that all machines of the run share"
            )
        try:
            written = self._optimizer.write(folder / OPTIMIZER, shares)
            state = {"cpu": torch.get_rng_state()}
            if self._device.type == "cuda":
                state["cuda"] = torch.cuda.get_rng_state(self._device)
            written.append(folder / f"random_rank_{rank}.pt")
            content = io.BytesIO()
            torch.save(state, content)  # to a file it would not say why it cannot
            written[-1].write_bytes(content.getbuffer())
            if rank == 0:
                written.append(folder / PROGRESS)
                written[-1].write_text(json.dumps(progress) + "\n")
            sealed = seal(folder, [os.path.relpath(path, folder) for path in written])
        except OSError as error:
            failure = f"trainer rank {rank}: {error}"
        if failures := [text for text in everyones(failure) if text]:
            raise SaveError("; ".join(failures))
        return sealed

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore what `save` wrote and return its `progress`. Raises `ValueError` if the files are
        those of another model, or cannot be read."""
        progress = json.loads((folder / PROGRESS).read_text())
        shares = everyones(self._optimizer.share())
        try:
            self._optimizer.read(folder / OPTIMIZER, shares)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"checkpoint {folder}: {error}") from error
        path = folder / f"random_rank_{dist.get_rank()}.pt"
        if path.exists():  # else this run has more ranks
            state = torch.load(path, weights_only=True)
            torch.set_rng_state(state["cpu"])
            if self._device.type == "cuda" and "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self._device)
        return progress


def everyones(mine: T) -> list[T]:
    """What each rank has, by rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
