"""Save and load the trainer's part of a checkpoint.

    optimizer/rank_0.safetensors …   tensors of each rank: `master.3`, `exp_avg.3`, `exp_avg_sq.3`
    optimizer/index.json             the parameter each piece belongs to, and Adam's step count
    random_rank_0.pt …               random state of each rank
    trainer.json                     progress

The model's weights are not saved, because they are the rounded master weights. Each rank writes its
own tensors without gathering them. A tensor held by several ranks is written by the lowest of them.
Each `_StatePiece` refers to a flattened parameter of the original model, so a checkpoint can be
loaded on any number of ranks and with any ZeRO stage. Loading a checkpoint never executes code from
it.
"""

import io
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from keel.trainer.engine import deepspeed_internals as internals
from keel.trainer.engine.deepspeed_internals import DeepSpeedEngine, Master
from keel.trainer.run.checkpoint import PROGRESS, SaveError
from keel.trainer.run.manifest import Entry, seal

_OPTIMIZER, INDEX = "optimizer", "index.json"
T = TypeVar("T")
_MASTER, _MOMENTS = "master", ("exp_avg", "exp_avg_sq")
BLOCK = 2**24  # the number of elements copied through host memory at a time


class _StatePiece(NamedTuple):
    parameter: str
    start: int  # index of the piece's first element in the flattened parameter
    count: int
    tensor: int  # index of the tensor on this rank that contains the piece
    offset: int  # index of the piece's first element in that tensor


class ElementRun(NamedTuple):
    """A run of consecutive elements in one of this rank's flattened parameters, and its position in
    the original parameter. `whole` is the original parameter's name. It differs from the name on
    this rank if the rank holds only some of the experts in a fused tensor."""

    start: int
    count: int
    whole: str
    into: int


Runs = Mapping[str, Sequence[ElementRun]]
"""Maps each parameter on a rank to its runs of elements, in order."""


class _Share(NamedTuple):
    pieces: list[list[_StatePiece]]  # the pieces in each of the rank's tensors
    steps: dict[int, float]  # Adam's step count for each tensor that has one
    ends: dict[str, int]
    """End index of the rank's elements in each original parameter."""


class Checkpoints:
    """Saves and loads one rank's part of a checkpoint. All methods are collective: every rank must
    call them."""

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
        """Write this rank's state and `progress`. If any rank fails to write, all ranks raise
        `SaveError`."""
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
        doesn't match the model."""
        progress = json.loads((folder / PROGRESS).read_text())
        shares = _all_gather(self._share())
        try:
            self._read(folder / _OPTIMIZER, shares)
        except (ValueError, KeyError, OSError, SafetensorError) as error:
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
        ends: dict[str, int] = {}
        for run in chain.from_iterable(self._runs.values()):
            ends[run.whole] = max(ends.get(run.whole, 0), run.into + run.count)
        return _Share(self._pieces(masters), steps, ends)

    def _pieces(self, masters: Sequence[Master]) -> list[list[_StatePiece]]:
        return [
            [
                _StatePiece(
                    run.whole, run.into + begin - run.start, end - begin, number, at + begin - start
                )
                for name, start, count, at, _ in master.parts
                for run in self._runs[name]
                for begin in (max(start, run.start),)
                for end in (min(start + count, run.start + run.count),)
                if begin < end
            ]
            for number, master in enumerate(masters)
        ]

    def _write(self, folder: Path, shares: Sequence[_Share]) -> list[Path]:
        rank, chosen = dist.get_rank(), _choose_writers(shares)
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
            ranks = [
                {
                    "steps": {n: step for n, step in share.steps.items() if n in numbers},
                    "pieces": [piece for n in sorted(numbers) for piece in share.pieces[n]],
                }
                for share, numbers in zip(shares, chosen, strict=True)
            ]
            _check_complete((piece for rank in ranks for piece in rank["pieces"]), _sizes(shares))
            files.append(folder / INDEX)
            files[1].write_text(
                json.dumps({"ranks": ranks, "loss_scale": internals.loss_scale(self._engine)})
            )
        return files

    def _read(self, folder: Path, shares: Sequence[_Share]) -> None:
        index = json.loads((folder / INDEX).read_text())
        written: dict[str, list[tuple[int, int, _StatePiece]]] = {}
        """Maps each parameter to its saved pieces as (start, rank, piece), sorted by start."""
        for rank, content in enumerate(index["ranks"]):
            for piece in (_StatePiece(*values) for values in content["pieces"]):
                written.setdefault(piece.parameter, []).append((piece.start, rank, piece))
        for pieces in written.values():
            pieces.sort()
        sizes = _sizes(shares)
        for name in sorted(written.keys() | sizes.keys()):
            before, now = sum(p.count for *_, p in written.get(name, ())), sizes.get(name, 0)
            if before != now:
                raise ValueError(
                    f"{name} has {before:,} elements here, but {now:,} in this model: the "
                    "checkpoint is of another model, or other parameters were trained"
                )
        steps = [{int(n): step for n, step in rank["steps"].items()} for rank in index["ranks"]]
        files: dict[int, Any] = {}
        masters = self._masters()
        with (
            torch.no_grad(),
            internals.edit_master_weights(self._engine, masters, stage=self._stage),
        ):
            for master, pieces in zip(masters, self._pieces(masters), strict=True):
                sources = [
                    source
                    for piece in pieces
                    for source in _sources(piece, written[piece.parameter])
                ]
                tensors = {_MASTER: master.flat}
                taken = [steps[s.rank][s.tensor] for s in sources if s.tensor in steps[s.rank]]
                self._adam.state.pop(master.tensor, None)  # stays empty before the first update
                if taken:
                    fused = any(group.get("fused") for group in self._adam.param_groups)
                    device = master.tensor.device if fused else "cpu"
                    step = torch.tensor(max(taken), device=device)
                    moments = {name: torch.zeros_like(master.tensor) for name in _MOMENTS}
                    self._adam.state[master.tensor] = {"step": step, **moments}
                    tensors |= {name: moment.view(-1) for name, moment in moments.items()}
                for rank, tensor, offset, into, count in sources:
                    if rank not in files:
                        files[rank] = safe_open(folder / f"rank_{rank}.safetensors", framework="pt")
                    for kind, whole in tensors.items():
                        if kind == _MASTER or tensor in steps[rank]:
                            values = files[rank].get_slice(f"{kind}.{tensor}")
                            whole[into:][:count].copy_(values[offset : offset + count])
        internals.set_loss_scale(self._engine, index["loss_scale"])

    def _masters(self) -> list[Master]:
        return internals.master_weights(self._model, self._engine, stage=self._stage)


def _choose_writers(shares: Sequence[_Share]) -> list[set[int]]:
    seen: set[tuple[_StatePiece, ...]] = {()}
    chosen: list[set[int]] = []
    for share in shares:
        contents = [tuple(piece._replace(tensor=0) for piece in pieces) for pieces in share.pieces]
        chosen.append({number for number, pieces in enumerate(contents) if pieces not in seen})
        seen.update(contents)
    return chosen


def _sizes(shares: Sequence[_Share]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, end in chain.from_iterable(share.ends.items() for share in shares):
        sizes[name] = max(sizes.get(name, 0), end)
    return sizes


def _check_complete(pieces: Iterable[_StatePiece], sizes: Mapping[str, int]) -> None:
    reached = dict.fromkeys(sizes, 0)
    for name, start, count, *_ in sorted(pieces):
        if start != reached[name]:
            raise RuntimeError(f"the trainer's ranks do not hold {name} exactly once")
        reached[name] += count
    if short := [name for name, size in sizes.items() if reached[name] != size]:
        raise RuntimeError(f"the trainer's ranks do not hold {short[0]} exactly once")


class _Source(NamedTuple):
    """A run of consecutive elements in a saved tensor, and where they belong in the requested
    tensor."""

    rank: int
    tensor: int
    offset: int
    into: int  # index of the first element in the requested tensor
    count: int


def _sources(
    piece: _StatePiece, written: Sequence[tuple[int, int, _StatePiece]]
) -> Iterator[_Source]:
    """Find the saved elements that make up a piece, given all saved pieces of the same
    parameter."""
    end = piece.start + piece.count
    first = bisect_right(written, piece.start, key=lambda entry: entry[0]) - 1
    for start, rank, source in written[first:]:
        at = max(start, piece.start)
        if at >= end:
            return
        count = min(start + source.count, end) - at
        offset, into = source.offset + at - start, piece.offset + at - piece.start
        yield _Source(rank, source.tensor, offset, into, count)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write flat float32 tensors to a safetensors file, block by block. The `safetensors` package
    would need all of them in host memory at the same time."""
    ends = [0, *accumulate(4 * tensor.numel() for tensor in tensors.values())]
    text = json.dumps(
        {
            name: {"dtype": "F32", "shape": [tensor.numel()], "data_offsets": offsets}
            for (name, tensor), offsets in zip(tensors.items(), pairwise(ends), strict=True)
        }
    ).encode()
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


def _all_gather(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
