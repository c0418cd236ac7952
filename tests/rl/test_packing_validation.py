"""Invalid input of packing is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keel.rl.packing import MicroBatch, TrainBatch, pack
from tests.rl.rollouts import random_groups, scored, segment, trajectory


def test_invalid_arguments_are_named() -> None:
    for knob in ("ranks", "micro_batch_tokens"):
        with pytest.raises(ValueError, match=knob):
            pack(random_groups(0), **{"ranks": 1, "micro_batch_tokens": 8, knob: 0})
    with pytest.raises(ValueError, match="trajectory"):
        pack([scored([], [], dropped=("late",))], ranks=1, micro_batch_tokens=8)


def test_missing_or_different_routes_name_the_prompt() -> None:
    recorded = segment(routes=True, name="yes")
    assert recorded.routes_TLK is not None
    missing = segment(10, name="odd")
    narrow = replace(missing, routes_TLK=recorded.routes_TLK[:, :1])
    for other in (missing, narrow):
        both = [trajectory(recorded), trajectory(other)]
        with pytest.raises(ValueError, match=r"segment of odd: routes_TLK"):
            pack([scored(both, [0, 1])], ranks=1, micro_batch_tokens=8)
    groups = [scored([trajectory(missing)], [1.0]), scored([trajectory(recorded)], [1.0])]
    with pytest.raises(ValueError, match=r"segment of odd: routes_TLK"):
        pack(groups, ranks=1, micro_batch_tokens=8)


def test_narrow_routes_are_widened() -> None:
    narrow = replace(segment(), routes_TLK=np.full((4, 1, 1), 200, np.uint8))
    (batch,) = pack([scored([trajectory(narrow)], [1.0])], ranks=1, micro_batch_tokens=8)
    routes = batch.micro_batches[0].routes_NLK
    assert routes is not None
    assert routes.dtype == np.int16
    assert (routes == 200).all()


GOOD: dict[str, Any] = {
    "token_ids_N": np.arange(5, dtype=np.int32),
    "position_N": np.array([0, 1, 2, 0, 1], np.int32),
    "segment_N": np.array([0, 0, 0, 1, 1], np.int32),
    "sequence_N": np.array([0, 0, 0, 1, 1], np.int64),
    "trainable_N": np.array([False, True, True, False, True]),
    "logp_old_N": np.zeros(5, np.float32),
    "advantage_N": np.array([1, 1, 1, -1, -1], np.float32),
    "kl_coef_N": np.zeros(5, np.float32),
    "sequence_tokens_S": np.array([2, 1], np.int64),
    "sequence_weight_S": np.ones(2, np.float32),
}
EMPTY = {name: values[:0] for name, values in GOOD.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp_old_N": np.zeros(4, np.float32)}, "logp_old_N"),
        ({"routes_NLK": np.zeros((4, 1, 1), np.int16)}, "routes_NLK"),
        ({"position_N": np.arange(5, dtype=np.int32)}, "position_N"),
        ({"trainable_N": np.ones(5, np.bool_)}, "trainable_N"),
        ({"sequence_N": np.array([0, 0, 0, 2, 2])}, "sequence_N"),
        ({"sequence_tokens_S": np.array([1, 1])}, "sequence_tokens_S"),
        ({"sequence_tokens_S": np.array([2, 2])}, "split_S"),
        ({"split_S": np.array([-1])}, "split_S"),
        ({"sequence_weight_S": np.zeros(2, np.float32)}, "sequence_weight_S"),
        ({"advantage_N": np.array([1, 1, 2, 0, 0], np.float32)}, "advantage_N"),
        ({"kl_coef_N": np.array([0, 0, 1, 0, 0], np.float32)}, "kl_coef_N"),
        ({"kl_coef_N": np.full(5, -1, np.float32)}, "kl_coef_N"),
        (EMPTY, "no tokens"),
    ],
)
def test_invalid_micro_batches_name_the_field(change: dict[str, Any], message: str) -> None:
    MicroBatch(**GOOD)
    with pytest.raises(ValueError, match=message):
        MicroBatch(**{**GOOD, **change})


def test_invalid_train_batches_name_the_field() -> None:
    micro_batch = MicroBatch(**GOOD)
    TrainBatch(micro_batches=(micro_batch,), total_sequences=2)
    with pytest.raises(ValueError, match="total_sequences"):
        TrainBatch(micro_batches=(micro_batch,), total_sequences=1)
    split = MicroBatch(**{**GOOD, "split_S": np.array([-1, 1])})
    TrainBatch(micro_batches=(split, split), total_sequences=3, split_sequences=2)
    with pytest.raises(ValueError, match="total_sequences"):
        TrainBatch(micro_batches=(split, split), total_sequences=2, split_sequences=2)
    with pytest.raises(ValueError, match="split_sequences"):
        TrainBatch(micro_batches=(split,), total_sequences=3, split_sequences=1)
    with pytest.raises(ValueError, match="no micro-batches"):
        TrainBatch(micro_batches=(), total_sequences=1)
