"""Pieces of the optimizer state are found wherever they were written; see also test_resharding."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from keel.trainer.engine import optimizer_state
from keel.trainer.engine.optimizer_state import (
    ElementRun,
    StatePiece,
    _check_same_model,
    _PieceIndex,
    _sizes_of,
    _TensorFile,
    _uncovered,
    _write_tensors,
)

pytestmark = pytest.mark.e2e  # loads DeepSpeed


def cut(name: str, size: int, *borders: int) -> list[StatePiece]:
    """A parameter cut over ranks, each with another tensor before it."""
    ends = [0, *borders, size]
    return [StatePiece(name, a, b - a, 1, 5 + i) for i, (a, b) in enumerate(pairwise(ends))]


def test_any_range_is_read_from_its_file() -> None:
    pieces = cut("w", 10, 3, 4, 9)
    index = _PieceIndex([[piece] for piece in pieces])
    for start in range(10):
        for end in range(start + 1, 11):
            elements = [
                (rank, tensor, offset + i, into + i)
                for rank, tensor, offset, count, into in index.find(
                    StatePiece("w", start, end - start, 0, 77)
                )
                for i in range(count)
            ]
            assert elements == [
                (rank, 1, piece.offset + at - piece.start, at - start)
                for at in range(start, end)
                for rank, piece in enumerate(pieces)
                if piece.start <= at < piece.start + piece.count
            ]


@pytest.mark.parametrize(
    "request_", [("w", 8, 4), ("w", 11, 1), ("v", 0, 1), ("gap", 0, 4), ("gap", 2, 1)]
)
def test_missing_elements_are_named(request_: tuple[str, int, int]) -> None:
    index = _PieceIndex(
        [[*cut("w", 10, 5), StatePiece("gap", 0, 2, 0, 0), StatePiece("gap", 3, 1, 0, 2)]]
    )
    with pytest.raises(ValueError, match=f"of {request_[0]} "):
        list(index.find(StatePiece(*request_, 0, 0)))


def test_parameters_must_be_covered_exactly_once() -> None:
    whole = cut("w", 10, 4)
    assert _uncovered(whole, {"w": 10}) == []
    assert _uncovered(whole[1:], {"w": 10}) == _uncovered(whole[:1], {"w": 10}) == ["w"]
    assert _uncovered([*whole, whole[0]], {"w": 10}) == _uncovered(whole, {"w": 11}) == ["w"]
    assert _uncovered([], {"w": 10}) == _uncovered(whole, {}) == ["w"]
    first, second = ElementRun(0, 6, "experts", 0), ElementRun(0, 6, "experts", 6)
    assert _sizes_of([first, second, first, ElementRun(0, 4, "w", 0)]) == {"experts": 12, "w": 4}


@pytest.mark.parametrize("sizes", [{"w": 10}, {"w": 10, "v": 3}, {"w": 10, "v": 4, "u": 1}, {}])
def test_checkpoint_of_another_model_is_refused(sizes: dict[str, int]) -> None:
    written = [*cut("w", 10, 4), *cut("v", 4, 2)]
    _check_same_model(written, {"w": 10, "v": 4})
    with pytest.raises(ValueError, match=r"^[uv] has "):
        _check_same_model(written, sizes)


def test_files_are_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "BLOCK", 7)
    flat = torch.randn(100)
    flat[3], flat[4] = torch.nan, -torch.inf
    tensors = {"a": flat, "b": flat[10:31], "empty": flat[:0], "c": flat[::2]}
    _write_tensors(tmp_path / "f", tensors)
    assert flat.untyped_storage().resizable(), "it can still be offloaded"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "g")
    actual, expected = load_file(tmp_path / "f"), load_file(tmp_path / "g")
    assert actual.keys() == expected.keys() == _TensorFile(tmp_path / "f").names
    for name, tensor in expected.items():
        assert torch.equal(actual[name].view(torch.int32), tensor.view(torch.int32)), name
    assert torch.equal(_TensorFile(tmp_path / "f").read("b", 5, 16), flat[15:31])
