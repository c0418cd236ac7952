"""Pickles planted in a run folder run no code."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.trainer.engine import checkpoint
from keel.trainer.run.bad_batches import read_batch


class Payload:
    """Makes a folder when unpickled."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._made),)


def test_saved_batch_with_pickles_is_refused(tmp_path: Path) -> None:
    payload, path = Payload(tmp_path / "made"), tmp_path / "step_000001.npz"
    array = np.array([payload], object)
    np.savez(path, allow_pickle=True, text=array)
    with pytest.raises(ValueError, match="not a saved batch"):
        read_batch(path)
    path.write_bytes(pickle.dumps(payload))
    with pytest.raises(ValueError, match="not a saved batch"):
        read_batch(path)
    assert not (tmp_path / "made").exists()


def test_checkpoint_with_pickles_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / checkpoint.PROGRESS).write_text("{}")
    torch.save({"cpu": Payload(tmp_path / "made")}, tmp_path / "random_rank_0.pt")
    monkeypatch.setattr(checkpoint.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint, "_all_gather", lambda value: [value])
    for name in ("_share", "_read"):
        monkeypatch.setattr(checkpoint.Checkpoints, name, lambda *_: None)
    unused: Any = None
    checkpoints = checkpoint.Checkpoints(
        unused, unused, unused, {}, stage=0, device=torch.device("cpu")
    )
    with pytest.raises(pickle.UnpicklingError):
        checkpoints.load(tmp_path)
    assert not (tmp_path / "made").exists()
