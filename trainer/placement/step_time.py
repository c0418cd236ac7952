"""How long a step takes, roughly: a model of the machine, not a measurement.

Nothing overlaps but an engine's host work with its device's. What each rate rests on is said
beside it; docs/scaling.md compares with what has been measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from keel.configs.schema import Config
from keel.model.load import ModelFacts
from keel.trainer.placement.gpus import Machine
from keel.trainer.placement.memory import (
    BYTES,
    elementwise_numbers,
    engine_sequences,
    expert_elements,
    key_width,
    kv_token_bytes,
    layer_elements,
    normed_elements,
    packed,
    read_together,
    sums_in_float32,
)

MIB = 2**20
COMPILE_S = 20.0
"""What `trainer.compile` takes longer in the first step, once for a machine and shape: 13 to 20 s
in six runs on one host of H200s (75561d7), up to 30 on slow ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How much of the machine is used. Measured and fitted on H200s; docs/scaling.md has the runs
    and how far off they are."""

    gemm_share: float = 0.75
    """Trainer: of the peak, by the GEMMs of all layers. In profiles 0.78 of dense ones
    and 0.66 of grouped ones (experts)."""
    attention_share: float = 0.27
    """Trainer: of the peak, by the GEMMs of attention. From trajectories of 4,096 tokens beside
    ones of 1,024."""
    flash4_share: float = 0.62
    flash4_tokens: float = 2000.0
    """The same by FlashAttention-4's kernels: of `flash4_share` what a context's tokens are of
    themselves and so many. From the kernels alone, and steps on 32,768 and 65,536 tokens (H100)."""
    layer_moves: float = 2.9
    """Trainer: how often a pass moves what `elementwise_numbers` counts between GPU and memory.
    Fitted, as are the four below, to the steps in docs/scaling.md."""
    norm_moves: float = 26.8
    """On top, for each number that a norm takes (`normed_elements`), where norms are not one kernel
    each and layers not compiled."""
    compiled_moves: float = 4.3
    """With `trainer.compile`: how often a pass moves each number that a layer then keeps
    (`layer_elements`)."""
    expert_moves: float = 3.5
    """How often a pass moves each number that tokens keep at their experts (`expert_elements`),
    compiled or not: with Keel's own experts (model/layers/fused.py)."""
    stock_expert_moves: float = 12.0
    """The same with other experts, and where experts are spread over ranks, which nobody has
    timed."""
    optimizer_bytes: float = 65.0
    """Moved for each parameter of a rank's share and each optimizer step, at the memory's full
    rate: AdamW, norm and clipping. Measured as a part of the step."""
    gradient_bytes: float = 30.0
    """Moved for each parameter that a rank holds and each micro-batch, to add its gradient to the
    sum. From a profile."""
    summed_bytes: float = 14.0
    """The same where it is added in one pass (trainer/engine/deepspeed_internals.py). From another
    profile."""
    host_adam_s: float = 3.5e-10
    """AdamW in host memory (`trainer.offload_optimizer`), for each parameter of a rank's share: 28
    bytes at 80 GB/s, assumed (docs/scaling.md). One core alone takes 1.2e-9 (an Intel Xeon)."""
    driver_s: float = 0.1
    group_s: float = 2e-3
    completion_s: float = 2e-4
    """Seconds of the driver per step (until the first token is sampled, metrics), per group
    (dispatch, packing) and per completion that a rule scores. Measured with a 135 M parameter model
    on an H200. Judges, programs and environments take longer and are not counted."""
    update_s: float = 9e-3
    """An update's beginning and end. Measured (benchmarks/transfer.py), as is:"""
    turn_s: float = 0.05
    """An engine asleep and awake again (`rollout.time_share`): the part that does not grow. From an
    update of 0.09 s with it, and 0.02 to 0.03 s without."""
    given_bytes: float = 107e9
    """A GPU gives memory out at this rate. Measured (docs/rollouts.md)."""
    block_s: float = 1.3e-3
    """For each bucket of weights on its way to the engines, beside its bytes; 0.7 ms on one GPU."""
    head_mfu: float = 0.40
    """Trainer, head over the whole vocabulary. Measured (benchmarks/training/support_head.py)."""
    prefill_mfu: float = 0.40  # assumed, as is:
    memory_share: float = 0.80
    """Of the memory's rate, for weights in decoding."""
    cache_share: float = 0.68
    """The same for keys and values. From a profile."""
    layer_step_s: float = 30e-6
    """A layer's part of a decoding step beside that: small kernels, and GEMMs too narrow for the
    memory's rate. From the same profile."""
    sampler_s: float = 3.6e-9
    """Of a step for each id of the vocabulary (logits, truncation, draw), whatever the sequences:
    0.56 to 0.67 ms of 151,936 ids in three models' steps. For other vocabularies assumed."""
    step_s: float = 2.0e-3
    sequence_s: float = 37e-6
    """Host of an engine with the native recorder, a step and each sequence. Through two points."""
    packed_step_s: float = 1.2e-3
    prepared_step_s: float = 2.2e-3
    packed_sequence_s: float = 3.2e-6
    """The same with the packed recorder: a step with the rows of the one before (1.0 to 1.3 ms at
    32 sequences), one that is prepared anew (3.0 ms at 256), and each sequence."""
    invariant_step: float = 1.15
    invariant_pass: float = 1.09
    """With `model.batch_invariant`: so many times a decoding step that reads prompts once for each
    completion, and a compiled pass of the trainer. Measured (docs/stability.md)."""
    pass_s: float = 1.8e-3
    compiled_pass_s: float = 1.15e-3
    """Host of a trainer rank, for each layer and pass of a micro-batch. From steps that left the
    GPU idle: one, and two with `trainer.compile`."""
    expert_pass_s: float = 0.65e-3
    """On top for a layer with experts, which `trainer.compile` leaves as they are. From two steps
    that left the GPU idle, not compiled."""

    def launch_seconds(self, config: Config, facts: ModelFacts, micro_batches: int) -> float:
        """What a trainer rank's host takes to start a step's kernels, while its GPU works."""
        each = self.compiled_pass_s if config.trainer.compile else self.pass_s
        layers = facts.layers * each + facts.moe_layers * self.expert_pass_s
        return layers * passes(config) * micro_batches

    def attention_of(self, config: Config, machine: Machine) -> float:
        """Of the peak, by attention's GEMMs in contexts at their limit."""
        longest, model = config.max_context, config.model
        other = model.batch_invariant or model.dtype == "float32" or not machine.flash4
        if other or not config.trainer.flash4(longest):
            return self.attention_share
        return self.flash4_share * longest / (longest + self.flash4_tokens)

    def host_seconds(self, config: Config, facts: ModelFacts, sequences: int) -> float:
        """One step of an engine's host."""
        if config.rollout.packs(full_attention=facts.full_attention):
            anew = config.rollout.tensor_parallel > 1 or config.rollout.enforce_eager
            step_s = self.prepared_step_s if anew else self.packed_step_s
            return step_s + self.packed_sequence_s * sequences
        return self.step_s + self.sequence_s * sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step with every completion at its limit."""

    decode: float
    prefill: float
    compute: float
    traffic: float
    """Between the trainer's ranks."""
    weights: float
    """From the trainer to the engines, which pause for it."""
    driver: float = 0.0
    """Dispatch, scoring by rules, packing and metrics on the driver."""
    turns: float = 0.0
    """Engines go to sleep and wake up, and what the trainer holds goes to host memory and comes
    back (`rollout.time_share`)."""
    machine: str
    sequences: int
    """Completions that an engine works on at once."""
    decode_step: float
    host_bound: bool
    """Decoding waits for the engine's host and not for its GPU."""
    launch: float = 0.0
    """Of the trainer's hosts, to start the kernels of `compute`."""
    idle_trainer: bool = False
    """The trainer's GPU waits for its host: micro-batches are too small."""

    @property
    def rollout(self) -> float:
        return self.decode + self.prefill

    @property
    def training(self) -> float:
        return self.compute + self.traffic

    @property
    def total(self) -> float:
        """One part after the other."""
        return self.rollout + self.training + self.weights + self.driver + self.turns

    def lines(self) -> list[str]:
        """The split, as `keel check` prints it."""
        bound = "its host" if self.host_bound else "its GPU"
        waits = "; bound by its host: raise trainer.micro_batch_tokens" * self.idle_trainer
        return [
            f"ESTIMATE, not measured, for {self.machine} and completions of full length: "
            f"{seconds(self.total)} per step",
            f"rollout {seconds(self.rollout)} (decoding {seconds(self.decode)}: an engine of "
            f"{self.sequences} sequences steps in {1e3 * self.decode_step:.1f} ms, bound by "
            f"{bound}; prefill {seconds(self.prefill)})",
            f"training {seconds(self.training)} (compute {seconds(self.compute)}, traffic between "
            f"ranks {seconds(self.traffic)}{waits}); weights to the engines "
            f"{seconds(self.weights)}; driver and rule-based rewards {seconds(self.driver)}"
            + f"; time-sharing {seconds(self.turns)}"
            * (self.turns > 0),
        ]


def step_time(
    config: Config,
    facts: ModelFacts,
    *,
    micro_batches: int,
    shared: bool = False,
    sequences: int | None = None,
    woken: float = 0.0,
    moved: float = 0.0,
    machine: Machine | None = None,
    rates: Rates | None = None,
) -> StepTime:
    """`micro_batches` of a rank, in all optimizer steps of a batch; `shared`: engines and ranks
    have the same GPUs; `sequences`: what an engine's KV cache holds, where that is less
    than the recipe asks for; `woken`: bytes of an engine that sleeps in each step; `moved`: those
    that a rank then moves between its GPU and host memory."""
    machine, rates = machine or Machine(), rates or Rates()
    rollout, algorithm = config.rollout, config.algorithm
    completions = algorithm.prompts_per_step * algorithm.group_size
    at_once = max(1, min(engine_sequences(config), sequences or engine_sequences(config)))
    # Completions of full length end together, and so the next ones begin: in waves.
    waves, last = divmod(-(-completions // rollout.engines), at_once)
    slower = rates.invariant_step if config.model.batch_invariant else 1.0

    def bounds(rows: int) -> tuple[float, float]:
        on_gpu = decode_device_seconds(config, facts, rows, machine, rates)
        return slower * rates.host_seconds(config, facts, rows), slower * on_gpu

    host, device = bounds(at_once)
    steps = waves * max(host, device) + (max(bounds(last)) if last else 0.0)
    prefilled = algorithm.prompts_per_step * config.data.max_prompt_tokens
    if not rollout.enable_prefix_caching:
        prefilled *= algorithm.group_size
    gpus = rollout.engines * rollout.tensor_parallel
    over = 1 if shared else gpus + config.trainer.ranks
    compute = compute_seconds(config, facts, packed(config)[1], micro_batches, machine, rates)
    launch = rates.launch_seconds(config, facts, micro_batches)
    sent = facts.parameters * BYTES[config.engine_dtype]
    return StepTime(
        decode=rollout.sampling.max_tokens * steps,
        prefill=2 * body_parameters(facts) * prefilled / (gpus * machine.flops * rates.prefill_mfu),
        compute=max(compute, launch),
        traffic=traffic_seconds(config, facts, micro_batches, machine),
        weights=rates.update_s
        + sent / machine.between(over)
        + math.ceil(sent / (config.trainer.publish_bucket_mib * MIB)) * rates.block_s,
        driver=rates.driver_s
        + algorithm.prompts_per_step * rates.group_s
        + completions * rates.completion_s,
        turns=rates.turn_s + woken / rates.given_bytes + moved / machine.host_bytes
        if woken
        else 0.0,
        machine=machine.name,
        sequences=at_once,
        decode_step=max(host, device),
        host_bound=host >= device,
        launch=launch,
        idle_trainer=launch > compute,
    )


def lesson_seconds(config: Config, facts: ModelFacts, machine: Machine) -> float:
    """One step of supervised learning, with every context at its limit."""
    sft, trainer, rates = config.sft, config.trainer, Rates()
    each = (sft.tokens_per_step or sft.max_context_tokens * sft.step_contexts) / sft.step_contexts
    most = each * math.ceil(sft.step_contexts / trainer.groups)  # of a rank
    micro_batches = math.ceil(most / max(trainer.micro_batch_tokens, config.max_context))
    tokens = math.ceil(most * trainer.groups)
    compute = compute_seconds(config, facts, tokens, micro_batches, machine, rates)
    launch = rates.launch_seconds(config, facts, micro_batches)
    return max(compute, launch) + traffic_seconds(config, facts, micro_batches, machine)


def decode_device_seconds(
    config: Config, facts: ModelFacts, sequences: int, machine: Machine, rates: Rates
) -> float:
    """One decoding step on the GPU: weights and KV cache read once, or the GEMMs, whichever takes
    longer, the small kernels of each layer, and the sampler. Of the experts those are read that any
    of the sequences is sent to."""
    width, parallel = BYTES[config.engine_dtype], config.rollout.tensor_parallel
    missed = (1 - facts.experts_per_token / facts.experts) ** sequences if facts.experts else 0.0
    rows = 0 if facts.tied else facts.vocab_size * facts.hidden_size  # a lookup, not a GEMM
    weights = facts.parameters - rows - missed * facts.expert_parameters
    sampled = config.rollout.sampling.max_tokens / 2
    prompts = config.data.max_prompt_tokens / read_together(config, facts)
    cache = sequences * (prompts + sampled) * kv_token_bytes(config, facts)
    moved = weights * width / parallel / rates.memory_share + cache / rates.cache_share
    gemms = 2 * facts.active_parameters * sequences / parallel
    longest = max(moved / machine.memory_bytes, gemms / (machine.flops * rates.prefill_mfu))
    return facts.layers * rates.layer_step_s + facts.vocab_size * rates.sampler_s + longest


def body_parameters(facts: ModelFacts) -> int:
    """That a token meets in GEMMs, without the head."""
    embeddings = facts.vocab_size * facts.hidden_size * (1 if facts.tied else 2)
    return facts.active_parameters - embeddings


def compute_seconds(
    config: Config,
    facts: ModelFacts,
    tokens: int,
    micro_batches: int,
    machine: Machine,
    rates: Rates,
) -> float:
    """A rank's share of a step of `tokens` on all, in so many micro-batches: forward, backward,
    recomputation, the reference's forward, and the optimizer.

    GEMMs at their share of the peak, and between them elements that go through the memory.
    """
    trainer, width = config.trainer, BYTES[config.model.dtype]
    share = tokens / trainer.ranks
    # Causal attention sees half of the context on average: scores and their sum over values.
    attention = 2 * facts.attention_width * config.max_context * facts.layers
    gemms = passes(config) * 2 * body_parameters(facts) / rates.gemm_share
    attended = passes(config) - trainer.keeps_attention
    gemms += attended * attention / rates.attention_of(config, machine)
    if trainer.expert_parallel > 1 or config.model.dtype != "bfloat16":
        facts = replace(facts, fused_experts=False)
    if trainer.compile or config.model.batch_invariant:
        moved = rates.compiled_moves * layer_elements(facts, config, compiled=True)
    else:
        moved = rates.layer_moves * elementwise_numbers(facts)
        moved += 0.0 if facts.fused_norms else rates.norm_moves * normed_elements(facts)
    moved *= facts.layers
    expert_moves = rates.expert_moves if facts.fused_experts else rates.stock_expert_moves
    moved += expert_moves * facts.moe_layers * expert_elements(facts)
    moved *= passes(config)
    body = share * (gemms / machine.flops + moved * width / machine.memory_bytes)
    body *= rates.invariant_pass if config.model.batch_invariant else 1.0
    head = 2 * facts.vocab_size * facts.hidden_size * share * 3
    if config.rollout.sampling.truncated:
        head *= probed_share(config, tokens)
    held = facts.parameters - facts.expert_parameters * (1 - 1 / trainer.expert_parallel)
    one_pass = sums_in_float32(config.model.dtype, trainer)
    weights = (rates.summed_bytes if one_pass else rates.gradient_bytes) * held * micro_batches
    owned = facts.parameters / trainer.ranks
    updates = updates_of(config)
    updating = updates * owned * rates.optimizer_bytes / machine.memory_bytes
    if trainer.offload_optimizer:
        added = width == 4 or trainer.zero_stage == 3  # there, else on the GPU
        crossing = (4 + width) * updates + 8 * added * (micro_batches - updates)
        updating = owned * (updates * rates.host_adam_s + crossing / machine.host_bytes)
    head /= machine.flops * rates.head_mfu
    return body + head + weights / machine.memory_bytes + updating


def updates_of(config: Config) -> int:
    """Optimizer steps of a batch."""
    return config.algorithm.updates_per_batch if config.data.sources else 1


def probed_share(config: Config, tokens: int) -> float:
    """Of a step's `tokens`, those whose mask's mass is held; of trajectories, as of one turn."""
    algorithm = config.algorithm
    if not algorithm.kept_mass_coef:
        return 0.0
    return min(1.0, algorithm.probes * algorithm.prompts_per_step * algorithm.group_size / tokens)


def passes(config: Config) -> int:
    """Over a micro-batch, in units of a forward pass: a backward pass is two."""
    with_reference = any(source.kl_coef > 0 for source in config.data.sources)
    return 3 + config.trainer.activation_checkpointing + with_reference


def traffic_seconds(
    config: Config, facts: ModelFacts, micro_batches: int, machine: Machine
) -> float:
    """Gradients, gathered weights, tokens on their way to experts and parts of contexts on theirs
    to heads, none of it overlapped; `micro_batches` as `step_time` has them."""
    trainer = config.trainer
    updates = updates_of(config)
    ranks, spread, stage = trainer.ranks, trainer.expert_parallel, trainer.zero_stage
    if ranks == 1:
        return 0.0
    width = BYTES[config.model.dtype]
    if width == 2:
        stage = max(1, stage)
    trips = passes(config) - 1
    # Bytes for each parameter: gradients are float32.
    moved = {0: 8 * updates, 1: (4 + width) * updates, 2: 4 * micro_batches + width * updates}.get(
        stage, (4 + trips * width) * micro_batches
    )
    inside = ranks <= machine.node_gpus
    # Over several nodes every GPU's card carries its part of a ring.
    ring = min(machine.link_bytes, machine.node_gpus * machine.network_bytes)
    dense = (facts.parameters - facts.expert_parameters) * (1 - 1 / ranks)
    seconds = dense * moved / (machine.link_bytes if inside else ring)
    # Ranks with the same experts: neighbours unless experts are spread, and then far apart.
    replicas = ranks // spread
    experts = facts.expert_parameters / spread * (1 - 1 / replicas)
    near = machine.link_bytes if inside else (ring if spread == 1 else machine.network_bytes)
    seconds += experts * moved / near
    per_rank = micro_batches * trainer.micro_batch_tokens / trainer.sequence_parallel
    sent = per_rank * facts.experts_per_token * facts.hidden_size * width * (1 - 1 / spread)
    seconds += facts.moe_layers * 2 * trips * sent / machine.between(spread)
    slices = trainer.sequence_parallel
    # Queries, keys and values to where their heads are computed, outputs back.
    exchanged = 2 * (facts.attention_width + key_width(facts)) * width * (1 - 1 / slices)
    return seconds + facts.layers * trips * per_rank * exchanged / machine.between(slices)


def seconds(value: float) -> str:
    if value < 0.1:
        return f"{1e3 * value:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min"
