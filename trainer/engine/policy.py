"""The trainer's policy network, which computes log-probabilities of packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.configs.schema import Config
from keel.model.attention import (
    Segments,
    attention_kept,
    flash4_disagreement,
    use_packed_attention,
)
from keel.model.batch_invariant.layers import use_invariant_layers
from keel.model.head.support import SupportHead, install_support_head
from keel.model.layers.flash4 import INSTALL, head_shapes, missing
from keel.model.layers.fused import use_fused_layers
from keel.model.layers.residual import use_float32_residual
from keel.model.logprobs import (
    HeadInputs,
    head_inputs,
    kept_mass,
    policy_logprobs,
    trainable_rows,
)
from keel.model.lora import adapters_off
from keel.model.routing import Replay, replay_routes, router_modules
from keel.model.sparse.attention import (
    SparsePass,
    indexers,
    recorded_selection,
    use_sparse_attention,
)
from keel.model.tiny.build import default_cache_dir
from keel.model.torch_internals import specialise_and_recompute, to_device
from keel.model.trainable import decoder_layers
from keel.model.transformers_internals import disable_dropout, fix_long_rope
from keel.model.ulysses import WHOLE, Slice
from keel.rl.packing import Loss, MicroBatch
from keel.rl.types import NO_ROUTE, TokenNumbers
from keel.trainer.engine.zero import initialize

Attention = Literal["sparse", "warm-up", "dense"]
BACKEND = "inductor"
"""The backend for torch.compile. On a CPU, it needs a C++ compiler and takes minutes to compile."""


def use_flash4(config: Config, model: PreTrainedModel, device: torch.device) -> tuple[bool, str]:
    """Return whether to use FlashAttention-4, along with a warning if a missing package is the only
    thing preventing it. Raises RuntimeError if the recipe requires FlashAttention-4 but it can't be
    used."""
    trainer, longest = config.trainer, config.max_context
    if config.model.batch_invariant or not trainer.flash4(longest) or device.type != "cuda":
        return False, ""
    if model.dtype == torch.float32:
        reason = "it needs half precision, but model.dtype is float32"
    else:
        shapes = head_shapes(model, trainer.sequence_parallel)
        reason = missing(device, default_cache_dir())
        reason = reason or flash4_disagreement(shapes, device, model.dtype)
    if not reason:
        return True, ""
    if trainer.attention_kernels == "flash4":
        raise RuntimeError(f"trainer.attention_kernels = flash4: {reason}. Set it to auto")
    if not reason.startswith(INSTALL):
        return False, ""
    return False, (
        f"{reason}. Attention over {longest:,} tokens uses PyTorch's kernels, which are up to half "
        "as fast. Set trainer.attention_kernels to torch to hide this warning"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A micro-batch on the trainer's device. This rank's shard of the row has N tokens. The whole
    row has R sampled tokens, in S trajectories.

    Inputs to the head and the routers stay in host memory, where they are checked. Under sequence
    parallelism, `token_ids`, `positions`, `head` and `*_N*` cover only this rank's shard of the
    row, whereas `segments` and `*_R` cover the whole row.
    """

    token_ids: Tensor
    """[1, N]"""
    positions: Tensor
    """[1, N]"""
    segments: Segments
    loss: Loss
    part: Slice
    """This rank's shard of the row. The other ranks of `part.group` have the rest."""
    mine: slice
    """The slice of the R sampled tokens that this rank's hidden states predict. The other ranks of
    the group predict the rest."""
    ends: int
    """Number of this rank's N tokens that have no recorded routes, because they were never an input
    to an engine. These are padding and the last token of each segment."""
    filled: int
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
    watched: bool = False
    """True if a segment will be saved to disk, so that `seen_tokens` is needed."""
    truncated: bool = False
    """True if the step has sampling masks. Has the same value on all ranks."""

    @property
    def padding(self) -> bool:
        """True if the micro-batch is empty. The rank runs it only to take part in the other ranks'
        collectives."""
        return len(self.sequence_tokens_S) == 0

    @staticmethod
    def of(
        batch: MicroBatch, device: torch.device, part: Slice = WHOLE, *, probes: int = 1
    ) -> Inputs:
        """Copy this rank's shard of `batch` to `device`. See `head_inputs` for `probes`."""

        def moved(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(array, dtype=dtype), device)

        count = len(batch.token_ids_N)
        last_N = np.append(np.diff(batch.segment_N) != 0, True)
        lengths = np.diff(np.flatnonzero(last_N), prepend=-1).tolist()
        follows = None if batch.follows is None else batch.follows.tolist()
        if follows is not None:  # a shared beginning continues after its end
            last_N[last_N] = ~np.isin(np.arange(len(follows)), follows)
        if filled := part.filled(count):
            lengths.append(filled)  # a separate segment
            follows = follows and [*follows, -1]
        rows = trainable_rows(batch)
        start, stop = part.bounds(count)
        head = head_inputs(batch, start, stop, probes=probes)
        # Hidden state t−1 predicts token t, so the token at `start` belongs to the rank before.
        before = int((rows <= start).sum())
        routes, selected = batch.routes_NLK, batch.selected_NLb
        return Inputs(
            token_ids=moved(part.cut(batch.token_ids_N, 0), torch.long)[None],
            positions=moved(part.cut(batch.position_N, 0), torch.long)[None],
            segments=Segments.of(lengths, device, part.group, follows),
            loss=batch.loss,
            part=part,
            mine=slice(before, before + len(head.rows)),
            ends=int(part.cut(last_N, True).sum()),
            filled=stop - max(start, min(stop, count)),
            head=head,
            logp_old_R=moved(batch.logp_old_N[rows], torch.float32),
            advantage_R=moved(batch.advantage_N[rows], torch.float32),
            kl_coef_R=moved(batch.kl_coef_N[rows], torch.float32),
            sequence_R=moved(batch.sequence_N[rows], torch.long),
            sequence_tokens_S=moved(batch.sequence_tokens_S, torch.long),
            sequence_weight_S=moved(batch.sequence_weight_S, torch.float32),
            split_S=None if batch.split_S is None else moved(batch.split_S, torch.long),
            reference_S=None if batch.reference_S is None else moved(batch.reference_S, torch.long),
            routes_NLK=None if routes is None else torch.tensor(part.cut(routes, NO_ROUTE)),
            selected_NLb=None if selected is None else part.cut(selected, 0),
            position_N=part.cut(batch.position_N, 0),
            watched=batch.watched is not None,
            truncated=batch.sampling_mask is not None,
        )


class PolicyNetwork(nn.Module):
    """A causal language model that computes log-probabilities of sampled tokens without
    materializing the full logits."""

    learning_indexers: int = 0
    """Number of layers with a sparse-attention indexer that is being trained."""
    replays: bool = True
    """True if sparse attention replays the token selections recorded by the engines, if any."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        context: int | None = None,
        attention: Attention = "sparse",
        indexer_loss: bool = True,
        batch_invariant: bool = False,
        wide_residual: bool = False,
        flash4: bool = False,
        learns_mass: bool = False,
    ) -> None:
        """`context` is the engines' `max_model_len`. Set `indexer_loss` if the indexers are
        trained. Set `learns_mass` to make the sampling masks' probability mass differentiable."""
        super().__init__()
        if context is not None:
            fix_long_rope(model, context)
        found_indexers = indexers(model)
        if found_indexers:
            learning = indexer_loss and attention != "dense"
            model.requires_grad_(attention != "warm-up")
            for indexer in found_indexers:
                indexer.requires_grad_(learning)
            self.learning_indexers = len(found_indexers) if learning else 0
        use_sparse_attention(model)
        self._sparse, self._dense = bool(found_indexers), attention != "sparse"
        use_packed_attention(model, flash4=flash4)
        if batch_invariant:
            use_invariant_layers(model)
        else:
            use_fused_layers(model)
        if wide_residual:
            use_float32_residual(model)
        install_support_head(model)
        disable_dropout(model)
        self.model = model
        self.config = model.config  # DeepSpeed reads it
        self.temperature = temperature
        self._learns_mass = learns_mass

    @classmethod
    def of(cls, model: PreTrainedModel, config: Config, *, flash4: bool) -> Self:
        return cls(
            model,
            temperature=config.rollout.sampling.temperature,
            context=config.max_context,
            attention=config.trainer.attention,
            indexer_loss=config.trainer.indexer_loss > 0,
            batch_invariant=config.model.batch_invariant,
            wide_residual=config.model.wide_residual,
            flash4=flash4,
            learns_mass=config.algorithm.kept_mass_coef > 0,
        )

    def recompute(self, *, keep_attention: bool) -> None:
        """Turn on activation checkpointing. With `keep_attention`, attention outputs are kept
        rather than recomputed."""
        options = {"context_fn": attention_kept} if keep_attention else {}
        self.model.gradient_checkpointing_enable({"use_reentrant": False, **options})

    def forward(self, *, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute log-probabilities of the sampled tokens in this rank's shard of the row.

        Returns five float32 tensors, where r counts the shard's sampled tokens (`Inputs.mine`):

            logp [r]: log-probability of each sampled token among the ids in its sampling mask
            entropy [r]: entropy of that distribution, without gradient
            log_mass [m]: log mass of the masks chosen by `probes`; m = 0 without gradients or masks
            loss []: loss of the indexers, summed over layers and tokens
            held [2]: attention within the indexers' top k (`SparsePass.held`), over all layers
        """
        learning = self.learning_indexers > 0 and torch.is_grad_enabled()
        warming = self._dense and self.learning_indexers > 0  # measured without gradient, too
        sparse = SparsePass(dense=self._dense, loss=learning or warming)
        if self._sparse and self.replays and inputs.selected_NLb is not None:
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
        scores = policy_logprobs(hidden, head, inputs.head, temperature=self.temperature)
        log_mass = scores[0].new_zeros(0)
        if inputs.truncated and torch.is_grad_enabled():
            with torch.set_grad_enabled(self._learns_mass):
                log_mass = kept_mass(
                    hidden, head, inputs.head, scores[0], temperature=self.temperature
                )
        indexer_loss = sparse.loss_sum() if sparse.losses else hidden.new_zeros(())
        none = hidden.new_zeros(2, dtype=torch.float32)
        held = torch.stack(sparse.held).sum(0) if sparse.held else none
        return *scores, log_mass, indexer_loss, held


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer on its first call, for any number of tokens.

    Each layer becomes a single graph. With several graphs per layer, launching them would take
    longer than a small micro-batch takes on the GPU. MoE blocks aren't compiled, because their
    shapes depend on the routing, and because Keep Routing (`keel.model.routing`) hooks into them.
    Attention is compiled only if it uses flash attention.
    """
    routers = set(router_modules(model))
    for block in model.modules():
        if routers & set(block.children()):
            block.forward = torch.compiler.disable(block.forward)
    specialise_and_recompute()
    for layer in decoder_layers(model):
        layer.compile(backend=BACKEND, dynamic=True)


class ReferencePolicy:
    """A frozen model for the KL term: either the initial policy or a teacher."""

    def __init__(
        self,
        network: PolicyNetwork,
        forward: Callable[..., tuple[Tensor, ...]],
        *,
        replays: bool = False,
    ) -> None:
        """If `replays` is set, each token is routed to the experts recorded by the engine."""
        self.network, self._forward, self._replays = network, forward, replays

    @classmethod
    def frozen(
        cls,
        network: PolicyNetwork,
        device: torch.device,
        sharded: Mapping[str, Any] | None,
        *,
        replays: bool = False,
    ) -> Self:
        """Create a reference policy with its own network. `sharded` is DeepSpeed's config under
        ZeRO-3 or expert parallelism. Otherwise it is None, and each rank holds a full copy."""
        network.eval().requires_grad_(False)
        network.replays = False  # uses its own indexers
        forward = network.to(device) if sharded is None else initialize(network, sharded, device)
        return cls(network, forward, replays=replays)

    @classmethod
    def base(cls, network: PolicyNetwork, *, replays: bool) -> Self:
        """Create a reference policy from a policy that trains with LoRA by using its network
        without the adapters."""

        def forward(*, inputs: Inputs) -> tuple[Tensor, ...]:
            with adapters_off(network.model):
                return network(inputs=inputs)

        return cls(network, forward, replays=replays)

    @torch.no_grad()
    def logp(self, inputs: Inputs) -> Tensor:
        """Return float32 log-probabilities [r] of the sampled tokens in this rank's shard,
        normalized over the sampling masks."""
        replays = self._replays and inputs.loss == "grpo"
        with recorded_routes(self.network, inputs) if replays else nullcontext():
            logp, *_ = self._forward(inputs=inputs)
        return logp


class References:
    """The reference models for the KL terms, in the same order as `DataConfig.references`."""

    def __init__(self, models: Sequence[ReferencePolicy | None], *, together: bool) -> None:
        """Set `together` if the weights are sharded. Every rank then has to call every model."""
        self._models, self._together = models, together

    def logp(self, inputs: Inputs) -> Tensor | None:
        """Return float32 log-probabilities [r] of the sampled tokens in this rank's shard, or None
        if there are no models. Each trajectory is scored by its own reference model. The values of
        trajectories without one are NaN."""
        if not any(self._models):
            return None
        first, *teachers = self._models
        if not teachers:
            assert first is not None
            return first.logp(inputs)
        owner_R = inputs.sequence_R[inputs.mine]
        kind_S = inputs.reference_S
        kind_R = torch.zeros_like(owner_R) if kind_S is None else kind_S[owner_R]
        logp_R = torch.full(kind_R.shape, torch.nan, device=kind_R.device)
        for kind, model in enumerate(self._models):
            if model is not None and (self._together or bool((kind_R == kind).any())):
                logp_R = torch.where(kind_R == kind, model.logp(inputs), logp_R)
        return logp_R


def recorded_routes(network: PolicyNetwork, inputs: Inputs) -> AbstractContextManager[Any]:
    """Return a context in which each token is routed to the experts recorded by the engine."""
    routes = inputs.routes_NLK
    if inputs.padding:
        # Replays nothing, but keeps the order of modules that ZeRO-3 needs equal on all ranks.
        routers = router_modules(network.model)
        top_k = getattr(routers[0], "top_k", 0)
        routes = torch.full((inputs.token_ids.shape[1], len(routers), top_k), NO_ROUTE)
    if routes is None:
        raise ValueError(
            "algorithm.keep_routing is on and the model has routers, but a micro-batch has no "
            "recorded routes"
        )
    return replay_routes(network.model, routes, by_token=inputs.watched)


def seen_tokens(
    batch: MicroBatch, part: Slice, logp: Tensor, replay: Replay | None
) -> dict[int, TokenNumbers]:
    """Return per-token values for the segments to be saved (`batch.watched`), keyed by segment
    number. The values are the log-probabilities and the overlap between the trainer's routing and
    the engine's. `logp` [R] covers the whole micro-batch. `replay` must come from a completed
    forward pass over that micro-batch."""
    if batch.watched is None:
        return {}
    count = len(batch.token_ids_N)
    logp_N, overlap_N = np.full((2, count), np.nan, np.float32)
    logp_N[trainable_rows(batch)] = logp.float().cpu().numpy()
    if replay is not None and (overlap := replay.overlap_N()) is not None:
        start, stop = part.bounds(count)
        here = max(0, min(stop, count) - start)
        overlap_N[start : start + here] = overlap[:here].float().cpu().numpy()
    numbers: dict[int, TokenNumbers] = {}
    for segment, number in enumerate(batch.watched):
        if number < 0:
            continue
        rows = batch.context_rows(segment)
        # A token is predicted by the position before it, whose routes count.
        overlap = np.append(np.float32(np.nan), overlap_N[rows[:-1]])
        numbers[int(number)] = TokenNumbers(logp_T=logp_N[rows], overlap_T=overlap)
    return numbers


def whole_sequences(
    inputs: Inputs, logp: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gather the values [r] from all shards of a micro-batch into [R]. Gradients flow back only to
    this rank's own values."""
    if inputs.part.group is None or inputs.padding:
        return logp, reference
    values = torch.stack([logp.detach()] if reference is None else [logp.detach(), reference])
    values = inputs.part.gather(values, inputs.mine, len(inputs.logp_old_R))
    before, after = values[0, : inputs.mine.start], values[0, inputs.mine.stop :]
    return torch.cat([before, logp, after]), None if reference is None else values[1]
