"""Synthetic load for the trainer: packed trajectories and engines with random weights.

The cost of a training step does not depend on the values of tokens, probabilities or weights.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from transformers import AutoModelForCausalLM, PreTrainedConfig

from keel.configs.schema import (
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.model.load import ModelFacts
from keel.rl.packing import MicroBatch
from keel.rl.recordings import NO_ROUTE, SamplingMasks
from keel.trainer.engine.engine import TrainerEngine

SOURCE = SourceConfig(name="made", source="reasoning_gym", task="chain_sum", size=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Micro-batch of `segments` packed trajectories of one length."""

    segments: int
    prompt: int
    completion: int
    """Sampled tokens, which follow the prompt."""
    vocabulary: int

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def tokens(self) -> int:
        return self.segments * self.length


def made_config(row: Row, trainer: TrainerConfig) -> Config:
    """Run config for such trajectories with truncated sampling."""
    return Config(
        model=ModelConfig(path="made", dtype="bfloat16"),
        data=DataConfig(sources=(SOURCE,), max_prompt_tokens=row.prompt),
        rollout=RolloutConfig(sampling=SamplingConfig(top_k=512, max_tokens=row.completion)),
        trainer=trainer,
    )


def draw_sets(tokens: int, vocabulary: int, mean: int, device: torch.device) -> tuple[Tensor, ...]:
    """Draw sampling masks: kept ids [E], offsets [tokens + 1] and one kept target per token.

    Set sizes are geometric and at least one. Ids within a set are distinct and favour small ids, as
    frequent tokens do. A mean of 0 means no truncation.
    """
    if mean == 0:
        targets = torch.randint(0, vocabulary, (tokens,), device=device)
        none = torch.zeros(0, dtype=torch.int32, device=device)
        return none, torch.zeros(tokens + 1, dtype=torch.int64, device=device), targets
    # Repeated ids are dropped, so draw more of them.
    drawn = mean * 1.06 if mean < 32 else mean * (1.12 if mean < 256 else 1.3)
    sizes = (torch.rand(tokens, device=device).log() * -drawn).long() + 1
    token = torch.repeat_interleave(torch.arange(tokens, device=device), sizes)
    ids = (torch.rand(token.numel(), device=device).pow(4) * vocabulary).long()
    pairs = torch.unique(token * vocabulary + ids.clamp(max=vocabulary - 1))
    token, ids = pairs // vocabulary, pairs % vocabulary
    sizes = torch.bincount(token, minlength=tokens)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    pick = offsets[:-1] + (torch.rand(tokens, device=device) * sizes).long()
    return ids.int(), offsets, ids[pick]


def draw_micro_batch(row: Row, mean_set: int, device: torch.device) -> MicroBatch:
    """Draw a micro-batch without routes."""
    position = np.tile(np.arange(row.length, dtype=np.int32), row.segments)
    segment = np.repeat(np.arange(row.segments), row.length)
    sampled = position >= row.prompt
    ids, offsets, targets = (
        tensor.cpu().numpy()
        for tensor in draw_sets(int(sampled.sum()), row.vocabulary, mean_set, device)
    )
    token_ids = np.random.default_rng(0).integers(0, row.vocabulary, row.tokens).astype(np.int32)
    token_ids[sampled] = targets
    sizes = np.zeros(row.tokens, np.int64)
    sizes[sampled] = np.diff(offsets)
    return MicroBatch(
        token_ids_N=token_ids,
        position_N=position,
        segment_N=segment.astype(np.int32),
        sequence_N=segment.astype(np.int64),
        trainable_N=sampled,
        logp_old_N=np.where(sampled, -2.0, 0.0).astype(np.float32),
        advantage_N=np.where(segment % 2 == 0, 0.5, -0.5).astype(np.float32),
        kl_coef_N=np.zeros(row.tokens, np.float32),
        sequence_tokens_S=np.full(row.segments, row.completion),
        sequence_weight_S=np.ones(row.segments, np.float32),
        sampling_mask=SamplingMasks(
            ids=ids.astype(np.int32), offsets=np.concatenate([[0], np.cumsum(sizes)])
        ),
    )


def with_even_routes(batch: MicroBatch, facts: ModelFacts, device: torch.device) -> MicroBatch:
    """Add routes that use all experts equally, like a trained router."""
    if not facts.experts:
        return batch
    shape = (len(batch.token_ids_N), facts.moe_layers, facts.experts)
    scores = torch.rand(shape, device=device)
    routes_NLK: NDArray[np.int16] = (
        scores.topk(facts.experts_per_token).indices.to(torch.int16).cpu().numpy()
    )
    last = np.append(np.flatnonzero(batch.position_N == 0)[1:], len(routes_NLK)) - 1
    routes_NLK[last] = NO_ROUTE
    return replace(batch, routes_NLK=routes_NLK)


class SyntheticEngine(TrainerEngine):
    """Trainer engine with random weights, drawn on the device of its rank."""

    def __init__(
        self,
        model: PreTrainedConfig,
        config: Config,
        *,
        rank: int = 0,
        store: Store | None = None,
    ) -> None:
        gpu = torch.cuda.is_available()
        with torch.device("cuda" if gpu else "cpu"):
            dtype = getattr(torch, config.model.dtype) if gpu else torch.float32
            made = AutoModelForCausalLM.from_config(model, dtype=dtype)
        super().__init__("made", config, rank=rank, store=store, loaded=made)
