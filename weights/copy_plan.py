"""Copies checkpoint tensors straight into the tensors that vLLM's kernels read.

vLLM's loader spends a fraction of a millisecond of Python time on each tensor, and a
mixture-of-experts model has tens of thousands. It puts every tensor in the same place in each
update. `keel.weights.trace` therefore records these places once, and a `CopyPlan` repeats the
copies with a few calls per layer. Offsets and strides count elements unless stated otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from keel.weights.buckets import TensorEntry

_LOG = logging.getLogger(__name__)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes. Copies between tensors with the same type are made with these."""
Dims = tuple[tuple[int, int, int], ...]
"""For each dimension: its length, its stride in the kernel's tensor and its stride in the
source."""


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """A part of a checkpoint tensor, and where it goes in a kernel's tensor."""

    kernel: int
    """Index into `CopyPlan.kernels`."""
    at: int
    """Where the piece starts in the kernel's storage."""
    source: int
    """Where the piece starts in the checkpoint tensor, or in a bucket."""
    dims: Dims
    dtype: torch.dtype
    """Element type in the source."""


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A checkpoint tensor, and the pieces of it that are copied. There are no pieces if vLLM's
    loader ignores the tensor."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[CopyPiece, ...]


@dataclass(frozen=True, slots=True)
class ConstantFill:
    """A part of a kernel's tensor that always has the same value, such as padding."""

    target: Tensor
    value: float

    def __call__(self) -> None:
        self.target.fill_(self.value)


@dataclass(slots=True)
class _CopyGroup:
    """Copies that are made in one call. They have the same types, and either all or none of them
    have gaps."""

    dtype: torch.dtype
    """Element type in the sources."""
    targets: list[Tensor] = field(default_factory=list)
    sources: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Offset in the bucket, size and stride of each source."""


class _CopyProgram:
    """All copies for a bucket with a certain table of tensors."""

    def __init__(self, kernels: Sequence[Tensor], pieces: Iterable[CopyPiece]) -> None:
        groups: dict[tuple[torch.dtype, torch.dtype, bool], _CopyGroup] = {}
        for piece in pieces:
            kernel = kernels[piece.kernel]
            dtype = kernel.dtype
            if dtype == piece.dtype:
                piece, dtype = _as_integers(piece)
            size = tuple(n for n, _, _ in piece.dims)
            key = piece.dtype, dtype, size[1:] == () and piece.dims[0][1:] == (1, 1)
            group = groups.setdefault(key, _CopyGroup(piece.dtype))
            strides = tuple(at for _, at, _ in piece.dims)
            group.targets.append(window(kernel, dtype, piece.at, size, strides))
            group.sources.append((piece.source, size, tuple(s for _, _, s in piece.dims)))
        self._groups = list(groups.values())

    @property
    def copies(self) -> int:
        return sum(len(group.targets) for group in self._groups)

    def run(self, flat: Tensor) -> None:
        """Copy from the bucket `flat`, which must be aligned to 8 bytes."""
        for group in self._groups:
            first = start_of(flat) // group.dtype.itemsize
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                group.targets,
                [
                    window(flat, group.dtype, first + offset, size, stride)
                    for offset, size, stride in group.sources
                ],
            )


class CopyPlan:
    """Copies all checkpoint tensors to where they belong in one worker of an engine."""

    def __init__(
        self,
        kernels: Sequence[Tensor],
        placed: Mapping[str, CopiedTensor],
        fills: Sequence[ConstantFill] = (),
    ) -> None:
        self.kernels, self.placed, self._fills = kernels, placed, fills
        self._programs: dict[str, tuple[tuple[TensorEntry, ...], _CopyProgram]] = {}
        """Keyed by the name of the first tensor in the bucket."""

    def begin(self) -> None:
        """Write the constant parts."""
        for fill in self._fills:
            fill()

    def load(self, entries: tuple[TensorEntry, ...], flat: Tensor) -> None:
        """Copy the tensors in a bucket to where they belong. On a GPU this is asynchronous.

        Raises ValueError if a tensor was not in the first update, or had another type or shape
        there.
        """
        if (flat.data_ptr() | start_of(flat)) % 8:
            flat = flat.clone()
        known, program = self._programs.get(entries[0].name, ((), None))
        if program is None or known != entries:
            program = self._checked(entries, flat)
            self._programs[entries[0].name] = entries, program
        else:
            program.run(flat)

    def _checked(self, entries: tuple[TensorEntry, ...], flat: Tensor) -> _CopyProgram:
        """Build the program for a table of tensors and run it. If its result differs from copying
        each piece separately, use separate copies instead."""
        pieces = [piece for entry in entries for piece in self._pieces(entry)]
        program, plain = (
            _CopyProgram(self.kernels, join(pieces)),
            _CopyProgram(self.kernels, pieces),
        )
        plain.run(flat)
        targets = [target for group in plain._groups for target in group.targets]
        expected = [target.clone() for target in targets]
        for target in targets:
            bits(target).bitwise_not_()  # unwritten elements then differ in every bit
        program.run(flat)
        wrong = [
            (bits(target) != bits(right)).any()
            for target, right in zip(targets, expected, strict=True)
        ]
        if wrong and bool(torch.stack(wrong).any()):
            _LOG.warning("copies of weights were joined wrongly; copying them one by one")
            plain.run(flat)
            return plain
        return program

    def _pieces(self, entry: TensorEntry) -> Iterable[CopyPiece]:
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
    """Return where a tensor starts in its storage."""
    return int(tensor.storage_offset())


def bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers, so that NaN compares equal to itself."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def window(
    tensor: Tensor,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """View any part of a tensor's storage as any type. `offset` counts from the start of the
    storage."""
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset, tuple(size), tuple(stride))


def dims(size: Sequence[int], at: Sequence[int], source: Sequence[int]) -> Dims:
    """Simplify the dimensions of a copy: sort them from outermost to innermost, drop those with
    length 1 and merge contiguous ones. This may change the order of elements, but in the same way
    for source and target."""
    parts = [part for part in zip(size, at, source, strict=True) if part[0] != 1]
    simple: list[tuple[int, int, int]] = []
    for n, inner_at, inner in sorted(parts, key=lambda part: part[1], reverse=True):
        if simple and simple[-1][1:] == (n * inner_at, n * inner):
            simple[-1] = simple[-1][0] * n, inner_at, inner
        else:
            simple.append((n, inner_at, inner))
    return tuple(simple) or ((1, 1, 1),)


def join(pieces: Iterable[CopyPiece]) -> list[CopyPiece]:
    """Merge pieces into larger ones. For example, all experts in a layer may become one piece."""
    ordered = sorted(
        pieces, key=lambda piece: (piece.kernel, str(piece.dtype), piece.at, piece.source)
    )
    while True:
        fewer = _join_steps(_join_neighbours(ordered))
        if len(fewer) == len(ordered):
            return fewer
        ordered = fewer


def _join_neighbours(pieces: Iterable[CopyPiece]) -> list[CopyPiece]:
    """Merge a piece with the next one if the next one continues it in both the source and the
    target."""
    joined: list[CopyPiece] = []
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


def _join_steps(pieces: Sequence[CopyPiece]) -> list[CopyPiece]:
    """Merge equal pieces that are spaced evenly into one piece with an extra dimension."""
    joined: list[CopyPiece] = []
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


def _step(one: CopyPiece, other: CopyPiece) -> tuple[int, int] | None:
    at, source = other.at - one.at, other.source - one.source
    if _together(one, other) and one.dims == other.dims and at > 0 and source >= 0:
        return at, source
    return None


def _together(one: CopyPiece, other: CopyPiece) -> bool:
    return one.kernel == other.kernel and one.dtype == other.dtype


def _simplified(parts: Dims) -> Dims:
    size, at, source = zip(*parts, strict=True)
    return dims(size, at, source)


def _as_integers(piece: CopyPiece) -> tuple[CopyPiece, torch.dtype]:
    """Describe the same bytes with the widest integer type that fits, so that the copy needs no
    conversion."""
    item = piece.dtype.itemsize
    *outer, (n, *inner) = piece.dims
    dense = inner == [1, 1]
    strides = [stride for _, *both in outer for stride in both]
    lengths = [length * item for length in (piece.at, piece.source, n, *strides)]
    width = max(w for w in _INTEGERS if w == item or (dense and not any(x % w for x in lengths)))
    if width == item:
        return replace(piece, dtype=_INTEGERS[item]), _INTEGERS[item]

    def wide(length: int) -> int:
        return length * item // width

    parts = (*((m, wide(at), wide(source)) for m, at, source in outer), (wide(n), 1, 1))
    changed = replace(
        piece, at=wide(piece.at), source=wide(piece.source), dims=parts, dtype=_INTEGERS[width]
    )
    return changed, _INTEGERS[width]
