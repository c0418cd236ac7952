from __future__ import annotations

from itertools import pairwise

import pytest

from keel.trainer.engine.state.pieces import (
    Index,
    Piece,
    Run,
    check_same,
    flaws,
    sizes_of,
    writers,
)


def cut(name: str, size: int, *borders: int) -> list[Piece]:
    """A parameter over ranks, each with a tensor of something else before it."""
    ends = [0, *borders, size]
    return [Piece(name, a, b - a, 1, 5 + i) for i, (a, b) in enumerate(pairwise(ends))]


def test_whatever_is_wanted_is_found_where_it_was_written() -> None:
    pieces = cut("w", 10, 3, 4, 9)
    index = Index([[piece] for piece in pieces])
    for start in range(10):
        for end in range(start + 1, 11):
            found = list(index.find(Piece("w", start, end - start, 0, 77)))
            elements = [
                (rank, tensor, offset + i, into + i)
                for rank, tensor, offset, count, into in found
                for i in range(count)
            ]
            assert elements == [
                (rank, 1, piece.offset + at - piece.start, at - start)
                for at in range(start, end)
                for rank, piece in enumerate(pieces)
                if piece.start <= at < piece.start + piece.count
            ]


@pytest.mark.parametrize(
    "wanted", [("w", 8, 4), ("w", 11, 1), ("v", 0, 1), ("gap", 0, 4), ("gap", 2, 1)]
)
def test_what_nobody_wrote_is_named(wanted: tuple[str, int, int]) -> None:
    index = Index([[*cut("w", 10, 5), Piece("gap", 0, 2, 0, 0), Piece("gap", 3, 1, 0, 2)]])
    with pytest.raises(ValueError, match=rf"elements .* of {wanted[0]} are not there"):
        list(index.find(Piece(*wanted, 0, 0)))


def test_of_replicas_the_first_writes_and_padding_nobody() -> None:
    shared = [Piece("w", 0, 4, 0, 0)], [Piece("b", 0, 2, 1, 0)]
    own = [[Piece(f"expert {i}", 0, 4, 2, 0)] for i in (0, 1)]
    ranks = [[*shared, own[0], []], [*shared, own[1], []], [*shared, own[0], []]]
    assert writers(ranks) == [{0, 1, 2}, {2}, set()]


def test_a_parameter_must_be_there_whole_and_once() -> None:
    whole = cut("w", 10, 4)
    assert flaws(whole, {"w": 10}) == []
    assert flaws(whole[1:], {"w": 10}) == flaws(whole[:1], {"w": 10}) == ["w"]
    assert flaws([*whole, whole[0]], {"w": 10}) == flaws(whole, {"w": 11}) == ["w"]
    assert flaws([], {"w": 10}) == flaws(whole, {}) == ["w"]


@pytest.mark.parametrize("sizes", [{"w": 10}, {"w": 10, "v": 3}, {"w": 10, "v": 4, "u": 1}, {}])
def test_another_model_is_refused_by_the_name_of_a_parameter(sizes: dict[str, int]) -> None:
    """Also one that has less, of which everything is there: in a narrower one, elsewhere."""
    written = [*cut("w", 10, 4), *cut("v", 4, 2)]
    check_same(written, {"w": 10, "v": 4})
    with pytest.raises(ValueError, match=r"elements of [uv], of which this model has \d"):
        check_same(written, sizes)


def test_the_size_of_a_parameter_is_that_of_its_parts() -> None:
    first, second = Run(0, 6, "experts", 0), Run(0, 6, "experts", 6)
    assert sizes_of([first, second, first, Run(0, 4, "w", 0)]) == {"experts": 12, "w": 4}
