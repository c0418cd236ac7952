"""Master weights and Adam's moments, written by all ranks and read by any others.

    rank_0.safetensors …   what each rank has: of tensor 3 `master.3`, `exp_avg.3`, `exp_avg_sq.3`
    index.json             which part of which parameter they hold, and Adam's step

Nothing is gathered to write it: a rank writes what it holds that no rank before it does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from keel.trainer.engine.deepspeed_internals import DeepSpeedEngine
from keel.trainer.engine.state.files import TensorFile, write_tensors
from keel.trainer.engine.state.optimizer_internals import (
    MOVED_ON,
    Held,
    flaw,
    held,
    loss_scale,
    replacing_masters,
    set_loss_scale,
)
from keel.trainer.engine.state.pieces import (
    Index,
    Piece,
    Run,
    check_same,
    flaws,
    sizes_of,
    writers,
)

INDEX = "index.json"
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")

Runs = Mapping[str, Sequence[Run]]
"""Parameter, as this rank has it → where its elements are in whole ones."""


class Share(NamedTuple):
    """What one rank has."""

    pieces: list[list[Piece]]
    """Of each of its tensors."""
    steps: dict[int, float]
    """Adam's step of those that it has stepped on."""
    runs: Runs


class OptimizerState:
    """Of one rank. `write` and `read` are collective."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        adam: torch.optim.Optimizer,
        model: nn.Module,
        runs: Runs,
        *,
        stage: int,
    ) -> None:
        """`stage`: of ZeRO."""
        self._engine, self._adam, self._model = engine, adam, model
        self._runs, self._stage = runs, stage

    def flaw(self) -> str:
        """Right after the start: why it cannot be written, if so."""
        try:
            return flaw(self._held())
        except MOVED_ON as error:
            return f"the optimizer's state is not found ({type(error).__name__}: {error})"

    def write(self, folder: Path, shares: Sequence[Share]) -> list[Path]:
        """This rank's files. `shares`: of all ranks. Raises `OSError`."""
        rank, mine = dist.get_rank(), writers([share.pieces for share in shares])
        content: dict[str, Tensor] = {}
        for number, part in enumerate(self._held()):
            if number in mine[rank]:
                state = self._adam.state.get(part.master, {})
                content[_key(MASTER, number)] = part.flat
                content |= {_key(m, number): state[m].view(-1) for m in MOMENTS if m in state}
        folder.mkdir(exist_ok=True)
        files = [folder / _file(rank)]
        write_tensors(files[0], content)
        if rank == 0:
            files.append(folder / INDEX)
            files[1].write_text(json.dumps(_index(shares, mine, loss_scale(self._engine))))
        return files

    def share(self) -> Share:
        """What this rank has."""
        found = self._held()
        states = [self._adam.state.get(part.master, {}) for part in found]
        steps = {n: float(state["step"]) for n, state in enumerate(states) if "step" in state}
        return Share(_pieces(found, self._runs), steps, self._runs)

    def read(self, folder: Path, shares: Sequence[Share]) -> None:
        """`shares`: of all ranks. Raises `ValueError` if it is that of another model, or cannot be
        read."""
        index = json.loads((folder / INDEX).read_text())
        written = [[Piece(*piece) for piece in rank["pieces"]] for rank in index["ranks"]]
        check_same(chain.from_iterable(written), sizes_of(_runs(shares)))
        where = Index(written)
        steps = [{int(n): step for n, step in rank["steps"].items()} for rank in index["ranks"]]
        files: dict[int, TensorFile] = {}
        found = self._held()
        with torch.no_grad(), replacing_masters(self._engine, found, stage=self._stage):
            for part, pieces in zip(found, _pieces(found, self._runs), strict=True):
                sources = [(piece, source) for piece in pieces for source in where.find(piece)]
                tensors = {MASTER: part.flat}
                taken = [s[t] for _, (r, t, *_) in sources for s in (steps[r],) if t in s]
                if taken:
                    tensors |= self._moments(part.master, max(taken))
                for piece, (rank, tensor, offset, count, into) in sources:
                    if rank not in files:
                        files[rank] = TensorFile(folder / _file(rank))
                    for kind, whole in tensors.items():
                        if (name := _key(kind, tensor)) in files[rank].names:
                            target = whole[piece.offset + into :][:count]
                            target.copy_(files[rank].read(name, offset, count))
        set_loss_scale(self._engine, index["loss_scale"])

    def _held(self) -> list[Held]:
        return held(self._model, self._engine, stage=self._stage)

    def _moments(self, master: Tensor, step: float) -> dict[str, Tensor]:
        """As Adam makes them at its first step; they are zero where nothing was written."""
        fused = any(group.get("fused") for group in self._adam.param_groups)
        device = master.device if fused else "cpu"
        moments = {moment: torch.zeros_like(master) for moment in MOMENTS}
        self._adam.state[master] = {"step": torch.tensor(step, device=device), **moments}
        return {moment: tensor.view(-1) for moment, tensor in moments.items()}


def _pieces(found: Sequence[Held], runs: Runs) -> list[list[Piece]]:
    return [
        [
            Piece(run.whole, run.into + begin - run.start, end - begin, number, at + begin - start)
            for name, start, count, at, _ in part.parts
            for run in runs[name]
            for begin in (max(start, run.start),)
            for end in (min(start + count, run.start + run.count),)
            if begin < end
        ]
        for number, part in enumerate(found)
    ]


def _index(
    shares: Sequence[Share], chosen: Sequence[set[int]], scale: Mapping[str, float]
) -> dict[str, Any]:
    """Raises `RuntimeError` if something of the model is not written, or twice."""
    ranks = [
        {
            "steps": {number: step for number, step in share.steps.items() if number in mine},
            "pieces": [piece for number in sorted(mine) for piece in share.pieces[number]],
        }
        for share, mine in zip(shares, chosen, strict=True)
    ]
    pieces = (piece for rank in ranks for piece in rank["pieces"])
    if wrong := flaws(pieces, sizes_of(_runs(shares))):
        raise RuntimeError(f"the trainer's ranks do not hold all of {wrong[0]} once")
    return {"ranks": ranks, "loss_scale": dict(scale)}


def _runs(shares: Sequence[Share]) -> set[Run]:
    return {run for share in shares for own in share.runs.values() for run in own}


def _key(kind: str, tensor: int) -> str:
    return f"{kind}.{tensor}"


def _file(rank: int) -> str:
    return f"rank_{rank}.safetensors"
