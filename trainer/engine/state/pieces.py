"""Which elements of which parameter are where, whoever holds them.

A rank holds flat tensors of master weights, each with its Adam moments. A `Piece` says that a run
of one tensor's elements is a run of a parameter's, flattened, in the model as it was before anybody
spread it: so what some ranks have written, others can find, whatever their number, ZeRO stage and
expert parallelism.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    parameter: str
    start: int
    """Its first element, in the flattened parameter."""
    count: int
    tensor: int
    """Number of the rank's tensor that holds it."""
    offset: int
    """Its first element, in that."""


NOTHING = Piece("", 0, 0, 0, 0)


class Run(NamedTuple):
    """Elements of a flattened parameter as a rank has it, and where they are in the whole one,
    which may have another name: of experts a rank has its own."""

    start: int
    count: int
    whole: str
    into: int


class Found(NamedTuple):
    """Where a part of a wanted piece was written."""

    rank: int
    tensor: int
    offset: int
    count: int
    into: int
    """Elements of the wanted piece before it."""


def writers(ranks: Sequence[Sequence[Sequence[Piece]]]) -> list[set[int]]:
    """Of each rank, given the pieces of each of its tensors, the tensors that it writes: of
    replicas the first. What holds nothing but padding is nobody's."""
    seen: set[tuple[Piece, ...]] = {()}
    chosen: list[set[int]] = []
    for tensors in ranks:
        held = [tuple(piece._replace(tensor=0) for piece in pieces) for pieces in tensors]
        chosen.append({number for number, pieces in enumerate(held) if pieces not in seen})
        seen.update(held)
    return chosen


def sizes_of(runs: Iterable[Run]) -> dict[str, int]:
    """Elements of each whole parameter, of which these are all parts."""
    parts = {(run.whole, run.into): run.count for run in runs}
    sizes: dict[str, int] = {}
    for (whole, _), count in parts.items():
        sizes[whole] = sizes.get(whole, 0) + count
    return sizes


def flaws(pieces: Iterable[Piece], sizes: Mapping[str, int]) -> list[str]:
    """Parameters that `pieces` do not cover once and only once. `sizes`: elements of each."""
    reached = dict.fromkeys(sizes, 0)
    wrong: set[str] = set()
    for name, start, count, *_ in sorted(pieces):
        if start != reached.get(name):
            wrong.add(name)
        reached[name] = start + count
    return sorted(wrong | {name for name, end in reached.items() if end != sizes.get(name)})


def check_same(pieces: Iterable[Piece], sizes: Mapping[str, int]) -> None:
    """Raises `ValueError` naming a parameter unless what was written is a model whose parameters
    have these `sizes`: of a larger one a part would be found, and be another part."""
    written: dict[str, int] = {}
    for name, _, count, *_ in pieces:
        written[name] = written.get(name, 0) + count
    for name in sorted(written.keys() | sizes.keys()):
        there, here = written.get(name, 0), sizes.get(name, 0)
        if there != here:
            raise ValueError(
                f"it has {there:,} elements of {name}, of which this model has {here:,}: it is of "
                "another model, or of one of which something else is trained"
            )


class Index:
    """Of everything that was written."""

    def __init__(self, ranks: Sequence[Iterable[Piece]]) -> None:
        """The pieces that each rank has written."""
        runs: dict[str, list[tuple[int, int, Piece]]] = {}
        for rank, pieces in enumerate(ranks):
            for piece in pieces:
                runs.setdefault(piece.parameter, []).append((piece.start, rank, piece))
        self._runs = {name: sorted(found) for name, found in runs.items()}

    def find(self, wanted: Piece) -> Iterator[Found]:
        """All of it, in order. Raises `ValueError` for what nobody has written."""
        runs = self._runs.get(wanted.parameter, [])
        at, end = wanted.start, wanted.start + wanted.count
        place = bisect_right(runs, at, key=lambda run: run[0]) - 1
        while at < end:
            start, rank, piece = runs[place] if 0 <= place < len(runs) else (at, 0, NOTHING)
            count = min(start + piece.count, end) - at
            if start > at or count <= 0:
                raise ValueError(f"elements {at:,} to {end:,} of {wanted.parameter} are not there")
            yield Found(rank, piece.tensor, piece.offset + at - start, count, at - wanted.start)
            at, place = at + count, place + 1
