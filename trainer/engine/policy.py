"""The policy network, which computes log-probabilities of packed tokens, and the reference models.

A packed row stores everything about token t (its probability, sampling mask and advantage) at
position t, but the network predicts token t at position t−1. `HeadInputs.of`, `Inputs.of` and
`token_numbers` account for this shift.

Shapes: under sequence parallelism, several ranks share a row. N counts the tokens of this rank's
shard of the row, R the sampled tokens of the whole row, r those of the R that this rank predicts,
and S the trajectories of the row. M counts the probes among the r tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.configs.schema import Config
from keel.model.attention import Segments, attention_kept, use_packed_attention
from keel.model.batch_invariant.layers import use_invariant_layers
from keel.model.layers.fused import use_fused_layers
from keel.model.layers.residual import use_float32_residual
from keel.model.logprobs import SupportHead, install_support_head
from keel.model.lora import adapters_off
from keel.model.routing import Replay, replay_routes, router_modules
from keel.model.sparse.attention import (
    SparsePass,
    indexers,
    recorded_selection,
    use_sparse_attention,
)
from keel.model.torch_internals import to_device
from keel.model.transformers_internals import disable_dropout, fix_long_rope
from keel.model.ulysses import WHOLE, Shard
from keel.rl.packing import Loss, MicroBatch
from keel.rl.recordings import NO_ROUTE, SamplingMasks
from keel.rl.types import TokenNumbers
from keel.trainer.engine.zero import initialize

_CUT = 4
"""A sampling mask counts as possibly cut by top-k if it has more than 1/`_CUT` of the ids that
top-k allows. Top-k is applied before top-p, but it makes no difference where a few ids hold nearly
all of the probability."""


class PolicyNetwork(nn.Module):
    """A causal language model that computes log-probabilities of sampled tokens without
    materializing the full logits."""

    learning_indexers: int = 0
    """Number of layers with a sparse-attention indexer that is being trained."""
    replays_selections: bool = True
    """True if sparse attention replays the token selections recorded by the engines, if any."""

    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        super().__init__()
        attention = config.trainer.attention
        fix_long_rope(model, config.max_context)
        found_indexers = indexers(model)
        if found_indexers:
            learning = config.trainer.indexer_loss > 0 and attention != "dense"
            model.requires_grad_(attention != "warm-up")
            for indexer in found_indexers:
                indexer.requires_grad_(learning)
            self.learning_indexers = len(found_indexers) if learning else 0
        use_sparse_attention(model)
        self._sparse, self._dense = bool(found_indexers), attention != "sparse"
        use_packed_attention(model)
        if config.model.batch_invariant:
            use_invariant_layers(model)
        else:
            use_fused_layers(model)
        if config.model.wide_residual:
            use_float32_residual(model)
        install_support_head(model)
        disable_dropout(model)
        self.model = model
        self.config = model.config  # DeepSpeed reads it
        self.temperature = config.rollout.sampling.temperature
        self._learns_mass = config.algorithm.kept_mass_coef > 0

    def checkpoint_activations(self, *, keep_attention: bool) -> None:
        """Turn on activation checkpointing. With `keep_attention`, attention outputs are kept
        rather than recomputed."""
        options = {"context_fn": attention_kept} if keep_attention else {}
        self.model.gradient_checkpointing_enable({"use_reentrant": False, **options})

    def forward(self, *, inputs: Inputs) -> PolicyOutput:
        learning = self.learning_indexers > 0 and torch.is_grad_enabled()
        warming = self._dense and self.learning_indexers > 0  # measured without gradient, too
        sparse = SparsePass(dense=self._dense, loss=learning or warming)
        if self._sparse and self.replays_selections and inputs.selected_NLb is not None:
            sparse.recorded_LNb = recorded_selection(
                self.model, inputs.selected_NLb, inputs.position_N
            )
        options = {"sparse": sparse} if self._sparse else {}
        hidden = self.model.get_decoder()(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            segments=inputs.segments,
            **options,
        ).last_hidden_state
        head = self.model.get_output_embeddings()
        assert isinstance(head, SupportHead)
        logp, entropy = inputs.head.logprobs(hidden, head, temperature=self.temperature)
        log_mass = logp.new_zeros(0)
        if inputs.truncated and torch.is_grad_enabled():
            with torch.set_grad_enabled(self._learns_mass):
                log_mass = inputs.head.kept_mass(hidden, head, logp, temperature=self.temperature)
        indexer_loss = sparse.loss_sum() if sparse.losses else hidden.new_zeros(())
        none = hidden.new_zeros(2, dtype=torch.float32)
        topk_attention, overlap = (
            torch.stack(layers).sum(0) if layers else none
            for layers in (sparse.topk_attention, sparse.overlap)
        )
        return PolicyOutput(logp, entropy, log_mass, indexer_loss, topk_attention, overlap)

    def keep_routing(
        self, inputs: Inputs, *, enabled: bool = True
    ) -> AbstractContextManager[Replay | None]:
        """Return a context in which each token is routed to the experts recorded by the engine.
        Without recorded tokens, as in conversations to learn from, or if not `enabled`, the routers
        choose the experts."""
        if not enabled or inputs.loss != "grpo":
            return nullcontext()
        routes = inputs.routes_NLK
        if inputs.only_padding:
            # Replays nothing, but keeps the order of modules that ZeRO-3 needs equal on all ranks.
            routers = router_modules(self.model)
            top_k = getattr(routers[0], "top_k", 0)
            routes = torch.full((inputs.token_ids.shape[1], len(routers), top_k), NO_ROUTE)
        if routes is None:
            raise ValueError(
                "algorithm.keep_routing is on and the model has routers, but a micro-batch has no "
                "recorded routes"
            )
        return replay_routes(self.model, routes, by_token=inputs.saved)


class PolicyOutput(NamedTuple):
    """The float32 results of a forward pass over this rank's shard of a row."""

    logp: Tensor
    """[r], log-probability of each sampled token among the ids in its sampling mask."""
    entropy: Tensor
    """[r], entropy of that distribution, without gradient."""
    log_mass: Tensor
    """[M], log mass of the masks of the probes. M = 0 without gradients or masks."""
    indexer_loss: Tensor
    """[], loss of the indexers, summed over layers and tokens."""
    topk_attention: Tensor
    """[2], attention within the indexers' top k (`SparsePass.topk_attention`), over all layers."""
    selection_overlap: Tensor
    """[2], overlap of recorded and own selections (`SparsePass.overlap`), over all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A micro-batch on the trainer's device. Inputs to the head and the routers stay in host
    memory, where they are checked.

    Under sequence parallelism, `token_ids`, `positions`, `head` and `*_N*` cover only this rank's
    shard of the row, whereas `segments` and `*_R` cover the whole row.
    """

    token_ids: Tensor
    """[1, N]"""
    positions: Tensor
    """[1, N]"""
    segments: Segments
    loss: Loss
    shard: Shard
    """This rank's shard of the row. The other ranks of `shard.group` have the rest."""
    own_R: slice
    """The r of the R sampled tokens that this rank predicts. The other ranks of the group predict
    the rest."""
    unrouted_tokens: int
    """Number of this rank's N tokens that have no recorded routes, because they were never an input
    to an engine. These are padding and the last token of each segment."""
    padding_tokens: int
    """Number of this rank's N tokens that are padding. The row is padded at the end so that all
    ranks' shards have the same length."""
    head: HeadInputs
    logp_old_R: Tensor
    advantage_R: Tensor
    kl_coef_R: Tensor
    sequence_R: Tensor
    sequence_tokens_S: Tensor
    sequence_weight_S: Tensor
    split_S: Tensor | None
    reference_S: Tensor | None
    routes_NLK: Tensor | None
    selected_NLb: NDArray[np.uint8] | None
    position_N: NDArray[np.int32]
    saved: bool = False
    """True if a segment will be saved to disk, so that `token_numbers` is needed."""
    truncated: bool = False
    """True if the step has sampling masks. Has the same value on all ranks."""

    @property
    def only_padding(self) -> bool:
        """True if the micro-batch is empty. The rank runs it only to take part in the other ranks'
        collectives."""
        return len(self.sequence_tokens_S) == 0

    @staticmethod
    def of(
        batch: MicroBatch, device: torch.device, shard: Shard = WHOLE, *, probes: int = 1
    ) -> Inputs:
        """Copy this rank's shard of `batch` to `device`. See `HeadInputs.of` for `probes`."""

        def moved(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(array, dtype=dtype), device)

        count = len(batch.token_ids_N)
        last_N = np.append(np.diff(batch.segment_N) != 0, True)
        lengths = np.diff(np.flatnonzero(last_N), prepend=-1).tolist()
        follows = None if batch.follows is None else batch.follows.tolist()
        if follows is not None:  # a shared beginning continues after its end
            last_N[last_N] = ~np.isin(np.arange(len(follows)), follows)
        if padding := shard.filled(count):
            lengths.append(padding)  # a separate segment
            follows = follows and [*follows, -1]
        rows = batch.sampled_rows
        start, stop = shard.bounds(count)
        head = HeadInputs.of(batch, start, stop, probes=probes)
        # Hidden state t−1 predicts token t, so the token at `start` belongs to the rank before.
        first = int((rows <= start).sum())
        routes, selected = batch.routes_NLK, batch.selected_NLb
        return Inputs(
            token_ids=moved(shard.cut(batch.token_ids_N, 0), torch.long)[None],
            positions=moved(shard.cut(batch.position_N, 0), torch.long)[None],
            segments=Segments.of(lengths, device, shard.group, follows),
            loss=batch.loss,
            shard=shard,
            own_R=slice(first, first + len(head.rows)),
            unrouted_tokens=int(shard.cut(last_N, True).sum()),
            padding_tokens=stop - max(start, min(stop, count)),
            head=head,
            logp_old_R=moved(batch.logp_old_N[rows], torch.float32),
            advantage_R=moved(batch.advantage_N[rows], torch.float32),
            kl_coef_R=moved(batch.kl_coef_N[rows], torch.float32),
            sequence_R=moved(batch.sequence_N[rows], torch.long),
            sequence_tokens_S=moved(batch.sequence_tokens_S, torch.long),
            sequence_weight_S=moved(batch.sequence_weight_S, torch.float32),
            split_S=None if batch.split_S is None else moved(batch.split_S, torch.long),
            reference_S=None if batch.reference_S is None else moved(batch.reference_S, torch.long),
            routes_NLK=None if routes is None else torch.tensor(shard.cut(routes, NO_ROUTE)),
            selected_NLb=None if selected is None else shard.cut(selected, 0),
            position_N=shard.cut(batch.position_N, 0),
            saved=batch.saved is not None,
            truncated=batch.sampling_mask is not None,
        )

    def gather(self, logp: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Gather the values [r] from all shards of the row into [R]. Gradients flow back only to
        this rank's own values."""
        if self.shard.group is None or self.only_padding:
            return logp, reference
        values = torch.stack([logp.detach()] if reference is None else [logp.detach(), reference])
        values = self.shard.gather(values, self.own_R, len(self.logp_old_R))
        before, after = values[0, : self.own_R.start], values[0, self.own_R.stop :]
        return torch.cat([before, logp, after]), None if reference is None else values[1]


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """Inputs to the output layer for the sampled tokens that a rank predicts, in host memory. They
    depend only on the micro-batch, so all forward passes over it can share them."""

    rows: Tensor
    """[r] int64, positions t of the sampled tokens, ascending."""
    hidden_rows: Tensor
    """[r] int64, positions t−1, where the tokens are predicted, counted from the shard's start."""
    targets: Tensor
    kept_ids: Tensor
    kept_offsets: Tensor
    """[r+1] int64. If sampling was not truncated, all masks are empty."""
    probes: Tensor
    """[M] int64, indices into the r tokens: a few tokens per segment for `kept_mass`. The choice
    depends only on the segment's sampled tokens, and not on packing."""
    probe_weight: Tensor
    """[M] float32, weight w_i / |o_i| from Eq. 5, multiplied by the number of tokens that the probe
    represents. A weighted sum over probes therefore estimates a sum over all tokens."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(
        batch: MicroBatch, start: int = 0, stop: int | None = None, *, probes: int = 1
    ) -> HeadInputs:
        """Collect the inputs for the hidden states of the positions `start` to `stop` − 1. A
        sampled token t is never the first in its segment, so the position t−1 that predicts it is
        in the same segment. `probes` is the maximum number of evenly spaced probes per segment."""
        sampled = batch.sampled_rows
        stop = len(batch.token_ids_N) if stop is None else stop
        rows = sampled[(sampled > start) & (sampled <= stop)]
        probed, represented = _choose_probes(batch, sampled, probes)
        here = (probed > start) & (probed <= stop)
        probed, represented = probed[here], represented[here]
        owner = batch.sequence_N[probed]
        weight = represented * batch.sequence_weight_S[owner] / batch.sequence_tokens_S[owner]
        masks = _select_masks(batch.sampling_mask, rows, len(batch.token_ids_N))
        return HeadInputs(
            rows=torch.from_numpy(rows),
            hidden_rows=torch.from_numpy(rows - 1 - start),
            targets=torch.from_numpy(batch.token_ids_N[rows].astype(np.int64)),
            kept_ids=torch.from_numpy(masks.ids),
            kept_offsets=torch.from_numpy(masks.offsets),
            probes=torch.from_numpy(np.searchsorted(rows, probed)),
            probe_weight=torch.from_numpy(weight.astype(np.float32)),
        )

    def logprobs(
        self, hidden_ND: Tensor, head: Callable[..., Any], *, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Compute log π_θ of the r tokens, and the entropy over their masks, with a `SupportHead`.

        `hidden_ND` are the final hidden states, [N, D] or [1, N, D]. Returns two [r] float32
        tensors. The entropy has no gradient. On a rank with only padding, both are empty, but the
        first one is still part of a graph with zero gradients. Include its sum in the loss, so that
        the ZeRO and data-parallel hooks run.
        """
        hidden_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
        return head(
            hidden_ND.index_select(0, to_device(self.hidden_rows, hidden_ND.device)),
            self.targets,
            self.kept_ids,
            self.kept_offsets,
            temperature=temperature,
            memo=self.memo,
        )

    def kept_mass(
        self,
        hidden_ND: Tensor,
        head: Callable[..., Any],
        logp: Tensor,
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """For each probe, compute log Σ_{v∈S} π(v), the log-probability of the whole sampling mask.
        Returns [M].

        `logp` [r] comes from `logprobs` and is normalized over the masks. A second pass covers the
        whole vocabulary, since π(o) = π(o | S) · Σ_{v∈S} π(v), and gradients flow through both. See
        `keel.rl.offpolicy.kept_mass_shortfall`.
        """
        hidden_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
        whole, _ = head(
            hidden_ND.index_select(0, to_device(self.hidden_rows[self.probes], hidden_ND.device)),
            self.targets[self.probes],
            self.kept_ids[:0],
            torch.zeros(len(self.probes) + 1, dtype=torch.int64),
            temperature=temperature,
            memo={},
        )
        return whole - logp[to_device(self.probes, logp.device)]

    def uncut_probe_weight(self, top_k: int) -> Tensor:
        """Return `probe_weight` [M], with 0 for masks that top-k may have cut (`_CUT`), because
        their probability at sampling time is unknown."""
        uncut = _CUT * self.kept_offsets.diff()[self.probes] <= top_k
        return self.probe_weight * uncut


def _choose_probes(
    batch: MicroBatch, rows: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Choose up to `most` evenly spaced rows in each segment, and count how many rows each of them
    represents. The first chosen row depends on the sum of the segment's sampled token ids."""
    _, first, owner, counts = np.unique(
        batch.segment_N[rows], return_index=True, return_inverse=True, return_counts=True
    )
    if not len(first):
        return rows, np.zeros(0)
    stride = -(-counts // most)
    offset = np.add.reduceat(batch.token_ids_N[rows].astype(np.int64), first)
    probed = (np.arange(len(rows)) - first[owner] - offset[owner]) % stride[owner] == 0
    chosen = owner[probed]
    return rows[probed], (counts / np.bincount(chosen))[chosen]


def _select_masks(
    masks: SamplingMasks | None, rows: NDArray[np.int64], tokens: int
) -> SamplingMasks:
    if masks is None:
        return SamplingMasks.empty(len(rows))
    sizes = masks.sizes()
    selected = np.zeros(tokens, np.bool_)
    selected[rows] = True
    # Usually only sampled tokens have spans; then no copy is needed.
    ids = masks.ids if not sizes[~selected].any() else masks.ids[np.repeat(selected, sizes)]
    return SamplingMasks(
        ids=ids, offsets=np.concatenate([np.zeros(1, np.int64), sizes[rows].cumsum()])
    )


class _Reference(NamedTuple):
    network: PolicyNetwork
    forward: Callable[..., PolicyOutput]
    replays: bool

    @torch.no_grad()
    def logp(self, inputs: Inputs) -> Tensor:
        with self.network.keep_routing(inputs, enabled=self.replays):
            return self.forward(inputs=inputs).logp


class References:
    """The reference models for the KL terms, in the same order as `DataConfig.references`: the
    initial policy, or None if it is not needed, and teachers."""

    def __init__(self, device: torch.device, sharding_config: Mapping[str, Any] | None) -> None:
        """`sharding_config` is DeepSpeed's config under ZeRO-3 or expert parallelism. Every rank
        then has to call every model. Otherwise it is None, and each rank holds full copies."""
        self._device, self.sharding_config = device, sharding_config
        self._models: list[_Reference | None] = []
        self.frozen: list[PolicyNetwork] = []  # the models that have their own network

    def add_none(self) -> None:
        self._models.append(None)

    def add_frozen(self, network: PolicyNetwork, *, replays: bool = False) -> None:
        """Add a model with its own network. If `replays` is set, each token is routed to the
        experts recorded by the engine."""
        network.eval().requires_grad_(False)
        network.replays_selections = False  # uses its own indexers
        if self.sharding_config is None:
            forward: Any = network.to(self._device)
        else:
            forward = initialize(network, self.sharding_config, self._device)
        self._models.append(_Reference(network, forward, replays))
        self.frozen.append(network)

    def add_base(self, network: PolicyNetwork, *, replays: bool) -> None:
        """Add the initial model of a policy that trains with LoRA: its own network without the
        adapters."""

        def forward(*, inputs: Inputs) -> PolicyOutput:
            with adapters_off(network.model):
                return network(inputs=inputs)

        self._models.append(_Reference(network, forward, replays))

    def logp(self, inputs: Inputs) -> Tensor | None:
        """Return float32 log-probabilities [r] of the sampled tokens that this rank predicts,
        normalized over the sampling masks, or None if there are no models. Each trajectory is
        scored by its own reference model. The values of trajectories without one are NaN."""
        if not any(self._models):
            return None
        first, *teachers = self._models
        if not teachers:
            assert first is not None
            return first.logp(inputs)
        owner_r = inputs.sequence_R[inputs.own_R]
        index_S = inputs.reference_S
        index_r = torch.zeros_like(owner_r) if index_S is None else index_S[owner_r]
        logp_r = torch.full(index_r.shape, torch.nan, device=index_r.device)
        for index, model in enumerate(self._models):
            used = index_r == index
            if model is not None and (self.sharding_config is not None or bool(used.any())):
                logp_r = torch.where(used, model.logp(inputs), logp_r)
        return logp_r


def token_numbers(
    batch: MicroBatch, shard: Shard, logp: Tensor, replay: Replay | None
) -> dict[int, TokenNumbers]:
    """Return per-token values for the segments to be saved (`batch.saved`), keyed by segment
    number. The values are the log-probabilities and the overlap between the trainer's routing and
    the engine's. `logp` [R] covers the whole row. `replay` must come from a completed
    forward pass over that micro-batch."""
    if batch.saved is None:
        return {}
    count = len(batch.token_ids_N)
    logp_N, overlap_N = np.full((2, count), np.nan, np.float32)
    logp_N[batch.sampled_rows] = logp.float().cpu().numpy()
    if replay is not None and (overlap := replay.overlap_N()) is not None:
        start, stop = shard.bounds(count)
        here = max(0, min(stop, count) - start)
        overlap_N[start : start + here] = overlap[:here].float().cpu().numpy()
    numbers: dict[int, TokenNumbers] = {}
    for segment, number in enumerate(batch.saved):
        if number < 0:
            continue
        rows = batch.context_rows(segment)
        # A token is predicted by the position before it, whose routes count.
        overlap = np.append(np.float32(np.nan), overlap_N[rows[:-1]])
        numbers[int(number)] = TokenNumbers(logp_T=logp_N[rows], overlap_T=overlap)
    return numbers
