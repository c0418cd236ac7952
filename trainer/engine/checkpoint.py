"""Saves and loads the trainer's part of a checkpoint.

    optimizer/rank_0.safetensors …   tensors of each rank: `master.3`, `exp_avg.3`, `exp_avg_sq.3`
    optimizer/index.json             the parameter that each piece belongs to, and Adam's step
    random_rank_0.pt …               random state of each rank
    trainer.json                     progress

The model's weights are not saved, as they are the rounded master weights. Tensors are not gathered:
each rank writes its own tensors, except those that a rank with a lower number writes, too. A
checkpoint can be loaded on any number of ranks and any ZeRO stage, because each `_StatePiece`
refers to a flattened parameter of the original model. Loading a checkpoint does not execute code
from it.
"""

from __future__ import annotations

import io
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from keel.trainer.engine.deepspeed_internals import (
    DeepSpeedEngine,
    Master,
    loss_scale,
    master_weights,
    replacing_masters,
    set_loss_scale,
)
from keel.trainer.run.checkpoint import PROGRESS, SaveError
from keel.trainer.run.manifest import Entry, seal

_OPTIMIZER, INDEX = "optimizer", "index.json"
T = TypeVar("T")
_MASTER, _MOMENTS = "master", ("exp_avg", "exp_avg_sq")
BLOCK = 2**24
"""The number of elements copied through host memory at a time."""


class _StatePiece(NamedTuple):
    parameter: str
    start: int
    """Index of the piece's first element in the flattened parameter."""
    count: int
    tensor: int
    """Index of the tensor on this rank that contains the piece."""
    offset: int
    """Index of the piece's first element in that tensor."""


class ElementRun(NamedTuple):
    """Consecutive elements of one of this rank's flattened parameters, and their position in the
    parameter of the original model. That parameter has another name (`whole`) if this rank has only
    some experts of a fused tensor."""

    start: int
    count: int
    whole: str
    into: int


Runs = Mapping[str, Sequence[ElementRun]]
"""Maps each parameter on a rank to its runs of elements, in order."""


class _Source(NamedTuple):
    rank: int
    tensor: int
    offset: int
    count: int
    into: int
    """Index in the requested piece at which these elements belong."""


class _Share(NamedTuple):
    pieces: list[list[_StatePiece]]
    """The pieces in each of the rank's tensors."""
    steps: dict[int, float]
    """Adam's step count for each tensor that has one."""
    runs: Runs


class Checkpoints:
    """Saves and loads one rank's part of a checkpoint. All ranks must call each method at the same
    time."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        adam: torch.optim.Optimizer,
        model: nn.Module,
        runs: Runs,
        *,
        stage: int,
        device: torch.device,
    ) -> None:
        self._engine, self._adam, self._model = engine, adam, model
        self._runs, self._stage, self._device = runs, stage, device

    def save(self, folder: Path, progress: Mapping[str, Any]) -> dict[str, Entry]:
        """Write this rank's state and `progress` (JSON values), and return the written files. If
        writing fails on any rank, all ranks raise `SaveError`."""
        rank, sealed, failure = dist.get_rank(), dict[str, Entry](), ""
        shares = _all_gather(self._share())
        try:
            files = self._write(folder / _OPTIMIZER, shares)
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
        """Restore this rank's state and return `progress`. Raises ValueError if the checkpoint
        cannot be read or is from another model."""
        progress = json.loads((folder / PROGRESS).read_text())
        shares = _all_gather(self._share())
        try:
            self._read(folder / _OPTIMIZER, shares)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"checkpoint {folder}: {error}") from error
        path = folder / f"random_rank_{dist.get_rank()}.pt"
        if path.exists():  # not if this run has more ranks
            state = torch.load(path, weights_only=True)
            torch.set_rng_state(state["cpu"])
            if self._device.type == "cuda" and "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self._device)
        return progress

    def _share(self) -> _Share:
        masters = self._masters()
        states = [self._adam.state.get(master.tensor, {}) for master in masters]
        steps = {n: float(state["step"]) for n, state in enumerate(states) if "step" in state}
        return _Share(_pieces(masters, self._runs), steps, self._runs)

    def _write(self, folder: Path, shares: Sequence[_Share]) -> list[Path]:
        rank, chosen = dist.get_rank(), _choose_writers([share.pieces for share in shares])
        content: dict[str, Tensor] = {}
        for number, master in enumerate(self._masters()):
            if number in chosen[rank]:
                state = self._adam.state.get(master.tensor, {})
                content[f"{_MASTER}.{number}"] = master.flat
                content |= {f"{m}.{number}": state[m].view(-1) for m in _MOMENTS if m in state}
        folder.mkdir(exist_ok=True)
        files = [folder / f"rank_{rank}.safetensors"]
        _write_tensors(files[0], content)
        if rank == 0:
            files.append(folder / INDEX)
            files[1].write_text(json.dumps(_index(shares, chosen, loss_scale(self._engine))))
        return files

    def _read(self, folder: Path, shares: Sequence[_Share]) -> None:
        index = json.loads((folder / INDEX).read_text())
        written = [[_StatePiece(*piece) for piece in rank["pieces"]] for rank in index["ranks"]]
        _check_same_model(chain.from_iterable(written), _sizes_of(_runs(shares)))
        lookup = _PieceIndex(written)
        steps = [{int(n): step for n, step in rank["steps"].items()} for rank in index["ranks"]]
        files: dict[int, _TensorFile] = {}
        masters = self._masters()
        with torch.no_grad(), replacing_masters(self._engine, masters, stage=self._stage):
            for master, pieces in zip(masters, _pieces(masters, self._runs), strict=True):
                sources = [(piece, source) for piece in pieces for source in lookup.find(piece)]
                tensors = {_MASTER: master.flat}
                taken = [s[t] for _, (r, t, *_) in sources for s in (steps[r],) if t in s]
                if taken:
                    tensors |= self._new_moments(master.tensor, max(taken))
                for piece, (rank, tensor, offset, count, into) in sources:
                    if rank not in files:
                        files[rank] = _TensorFile(folder / f"rank_{rank}.safetensors")
                    for kind, whole in tensors.items():
                        if (name := f"{kind}.{tensor}") in files[rank].names:
                            target = whole[piece.offset + into :][:count]
                            target.copy_(files[rank].read(name, offset, count))
        set_loss_scale(self._engine, index["loss_scale"])

    def _masters(self) -> list[Master]:
        return master_weights(self._model, self._engine, stage=self._stage)

    def _new_moments(self, master: Tensor, step: float) -> dict[str, Tensor]:
        fused = any(group.get("fused") for group in self._adam.param_groups)
        device = master.device if fused else "cpu"
        moments = {moment: torch.zeros_like(master) for moment in _MOMENTS}
        self._adam.state[master] = {"step": torch.tensor(step, device=device), **moments}
        return {moment: tensor.view(-1) for moment, tensor in moments.items()}


def _pieces(masters: Sequence[Master], runs: Runs) -> list[list[_StatePiece]]:
    return [
        [
            _StatePiece(
                run.whole, run.into + begin - run.start, end - begin, number, at + begin - start
            )
            for name, start, count, at, _ in master.parts
            for run in runs[name]
            for begin in (max(start, run.start),)
            for end in (min(start + count, run.start + run.count),)
            if begin < end
        ]
        for number, master in enumerate(masters)
    ]


def _index(
    shares: Sequence[_Share], chosen: Sequence[set[int]], scale: Mapping[str, float]
) -> dict[str, Any]:
    ranks = [
        {
            "steps": {number: step for number, step in share.steps.items() if number in numbers},
            "pieces": [piece for number in sorted(numbers) for piece in share.pieces[number]],
        }
        for share, numbers in zip(shares, chosen, strict=True)
    ]
    pieces = (piece for rank in ranks for piece in rank["pieces"])
    if wrong := _uncovered(pieces, _sizes_of(_runs(shares))):
        raise RuntimeError(f"the trainer's ranks do not hold {wrong[0]} exactly once")
    return {"ranks": ranks, "loss_scale": dict(scale)}


def _runs(shares: Sequence[_Share]) -> set[ElementRun]:
    return {run for share in shares for runs in share.runs.values() for run in runs}


def _choose_writers(ranks: Sequence[Sequence[Sequence[_StatePiece]]]) -> list[set[int]]:
    """Choose which tensors each rank writes. If several ranks have the same tensor, only the first
    one writes it. Padding is not written. `ranks` holds the pieces by rank and tensor."""
    seen: set[tuple[_StatePiece, ...]] = {()}
    chosen: list[set[int]] = []
    for tensors in ranks:
        contents = [tuple(piece._replace(tensor=0) for piece in pieces) for pieces in tensors]
        chosen.append({number for number, pieces in enumerate(contents) if pieces not in seen})
        seen.update(contents)
    return chosen


def _sizes_of(runs: Iterable[ElementRun]) -> dict[str, int]:
    parts = {(run.whole, run.into): run.count for run in runs}
    sizes: dict[str, int] = {}
    for (whole, _), count in parts.items():
        sizes[whole] = sizes.get(whole, 0) + count
    return sizes


def _uncovered(pieces: Iterable[_StatePiece], sizes: Mapping[str, int]) -> list[str]:
    reached = dict.fromkeys(sizes, 0)
    wrong: set[str] = set()
    for name, start, count, *_ in sorted(pieces):
        if start != reached.get(name):
            wrong.add(name)
        reached[name] = start + count
    return sorted(wrong | {name for name, end in reached.items() if end != sizes.get(name)})


def _check_same_model(pieces: Iterable[_StatePiece], sizes: Mapping[str, int]) -> None:
    written: dict[str, int] = {}
    for name, _, count, *_ in pieces:
        written[name] = written.get(name, 0) + count
    for name in sorted(written.keys() | sizes.keys()):
        if (before := written.get(name, 0)) != (now := sizes.get(name, 0)):
            raise ValueError(
                f"{name} has {before:,} elements here, but {now:,} in this model: the checkpoint "
                "is of another model, or other parameters were trained"
            )


class _PieceIndex:
    def __init__(self, ranks: Sequence[Iterable[_StatePiece]]) -> None:
        """`ranks` holds the pieces that each rank has written."""
        by_name: dict[str, list[tuple[int, int, _StatePiece]]] = {}
        for rank, pieces in enumerate(ranks):
            for piece in pieces:
                by_name.setdefault(piece.parameter, []).append((piece.start, rank, piece))
        self._by_name = {name: sorted(pieces) for name, pieces in by_name.items()}

    def find(self, request: _StatePiece) -> Iterator[_Source]:
        """Yield where to read each part of a piece. Raises ValueError if elements are missing."""
        pieces = self._by_name.get(request.parameter, [])
        at, end = request.start, request.start + request.count
        place = bisect_right(pieces, at, key=lambda entry: entry[0]) - 1
        while at < end:
            start, rank, piece = (
                pieces[place] if 0 <= place < len(pieces) else (at, 0, _StatePiece("", 0, 0, 0, 0))
            )
            count = min(start + piece.count, end) - at
            if start > at or count <= 0:
                raise ValueError(f"elements {at:,} to {end:,} of {request.parameter} are missing")
            yield _Source(rank, piece.tensor, piece.offset + at - start, count, at - request.start)
            at, place = at + count, place + 1


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write flat float32 tensors to a safetensors file, copying one block at a time through host
    memory. The `safetensors` package would need all tensors in host memory at once."""
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        size = 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": [len(tensor)], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    longest = max((len(tensor) for tensor in tensors.values()), default=0)
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    staging = torch.empty(min(BLOCK, longest), pin_memory=on_gpu)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                for block in tensor.detach().split(BLOCK):
                    # Not `numpy` of the tensor itself: its storage could not be resized again.
                    staged = staging[: len(block)].copy_(block)
                    file.write(staged.numpy().data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class _TensorFile:
    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        self.names = frozenset(self._file.keys())

    def read(self, name: str, start: int, count: int) -> Tensor:
        """Return [count] elements of a tensor, beginning at index `start`."""
        return self._file.get_slice(name)[start : start + count]


def _all_gather(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
