"""The network as the trainer runs it: packed tokens in, log-probabilities of sampled tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.configs.schema import Config
from keel.model.attention import Segments, attention_kept, use_packed_attention
from keel.model.batch_invariant.layers import use_invariant_layers
from keel.model.device import to_device
from keel.model.disable_dropout import switch_off_noise
from keel.model.head.module import SupportHead, install_support_head
from keel.model.layers.flash4 import INSTALL, disagreement, head_shapes, missing
from keel.model.layers.fused import use_fused_layers
from keel.model.layers.residual import use_float32_residual
from keel.model.logprobs import (
    HeadInputs,
    head_inputs,
    kept_mass,
    policy_logprobs,
    trainable_rows,
)
from keel.model.rope import fix_long_rope
from keel.model.routing.replay import Replay, replay_routes
from keel.model.routing.routers import router_modules
from keel.model.sparse.attention import (
    SparsePass,
    check_sparse_attention,
    indexers,
    recorded_selection,
    use_sparse_attention,
)
from keel.model.tiny.build import default_cache_dir
from keel.model.ulysses import WHOLE, Slice
from keel.rl.packing import Loss, MicroBatch, TrainBatch
from keel.rl.types import NO_ROUTE, TokenNumbers
from keel.trainer.engine.zero import initialize

Attention = Literal["sparse", "warm-up", "dense"]


def flash4_here(config: Config, model: PreTrainedModel, device: torch.device) -> tuple[bool, str]:
    """Whether `model`'s attention is FlashAttention-4's in this run, on this device; and a line
    about it where only the package is not as it should be.

    Raises `RuntimeError` where the recipe asks for it in vain.
    """
    trainer, longest = config.trainer, config.max_context
    if config.model.batch_invariant or not trainer.flash4(longest) or device.type != "cuda":
        return False, ""
    if model.dtype == torch.float32:
        why = "they are for half precision, and model.dtype is float32"
    else:
        shapes = head_shapes(model, trainer.sequence_parallel)
        why = missing(device, default_cache_dir()) or disagreement(shapes, device, model.dtype)
    if not why:
        return True, ""
    if trainer.attention_kernels == "flash4":
        raise RuntimeError(f"trainer.attention_kernels = 'flash4': {why}. Leave it out (auto)")
    if not why.startswith(INSTALL):
        return False, ""
    return False, (
        f"{why}. Attention in contexts of {longest:,} tokens takes PyTorch's kernels, which are up "
        "to half as fast. Set trainer.attention_kernels to torch to have it said no more"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A micro-batch on the trainer's device: N tokens, R of them sampled, S trajectories.

    `*_R` entries are about sampled tokens in packed order. What the head and the routers are told
    stays in host memory, where it is checked and planned with.

    Under sequence parallelism the network's inputs (`token_ids`, `positions`, `head`, `routes_NLK`)
    are about this rank's part of the row; segments and `*_R`, which attention and the loss need
    whole, are about all of it.
    """

    token_ids: Tensor
    """[1, N]"""
    positions: Tensor
    """[1, N]"""
    segments: Segments
    loss: Loss
    part: Slice
    mine: slice
    """Which of R are about this rank's part: those that its hidden states predict."""
    ends: int
    """Tokens here that no engine had as an input: last of a segment, or filling."""
    filled: int
    """Tokens here that only fill the row up to equal parts."""
    head: HeadInputs
    logp_old_R: Tensor
    advantage_R: Tensor
    kl_coef_R: Tensor
    sequence_R: Tensor
    sequence_tokens_S: Tensor
    sequence_weight_S: Tensor
    split_S: Tensor | None
    routes_NLK: Tensor | None
    selected_NLk: NDArray[np.int32] | None
    position_N: NDArray[np.int32]
    watched: bool = False
    """Whether any segment is watched: see `seen_tokens`."""
    truncated: bool = False
    """Whether there are sampling masks in the step; the same on all ranks."""

    @property
    def padding(self) -> bool:
        """Whether this only keeps the ranks in step and trains on nothing."""
        return len(self.sequence_tokens_S) == 0

    @staticmethod
    def of(
        batch: MicroBatch,
        device: torch.device,
        part: Slice = WHOLE,
        *,
        probes: int = 1,
    ) -> Inputs:
        """Copies this rank's part of `batch` to `device`. probes: `head_inputs`."""

        def moved(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(array, dtype=dtype), device)

        count = len(batch.token_ids_N)
        last_N = np.append(np.diff(batch.segment_N) != 0, True)
        lengths = np.diff(np.flatnonzero(last_N), prepend=-1).tolist()
        follows = None if batch.follows is None else batch.follows.tolist()
        if follows is not None:  # the end of a beginning goes on
            last_N[last_N] = ~np.isin(np.arange(len(follows)), follows)
        if filled := part.filled(count):
            lengths.append(filled)  # a segment of its own
            follows = follows and [*follows, -1]
        rows = trainable_rows(batch)
        start, stop = part.bounds(count)
        head = head_inputs(batch, start, stop, probes=probes)
        before = int((rows <= start).sum())
        routes = batch.routes_NLK
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
            routes_NLK=None if routes is None else torch.tensor(part.cut(routes, NO_ROUTE)),
            selected_NLk=batch.selected_NLk,
            position_N=batch.position_N,
            watched=batch.watched is not None,
            truncated=batch.sampling_mask is not None,
        )


class PolicyNetwork(nn.Module):
    """A causal language model that scores sampled tokens and never forms full logits.

    One forward of this module, rather than calls to its parts, so that ZeRO-3 gathers and frees
    each submodule's parameters as they are used.
    """

    learning_indexers: int = 0
    """Layers whose indexer learns what to select."""
    replays: bool = True
    """Attends to what engines selected, where that was recorded."""

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
        """`context`: tokens that an engine's trajectories have at most (its `max_model_len`); None
        for a model to which it makes no difference. `attention` and `indexer_loss` are about a
        model with sparse attention: as in `trainer.attention`, and whether its indexers learn.
        `batch_invariant`: by the engine's own kernels. `wide_residual`: blocks' outputs are added
        up in float32. `flash4`: `use_packed_attention`. `learns_mass`: whether the mass of sampling
        masks has a gradient."""
        super().__init__()
        if context is not None:
            fix_long_rope(model, context)
        own = indexers(model)
        if own:
            check_sparse_attention()
            learning = indexer_loss and attention != "dense"
            model.requires_grad_(attention != "warm-up")
            for indexer in own:
                indexer.requires_grad_(learning)
            self.learning_indexers = len(own) if learning else 0
        use_sparse_attention(model)
        self._sparse, self._dense = bool(own), attention != "sparse"
        use_packed_attention(model, flash4=flash4)
        if batch_invariant:
            use_invariant_layers(model)
        else:
            use_fused_layers(model)
        if wide_residual:
            use_float32_residual(model)
        install_support_head(model)
        switch_off_noise(model)
        self.model = model
        self.config = model.config  # where DeepSpeed looks for facts about the experts
        self.temperature = temperature
        self._learns_mass = learns_mass

    @classmethod
    def of(cls, model: PreTrainedModel, config: Config, *, flash4: bool) -> Self:
        """As a run has it. flash4: as `flash4_here` says."""
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
        """Compute activations again in backward passes from now on, or all but attention's."""
        kept = {"context_fn": attention_kept} if keep_attention else {}
        self.model.gradient_checkpointing_enable({"use_reentrant": False, **kept})

    def forward(self, *, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Log-probability [R] (float32) of each sampled token over its mask; entropy [R] of that
        distribution, without gradient; the log-mass [m] of the masks of some of them
        (`keel.model.logprobs.kept_mass`; m = 0 in a pass without gradients, or without masks); the
        indexers' loss, summed over layers and tokens (0 without gradient where none is computed);
        and [2] of the attention that their top k hold, as in `SparsePass.held`, of all layers
        together. R and m: of this rank's part of the row."""
        learning = self.learning_indexers > 0 and torch.is_grad_enabled()
        warming = self._dense and self.learning_indexers > 0  # measured, too, where nothing learns
        sparse = SparsePass(dense=self._dense, loss=learning or warming)
        if self._sparse and self.replays and inputs.selected_NLk is not None:
            sparse.recorded_LNk = recorded_selection(
                self.model, inputs.selected_NLk, inputs.position_N
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
        lost = sparse.loss_sum() if sparse.losses else hidden.new_zeros(())
        none = hidden.new_zeros(2, dtype=torch.float32)
        held = torch.stack(sparse.held).sum(0) if sparse.held else none
        return *scores, log_mass, lost, held


class Reference:
    """The frozen initial policy that the KL term pulls towards.

    Each rank holds a whole copy, unless `sharded` (DeepSpeed's configuration under ZeRO-3 or expert
    parallelism) is given: then every rank must call `logp` each time. `replays`: sends tokens to
    the experts that the engine recorded.
    """

    def __init__(
        self,
        network: PolicyNetwork,
        device: torch.device,
        sharded: Mapping[str, Any] | None,
        *,
        replays: bool = False,
    ) -> None:
        self.network, self._replays = network.eval().requires_grad_(False), replays
        network.replays = False  # it selects by its own indexers, as it routes by its own routers
        self._forward: Callable[..., tuple[Tensor, ...]] = (
            network.to(device) if sharded is None else initialize(network, sharded, device)
        )

    @torch.no_grad()
    def logp(self, inputs: Inputs) -> Tensor:
        """[R] (of this rank's part) float32, over the same sampling masks as the policy's."""
        replays = self._replays and inputs.loss == "grpo"
        with recorded_routes(self.network, inputs) if replays else nullcontext():
            logp, *_ = self._forward(inputs=inputs)
        return logp


def indexer_weight(network: PolicyNetwork, config: Config, step: TrainBatch) -> float:
    """What the indexers' loss of a micro-batch (Σ over its tokens) counts in that of the step.

    Raises ValueError for a step whose tokens nobody has counted."""
    if not network.learning_indexers:
        return 0.0
    if step.total_tokens < 1:
        raise ValueError("train batch: total_tokens is 0, and the indexers' loss is a mean over it")
    return config.trainer.indexer_loss / step.total_tokens


def recorded_routes(network: PolicyNetwork, inputs: Inputs) -> AbstractContextManager[Any]:
    """Within it, `network` sends tokens to the experts that the engine recorded.

    Raises `ValueError` for a micro-batch without routes.
    """
    routes = inputs.routes_NLK
    if inputs.padding:
        # Replayed too, if nothing: ZeRO-3 wants one order of modules on all ranks, the backward
        # pass included, and a replayed router has another than one that runs alone.
        routers = router_modules(network.model)
        top_k = getattr(routers[0], "top_k", 0)
        routes = torch.full((inputs.token_ids.shape[1], len(routers), top_k), NO_ROUTE)
    if routes is None:
        raise ValueError(
            "algorithm.keep_routing is on and the model has routers, but a micro-batch came "
            "without recorded routes"
        )
    return replay_routes(network.model, routes, by_token=inputs.watched)


def seen_tokens(
    batch: MicroBatch, part: Slice, logp: Tensor, replay: Replay | None
) -> dict[int, TokenNumbers]:
    """What this rank sees of the watched segments, by their numbers. Waits for the device.

    part: this rank's; logp: [R], of the whole micro-batch; replay: of its forward pass, done.
    """
    if batch.watched is None:
        return {}
    count = len(batch.token_ids_N)
    logp_N, overlap_N = np.full((2, count), np.nan, np.float32)
    logp_N[trainable_rows(batch)] = logp.float().cpu().numpy()
    if replay is not None and (overlap := replay.overlap_N()) is not None:
        start, stop = part.bounds(count)
        here = max(0, min(stop, count) - start)
        overlap_N[start : start + here] = overlap[:here].float().cpu().numpy()
    found: dict[int, TokenNumbers] = {}
    for segment, number in enumerate(batch.watched):
        if number < 0:
            continue
        rows = batch.context_rows(segment)
        # Routes are about inputs: a token was predicted where the one before it went.
        overlap = np.append(np.float32(np.nan), overlap_N[rows[:-1]])
        found[int(number)] = TokenNumbers(logp_T=logp_N[rows], overlap_T=overlap)
    return found


def whole_sequences(
    inputs: Inputs, logp: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """[r] of this rank's part → [R] of the micro-batch, for a loss that looks at whole sequences.

    Gradient leads to this rank's own entries; the other ranks have the rest of it.
    """
    if inputs.part.group is None or inputs.padding:
        return logp, reference
    values = torch.stack([logp.detach()] if reference is None else [logp.detach(), reference])
    values = inputs.part.gather(values, inputs.mine, len(inputs.logp_old_R))
    before, after = values[0, : inputs.mine.start], values[0, inputs.mine.stop :]
    return torch.cat([before, logp, after]), None if reference is None else values[1]
