"""What cannot be packed is refused by name, and what looks odd but can be is packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keel.rl.packing import MicroBatch, TrainBatch, pack
from tests.rl.rollouts import kept_of, random_groups, scored, segment, trajectory


@pytest.mark.parametrize("knob", ["ranks", "micro_batch_tokens"])
def test_no_ranks_and_no_room_are_refused(knob: str) -> None:
    knobs = {"ranks": 1, "micro_batch_tokens": 8, knob: 0}
    with pytest.raises(ValueError, match=f"{knob} = 0: must be at least 1"):
        pack(random_groups(0), **knobs)


def test_a_batch_without_trajectories_is_refused() -> None:
    with pytest.raises(ValueError, match="groups: none of 1 has a trajectory"):
        pack([scored([], [], dropped=("late",))], ranks=1, micro_batch_tokens=8)


@pytest.mark.parametrize("order", [1, -1])
def test_routes_missing_from_one_segment_name_its_prompt(order: int) -> None:
    with_routes = scored([trajectory(segment(routes=True, name="yes"))], [1.0])
    without = scored([trajectory(segment(10, name="no"))], [1.0])
    with pytest.raises(ValueError, match=r"segment of no: routes_TLK has \(L, K\) = None"):
        pack([with_routes, without][::order], ranks=1, micro_batch_tokens=8)


def test_routes_of_another_model_name_their_prompt() -> None:
    right = segment(routes=True)
    assert right.routes_TLK is not None
    wrong = segment_with(segment(10, name="odd"), routes_TLK=right.routes_TLK[:, :1])
    with pytest.raises(ValueError, match=r"segment of odd: .* = \(1, 3\), another .* \(2, 3\)"):
        pack(
            [scored([trajectory(right), trajectory(wrong)], [0, 1])],
            ranks=1,
            micro_batch_tokens=8,
        )


def test_narrow_routes_are_widened() -> None:
    narrow = segment_with(segment(), routes_TLK=np.full((4, 1, 1), 200, np.uint8))
    (batch,) = pack([scored([trajectory(narrow)], [1.0])], ranks=1, micro_batch_tokens=8)
    routes = batch.micro_batches[0].routes_NLK
    assert routes is not None
    assert routes.dtype == np.int16
    assert (routes == 200).all()


def test_untruncated_segments_among_truncated_ones_get_empty_spans() -> None:
    both = [trajectory(segment(0, 3)), trajectory(segment(10, 3, kept=True), sibling=1)]
    (batch,) = pack([scored(both, [0, 1])], ranks=1, micro_batch_tokens=20)
    kept = batch.micro_batches[0].sampling_mask
    assert kept is not None
    assert [kept[t].tolist() for t in range(6)] == [[], [], [], [], kept_of(11), kept_of(12)]


def segment_with(base: Any, **fields: Any) -> Any:
    return type(base)(**{**{name: getattr(base, name) for name in base.__slots__}, **fields})


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
        ({"logp_old_N": np.zeros(4, np.float32)}, "logp_old_N has 4 entries for 5 tokens"),
        ({"routes_NLK": np.zeros((4, 1, 1), np.int16)}, "routes_NLK has 4 entries"),
        ({"routes_NLK": np.zeros((5, 2), np.int16)}, r"routes_NLK must be \[N, L, K\]"),
        ({"position_N": np.arange(5, dtype=np.int32)}, "position_N must count from 0"),
        ({"trainable_N": np.ones(5, np.bool_)}, "trainable_N is True at the first token"),
        ({"sequence_N": np.array([0, 0, 0, 2, 2])}, "sequence_N is out of range for 2 sequences"),
        ({"sequence_N": np.array([0, 0, -1, 1, 1])}, "sequence_N is out of range"),
        ({"sequence_tokens_S": np.array([1, 1])}, "sequence_tokens_S must be above 0 and count"),
        ({"sequence_tokens_S": np.array([2, 1, 0])}, "sequence_tokens_S must be above 0"),
        ({"sequence_tokens_S": np.array([2, 2])}, "split_S must be 2 numbers, at least 0 for each"),
        ({"split_S": np.array([-1])}, "split_S must be 2 numbers"),
        ({"sequence_weight_S": np.ones(3, np.float32)}, "sequence_weight_S must be 2 finite"),
        ({"sequence_weight_S": np.zeros(2, np.float32)}, "sequence_weight_S must be 2 finite"),
        ({"advantage_N": np.array([1, 1, 2, 0, 0], np.float32)}, "advantage_N must be one finite"),
        ({"advantage_N": np.full(5, np.nan, np.float32)}, "advantage_N must be one finite"),
        ({"kl_coef_N": np.array([0, 0, 1, 0, 0], np.float32)}, "kl_coef_N must be one finite"),
        ({"kl_coef_N": np.full(5, -1, np.float32)}, "kl_coef_N must not be negative"),
        (EMPTY, "no tokens; pad with an untrainable one"),
    ],
)
def test_a_micro_batch_polices_itself(change: dict[str, Any], message: str) -> None:
    MicroBatch(**GOOD)
    with pytest.raises(ValueError, match=message):
        MicroBatch(**{**GOOD, **change})


def test_a_train_batch_polices_itself() -> None:
    micro_batch = MicroBatch(**GOOD)
    TrainBatch(micro_batches=(micro_batch,), total_sequences=2)
    with pytest.raises(ValueError, match="total_sequences = 1, but 2 are in it"):
        TrainBatch(micro_batches=(micro_batch,), total_sequences=1)
    split = MicroBatch(**{**GOOD, "split_S": np.array([-1, 1])})
    TrainBatch(micro_batches=(split, split), total_sequences=3, split_sequences=2)
    with pytest.raises(ValueError, match="total_sequences = 2, but 3 are in it"):
        TrainBatch(micro_batches=(split, split), total_sequences=2, split_sequences=2)
    with pytest.raises(ValueError, match="split_sequences = 1, but split_S goes up to 1"):
        TrainBatch(micro_batches=(split,), total_sequences=3, split_sequences=1)
    with pytest.raises(ValueError, match="no micro-batches"):
        TrainBatch(micro_batches=(), total_sequences=1)
