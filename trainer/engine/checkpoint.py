"""What a rank writes to resume from later, exactly: weights, optimizer, random state, progress."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from keel.trainer.engine.deepspeed_internals import files_of
from keel.trainer.run.manifest import Entry, seal

TAG = "deepspeed"
"""Folder of DeepSpeed's own files inside a checkpoint."""
PROGRESS = "trainer.json"


def save_state(
    engine: DeepSpeedEngine, folder: Path, device: torch.device, progress: Mapping[str, Any]
) -> dict[str, Entry]:
    """Collective. `progress`: numbers of the run and what it was laid out on, for JSON. Returns
    what this rank wrote, on the disk."""
    rank = dist.get_rank()
    with files_of(engine) as written:
        engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    written.append(str(folder / f"random_rank_{rank}.pt"))
    torch.save(state, written[-1])
    if rank == 0:
        written.append(str(folder / PROGRESS))
        (folder / PROGRESS).write_text(json.dumps(progress) + "\n")
    sealed = seal(folder, [os.path.relpath(path, folder) for path in written])
    dist.barrier()
    return sealed


def saved_progress(folder: Path, layout: Mapping[str, Any]) -> dict[str, Any]:
    """The `progress` of `save_state`. Raises `ValueError` where `layout` says anything else."""
    progress = json.loads((folder / PROGRESS).read_text())
    for knob, value in layout.items():
        if progress.get(knob) != value:
            raise ValueError(
                f"checkpoint {folder}: written with {knob} = {progress.get(knob)!r}, this run has "
                f"{value!r}. Resume with the former, or start anew from an exported model"
            )
    return progress


def load_state(engine: DeepSpeedEngine, folder: Path, device: torch.device) -> None:
    """Collective. Raises `ValueError` if DeepSpeed's files cannot be read."""
    with redirect_stdout(io.StringIO()):  # it prints what it is about to do
        found, _ = engine.load_checkpoint(str(folder), tag=TAG)
    if found is None:
        raise ValueError(f"checkpoint {folder}: its folder {TAG!r} could not be read")
    state = torch.load(folder / f"random_rank_{dist.get_rank()}.pt", weights_only=True)
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
