"""Build supervised fine-tuning examples and divide them into batches. The loss is
`keel.rl.losses.nll_loss`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keel.rl.packing import PackPlan
from keel.rl.prefix_sharing import PackItem, arrange, split_long
from keel.rl.types import Segment

Average = Literal["tokens", "conversations"]
"""Whether the loss is averaged over tokens or over conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftExample:
    """A conversation to train on. Like a `Trajectory`, it consists of one or more segments."""

    prompt_id: str  # id that is unique within a run and stays the same after a restart
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if self.learned_tokens == 0:
            raise ValueError(f"conversation {self.prompt_id}: no token to learn")

    @property
    def learned_tokens(self) -> int:
        """Number of tokens to train on across all segments, |o_i|."""
        return sum(int(segment.trainable_T.sum()) for segment in self.segments)

    @property
    def total_tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)

    @property
    def longest(self) -> int:
        """Number of tokens in the longest segment."""
        return max(len(segment.token_ids_T) for segment in self.segments)


def supervised_segment(
    prompt_id: str,
    ids: Sequence[int] | NDArray[np.int32],
    learned: Sequence[bool] | NDArray[np.bool_],
) -> Segment:
    """Build a segment from text that the policy did not sample. `learned` marks the tokens to train
    on."""
    count = len(ids)
    return Segment(
        prompt_id=prompt_id,
        token_ids_T=np.asarray(ids, np.int32),
        trainable_T=np.asarray(learned, np.bool_),
        # The loss ignores both fields, so one broadcast number is enough.
        logp_old_T=np.broadcast_to(np.float32(0), count),
        version_T=np.broadcast_to(np.int32(-1), count),
    )


def plan_sft(
    examples: Sequence[SftExample],
    *,
    replicas: int,
    micro_batch_tokens: int,
    mean: Average = "tokens",
) -> list[PackPlan]:
    """Divide the examples of one optimizer step among the data-parallel replicas. Returns a plan
    for each replica. An example's weight is |o_i| B / Σ |o_j| when averaging over tokens, and 1
    when averaging over conversations (see `nll_loss`). The segments of an example that does not fit
    into a micro-batch are packed separately."""
    tokens = sum(example.learned_tokens for example in examples)
    whole = [
        PackItem(
            example.segments,
            example.learned_tokens,
            advantage=0.0,
            kl_coef=0.0,
            weight=example.learned_tokens * len(examples) / tokens if mean == "tokens" else 1.0,
        )
        for example in examples
    ]
    (items,), split = split_long([whole], micro_batch_tokens)
    return [
        PackPlan(
            micro_batches=plans,
            total_sequences=len(examples),
            total_tokens=sum(item.tokens for item in items),
            split_sequences=split,
            loss="nll",
        )
        for plans in arrange([items], replicas=replicas, capacity=micro_batch_tokens)
    ]
