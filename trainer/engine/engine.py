"""Train with DeepSpeed on one rank, with GRPO or supervised learning. This module does not use Ray.

The loss of a micro-batch is its contribution to Eq. 8 (`keel.rl.losses`) or to the mean negative
log-likelihood (`keel.rl.sft`), so the total loss is the sum over all micro-batches and ranks.
DeepSpeed sums gradients over micro-batches but averages them over ranks, so each contribution is
multiplied by `trainer.ranks`. (DeepSpeed is configured to accumulate over one micro-batch, so it
divides the sum by one.)

All ranks in a sequence-parallel group compute the loss of the same micro-batch, but each rank's
gradient flows only through its own tokens. These gradients also add up, so DeepSpeed does not need
to know about the groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from transformers import PreTrainedModel

from keel.configs.schema import Config
from keel.model.load import load_policy
from keel.model.lora import add_adapters, save_adapter
from keel.model.routing import Replay, router_modules
from keel.model.torch_internals import limit_all_groups, to_device
from keel.model.trainable import decoder_layers
from keel.model.ulysses import Shard
from keel.rl.losses import LossOutput, grpo_loss, nll_loss
from keel.rl.metrics import Max, Mean, Metric, Sum, merge
from keel.rl.offpolicy import GapTotals, kept_mass_metrics, kept_mass_penalty
from keel.rl.packing import MicroBatch, TrainBatch
from keel.rl.summary import merge_optimizer_steps
from keel.rl.types import TokenNumbers
from keel.trainer.engine import zero
from keel.trainer.engine.checkpoint import Checkpoints
from keel.trainer.engine.deepspeed_internals import (
    EngineTensors,
    check_libraries,
    clip_apart,
    discard_gradient_sums,
    grow_loss_scale,
    sum_in_one_pass,
    trainable,
    whole_shape,
)
from keel.trainer.engine.expert_parallel import ExpertLayers, clip_gradients
from keel.trainer.engine.offload import NoOffload, Offload
from keel.trainer.engine.policy import (
    Inputs,
    PolicyNetwork,
    PolicyOutput,
    References,
    token_numbers,
)
from keel.trainer.engine.weights import (
    Load,
    Weights,
    build_from_outline,
    copy_weights,
    export_model,
    read_once,
)
from keel.trainer.nonfinite import Finding, NanTracer, SkipCounter
from keel.trainer.run.errors import UpdateOutOfMemory
from keel.trainer.run.manifest import Entry
from keel.weights.channel import FlatBucket

MIB = 2**20


class TrainerEngine:
    """The policy, optimizer and reference models of one rank. All methods except
    `recover` and `checkpoint_activations` are collective."""

    def __init__(
        self,
        model_path: str,
        config: Config,
        *,
        rank: int = 0,
        store: Store | None = None,
        loaded: PreTrainedModel | None = None,
    ) -> None:
        """Join the other ranks through `store` and load the weights. Pass `loaded` if the model is
        already in host memory."""
        trainer = config.trainer
        self._model_path, self._config = model_path, config
        self._rank = rank
        self.notes: list[str] = []  # warnings about optimizations that are not available
        check_libraries()
        # While a rank sends weights and waits for an engine, the others wait for it.
        timeout_s = trainer.timeout_s + config.sending_timeout_s
        self.device = zero.join_ranks(rank, trainer.ranks, store, timeout_s=timeout_s)
        dtype = zero.compute_dtype(config, self.device)
        torch.manual_seed(config.run.seed)
        self._stage = trainer.used_zero_stage(float32=dtype == torch.float32)
        self._scales_loss = dtype == torch.float16
        most = config.run.max_skipped_steps
        # In float16 the first steps may be skipped until the loss scale fits.
        self._skips = SkipCounter(max(most, zero.SCALE_POWER) if self._scales_loss else most)
        self.findings: list[Finding] = []
        """The tokens on this rank that made the gradient of the last `step` non-finite."""
        self._shard = Shard.join(trainer.sequence_parallel)

        warm_up = trainer.attention == "warm-up"
        load = partial(load_policy, model_path, dtype, new_indexers=warm_up)
        model, outline = read_once(load, dtype, readers=trainer.reading_ranks, loaded=loaded)
        if config.model.lora.enabled:
            add_adapters(model, config.model.lora, seed=config.run.seed)
        network = self._network = self._make_network(model)
        routers = router_modules(network.model)
        self._replays = bool(routers) and config.algorithm.keep_routing
        if trainer.activation_checkpointing:
            self.checkpoint_activations(keep_attention=trainer.keeps_attention)
        options = zero.deepspeed_config(trainer, dtype, self.device, network.model)
        self._adam: torch.optim.AdamW

        def make_adam(_: object) -> torch.optim.AdamW:
            self._adam = zero.create_adam(network, trainer, self.device)
            return self._adam

        self._engine = zero.initialize(network.train(), options, self.device, make_adam)
        if trainer.compile:
            zero.compile_layers(network.model)
        # Hooks would break compiled layers.
        self._traced_layers = () if trainer.compile else decoder_layers(network.model)
        expected = len(routers) if trainer.expert_parallel > 1 else 0
        experts = ExpertLayers(network.model, expected=expected)
        self._weights = Weights(network.model, experts, stage=self._stage)
        sharded = zero.frozen_config(options) if self._weights.sharded else None
        self._references = References(self.device, sharded)
        self._add_references(load, outline)
        self._float32_sums = dtype == torch.bfloat16 and trainer.sums_in_float32("bfloat16")
        if self._float32_sums:
            sum_in_one_pass(self._engine.optimizer)
        self._clipped_apart = zero.clipped_apart(network)
        if self._clipped_apart and self._stage > 0:
            clip_apart(self._engine.optimizer, self._clipped_apart)
        self._offload: Offload | NoOffload = NoOffload()
        if config.rollout.time_share:
            self._offload = Offload(self._engine, self._references.frozen, self.device, config)
        runs = {name: experts.runs(name, whole_shape(p)) for name, p in trainable(network.model)}
        self._checkpoints = Checkpoints(
            self._engine, self._adam, network.model, runs, stage=self._stage, device=self.device
        )
        # Groups made meanwhile would have PyTorch's default.
        limit_all_groups(timeout_s)
        self.steps = 0  # the number of rollout batches trained on so far
        self.version = 0  # the number of optimizer steps so far, including skipped ones
        self._updated = False
        self.token_numbers: dict[int, TokenNumbers] = {}
        """Per-token values from the last step for the segments to be saved, keyed by segment."""

    def _make_network(self, model: PreTrainedModel) -> PolicyNetwork:
        note = zero.use_flash4(self._config, model, self.device)
        if note and note not in self.notes:
            self.notes.append(note)
        return PolicyNetwork(model, self._config)

    def _add_references(self, load: Load, outline: bytes) -> None:
        config, references = self._config, self._references
        replays = self._replays and config.algorithm.ref_routing == "replay"
        if not config.data.uses_initial_model:
            references.add_none()
        elif config.model.lora.enabled:
            references.add_base(self._network, replays=replays)
        else:
            device = "cpu" if references.sharding_config else self.device
            initial = self._make_network(build_from_outline(outline, load, device))
            references.add_frozen(initial, replays=replays)
            if outline:
                copy_weights(self._network, initial, stage=self._stage)
        for path in config.data.references[1:]:
            dtype = zero.compute_dtype(config, self.device)
            references.add_frozen(self._make_network(load_policy(path, dtype)))
        for network in references.frozen if config.trainer.compile else ():
            zero.compile_layers(network.model)

    @property
    def gave_up(self) -> str:
        return self._skips.gave_up

    # Training

    def step(self, batches: Sequence[TrainBatch]) -> dict[str, Metric]:
        """Take one optimizer step per batch and return the metrics. Stops early once `gave_up`
        becomes true."""
        self.findings, self.token_numbers, self._updated = [], {}, False
        config = self._config
        lr, indexer_lr = (
            zero.learning_rate(self.steps + 1, trainer, total_steps=config.run.steps)
            for trainer in (config.trainer, config.trainer.of_indexers)
        )
        for group in self._adam.param_groups:
            group["lr"] = indexer_lr if group["indexers"] else lr
        steps = [self._optimizer_step(batch) for batch in batches if not self.gave_up]
        metrics = merge_optimizer_steps(steps)
        self.steps += 1
        if self._rank == 0:
            metrics["lr"] = Mean(lr, 1)
            if any(group["indexers"] for group in self._adam.param_groups):
                metrics["indexer/lr"] = Mean(indexer_lr, 1)
        return metrics

    def _optimizer_step(self, batch: TrainBatch) -> dict[str, Metric]:
        """Take one optimizer step: sum the gradients of all micro-batches, then update the
        weights."""
        algorithm = self._config.algorithm
        auxiliary = algorithm.kept_mass_coef > 0 or self._network.learning_indexers > 0
        if not batch.signal and (algorithm.skip_uniform_groups or not auxiliary):
            # Momentum and weight decay would move the weights, so Adam does not step. The version
            # counts, so that engines and trainer agree on it.
            self.version += 1
            return self._skip_metrics(non_finite=False, no_signal=True)
        self._offload.before_gradients()
        gaps = self._split_gaps(batch)
        last = len(batch.micro_batches) - 1
        results: list[_MicroBatchResults | None] = []
        for index, micro_batch in enumerate(batch.micro_batches):
            self._engine.set_gradient_accumulation_boundary(index == last)
            results.append(self._forward_backward(micro_batch, batch, gaps))
        self._updated = True
        norm, indexer_norm = self._apply_gradients()
        self.version += 1
        # Metrics are read after the update, so that the host does not wait for the device before.
        parts: list[dict[str, Metric]] = []
        for result in filter(None, results):
            parts.append(result.metrics())
            self.token_numbers |= result.token_numbers()
        if algorithm.mask_delta is not None:
            parts.append(gaps.end_step())
        skipped = self._skips.count(norm + indexer_norm, self.version)
        parts.append(self._skip_metrics(non_finite=skipped, no_signal=False))
        if skipped and (self.gave_up or not self._scales_loss):
            self._find_non_finite(batch)
        if self._rank == 0:
            if self._scales_loss:
                optimizer: Any = self._engine.optimizer
                parts.append({"train/loss_scale": Mean(float(optimizer.loss_scale), 1)})
            if not skipped:
                parts.append({"grad_norm": Mean(norm, 1)})
            if not skipped and self._clipped_apart:
                parts.append({"indexer/grad_norm": Mean(indexer_norm, 1)})
        return merge(parts)

    def _skip_metrics(self, *, non_finite: bool, no_signal: bool) -> dict[str, Metric]:
        if self._rank > 0:
            return {}
        return {
            "train/skipped_steps": Sum(float(non_finite)),
            "train/skipped_no_signal": Sum(float(no_signal)),
        }

    def _forward_backward(
        self,
        micro_batch: MicroBatch,
        batch: TrainBatch,
        gaps: SplitGaps,
        tracer: NanTracer | None = None,
    ) -> _MicroBatchResults | None:
        """Add a micro-batch's gradients to those of the step. Returns None for a micro-batch that
        is only padding."""
        config, network = self._config, self._network
        inputs = Inputs.of(micro_batch, self.device, self._shard, probes=config.algorithm.probes)
        reference = self._references.logp(inputs)
        with network.keep_routing(inputs, enabled=self._replays) as replay:
            output: PolicyOutput = self._engine(inputs=inputs)
            if inputs.only_padding:
                # Zero gradients for every parameter, so that all ranks reduce the same set.
                nothing = output.logp.sum() + output.log_mass.sum() + 0 * output.indexer_loss
                self._engine.backward(nothing)
                return None
            logp, reference = inputs.gather(output.logp, reference)
            total = batch.total_sequences
            policy = self._policy_loss(micro_batch, inputs, logp, reference, total, gaps)
            gaps.add(inputs, logp)
            penalty, kept_mass = self._kept_mass_penalty(inputs, output.log_mass, total)
            loss = policy.loss + penalty
            if network.learning_indexers:  # a mean over tokens
                loss = loss + output.indexer_loss * (
                    config.trainer.indexer_loss / batch.total_tokens
                )
            if tracer:
                tracer.observe(logp, reference, inputs.kl_coef_R, loss)
            # A NaN factor makes every gradient NaN if the loss is not finite. All ranks then see a
            # NaN gradient norm and skip the step.
            factor = tracer.factor if tracer else loss.detach() * 0 + 1
            self._engine.backward(loss * (factor * config.trainer.ranks))
        return _MicroBatchResults(
            policy=replace(policy, loss=policy.loss.detach()),
            entropy_sum=output.entropy.sum(),
            own_tokens=len(output.entropy),
            topk_attention=output.topk_attention,
            selection_overlap=output.selection_overlap,
            indexer_loss=output.indexer_loss.detach(),
            learning_indexers=network.learning_indexers,
            kept_mass=kept_mass,
            tokens=inputs.token_ids.shape[1] - inputs.padding_tokens,
            unrouted_tokens=inputs.unrouted_tokens,
            micro_batch=micro_batch,
            shard=inputs.shard,
            logp_R=None if micro_batch.saved is None else logp.detach(),
            replay=replay,
        )

    def _policy_loss(
        self,
        micro_batch: MicroBatch,
        inputs: Inputs,
        logp: Tensor,
        reference: Tensor | None,
        total_sequences: int,
        gaps: SplitGaps,
    ) -> LossOutput:
        if micro_batch.loss == "nll":
            return nll_loss(
                logp,
                inputs.sequence_R,
                sequence_tokens=inputs.sequence_tokens_S,
                total_sequences=total_sequences,
                sequence_weight=inputs.sequence_weight_S,
            )
        algorithm = self._config.algorithm
        with_kl = reference is not None or micro_batch.kl_coef_N.any()
        return grpo_loss(
            logp,
            inputs.logp_old_R,
            inputs.advantage_R,
            inputs.sequence_R,
            sequence_tokens=inputs.sequence_tokens_S,
            total_sequences=total_sequences,
            logp_ref=reference,
            kl_coef=inputs.kl_coef_R if with_kl else 0.0,  # a float avoids a device synchronisation
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            mask_delta=algorithm.mask_delta,
            kl=algorithm.kl,
            sequence_weight=inputs.sequence_weight_S,
            sequence_gap=gaps.sequence_gap(inputs),
        )

    def _kept_mass_penalty(
        self, inputs: Inputs, log_mass: Tensor, total_sequences: int
    ) -> tuple[Tensor, Tensor]:
        algorithm, sampling = self._config.algorithm, self._config.rollout.sampling
        weight = None
        if algorithm.kept_mass_coef > 0 and inputs.truncated:
            # Also without probes, because all ranks need the same graph.
            weight = to_device(inputs.head.uncut_probe_weight(sampling.top_k), self.device)
        return kept_mass_penalty(
            log_mass,
            weight,
            coef=algorithm.kept_mass_coef,
            top_p=sampling.top_p,
            total_sequences=total_sequences,
        )

    def _split_gaps(self, batch: TrainBatch) -> SplitGaps:
        """Compute the mean gaps of split trajectories before an optimizer step. Collective."""
        gaps = SplitGaps(batch, self.device)
        for micro_batch in batch.mask_pass:
            gaps.add(*self._forward_only(micro_batch)[:2])
        if batch.mask_pass:
            gaps.begin_step()
        return gaps

    def _forward_only(self, micro_batch: MicroBatch) -> tuple[Inputs, Tensor, Tensor]:
        """Run a forward pass without gradients. Returns the inputs, the log-probabilities [R], and
        `PolicyOutput.topk_attention`."""
        inputs = Inputs.of(micro_batch, self.device, self._shard)
        with torch.no_grad(), self._network.keep_routing(inputs, enabled=self._replays):
            output: PolicyOutput = self._engine(inputs=inputs)
        return inputs, inputs.gather(output.logp, None)[0], output.topk_attention

    def _apply_gradients(self) -> tuple[float, float]:
        """Take the optimizer step and return two gradient norms before clipping: that of all
        parameters except `_clipped_apart`, and that of these (0 if empty). If either is not finite,
        the gradients are discarded and the weights stay unchanged."""
        try:
            self._offload.before_update()
            if self._stage > 0:
                return self._apply_in_zero()
            clip = self._config.trainer.grad_clip or math.inf
            parameters = [*self._network.parameters()]  # the order makes the norms repeatable
            norm = clip_gradients((p for p in parameters if p not in self._clipped_apart), clip)
            apart = [p for p in parameters if p in self._clipped_apart]
            own = clip_gradients(apart, clip) if apart else 0.0
            if math.isfinite(norm + own):
                self._engine.step()
            else:
                self._engine.zero_grad()
            return norm, own
        except torch.OutOfMemoryError as error:
            raise UpdateOutOfMemory(
                f"the GPU has no room to update the weights ({error}). Smaller micro-batches do "
                "not help. Set trainer.offload_optimizer: true or rollout.time_share: true, or "
                "use a higher trainer.zero_stage or more trainer.ranks"
            ) from None

    def _apply_in_zero(self) -> tuple[float, float]:
        optimizer: Any = self._engine.optimizer
        self._engine.step()  # clips, and skips the step if the norm is not finite
        norm = self._engine.get_global_grad_norm()
        assert norm is not None
        if math.isfinite(norm):
            grow_loss_scale(self._engine, zero.SCALE_WINDOW)
        else:
            discard_gradient_sums(self._engine)
        return float(norm), optimizer.apart_norm if self._clipped_apart else 0.0

    def _find_non_finite(self, batch: TrainBatch) -> None:
        """Rerun a skipped step's forward and backward passes to find the tokens that caused the
        skip. The weights are not updated."""
        self._offload.before_gradients()
        gaps = self._split_gaps(batch)
        tracer = NanTracer(self._traced_layers)
        self._engine.set_gradient_accumulation_boundary(False)
        for micro_batch in batch.micro_batches:
            with tracer.trace(micro_batch, self._shard.bounds(len(micro_batch.token_ids_N))[0]):
                self._forward_backward(micro_batch, batch, gaps, tracer)
        # A non-finite loss makes all ranks skip again and drop what DeepSpeed has accumulated.
        self._engine.set_gradient_accumulation_boundary(True)
        tracer.factor = math.nan
        self._forward_backward(batch.micro_batches[0], batch, gaps, tracer)
        self._apply_gradients()
        self.findings += tracer.findings

    def evaluate_nll(self, batch: TrainBatch) -> dict[str, Metric]:
        """Return `nll` for a batch of conversations, plus `indexer/held` during the indexer
        warmup."""
        self._offload.load()
        parts: list[dict[str, Metric]] = []
        for micro_batch in batch.micro_batches:
            _, logp, topk_attention = self._forward_only(micro_batch)
            parts.append(_indexer_metrics(topk_attention))
            if self._shard.rank == 0:  # its group has the same log-probabilities
                parts.append({"nll": Mean(-float(logp.double().sum()), len(logp))})
        return merge(parts)

    def recover(self) -> bool:
        """Clean up after `step` ran out of memory. Returns True if training can continue, which
        requires that there is only one rank, that the error occurred before the update, and that
        the gradient sums aren't in ZeRO's buffers."""
        self._offload.mark_crowded()
        outside_zero = self._stage == 0 or self._float32_sums
        alone = self._config.trainer.ranks == 1 and outside_zero and not self._updated
        if alone:
            self._network.zero_grad(set_to_none=True)
            for total in EngineTensors(self._engine).gradient_sums():
                if total.untyped_storage().nbytes():  # it may be offloaded
                    total.zero_()
            torch.cuda.empty_cache()
        return alone

    def checkpoint_activations(self, *, keep_attention: bool) -> None:
        """Turn on activation checkpointing. With `keep_attention`, attention outputs are kept
        rather than recomputed."""
        self._network.checkpoint_activations(keep_attention=keep_attention)

    # Weights

    def buckets(self, *, requested: bool) -> Iterator[FlatBucket]:
        """Yield the current weights on this rank's device, in the engines' dtype. If `requested` is
        False, only help the other ranks gather weights, without yielding any. With
        `rollout.time_share`, engines wake up during this call, so tensors that don't fit alongside
        them are offloaded."""
        if requested or self._weights.sharded:
            self._offload.load()
        self._offload.offload(weights=False)
        if requested:
            dtype = getattr(torch, self._config.engine_dtype)
            yield from self._weights.buckets(dtype, self._config.trainer.publish_bucket_mib * MIB)
        else:
            self._weights.gather_along()
        self._offload.offload(weights=True)

    def export(self, folder: Path) -> dict[str, Entry]:
        self._offload.load()
        model, config = self._network.model, self._config.model
        if config.lora.enabled and self._rank == 0:
            save_adapter(folder / "adapter", model, config.lora, self._model_path)
        return export_model(folder, model, self._weights, config, self._model_path)

    # Checkpoints

    def save(self, folder: Path) -> dict[str, Entry]:
        self._offload.load(state=True)
        return self._checkpoints.save(folder, {"steps": self.steps, "version": self.version})

    def load(self, folder: Path) -> None:
        """Restore a saved state. If the ranks are laid out differently, results can differ by
        rounding error, because values are summed in a different order."""
        self._offload.load(state=True)
        progress = self._checkpoints.load(folder)
        self.steps, self.version = progress["steps"], progress["version"]


class SplitGaps:
    """The mean of log π_old − log π_θ for each of the P trajectories that are split across
    micro-batches or ranks. The sequence mask needs the means from before the optimizer step."""

    def __init__(self, batch: TrainBatch, device: torch.device) -> None:
        sampled = batch.micro_batches[0].loss == "grpo"
        count = self._count = batch.split_sequences if sampled else 0
        self._totals = GapTotals(count, device)
        self._before_P = torch.full((count,), torch.nan, dtype=torch.float64, device=device)
        """The means before the step. NaN for trajectories that the mask can never drop, and for all
        of them without `TrainBatch.mask_pass`."""

    def add(self, inputs: Inputs, logp: Tensor) -> None:
        # All ranks of a sequence-parallel group have the same.
        if self._count and inputs.split_S is not None and inputs.shard.rank == 0:
            self._totals.add(logp, inputs.logp_old_R, inputs.split_S[inputs.sequence_R])

    def begin_step(self) -> None:
        """Compute the mean gaps before the step from everything added so far. Collective."""
        self._before_P = self._all_reduce_means()
        self._totals = GapTotals(self._count, self._before_P.device)

    def sequence_gap(self, inputs: Inputs) -> Tensor | None:
        """Return the argument `sequence_gap` [S] of `keel.rl.losses.grpo_loss` for a micro-batch,
        or None if the micro-batch contains no split trajectories."""
        if inputs.split_S is None:
            return None
        gaps = self._before_P[inputs.split_S.clamp(min=0)]
        return torch.where(inputs.split_S < 0, torch.nan, gaps)

    def end_step(self) -> dict[str, Metric]:
        """Return metrics for the trajectories added during the step. Collective."""
        if not self._count:
            return {}
        return {"mask/logp_gap_max": Max(float(self._all_reduce_means().clamp(min=0).amax()))}

    def _all_reduce_means(self) -> Tensor:
        dist.all_reduce(self._totals.sums_2P)
        return self._totals.means()


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatchResults:
    """Results of a micro-batch that the device may still be computing. They keep neither the graph
    nor the inputs alive."""

    policy: LossOutput
    """Output of the loss function, detached."""
    entropy_sum: Tensor
    own_tokens: int
    """Number r of sampled tokens that this rank predicts."""
    topk_attention: Tensor
    selection_overlap: Tensor
    indexer_loss: Tensor
    learning_indexers: int
    kept_mass: Tensor
    """Totals for `kept_mass_metrics`."""
    tokens: int
    """Number of this rank's tokens without padding."""
    unrouted_tokens: int
    micro_batch: MicroBatch
    shard: Shard
    logp_R: Tensor | None
    """Log-probabilities of the row, if one of its segments will be saved."""
    replay: Replay | None

    def metrics(self) -> dict[str, Metric]:
        """Wait for the device and return the metrics."""
        values: dict[str, Metric] = {
            "entropy/kept": Mean(float(self.entropy_sum), self.own_tokens),
            "train/tokens": Sum(self.tokens),
        }
        if self.learning_indexers:
            count = self.tokens * self.learning_indexers
            values["indexer/kl"] = Mean(float(self.indexer_loss), count)
        values |= _indexer_metrics(self.topk_attention) | kept_mass_metrics(self.kept_mass)
        share, queries = self.selection_overlap.tolist()
        if queries:
            values["selection/overlap"] = Mean(share, queries)
        if self.shard.rank == 0:  # its group has the same
            values |= self.policy.metrics
            if self.micro_batch.follows is not None:
                values["train/shared_tokens"] = Sum(self.micro_batch.shared_tokens)
        if self.replay is not None:
            values |= self.replay.metrics(unrouted=self.unrouted_tokens)
        return values

    def token_numbers(self) -> dict[int, TokenNumbers]:
        if self.logp_R is None:
            return {}
        return token_numbers(self.micro_batch, self.shard, self.logp_R, self.replay)


def _indexer_metrics(topk_attention: Tensor) -> dict[str, Metric]:
    """Return `indexer/held`: the fraction of attention on the top k keys, averaged over layers and
    over queries with more than k keys."""
    attention, queries = topk_attention.tolist()
    return {"indexer/held": Mean(attention, queries)} if queries else {}
