"""Saved batches are the same when they are read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from keel.rl.types import Usage, Verdict
from keel.trainer.run.batches import (
    read_batch,
    save_batch,
)
from tests.rl.rollouts import scored, segment, trajectory


def batch() -> list[Any]:
    messages = ({"role": "assistant", "content": "é", "tool_calls": [{"id": 1, "args": ["a"]}]},)
    first = dataclasses.replace(
        trajectory(segment(3, 4, kept=True), segment(2, 5, kept=True)),
        messages=messages,
        verdict=Verdict(parts={"correct": 0.5}, facts={"seen": (1, 2)}),
        usage=Usage(turns=2, tools_s=0.25),
    )
    return [scored([first, trajectory(segment(3, 4, routes=True), sibling=1)], [0.0, 1.0])]


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_batch_is_read_back_exactly(tmp_path: Path) -> None:
    groups = batch()
    path = save_batch(tmp_path, 7, groups, ["p, token 3: nan"])
    assert path == tmp_path / "nonfinite" / "step_000007.npz"
    again, findings = read_batch(path)
    assert findings == ["p, token 3: nan"] and same(again, groups)
