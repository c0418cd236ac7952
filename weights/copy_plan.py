"""Copies checkpoint tensors straight into the tensors that kernels read.

vLLM's loader takes a fraction of a millisecond of Python per tensor, and a mixture of experts has
tens of thousands. Where it puts each one does not change between updates: `keel.weights.trace`
records it once, and a `CopyPlan` repeats it with a few copies per layer. Offsets and strides are in
elements unless stated otherwise.
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
"""Integer types by size in bytes, used for copies between equal types."""
Dims = tuple[tuple[int, int, int], ...]
"""Per dimension: length, stride in the kernel's tensor, stride in the source."""


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """A part of a checkpoint tensor and its place in a kernel's tensor."""

    kernel: int
    """Index in `CopyPlan.kernels`."""
    at: int
    """Start in the kernel's storage."""
    source: int
    """Start in the checkpoint tensor, or in a bucket."""
    dims: Dims
    dtype: torch.dtype
    """Type of the source."""


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A checkpoint tensor with the pieces that are copied; none if vLLM's loader ignores it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[CopyPiece, ...]


@dataclass(frozen=True, slots=True)
class ConstantFill:
    """A part of a kernel's tensor with a constant value, such as padding."""

    target: Tensor
    value: float

    def __call__(self) -> None:
        self.target.fill_(self.value)


@dataclass(slots=True)
class _CopyGroup:
    """Copies of equal types that are made in one call, all with or all without gaps."""

    dtype: torch.dtype
    """Type of the sources."""
    targets: list[Tensor] = field(default_factory=list)
    sources: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Offset in the bucket, size, stride."""


class _CopyProgram:
    """The copies of a bucket with a given table of contents."""

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
        """Copy from `flat`, bytes aligned to 8."""
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
    """Copies checkpoint tensors to their places in one worker of an engine."""

    def __init__(
        self,
        kernels: Sequence[Tensor],
        placed: Mapping[str, CopiedTensor],
        fills: Sequence[ConstantFill] = (),
    ) -> None:
        self.kernels, self.placed, self._fills = kernels, placed, fills
        self._programs: dict[str, tuple[tuple[TensorEntry, ...], _CopyProgram]] = {}
        """Keyed by the name of the bucket's first tensor."""

    def begin(self) -> None:
        """Write constants."""
        for fill in self._fills:
            fill()

    def load(self, entries: tuple[TensorEntry, ...], flat: Tensor) -> None:
        """Copy a bucket's tensors, asynchronously on a GPU.

        Raises ValueError naming a tensor that the first update did not have, or had with another
        type or shape.
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
        """Build the program of a table of contents, run it, and compare it with copying the pieces
        one by one."""
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
    """Offset of a tensor in its storage."""
    return int(tensor.storage_offset())


def bits(tensor: Tensor) -> Tensor:
    """View as integers, in which NaN equals itself."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def window(
    tensor: Tensor,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """View any part of a tensor's storage as any type; `offset` counts from the storage's start."""
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset, tuple(size), tuple(stride))


def dims(size: Sequence[int], at: Sequence[int], source: Sequence[int]) -> Dims:
    """Simplify dimensions: outermost first, without those of length 1, joined if contiguous. The
    order of elements may change, equally at both ends."""
    parts = [part for part in zip(size, at, source, strict=True) if part[0] != 1]
    simple: list[tuple[int, int, int]] = []
    for n, inner_at, inner in sorted(parts, key=lambda part: part[1], reverse=True):
        if simple and simple[-1][1:] == (n * inner_at, n * inner):
            simple[-1] = simple[-1][0] * n, inner_at, inner
        else:
            simple.append((n, inner_at, inner))
    return tuple(simple) or ((1, 1, 1),)


def join(pieces: Iterable[CopyPiece]) -> list[CopyPiece]:
    """Merge pieces, such as all experts of a layer."""
    ordered = sorted(
        pieces, key=lambda piece: (piece.kernel, str(piece.dtype), piece.at, piece.source)
    )
    while True:
        fewer = _join_steps(_join_neighbours(ordered))
        if len(fewer) == len(ordered):
            return fewer
        ordered = fewer


def _join_neighbours(pieces: Iterable[CopyPiece]) -> list[CopyPiece]:
    """Merge a piece with the next if that begins at its end, on both sides."""
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
    """Merge equal pieces at equal distances into one with another dimension."""
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
    """The same bytes as the widest integers that fit, for copies without conversion."""
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
