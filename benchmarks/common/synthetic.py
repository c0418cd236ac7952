"""Synthetic load for the trainer's benchmarks: packed trajectories and engines with random weights.

No cost of a training step depends on what the tokens, probabilities or weights are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.common.batch_shape import Row
from keel.configs.schema import Config
from keel.model.load import ModelFacts
from keel.model.routing.replay import record_routes
from keel.rl.packing import MicroBatch
from keel.rl.types import NO_ROUTE, KeptSets
from keel.trainer.engine.engine import TrainerEngine
from keel.trainer.engine.policy import Inputs


def draw_sets(tokens: int, vocabulary: int, mean: int, device: torch.device) -> tuple[Tensor, ...]:
    """Kept ids (frequent ids first), offsets and one kept target a token.

    Set sizes are geometric, at least 1; ids differ within a set. `vocabulary` is how many ids the
    sets are drawn from. mean 0: nothing was truncated.
    """
    if mean == 0:
        targets = torch.randint(0, vocabulary, (tokens,), device=device)
        none = torch.zeros(0, dtype=torch.int32, device=device)
        return none, torch.zeros(tokens + 1, dtype=torch.int64, device=device), targets
    # Repeated ids are dropped, so more are drawn.
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


def draw_micro_batch(
    row: Row, mean_set: int, device: torch.device, *, kl_coef: float = 0.0
) -> MicroBatch:
    """Without routes."""
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
        kl_coef_N=np.where(sampled, kl_coef, 0.0).astype(np.float32),
        sequence_tokens_S=np.full(row.segments, row.completion),
        sequence_weight_S=np.ones(row.segments, np.float32),
        kept=KeptSets(ids=ids.astype(np.int32), offsets=np.concatenate([[0], np.cumsum(sizes)])),
    )


def with_live_routes(engine: TrainerEngine, batch: MicroBatch) -> MicroBatch:
    """The batch with the routes that the engine's model chooses by itself."""
    network, inputs = engine._network, Inputs.of(batch, engine._device)
    with torch.no_grad(), record_routes(network.model) as recording:
        network(inputs=inputs)
    return _routed(batch, recording.routes())


def with_even_routes(batch: MicroBatch, facts: ModelFacts, device: torch.device) -> MicroBatch:
    """The batch with experts drawn evenly, as a model sends its tokens that was trained to."""
    if not facts.experts:
        return batch
    shape = (len(batch.token_ids_N), facts.moe_layers, facts.experts)
    scores = torch.rand(shape, device=device)
    return _routed(batch, scores.topk(facts.experts_per_token).indices)


def _routed(batch: MicroBatch, routes_NLK: Tensor) -> MicroBatch:
    routes: NDArray[np.int16] = routes_NLK.to(torch.int16).cpu().numpy()
    routes[np.append(np.flatnonzero(batch.position_N == 0)[1:], len(routes)) - 1] = NO_ROUTE
    return replace(batch, routes_NLK=routes)


class SyntheticEngine(TrainerEngine):
    """A trainer engine whose weights are drawn where they are used, and not read from a folder."""

    def __init__(self, model: PreTrainedConfig, config: Config, **ranks: object) -> None:
        self._made = model
        super().__init__("made", config, **ranks)  # type: ignore[arg-type]

    def _load(self, model_path: str, dtype: torch.dtype) -> PreTrainedModel:
        with self._device:
            return AutoModelForCausalLM.from_config(self._made, dtype=dtype)
