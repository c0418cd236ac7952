from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from keel.trainer.engine.state import files
from keel.trainer.engine.state.files import TensorFile, write_tensors


def test_what_is_written_is_a_safetensors_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK", 7)
    flat = torch.randn(100)
    flat[3], flat[4] = torch.nan, -torch.inf
    tensors = {"a": flat, "b": flat[10:31], "empty": flat[:0], "c": flat[::2]}
    write_tensors(tmp_path / "f", tensors)
    assert flat.untyped_storage().resizable(), "or nothing could be offloaded any more"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "g")
    read, theirs = load_file(tmp_path / "f"), load_file(tmp_path / "g")
    assert read.keys() == theirs.keys() == TensorFile(tmp_path / "f").names
    for name, tensor in theirs.items():
        assert torch.equal(read[name].view(torch.int32), tensor.view(torch.int32)), name
    assert torch.equal(TensorFile(tmp_path / "f").read("b", 5, 16), flat[15:31])


def test_other_dtypes_and_shapes_are_refused(tmp_path: Path) -> None:
    for tensor in (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="w: torch"):
            write_tensors(tmp_path / "f", {"w": tensor})


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # bytes
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/weights'"):
            write_tensors(tmp_path / "weights", {"w": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("{}")
    for name in ("f", "absent"):
        with pytest.raises(ValueError, match=rf"/{name}: cannot be read"):
            TensorFile(tmp_path / name)
