"""Conversations in ids, and the packed micro-batches of an optimizer step on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keel.rl.packing.batch import TrainBatch
from keel.rl.packing.pack import Layout, deal
from keel.rl.packing.prefix_sharing import singly
from keel.rl.packing.work import Work, split_long
from keel.rl.types import Segment

Average = Literal["tokens", "conversations"]
"""What the loss is a mean over."""
_LAYOUT = Layout(routes=None, kept=False, loss="nll")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A conversation to learn from. Its segments are contexts, as those of a `Trajectory`."""

    prompt_id: str
    """Unique within a run, and the same in every start of it."""
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if self.learned_tokens == 0:
            raise ValueError(f"conversation {self.prompt_id}: no token to learn")

    @property
    def learned_tokens(self) -> int:
        """|o_i|, over all segments."""
        return sum(int(segment.trainable_T.sum()) for segment in self.segments)

    @property
    def total_tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)

    @property
    def longest(self) -> int:
        """Tokens of its longest segment."""
        return max(len(segment.token_ids_T) for segment in self.segments)


def shown(
    prompt_id: str, ids: Sequence[int] | NDArray[np.int32], said: Sequence[bool] | NDArray[np.bool_]
) -> Segment:
    """A segment that nobody sampled: `said` marks the tokens to learn."""
    count = len(ids)
    return Segment(
        prompt_id=prompt_id,
        token_ids_T=np.asarray(ids, np.int32),
        trainable_T=np.asarray(said, np.bool_),
        # One number in memory, however long: no loss looks at them.
        logp_old_T=np.broadcast_to(np.float32(0), count),
        version_T=np.broadcast_to(np.int32(-1), count),
    )


def pack_lessons(
    lessons: Sequence[Lesson], *, ranks: int, micro_batch_tokens: int, mean: Average = "tokens"
) -> list[TrainBatch]:
    """One `TrainBatch` a rank, for one optimizer step on all of `lessons`, as
    `keel.rl.packing.pack` makes them.

    A conversation has the weight |o_i| B / Σ |o_j| where the loss is a mean over tokens, and 1
    where it is one over conversations (`keel.rl.sft.loss.nll_loss`). A conversation that
    fills more than a micro-batch falls into its segments, which stand wherever there is room.

    Raises `ValueError` without any.
    """
    if not lessons:
        raise ValueError("lessons: there is none to learn from")
    tokens = sum(lesson.learned_tokens for lesson in lessons)
    whole = [
        Work(
            lesson.segments,
            lesson.learned_tokens,
            advantage=0.0,
            kl_coef=0.0,
            weight=lesson.learned_tokens * len(lessons) / tokens if mean == "tokens" else 1.0,
        )
        for lesson in lessons
    ]
    (work,), split = split_long([whole], micro_batch_tokens)
    dealt = deal(singly(work), _LAYOUT, ranks=ranks, capacity=micro_batch_tokens)
    return [
        TrainBatch(
            micro_batches=micro_batches,
            total_sequences=len(lessons),
            total_tokens=sum(item.tokens for item in work),
            split_sequences=split,
        )
        for micro_batches in dealt
    ]
