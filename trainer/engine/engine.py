"""One rank of the trainer: GRPO or supervised steps on a DeepSpeed engine. Knows nothing of Ray.

The loss of a micro-batch is its share of Eq. 8 (`keel.rl.losses`), or of the mean negative
log-likelihood (`keel.rl.sft`): shares add up over micro-batches and ranks. DeepSpeed
adds gradients up over micro-batches (it is told to accumulate over one, so it divides by one) and
averages them over ranks, hence the factor `world_size` on each share. Ranks of a sequence-parallel
group have the loss of one micro-batch, each with the gradient through its own tokens, so theirs add
up as well and DeepSpeed need not know of the groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from transformers import PreTrainedModel

from keel.configs.schema import Config
from keel.model.load import load_policy
from keel.model.routing.routers import router_modules
from keel.model.trainable import decoder_layers
from keel.model.transformers_internals import check_transformers
from keel.model.ulysses import Slice
from keel.rl.metrics import Mean, Metric, Sum, merge
from keel.rl.packing import MicroBatch, TrainBatch
from keel.rl.summary import of_updates
from keel.rl.types import TokenNumbers
from keel.trainer.engine.checkpoint import Checkpoints
from keel.trainer.engine.deepspeed_internals import sum_in_one_pass
from keel.trainer.engine.expert_parallel import ExpertLayers
from keel.trainer.engine.export import export_model
from keel.trainer.engine.layer_compile import compile_layers, warm_up, worth_it
from keel.trainer.engine.lr_schedule import learning_rate
from keel.trainer.engine.objectives import LOSSES, SplitGaps, counted, looked_at, mass_share
from keel.trainer.engine.offload import make_offload
from keel.trainer.engine.policy import (
    Inputs,
    PolicyNetwork,
    Reference,
    flash4_here,
    indexer_weight,
    recorded_routes,
    seen_tokens,
    whole_sequences,
)
from keel.trainer.engine.process_group import join_ranks, limit_waits
from keel.trainer.engine.state.optimizer_internals import sums_missed
from keel.trainer.engine.weights import Weights, copy_weights, read_once, twin
from keel.trainer.engine.zero import (
    SCALE_POWER,
    adam_for,
    apply_gradients,
    check_libraries,
    compute_dtype,
    deepspeed_config,
    drop_gradients,
    frozen_config,
    initialize,
    room_to_update,
    zero_stage,
)
from keel.trainer.nonfinite import Finding, Look, Skips, sound
from keel.trainer.placement.memory import reading_ranks, sums_in_float32
from keel.trainer.run.checkpoint import layout_of
from keel.trainer.run.manifest import Entry
from keel.weights.buckets import Bucket, FlatBucket, in_host_memory

MIB = 2**20
_LOG = logging.getLogger(__name__)


class TrainerEngine:
    """Policy, optimizer and reference policy of one rank. Every method but the properties is
    collective: all ranks call it, in the same order."""

    def __init__(
        self,
        model_path: str,
        config: Config,
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        read: PreTrainedModel | None = None,
    ) -> None:
        """Join the other ranks through `store` (a rank on its own needs none); load the weights.

        read: the model at `model_path`, if this rank has it in host memory already.
        """
        trainer = config.trainer
        if world_size != trainer.ranks:
            raise ValueError(
                f"trainer.ranks = {trainer.ranks}, but {world_size} ranks were started"
            )
        self._model_path, self._config = model_path, config
        self._rank, self._world_size = rank, world_size
        self.notes: list[str] = []
        """What is lost because a library is not as Keel knows it: one line each, also logged."""
        self._note(check_libraries(expert_parallel=trainer.expert_parallel))
        # A rank that sends weights, and waits for an engine, keeps the others waiting.
        timeout_s = trainer.timeout_s + config.sending_timeout_s
        self._device = join_ranks(rank, world_size, store, timeout_s=timeout_s)
        dtype = compute_dtype(config, self._device)
        torch.manual_seed(config.run.seed)
        self._stage = zero_stage(trainer, dtype)
        self._scaled = dtype == torch.float16
        most = config.run.max_skipped_steps
        self._skips = Skips(max(most, SCALE_POWER) if self._scaled else most)  # see `zero`
        self.findings: list[Finding] = []
        """What made gradients of the last `step` other than finite, on this rank."""
        self._part = Slice.join(trainer.sequence_parallel)

        load = partial(self._load, model_path, dtype)
        model, written = read_once(load, dtype, readers=reading_ranks(trainer), read=read)
        network = self._network = self._made_of(model)
        self._note(check_transformers(network.model))
        routers = router_modules(network.model)
        self._replays = bool(routers) and config.algorithm.keep_routing
        if trainer.activation_checkpointing:
            self.recompute(keep_attention=trainer.keeps_attention)
        options = deepspeed_config(trainer, dtype, self._device, network.model)
        self._adam: torch.optim.AdamW

        def make_adam(_: object) -> torch.optim.AdamW:
            self._adam = adam_for(network, trainer, self._device)
            return self._adam

        made = self._engine = initialize(network.train(), options, self._device, make_adam)
        if trainer.compile:
            compile_layers(network.model)
        self._layers = () if trainer.compile else decoder_layers(network.model)
        spread = ExpertLayers(network.model, expected=(trainer.expert_parallel > 1) * len(routers))
        self._weights = Weights(network.model, spread, stage=self._stage)
        self._reference = frozen = None
        if any(source.kl_coef > 0 for source in config.data.sources):
            sharded = frozen_config(options) if self._weights.gathered else None
            replays = self._replays and config.algorithm.ref_routing == "replay"
            frozen = self._made_of(twin(written, load, "cpu" if sharded else self._device))
            self._reference = Reference(frozen, self._device, sharded, replays=replays)
            if written:
                copy_weights(network, frozen, stage=self._stage)
            if trainer.compile:
                compile_layers(frozen.model)
        summed = self._summed = dtype == torch.bfloat16 and sums_in_float32("bfloat16", trainer)
        self._note(sum_in_one_pass(made.optimizer) if summed else sums_missed(made))
        of = (self._engine, frozen, self._device, config)
        self._offload, note = make_offload(*of, stage=self._stage, sums=summed)
        self._note(note)
        self._checkpoints = Checkpoints(
            self._engine, self._adam, network.model, spread, stage=self._stage, device=self._device
        )
        limit_waits(timeout_s)  # of groups for ZeRO, experts and sequences
        self._steps, self._version, self._applied = 0, 0, False
        self.tokens: dict[int, TokenNumbers] = {}  # of the last step's watched segments

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def version(self) -> int:
        """Optimizer steps so far, those skipped for lack of a signal or of a finite gradient
        included."""
        return self._version

    @property
    def gave_up(self) -> str:
        """Why no more steps are to be taken: too many in a row had no finite gradient; "" else."""
        return self._skips.gave_up

    @property
    def steps(self) -> int:
        """Calls of `step` so far: batches of rollouts trained on."""
        return self._steps

    # Training

    def warm_up(self, *, whole: bool = False) -> None:
        """Compile what steps need, where nobody has to wait for it (`layer_compile.warm_up`)."""
        if worth_it(self._config, gpu=self._device.type == "cuda", whole=whole):
            of = (self._config, self._device, self._part)
            warm_up(self._network, self._reference, *of, whole=whole)

    def step(self, batches: Sequence[TrainBatch], *, examine: bool = False) -> dict[str, Metric]:
        """Train on one batch of rollouts: one optimizer step for each of `batches`, in order, or
        until `gave_up`. Metrics are those of `keel.rl.summary.of_updates`. examine: look for what
        made it skip a step also in float16."""
        self.findings, self.tokens, self._applied = [], {}, False
        config = self._config
        lr = learning_rate(self._steps + 1, config.trainer, total_steps=config.run.steps)
        for group in self._adam.param_groups:
            group["lr"] = lr
        done = [self._update(batch, examine) for batch in batches if not self.gave_up]
        metrics = of_updates(done)
        self._steps += 1
        return {**metrics, "lr": Mean(lr, 1)} if self._rank == 0 else metrics

    def forgotten(self) -> bool:
        """Drop what a `step` that raised has left. Whether that is all: a single rank had computed
        gradients alone, and they are in no buffer of ZeRO's."""
        self._offload.crowded()
        alone = self._world_size == 1 and self._stage <= self._summed and not self._applied
        if alone:
            drop_gradients(self._engine, self._network)
        return alone

    def recompute(self, *, keep_attention: bool) -> None:
        """Compute activations again in backward passes from now on."""
        self._network.recompute(keep_attention=keep_attention)

    def score(self, batch: TrainBatch) -> dict[str, Metric]:
        """`nll` of a batch of conversations (see `keel.rl.sft`), and `indexer/held` in
        a warm-up of indexers; the weights stay as they are."""
        self._offload.load()
        scored = [self._scored(micro_batch)[1:] for micro_batch in batch.micro_batches]
        if self._part.rank > 0:  # every rank of its group has computed the same
            return {}
        nll = ({"nll": Mean(-float(logp.double().sum()), len(logp))} for logp, _ in scored)
        return merge([*nll, *(looked_at(held) for _, held in scored)])

    def _has_gradient(self, batch: TrainBatch) -> bool:
        """Whether an objective of the step can have a gradient. The same on all ranks."""
        algorithm = self._config.algorithm
        beside = algorithm.kept_mass_coef > 0 or self._network.learning_indexers > 0
        return batch.signal or (beside and not algorithm.skip_uniform_groups)

    def _update(self, batch: TrainBatch, examine: bool) -> dict[str, Metric]:
        if not self._has_gradient(batch):
            # Adam's moments and weight decay would move the weights all the same. The version
            # counts, so that engines and trainer agree about what is published after a step.
            self._version += 1
            counts: dict[str, Metric] = {
                "train/skipped_steps": Sum(0.0),
                "train/skipped_no_signal": Sum(1.0),
            }
            return counts if self._rank == 0 else {}
        seen: list[Callable[[], dict[str, Metric]]] = []
        self._offload.before_gradients()
        split = SplitGaps.begun(batch, self._device, self._scored)
        for index, micro_batch in enumerate(batch.micro_batches, 1):
            self._engine.set_gradient_accumulation_boundary(index == len(batch.micro_batches))
            seen.append(self._accumulate(micro_batch, batch, split))
        self._applied = True
        norm = self._apply_gradients()
        parts = [metrics() for metrics in seen]
        if self._config.algorithm.mask_delta is not None:
            parts.append(split.metrics())
        self._version += 1
        skipped = self._skips.count(norm, self._version)
        if skipped and (examine or self.gave_up or not self._scaled):
            self._examine(batch)
        if self._rank == 0:
            parts.append({"train/skipped_steps": Sum(float(skipped))})
            parts.append({"train/skipped_no_signal": Sum(0.0)})
            if self._scaled:
                optimizer: Any = self._engine.optimizer
                parts.append({"train/loss_scale": Mean(float(optimizer.loss_scale), 1)})
            parts.append({} if skipped else {"grad_norm": Mean(norm, 1)})
        return merge(parts)

    def _examine(self, batch: TrainBatch) -> None:
        """Compute a skipped step again, with a look at what it goes through; weights are as they
        were, and no gradient stays."""
        self._offload.before_gradients()
        split = SplitGaps.begun(batch, self._device, self._scored)
        look = Look(self._layers)
        self._engine.set_gradient_accumulation_boundary(False)
        for micro_batch in batch.micro_batches:
            with look.at(micro_batch, self._part.bounds(len(micro_batch.token_ids_N))[0]):
                self._accumulate(micro_batch, batch, split, look)
        # All ranks drop it as they dropped the step itself, with what their optimizers hold of it.
        self._engine.set_gradient_accumulation_boundary(True)
        self._accumulate(batch.micro_batches[0], batch, split, look.spoiling())
        self._apply_gradients()
        self.findings += look.found

    def _accumulate(
        self, batch: MicroBatch, step: TrainBatch, split: SplitGaps, look: Look | None = None
    ) -> Callable[[], dict[str, Metric]]:
        """Forward and backward of one micro-batch. Returns what reads its metrics, which waits for
        the device: meanwhile the host prepares the next micro-batch."""
        probes = self._config.algorithm.probes
        inputs = Inputs.of(batch, self._device, self._part, probes=probes)
        reference = self._reference.logp(inputs) if self._reference else None
        with self._replayed(inputs) as replay:
            logp, entropy, log_mass, indexers, held = self._engine(inputs=inputs)
            if inputs.padding:
                # Zero gradients for every parameter, so that all ranks reduce the same set.
                self._engine.backward(logp.sum() + log_mass.sum() + 0 * indexers)
                return dict
            logp, reference = whole_sequences(inputs, logp, reference)
            share = LOSSES[batch.loss](
                batch, inputs, logp, reference, step.total_sequences, self._config.algorithm, split
            )
            split.add(inputs, logp)
            penalty, masses = mass_share(inputs, log_mass, step.total_sequences, self._config)
            of_indexers = indexers * indexer_weight(self._network, self._config, step)
            loss = share.loss + penalty + of_indexers
            factor = sound(loss)
            if look:
                factor = look.saw(logp, reference, inputs.kl_coef_R, loss)
            self._engine.backward(loss * (factor * self._world_size))
        # Lets go of the graph; and of the inputs, which `metrics` must not hold on the device.
        share, part = replace(share, loss=share.loss.detach()), inputs.part
        seen = logp.detach() if batch.watched is not None else None
        total, count, indexers = entropy.sum(), len(entropy), indexers.detach()
        tokens, ends = inputs.token_ids.shape[1] - inputs.filled, inputs.ends

        def metrics() -> dict[str, Metric]:
            found: dict[str, Metric] = {"entropy/kept": Mean(float(total), count)}
            found["train/tokens"] = Sum(tokens)
            if layers := self._network.learning_indexers:
                found["indexer/kl"] = Mean(float(indexers), tokens * layers)
            found |= looked_at(held, masses)
            if self._part.rank == 0:  # every rank of its group has computed the same
                found |= share.metrics | counted(batch)
            if replay is not None:
                found |= replay.metrics(ends=ends)
            if seen is not None:
                self.tokens |= seen_tokens(batch, part, seen, replay)
            return found

        return metrics

    def _scored(self, batch: MicroBatch) -> tuple[Inputs, Tensor, Tensor]:
        """Without gradient: [R] log-probabilities, and what `looked_at` reads."""
        inputs = Inputs.of(batch, self._device, self._part)
        with torch.no_grad(), self._replayed(inputs):
            logp, *_, held = self._engine(inputs=inputs)
        return inputs, whole_sequences(inputs, logp, None)[0], held

    def _apply_gradients(self) -> float:
        clip = self._config.trainer.grad_clip
        with room_to_update(self._config):
            self._offload.before_update()
            return apply_gradients(self._engine, self._network, stage=self._stage, clip=clip)

    def _replayed(self, inputs: Inputs) -> AbstractContextManager[Any]:
        # Nobody has recorded routes of conversations that are given.
        replayed = self._replays and inputs.loss == "grpo"
        return recorded_routes(self._network, inputs) if replayed else nullcontext()

    # Weights

    def buckets(self, *, wanted: bool, bucket_bytes: int | None = None) -> Iterator[FlatBucket]:
        """The current weights for the rollout engines, in their precision, on this rank's device.

        A rank that does not want them yields nothing, and gathers along where the others need it.
        With `rollout.time_share` the engines wake up meanwhile, so what their share leaves no room
        for
        goes to host memory: of all that a bucket does not need before the first, and of the rest
        after the last.
        """
        if wanted or self._weights.gathered:
            self._offload.load()
        self._offload.offload(weights=False)
        if wanted:
            dtype = getattr(torch, self._config.engine_dtype)
            size = bucket_bytes or self._config.trainer.publish_bucket_mib * MIB
            yield from self._weights.buckets(dtype, size)
        else:
            self._weights.gather_along()
        self._offload.offload(weights=True)

    def publish(self, bucket_bytes: int | None = None) -> Iterator[Bucket]:
        """`buckets` in host memory: on rank 0, nothing elsewhere."""
        return in_host_memory(self.buckets(wanted=self._rank == 0, bucket_bytes=bucket_bytes))

    def export(self, folder: Path) -> dict[str, Entry]:
        """Write a model folder for transformers and vLLM. Returns what this rank wrote."""
        self._offload.load()
        of = self._config.model
        return export_model(folder, self._network.model, self._weights, of, self._model_path)

    # Checkpoints

    def save(self, folder: Path) -> dict[str, Entry]:
        """Write what `load` needs into `folder`. Returns what this rank wrote, on the disk."""
        self._offload.load(state=True)
        progress = {"steps": self._steps, "version": self._version, **self._layout()}
        return self._checkpoints.save(folder, progress)

    def load(self, folder: Path) -> None:
        """Continue from `save`, exactly; on another layout, up to the order in which numbers are
        added up. Call it on a new engine. Raises `ValueError` if it cannot be read."""
        self._offload.load(state=True)
        progress = self._checkpoints.load(folder)
        self._steps, self._version = progress["steps"], progress["version"]

    def _layout(self) -> dict[str, Any]:
        return {**layout_of(self._config), "device": self._device.type}

    def _note(self, line: str) -> None:
        if line and line not in self.notes:
            self.notes.append(line)
            _LOG.warning(line)

    def _load(self, model_path: str, dtype: torch.dtype) -> PreTrainedModel:
        return load_policy(model_path, dtype)

    def _made_of(self, model: PreTrainedModel) -> PolicyNetwork:
        flash4, note = flash4_here(self._config, model, self._device)
        self._note(note)
        return PolicyNetwork.of(model, self._config, flash4=flash4)
