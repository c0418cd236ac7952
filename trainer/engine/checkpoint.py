"""What the ranks write to resume from later, exactly: weights, optimizer, random state, progress.

    optimizer/…            master weights and Adam's moments (`keel.trainer.engine.state.optimizer`)
    random_rank_0.pt …     random state of each rank
    trainer.json           progress, and what the run was laid out on

The number of ranks, the ZeRO stage and both kinds of parallelism may be others when it is read. The
weights that the model computes with are not written: they are the master weights, rounded.

DeepSpeed's own files (`deepspeed/`) take the same layout again. They are written by a DeepSpeed
whose optimizers are not as they are known, and read where an earlier Keel has written them.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from keel.trainer.engine.deepspeed_internals import DeepSpeedEngine, found_changed, whole_shape
from keel.trainer.engine.expert_parallel import ExpertLayers
from keel.trainer.engine.state.optimizer import OptimizerState, Share
from keel.trainer.engine.state.optimizer_internals import files_of, trainable
from keel.trainer.run.checkpoint import NATIVE, PROGRESS, Unwritten
from keel.trainer.run.manifest import Entry, seal

OPTIMIZER = "optimizer"
T = TypeVar("T")


class Checkpoints:
    """Of one rank. Everything is collective."""

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
        """Right after the start. `stage`: of ZeRO."""
        shapes = {name: whole_shape(parameter) for name, parameter in trainable(model)}
        runs = {name: experts.runs(name, shape) for name, shape in shapes.items()}
        self._engine, self._device = engine, device
        self._optimizer = OptimizerState(engine, adam, model, runs, stage=stage)
        what = max(everyones(self._optimizer.flaw()))  # all take the same way
        lost = "A checkpoint can be resumed on the same number of ranks and ZeRO stage only"
        self.note = what and found_changed(what, lost)
        """What is lost with this DeepSpeed, if anything."""

    def save(self, folder: Path, progress: Mapping[str, Any]) -> dict[str, Entry]:
        """`progress`: numbers of the run and what it was laid out on, for JSON. Returns what this
        rank wrote, on the disk. Raises `Unwritten` on all ranks if one of them could not write."""
        rank, sealed, failure = dist.get_rank(), dict[str, Entry](), ""
        shares = everyones(Share([], {}, {}) if self.note else self._optimizer.share())
        if blind := [other for other, sees in enumerate(everyones(folder.is_dir())) if not sees]:
            raise RuntimeError(
                f"trainer rank {blind[0]} does not see {folder}: run.dir must be on a file system "
                "that all machines of the run share"
            )
        try:
            written = (
                self._write_native(folder)
                if self.note
                else self._optimizer.write(folder / OPTIMIZER, shares)
            )
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
            raise Unwritten("; ".join(failures))
        return sealed

    def load(self, folder: Path, layout: Mapping[str, Any]) -> dict[str, Any]:
        """The `progress` of `save`. Raises `ValueError` if the files are those of another model, or
        DeepSpeed's own and of another `layout`."""
        progress = json.loads((folder / PROGRESS).read_text())
        if (folder / NATIVE).is_dir():
            self._read_native(folder, progress, layout)
        else:
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

    def _write_native(self, folder: Path) -> list[Path]:
        with files_of(self._engine) as written:
            self._engine.save_checkpoint(str(folder), tag=NATIVE, save_latest=False)
        return [Path(path) for path in written]

    def _read_native(
        self, folder: Path, progress: Mapping[str, Any], layout: Mapping[str, Any]
    ) -> None:
        for knob in ("trainer.ranks", "trainer.zero_stage", "trainer.expert_parallel", "device"):
            if progress.get(knob) != layout[knob]:
                raise ValueError(
                    f"checkpoint {folder}: written by DeepSpeed with {knob} = "
                    f"{progress.get(knob)!r}, this run has {layout[knob]!r}. Resume with the "
                    "former, or start anew from an exported model"
                )
        with redirect_stdout(io.StringIO()):  # it prints what it is about to do
            found, _ = self._engine.load_checkpoint(str(folder), tag=NATIVE)
        if found is None:
            raise ValueError(f"checkpoint {folder}: its folder {NATIVE!r} could not be read")


def everyones(mine: T) -> list[T]:
    """What each rank has, by rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
