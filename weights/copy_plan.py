"""Checkpoint tensors copied straight into the tensors that kernels read.

vLLM's loader takes a fraction of a millisecond of Python for each tensor of an update, and a
mixture of experts has tens of thousands. Where it puts each one does not change from update to
update: `keel.weights.trace` finds it out once, and a `Plan` does the same with a few
copies for each layer. Offsets and strides are in elements unless they are said to be in bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from keel.weights.buckets import TensorEntry

_LOG = logging.getLogger(__name__)
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes. Copies between equal types are of these."""
Dims = tuple[tuple[int, int, int], ...]
"""Length of each dimension, its stride in the kernel's tensor and its stride in the source."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a checkpoint tensor, and where in a kernel's tensor it belongs."""

    kernel: int
    """Index in `Plan.kernels`."""
    at: int
    """Where it starts in the kernel's storage."""
    source: int
    """Where it starts in the checkpoint tensor, or in a bucket."""
    dims: Dims
    dtype: torch.dtype
    """Of the source."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A checkpoint tensor and all that becomes of it; nothing, if vLLM's loader ignores it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """A part of a kernel's tensor that is the same in every update, such as padding."""

    target: Tensor
    value: float

    def __call__(self) -> None:
        self.target.fill_(self.value)


@dataclass(slots=True)
class _Group:
    """Copies that are one call: equal types, and either all or none without gaps."""

    dtype: torch.dtype
    """Of the sources."""
    targets: list[Tensor] = field(default_factory=list)
    sources: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Offset in the bucket, size and stride."""


class Program:
    """The copies of one bucket: made once for its table of contents, run in every update."""

    def __init__(self, kernels: Sequence[Tensor], pieces: Iterable[Piece]) -> None:
        groups: dict[tuple[torch.dtype, torch.dtype, bool], _Group] = {}
        for piece in pieces:
            kernel = kernels[piece.kernel]
            dtype = kernel.dtype
            if dtype == piece.dtype:
                piece, dtype = _in_whole_numbers(piece)
            size = tuple(n for n, _, _ in piece.dims)
            key = piece.dtype, dtype, size[1:] == () and piece.dims[0][1:] == (1, 1)
            group = groups.setdefault(key, _Group(piece.dtype))
            strides = tuple(at for _, at, _ in piece.dims)
            group.targets.append(window(kernel, dtype, piece.at, size, strides))
            group.sources.append((piece.source, size, tuple(s for _, _, s in piece.dims)))
        self._groups = list(groups.values())

    @property
    def copies(self) -> int:
        return sum(len(group.targets) for group in self._groups)

    def run(self, flat: Tensor) -> None:
        """`flat`: bytes, aligned to 8."""
        for group in self._groups:
            first = start_of(flat) // group.dtype.itemsize
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                group.targets,
                [
                    window(flat, group.dtype, first + offset, size, stride)
                    for offset, size, stride in group.sources
                ],
            )


class Plan:
    """Where each tensor of a checkpoint belongs, in one worker of an engine."""

    def __init__(
        self, kernels: Sequence[Tensor], placed: Mapping[str, Placed], fills: Sequence[Fill] = ()
    ) -> None:
        self.kernels, self.placed, self._fills = kernels, placed, fills
        self._programs: dict[str, tuple[tuple[TensorEntry, ...], Program]] = {}
        """By the first tensor of the bucket that they are for."""

    def begin(self) -> None:
        for fill in self._fills:
            fill()

    def load(self, entries: tuple[TensorEntry, ...], flat: Tensor) -> None:
        """Copy a bucket's tensors; the copies may be under way on return.

        Raises `ValueError` naming a tensor that was not in the first update, or was another kind of
        tensor there.
        """
        if (flat.data_ptr() | start_of(flat)) % 8:
            flat = flat.clone()
        known, program = self._programs.get(entries[0].name, ((), None))
        if program is None or known != entries:
            program = self._checked(entries, flat)
            self._programs[entries[0].name] = entries, program
        else:
            program.run(flat)

    def _checked(self, entries: tuple[TensorEntry, ...], flat: Tensor) -> Program:
        """The program for a table of contents, after it has run: the first time, what it does is
        compared with the pieces one by one."""
        pieces = [piece for entry in entries for piece in self._pieces(entry)]
        program, plain = Program(self.kernels, join(pieces)), Program(self.kernels, pieces)
        plain.run(flat)
        targets = [target for group in plain._groups for target in group.targets]
        expected = [target.clone() for target in targets]
        for target in targets:
            bits(target).bitwise_not_()  # whatever is not written again differs in every bit
        program.run(flat)
        wrong = [
            (bits(target) != bits(right)).any()
            for target, right in zip(targets, expected, strict=True)
        ]
        if wrong and bool(torch.stack(wrong).any()):
            _LOG.warning("copies of weights were joined wrongly; they are made one by one")
            plain.run(flat)
            return plain
        return program

    def _pieces(self, entry: TensorEntry) -> Iterable[Piece]:
        placed = self.placed.get(entry.name)
        if placed is None or (placed.dtype, placed.shape) != (entry.dtype, entry.shape):
            was = "absent" if placed is None else f"{placed.dtype} {list(placed.shape)}"
            raise ValueError(
                f"weight update: {entry.name!r} is {entry.dtype} {list(entry.shape)} and was {was} "
                "in the first update; publish the same tensors each time"
            )
        for piece in placed.pieces:
            yield replace(piece, source=piece.source + entry.offset // piece.dtype.itemsize)


def start_of(tensor: Tensor) -> int:
    """In its storage."""
    return int(tensor.storage_offset())


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, in which NaN equals itself."""
    return tensor.view(_WHOLE[tensor.dtype.itemsize])


def window(
    tensor: Tensor,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """A view of any part of a tensor's storage, as any type. `offset`: from the storage's start."""
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset, tuple(size), tuple(stride))


def dims(size: Sequence[int], at: Sequence[int], source: Sequence[int]) -> Dims:
    """In their simplest form: outermost first, without those of length 1, joined where there are no
    gaps. Elements may come in another order, the same in both."""
    parts = [part for part in zip(size, at, source, strict=True) if part[0] != 1]
    simple: list[tuple[int, int, int]] = []
    for n, inner_at, inner in sorted(parts, key=lambda part: part[1], reverse=True):
        if simple and simple[-1][1:] == (n * inner_at, n * inner):
            simple[-1] = simple[-1][0] * n, inner_at, inner
        else:
            simple.append((n, inner_at, inner))
    return tuple(simple) or ((1, 1, 1),)


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """The same copies in fewer pieces, as those of a layer's experts."""
    ordered = sorted(
        pieces, key=lambda piece: (piece.kernel, str(piece.dtype), piece.at, piece.source)
    )
    while True:
        fewer = _join_steps(_join_neighbours(ordered))
        if len(fewer) == len(ordered):
            return fewer
        ordered = fewer


def _join_neighbours(pieces: Iterable[Piece]) -> list[Piece]:
    """One piece where the next begins at the end of the one before, on both sides."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and _together(joined[-1], piece):
            last = joined[-1]
            n, at, source = last.dims[0]
            if last.at + n * at == piece.at and last.source + n * source == piece.source:
                (more, *strides), inner = piece.dims[0], piece.dims[1:]
                if strides == [at, source] and inner == last.dims[1:]:
                    joined[-1] = replace(last, dims=_simplified(((n + more, at, source), *inner)))
                    continue
        joined.append(piece)
    return joined


def _join_steps(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece with a dimension more for equal ones at equal distances."""
    joined: list[Piece] = []
    index = 0
    while index < len(pieces):
        first, end = pieces[index], index + 1
        step = _step(first, pieces[end]) if end < len(pieces) else None
        while step and end < len(pieces) and _step(pieces[end - 1], pieces[end]) == step:
            end += 1
        if step:
            outer = (end - index, *step)
            first = replace(first, dims=_simplified((outer, *first.dims)))
        joined.append(first)
        index = end
    return joined


def _step(one: Piece, other: Piece) -> tuple[int, int] | None:
    at, source = other.at - one.at, other.source - one.source
    if _together(one, other) and one.dims == other.dims and at > 0 and source >= 0:
        return at, source
    return None


def _together(one: Piece, other: Piece) -> bool:
    return one.kernel == other.kernel and one.dtype == other.dtype


def _simplified(parts: Dims) -> Dims:
    size, at, source = zip(*parts, strict=True)
    return dims(size, at, source)


def _in_whole_numbers(piece: Piece) -> tuple[Piece, torch.dtype]:
    """The same bytes in the largest numbers that fit; a type conversion is none then."""
    item = piece.dtype.itemsize
    *outer, (n, *inner) = piece.dims
    dense = inner == [1, 1]
    strides = [stride for _, *both in outer for stride in both]
    lengths = [length * item for length in (piece.at, piece.source, n, *strides)]
    width = max(w for w in _WHOLE if w == item or (dense and not any(x % w for x in lengths)))
    if width == item:
        return replace(piece, dtype=_WHOLE[item]), _WHOLE[item]

    def wide(length: int) -> int:
        return length * item // width

    parts = (*((m, wide(at), wide(source)) for m, at, source in outer), (wide(n), 1, 1))
    changed = replace(
        piece, at=wide(piece.at), source=wide(piece.source), dims=parts, dtype=_WHOLE[width]
    )
    return changed, _WHOLE[width]
