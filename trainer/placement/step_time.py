"""Cost model: estimate how long a step takes, using rates measured on H200s.

The model assumes that host and device work overlap in an engine, and that nothing else overlaps.
docs/scaling.md lists the measurements and the errors.
"""

import math
from dataclasses import dataclass, replace

from keel.configs.schema import Config
from keel.model.load import ModelFacts
from keel.trainer.placement import memory
from keel.trainer.placement.hardware import GpuSpec
from keel.trainer.placement.memory import (
    BYTES,
    count_micro_batches,
    engine_layer_bytes,
    engine_sequences,
    kv_token_bytes,
)

_MIB = 2**20
COMPILE_S = 20.0  # added to the first step by `trainer.compile`: 13 to 20 s in six runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Achieved fractions of the hardware's peak rates, plus fixed overheads. Both are fitted to the
    step times in docs/scaling.md."""

    # Trainer: fractions of the peak that GEMMs reach (0.78 for dense layers and 0.66 for grouped
    # experts in profiles), and attention. On n tokens, FlashAttention-4 reaches `flash4_share` ·
    # n / (n + `flash4_tokens`) of the peak (H100). `head_mfu` is for the whole vocabulary.
    gemm_share: float = 0.75
    attention_share: float = 0.27
    flash4_share: float = 0.62
    flash4_tokens: float = 2000.0
    head_mfu: float = 0.40
    # Seconds of sparse attention per token, layer and pass. Each token of context above
    # `sparse_context` adds `sparse_token_s`. `dense_s` and `dense_token_s` apply if every earlier
    # token is read (`trainer.attention`). Each is a third of the forward and backward time measured
    # with the heads of DeepSeek-V3.2 and a learning indexer (docs/sparse-attention.md).
    # The slow rates are those of PyTorch, without kernels.
    sparse_s: float = 6.1e-6
    sparse_token_s: float = 0.024e-9
    slow_sparse_s: float = 21e-6
    slow_sparse_token_s: float = 0.37e-9
    sparse_context: int = 16_384
    sparse_heads: int = 128
    dense_s: float = 7.6e-6
    dense_token_s: float = 0.79e-9
    # How many times a pass moves elements through memory: `elementwise_elements`, also
    # `normed_elements` of norms that are neither fused nor compiled, or `layer_elements` if
    # compiled; `expert_elements` with Keel's experts (model/layers/fused.py), and with others or
    # experts that are spread over ranks, which has not been measured.
    layer_moves: float = 2.9
    norm_moves: float = 26.8
    compiled_moves: float = 4.3
    expert_moves: float = 3.5
    stock_expert_moves: float = 12.0
    # Bytes moved per owned parameter by an optimizer step (AdamW, norm and clipping), and per
    # parameter to add the gradients of a micro-batch, in general or in a single pass
    # (trainer/engine/deepspeed_internals.py). AdamW in host memory: 28 bytes at an assumed 80 GB/s.
    optimizer_bytes: float = 65.0
    gradient_bytes: float = 30.0
    summed_bytes: float = 14.0
    host_adam_s: float = 3.5e-10
    # Driver seconds per step, per group and per completion with rule-based rewards (135 M model).
    driver_s: float = 0.1
    group_s: float = 2e-3
    completion_s: float = 2e-4
    # Fixed seconds for a weight update (benchmarks/transfer.py), per bucket of weights (0.7 ms on
    # one GPU), and for putting an engine to sleep and waking it up; bytes per second that a GPU
    # allocates (docs/rollouts.md).
    update_s: float = 9e-3
    block_s: float = 1.3e-3
    turn_s: float = 0.05
    allocated_bytes: float = 107e9
    # Engine: model FLOP utilization of prefill and fraction of the memory bandwidth at which
    # decoding reads weights (assumed), and reads the KV cache (profiled); seconds for the small
    # kernels of a layer in a decoding step; sampler seconds per vocabulary id and decoding step
    # (0.56 to 0.67 ms for 151,936 ids).
    prefill_mfu: float = 0.40
    memory_share: float = 0.80
    cache_share: float = 0.68
    layer_step_s: float = 30e-6
    sampler_s: float = 3.6e-9
    # Latency of an all-reduce of an engine on several nodes, two per layer (assumed).
    all_reduce_s: float = 50e-6
    # Host seconds of an engine per decoding step and per sequence, with the native recorder and
    # with the packed one, where a step may reuse rows or be prepared.
    step_s: float = 2.0e-3
    sequence_s: float = 37e-6
    packed_step_s: float = 1.2e-3
    prepared_step_s: float = 2.2e-3
    packed_sequence_s: float = 3.2e-6
    # Slowdown of a decoding step and a compiled pass by `model.batch_invariant`.
    invariant_step: float = 1.15
    invariant_pass: float = 1.09
    # Host seconds of the trainer per layer and pass, more with experts, compiled or not.
    pass_s: float = 1.8e-3
    compiled_pass_s: float = 1.15e-3
    expert_pass_s: float = 0.65e-3

    def sparse_attention_seconds(self, config: Config, facts: ModelFacts, spec: GpuSpec) -> float:
        """Return the seconds of a layer's sparse attention per token and pass."""
        context, slower = config.max_context, GpuSpec().memory_bytes / spec.memory_bytes
        beyond = max(0, context - self.sparse_context)
        if config.trainer.attention != "sparse":
            seconds = self.dense_s + self.dense_token_s * context
        elif spec.sparse_kernels and config.model.dtype != "float32":
            seconds = self.sparse_s + self.sparse_token_s * beyond
            slower = GpuSpec().flops / spec.flops
        else:
            seconds = self.slow_sparse_s + self.slow_sparse_token_s * beyond
        return seconds * slower * facts.attention_heads / self.sparse_heads

    def launch_seconds(self, config: Config, facts: ModelFacts, micro_batches: int) -> float:
        each = self.compiled_pass_s if config.trainer.compile else self.pass_s
        layers = facts.layers * each + facts.moe_layers * self.expert_pass_s
        return layers * _count_forward_passes(config, facts) * micro_batches

    def host_seconds(self, config: Config, facts: ModelFacts, sequences: int) -> float:
        if config.rollout.packs(full_attention=facts.full_attention):
            prepared = config.rollout.tensor_parallel > 1 or config.rollout.enforce_eager
            step_s = self.prepared_step_s if prepared else self.packed_step_s
            return step_s + self.packed_sequence_s * sequences
        return self.step_s + self.sequence_s * sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Estimated seconds for a step in which all completions reach their length limits."""

    decode: float
    prefill: float
    compute: float
    traffic: float  # time for communication between trainer ranks
    weights: float  # time for the weight update, during which engines are paused
    driver: float  # time for dispatch, rule-based scoring, packing and metrics
    turns: float
    """Time to put engines to sleep, wake them up and offload tensors, if GPUs are time-shared."""
    launch: float  # time that the trainer's host needs to launch the kernels counted in `compute`
    machine: str

    @property
    def rollout(self) -> float:
        return self.decode + self.prefill

    @property
    def training(self) -> float:
        return self.compute + self.traffic

    @property
    def total(self) -> float:
        return self.rollout + self.training + self.weights + self.driver + self.turns

    def lines(self) -> list[str]:
        idle = self.launch >= self.compute
        waits = "; bound by its host: raise trainer.micro_batch_tokens" * idle
        turns = f"; time-sharing {seconds(self.turns)}" * (self.turns > 0)
        return [
            f"ESTIMATE, not measured, for {self.machine} and completions of full length: "
            f"{seconds(self.total)} per step",
            f"rollout {seconds(self.rollout)} (decoding {seconds(self.decode)}, prefill "
            f"{seconds(self.prefill)})",
            f"training {seconds(self.training)} (compute {seconds(self.compute)}, traffic between "
            f"ranks {seconds(self.traffic)}{waits}); weights to the engines "
            f"{seconds(self.weights)}; driver and rule-based rewards {seconds(self.driver)}{turns}",
        ]


def step_time(
    config: Config,
    facts: ModelFacts,
    *,
    micro_batches: int = 0,
    shared: bool = False,
    sequences: int | None = None,
    woken: float = 0.0,
    moved: float = 0.0,
    spec: GpuSpec | None = None,
) -> StepTime:
    """Estimate how many seconds each part of a step takes.

    `micro_batches` is the number of micro-batches per rank, over all optimizer steps in a batch (0:
    as the config needs). Set `shared` if engines and ranks share GPUs. `sequences` is the capacity
    of an engine's KV cache. For time-shared GPUs, `woken` is the size in bytes of an engine that
    goes to sleep in each step, and `moved` is the number of bytes that a rank offloads and reloads.
    """
    spec, rates = spec or GpuSpec(), Rates()
    rollout, algorithm = config.rollout, config.algorithm
    micro_batches = micro_batches or count_micro_batches(config)[0] * algorithm.updates_per_batch
    completions = algorithm.prompts_per_step * algorithm.group_size
    at_once = max(1, min(engine_sequences(config), sequences or engine_sequences(config)))
    # Completions of full length end together, so that they are sampled in waves.
    waves, last = divmod(-(-completions // rollout.engines), at_once)
    slower = rates.invariant_step if config.model.batch_invariant else 1.0

    def step_seconds(rows: int) -> float:
        device = _decode_device_seconds(config, facts, rows, spec, rates)
        device += _all_reduce_seconds(config, facts, rows, 1, spec, rates)
        return slower * max(rates.host_seconds(config, facts, rows), device)

    steps = waves * step_seconds(at_once) + (step_seconds(last) if last else 0.0)
    prefilled = algorithm.prompts_per_step * config.data.max_prompt_tokens
    if not rollout.enable_prefix_caching:
        prefilled *= algorithm.group_size
    gpus = rollout.engines * rollout.tensor_parallel
    prefill = 2 * body_parameters(facts) * prefilled / (gpus * spec.flops * rates.prefill_mfu)
    tokens = prefilled / rollout.engines
    passes = math.ceil(tokens / rollout.max_num_batched_tokens)
    prefill += _all_reduce_seconds(config, facts, tokens, passes, spec, rates)
    span = 1 if shared else gpus + config.trainer.ranks
    compute = compute_seconds(
        config, facts, count_micro_batches(config)[1], micro_batches, spec, rates
    )
    launch = rates.launch_seconds(config, facts, micro_batches)
    sent = facts.parameters * BYTES[config.engine_dtype]
    turns = rates.turn_s + woken / rates.allocated_bytes + moved / spec.host_bytes
    return StepTime(
        decode=rollout.sampling.max_tokens * steps,
        prefill=prefill,
        compute=max(compute, launch),
        traffic=traffic_seconds(config, facts, micro_batches, spec),
        weights=rates.update_s
        + sent / spec.between(span)
        + math.ceil(sent / (config.trainer.publish_bucket_mib * _MIB)) * rates.block_s,
        driver=rates.driver_s
        + algorithm.prompts_per_step * rates.group_s
        + completions * rates.completion_s,
        turns=turns if woken else 0.0,
        launch=launch,
        machine=spec.name,
    )


def sft_seconds(config: Config, facts: ModelFacts, spec: GpuSpec) -> float:
    """Estimate how many seconds a supervised training step takes with the maximum number of
    tokens."""
    sft, trainer, rates = config.sft, config.trainer, Rates()
    each = (sft.tokens_per_step or sft.max_context_tokens * sft.step_contexts) / sft.step_contexts
    most = each * math.ceil(sft.step_contexts / trainer.data_parallel)  # of a rank
    micro_batches = math.ceil(most / max(trainer.micro_batch_tokens, config.max_context))
    tokens = math.ceil(most * trainer.data_parallel)
    compute = compute_seconds(config, facts, tokens, micro_batches, spec, rates)
    launch = rates.launch_seconds(config, facts, micro_batches)
    return max(compute, launch) + traffic_seconds(config, facts, micro_batches, spec)


def _decode_device_seconds(
    config: Config, facts: ModelFacts, sequences: int, spec: GpuSpec, rates: Rates
) -> float:
    """Estimate the GPU time of a decoding step: small kernels, the sampler, and the slower of
    memory traffic and GEMMs."""
    width, parallel = BYTES[config.engine_dtype], config.rollout.tensor_parallel
    missed = (1 - facts.experts_per_token / facts.experts) ** sequences if facts.experts else 0.0
    head = facts.vocab_size * facts.hidden_size
    # Of the embeddings, the input is a lookup and not a GEMM.
    layers = facts.parameters - facts.embedding_parameters - missed * facts.expert_parameters
    sampled = config.rollout.sampling.max_tokens / 2
    cache = sequences * (config.data.max_prompt_tokens + sampled) * kv_token_bytes(config, facts)
    weights = layers * engine_layer_bytes(config) + head * width
    moved = weights / parallel / rates.memory_share + cache / rates.cache_share
    gemms = 2 * facts.active_parameters * sequences / parallel
    longest = max(moved / spec.memory_bytes, gemms / (spec.flops * rates.prefill_mfu))
    return facts.layers * rates.layer_step_s + facts.vocab_size * rates.sampler_s + longest


def _all_reduce_seconds(
    config: Config, facts: ModelFacts, tokens: float, passes: int, spec: GpuSpec, rates: Rates
) -> float:
    """Estimate how long the nodes of an engine take to sum the outputs of its layers, for `tokens`
    tokens in `passes` forward passes. Sums within a node are neglected."""
    if config.rollout.tensor_parallel <= spec.node_gpus:
        return 0.0
    size = tokens * facts.hidden_size * BYTES[config.engine_dtype]
    return 2 * facts.layers * (passes * rates.all_reduce_s + 2 * size / spec.ring_bytes)


def body_parameters(facts: ModelFacts) -> int:
    return facts.active_parameters - facts.embedding_parameters


def compute_seconds(
    config: Config, facts: ModelFacts, tokens: int, micro_batches: int, spec: GpuSpec, rates: Rates
) -> float:
    """Estimate a rank's compute time for its part of a step with `tokens` tokens, including
    recomputation, the reference model, the head and the optimizer."""
    trainer, width = config.trainer, BYTES[config.model.dtype]
    share = tokens / trainer.ranks
    # Causal attention sees half of the context on average: scores and their sum over values.
    attention = 2 * facts.attention_width * config.max_context
    attention *= facts.layers - facts.linear_layers
    gemms = _count_forward_passes(config, facts) * 2 * body_parameters(facts) / rates.gemm_share
    attended = _count_forward_passes(config, facts) - trainer.keeps_attention
    flash4 = spec.flash4 and facts.head_size and config.model.dtype != "float32"
    longest, attention_share = config.max_context, rates.attention_share
    if flash4 and not config.model.batch_invariant and trainer.flash4(longest):
        attention_share = rates.flash4_share * longest / (longest + rates.flash4_tokens)
    sparse = 0.0
    if facts.index_top_k:
        sparse = attended * facts.layers * rates.sparse_attention_seconds(config, facts, spec)
    else:
        gemms += attended * attention / attention_share
    if trainer.expert_parallel > 1 or config.model.dtype != "bfloat16":
        facts = replace(facts, fused_experts=False)
    if trainer.compile or config.model.batch_invariant:
        moved = rates.compiled_moves * memory.layer_elements(facts, config, compiled=True)
    else:
        moved = rates.layer_moves * memory.elementwise_elements(facts)
        moved += 0.0 if facts.fused_norms else rates.norm_moves * memory.normed_elements(facts)
    moved *= facts.layers
    expert_moves = rates.expert_moves if facts.fused_experts else rates.stock_expert_moves
    moved += expert_moves * facts.moe_layers * memory.expert_elements(facts)
    moved *= _count_forward_passes(config, facts)
    body = share * (gemms / spec.flops + moved * width / spec.memory_bytes + sparse)
    body *= rates.invariant_pass if config.model.batch_invariant else 1.0
    head = 2 * facts.vocab_size * facts.hidden_size * share * 3
    if config.rollout.sampling.truncated:  # the kept mass is computed for probed tokens
        a = config.algorithm
        probed = a.probes * a.prompts_per_step * a.group_size * bool(a.kept_mass_coef)
        head *= min(1.0, probed / tokens)
    held = facts.parameters - facts.expert_parameters * (1 - 1 / trainer.expert_parallel)
    one_pass = trainer.sums_in_float32(config.model.dtype)
    weights = (rates.summed_bytes if one_pass else rates.gradient_bytes) * held * micro_batches
    owned = facts.parameters / trainer.ranks
    updates = config.algorithm.updates_per_batch if config.data.sources else 1
    updating = updates * owned * rates.optimizer_bytes / spec.memory_bytes
    if trainer.offload_optimizer:
        added = width == 4 or trainer.zero_stage == 3  # summed on the host, else on the GPU
        crossing = (4 + width) * updates + 8 * added * (micro_batches - updates)
        updating = owned * (updates * rates.host_adam_s + crossing / spec.host_bytes)
    head /= spec.flops * rates.head_mfu
    return body + head + weights / spec.memory_bytes + updating


def _count_forward_passes(config: Config, facts: ModelFacts) -> float:
    """Return the cost of a micro-batch in units of forward passes. A backward pass counts as
    two."""
    lora, data = config.model.lora, config.data
    frozen = lora.enabled and not lora.adapts_experts
    backward = 1 if frozen else 2  # no gradients of frozen weights
    references = data.uses_initial_model + facts.teacher_passes
    return 1 + backward + config.trainer.activation_checkpointing + references


def token_flops(config: Config, facts: ModelFacts) -> tuple[float, float]:
    """Return the FLOPs per token for training (without recomputation) and for an engine."""
    looked_up = 0 if facts.tied else facts.vocab_size * facts.hidden_size
    forward = 2.0 * (facts.active_parameters - looked_up)
    return (
        _count_forward_passes(config, facts) - config.trainer.activation_checkpointing
    ) * forward, forward


def traffic_seconds(config: Config, facts: ModelFacts, micro_batches: int, spec: GpuSpec) -> float:
    """Estimate how much of a rank's communication time isn't hidden by compute. This includes
    gradients, gathered weights, tokens routed to experts, and exchanges under sequence
    parallelism."""
    trainer = config.trainer
    updates = config.algorithm.updates_per_batch if config.data.sources else 1
    ranks, spread, stage = trainer.ranks, trainer.expert_parallel, trainer.zero_stage
    if ranks == 1:
        return 0.0
    width = BYTES[config.model.dtype]
    if width == 2:
        stage = max(1, stage)
    trips = _count_forward_passes(config, facts) - 1
    # Bytes per parameter: gradients are float32.
    moved = {0: 8 * updates, 1: (4 + width) * updates, 2: 4 * micro_batches + width * updates}.get(
        stage, (4 + trips * width) * micro_batches
    )
    inside = ranks <= spec.node_gpus
    ring = spec.link_bytes if inside else spec.ring_bytes
    seconds, shares = 0.0, trainer.hpz_partition_size
    if shares > 1:  # gathers within a node, except the first after an update
        near = width * (trips * micro_batches - updates)
        seconds += facts.parameters * (1 - 1 / shares) * near / spec.link_bytes
        moved -= near
    dense = (facts.parameters - facts.expert_parameters) * (1 - 1 / ranks)
    seconds += dense * moved / ring
    # Ranks with the same experts are neighbours unless experts are spread.
    replicas = ranks // spread
    experts = facts.expert_parameters / spread * (1 - 1 / replicas)
    seconds += experts * moved / (ring if inside or spread == 1 else spec.network_bytes)
    per_rank = micro_batches * trainer.micro_batch_tokens / trainer.sequence_parallel
    sent = per_rank * facts.experts_per_token * facts.hidden_size * width * (1 - 1 / spread)
    seconds += facts.moe_layers * 2 * trips * sent / spec.between(spread)
    slices = trainer.sequence_parallel
    # Queries, keys and values to the ranks of their heads, outputs back.
    exchanged = 2 * (facts.attention_width + memory.key_width(facts)) * width * (1 - 1 / slices)
    if facts.index_top_k:  # sparse attention gathers keys instead
        exchanged = memory.gathered_elements(facts, config) * width
    return seconds + facts.layers * trips * per_rank * exchanged / spec.between(slices)


def seconds(value: float) -> str:
    if value < 0.1:
        return f"{1e3 * value:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min"
