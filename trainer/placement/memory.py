"""What an engine and a trainer rank hold in memory, by what it is for: estimates from the model's
configuration. How far they are from measured figures is in docs/scaling.md.

Those for the CPU add the measured size of a process that has loaded the libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from keel.configs.schema import Config, ConfigError, TrainerConfig
from keel.model.load import ModelFacts
from keel.rl.packing.prefix_sharing import estimate_packing
from keel.trainer.placement.families import learned_parameters

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ENGINE_PROCESS_GIB = 1.3
"""Resident size of an actor that has loaded vLLM on a CPU, without weights and KV cache."""
TRAINER_PROCESS_GIB = 1.2
"""Resident size of an actor that has loaded DeepSpeed on a CPU, without a model."""
ENGINE_CUDA_GIB, TRAINER_CUDA_GIB = 1.5, 1.3
"""GPU: context, kernels and NCCL, and an engine's CUDA graphs. Assumed for an engine; of a rank
what the driver had given away beside PyTorch's allocator, the same in every measured step."""
STEP_PARTS = ("activations", "experts' tokens", "support head", "new gradients")
"""Parts of a rank's memory that it has not before its first step, nor in an update."""
JOINED = "gradients joined"
"""What an update needs for gradients in one piece beyond the place that activations leave."""
SUB_GROUP_BYTES = 4e9
"""ZeRO-3 updates so many bytes of master weights at a time (DeepSpeed's default)."""
RANK_SPARE = 1.06
"""Of a rank's memory: the model says up to 2 % too little (docs/scaling.md), and no trajectory is
like another."""
ENGINE_SPARE, ENGINE_SPARE_GIB = 1.1, 1.0
"""Of an engine's memory beside the KV cache, which nobody has measured."""
ENGINE_BEYOND_GIB = 1.0
"""What an engine takes beside its share once it samples, of CUDA graphs and buffers that vLLM does
not count: 0.6 to 1.0 in four of five drawn workloads."""
TRAINER_UNUSED_GIB = 1.5
"""What PyTorch's allocator holds at most beside a step's tensors: 0.2 to 2.4 in the same steps."""
SAMPLER_BYTES = 20
"""An engine, for each id of the vocabulary and each sequence: logits, probabilities, and both
sorted with their ids."""
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed reduces gradients in buckets of this many elements (its default)."""
LONE_BUCKET_ELEMENTS = 50_000_000
"""The same on one rank, where a bucket goes nowhere."""
ZERO_2_BUCKETS = 4
"""Buckets' worth of memory under ZeRO-2: itself and its copies. Fitted to three measured steps."""
LIVE_ELEMENTS = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered at a time (DeepSpeed's default)."""
KEPT_ID_BYTES = 60
"""Support head, for each kept id: fitted to the measured 45–60 (docs/performance.md)."""
MEAN_KEPT = 8
"""Kept ids a token with a real model."""
HEAD_CHUNK_BYTES = 2048 * 4 * 1.2
"""Support head, for each id of the vocabulary: a chunk of tokens that were not truncated."""


class DoesNotFit(ConfigError):
    """A GPU, or its machine's memory, is too small for what the recipe puts there. What would help:
    `keel.trainer.placement.suggestions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One GPU's (or on a CPU one actor's) memory in bytes, by what it is for."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        inside = " + ".join(f"{name} {gib(size)}" for name, size in self.parts.items() if size > 0)
        return f"{gib(self.total)} each ({inside})"


def engine_sequences(config: Config) -> int:
    """Answers that an engine works on at once, as far as the recipe goes."""
    sequences = config.algorithm.prompts_per_step * config.algorithm.group_size
    return min(config.rollout.max_num_seqs, -(-sequences // config.rollout.engines))


def packed(config: Config, ranks: int = 0, capacity: int = 0) -> tuple[int, int]:
    """Micro-batches of a rank in an optimizer step, and tokens of a step as the trainer computes
    them, every context at its limit, were all ranks as busy as the busiest: a shared prompt once
    for those of its group that fit a micro-batch with it. `ranks`, dealt to, and `capacity` instead
    of the recipe's."""
    a, context = config.algorithm, config.max_context
    groups = -(-a.prompts_per_step // a.updates_per_batch)
    shared = config.data.max_prompt_tokens if config.trainer.share_prompts else 0
    ranks = ranks or config.trainer.groups
    count, tokens = estimate_packing(
        groups,
        a.group_size,
        shared=shared,
        own=context - shared,
        ranks=ranks,
        capacity=capacity or config.trainer.micro_batch_tokens,
    )
    return count, tokens * ranks * a.prompts_per_step // groups


def rank_tokens(config: Config) -> float:
    """Of a micro-batch, those that a rank holds; a trajectory that is longer is one by itself."""
    longest = max(config.trainer.micro_batch_tokens, config.max_context)
    return longest / config.trainer.sequence_parallel


def kv_token_bytes(config: Config, facts: ModelFacts) -> float:
    """Of one token's cached keys and values, on each GPU of an engine."""
    shares = min(config.rollout.tensor_parallel, facts.kv_heads)
    return facts.layers * facts.kv_width * BYTES[config.engine_dtype] / shares


def engine_memory(config: Config, facts: ModelFacts, *, gpu: bool) -> Memory:
    """A GPU's share of an engine, its KV cache large enough that no answer has to wait."""
    rollout, width = config.rollout, BYTES[config.engine_dtype]
    weights = facts.parameters * width / rollout.tensor_parallel
    if not gpu:
        cache = rollout.kv_cache_gib * GIB
        process = ENGINE_PROCESS_GIB * GIB
        return Memory(parts={"weights": weights, "process": process, "KV cache": cache})
    sampler = SAMPLER_BYTES * rollout.max_num_seqs * facts.vocab_size
    layer = layer_elements(facts, config) + (expert_elements(facts) if facts.moe_layers else 0.0)
    layer *= width * rollout.max_num_batched_tokens / rollout.tensor_parallel
    cache = kv_token_bytes(config, facts) * cached_tokens(config, facts)
    return Memory(
        parts={
            "weights": weights,
            "KV cache": cache,
            "activations": layer,
            "sampler": sampler,
            "CUDA": ENGINE_CUDA_GIB * GIB,
        }
    )


def cached_tokens(config: Config, facts: ModelFacts) -> int:
    """Of an engine's completions at their limits. Those of a group have their prompt in common."""
    sequences, longest = engine_sequences(config), config.max_context
    prompt = config.data.max_prompt_tokens
    # A window may fill with turns, whatever the prompt's length.
    shares = config.rollout.enable_prefix_caching and facts.full_attention
    if not shares or longest > prompt + config.rollout.sampling.max_tokens:
        return sequences * longest
    # The last group of a batch may have to begin in another engine than the rest of it.
    groups = min(sequences, -(-sequences // config.algorithm.group_size) + 1)
    return sequences * (longest - prompt) + groups * prompt


def read_together(config: Config, facts: ModelFacts) -> int:
    """Completions of a group for which attention reads their prompt once
    (`rollout.cascade_attention`, keel.rollout.vllm_fast.cascade.plan)."""
    plain = not config.model.batch_invariant and config.engine_dtype != "float32"
    if not (
        plain and facts.head_size and config.rollout.cascades(full_attention=facts.full_attention)
    ):
        return 1
    each = facts.attention_width // facts.head_size // facts.kv_heads
    return min(config.algorithm.group_size, {1: 16, 2: 8, 3: 4, 4: 4}.get(each, 1))


def cached_sequences(
    config: Config, memory: Memory, gpu_gib: float, *, taken_gib: float = 0.0
) -> int:
    """Trajectories of full length that an engine's KV cache holds on such GPUs; `taken_gib` of each
    by processes of others.

    Raises DoesNotFit if it holds not even one, or the engine's share is not free.
    """
    rest = memory.total - memory.parts["KV cache"]
    one = memory.parts["KV cache"] / engine_sequences(config)
    budget = config.rollout.gpu_memory_utilization * gpu_gib * GIB
    if taken_gib and budget > (gpu_gib - taken_gib) * GIB:
        raise DoesNotFit(
            f"rollout.gpu_memory_utilization = {config.rollout.gpu_memory_utilization:g}: that is "
            f"{gib(budget)}, and processes of others hold {gib(taken_gib * GIB)} of a GPU's "
            f"{gib(gpu_gib * GIB)}"
        )
    sequences = int((budget - rest) / one) if one else engine_sequences(config)
    if sequences < 1:
        raise DoesNotFit(
            f"an engine's GPU needs {gib(rest + one)} ({largest_first(memory, but='KV cache')}, "
            f"KV cache of one trajectory {gib(one)}), and rollout.gpu_memory_utilization = "
            f"{config.rollout.gpu_memory_utilization:g} of a GPU with {gib(gpu_gib * GIB)} "
            f"(run.gpu_gib) is {gib(budget)}"
        )
    return sequences


def within(memory: Memory, budget: float) -> Memory:
    """An engine's, its KV cache no larger than `budget` bytes leave."""
    cache = budget - (memory.total - memory.parts["KV cache"])
    return Memory(parts={**memory.parts, "KV cache": min(cache, memory.parts["KV cache"])})


def stage_in_use(config: Config, *, gpu: bool) -> int:
    """ZeRO's; `keel.trainer.engine.zero.zero_stage`, without its imports."""
    mixed = gpu and config.model.dtype != "float32"
    return max(1, config.trainer.zero_stage) if mixed else config.trainer.zero_stage


def trainer_memory(config: Config, facts: ModelFacts, *, gpu: bool) -> Memory:
    """One rank. ZeRO shards optimizer state from stage 1, gradients from 2, parameters from 3;
    expert parallelism shards the experts at every stage, sequence parallelism a micro-batch's
    tokens. An offloaded optimizer's state is not on the GPU."""
    trainer, count = config.trainer, facts.parameters
    ranks, tokens = trainer.ranks, rank_tokens(config)
    mixed = gpu and config.model.dtype != "float32"
    stage = stage_in_use(config, gpu=gpu)
    width = BYTES[config.model.dtype] if gpu else 4
    routed = facts.expert_parameters
    held = count - routed * (1 - 1 / trainer.expert_parallel)
    shard = count / ranks
    learned, of_experts = learned_parameters(config, facts)
    own = learned - of_experts * (1 - 1 / trainer.expert_parallel)
    # Adam's two moments, and from stage 1 up float32 master weights.
    state = 12 * learned / ranks if stage >= 1 else 8 * own
    with_reference = any(source.kl_coef > 0 for source in config.data.sources)
    if not gpu:  # there transformers' own norms and experts run
        facts = replace(facts, fused_norms=False, fused_experts=False)
    elif trainer.expert_parallel > 1 or config.model.dtype != "bfloat16":
        facts = replace(facts, fused_experts=False)
    kept_layers = 1 if trainer.activation_checkpointing else facts.moe_layers
    experts = kept_layers * expert_elements(facts)
    activations = activation_elements(facts, config)
    away = gpu and trainer.offload_optimizer
    parts = {
        "weights": width * (shard if stage == 3 else held),
        "gradients": 4 * (learned / ranks if stage >= 2 else own) * (not (away and stage == 3)),
        "optimizer": state * (not away),
        "reference": width * with_reference * (shard if stage == 3 else held),
        "activations": activations * width * tokens,
        "experts' tokens": experts * width * tokens,
        "support head": support_head_bytes(config, facts, width),
    }
    if ranks > 1 or (stage >= 1 and not sums_in_float32(config.model.dtype, trainer)):
        buckets = ZERO_2_BUCKETS if stage == 2 else 1
        parts["buckets"] = 4 * buckets * min(own, bucket_elements(trainer))
        # One gradient on its way to host memory, at most as large as the embeddings.
        parts["buckets"] += width * facts.vocab_size * facts.hidden_size * (away and stage < 3)
    # Parameters are gathered tensor by tensor, and a layer's experts are one tensor.
    largest = (count - routed) / facts.layers
    largest += routed / max(1, facts.moe_layers) / trainer.expert_parallel
    if stage == 3 and ranks > 1:
        parts["gathered"] = width * (max(min(held, LIVE_ELEMENTS), largest) + largest)
    elif mixed:
        # Of one layer, before they join the float32 sum.
        parts["new gradients"] = width * min(own, largest)
    of_a_step = sum(parts.get(name, 0.0) for name in (*STEP_PARTS, "gathered"))
    parts[JOINED] = max(0.0, update_copy_bytes(config, parts, gpu=gpu) - of_a_step)
    if gpu:
        parts["unused"] = TRAINER_UNUSED_GIB * GIB
        parts["CUDA"] = TRAINER_CUDA_GIB * GIB
    else:
        parts["process"] = TRAINER_PROCESS_GIB * GIB
    return Memory(parts=parts)


def update_copy_bytes(config: Config, parts: Mapping[str, float], *, gpu: bool) -> float:
    """In an update: a rank's gradients once more, joined to one piece, under ZeRO-3 those of a few
    layers at a time. They are one as they are where bfloat16 is summed apart, and in 16 bits under
    ZeRO-2. (DeepSpeed 0.19.8: its optimizer for bfloat16, `_build_compact_grad_partition_buffer`
    and `flatten_dense_tensors_aligned` of that for stages 1 and 2.)"""
    trainer, stage = config.trainer, stage_in_use(config, gpu=gpu)
    dtype = config.model.dtype if gpu else "float32"
    if stage == 0 or sums_in_float32(dtype, trainer) or (stage == 2 and dtype != "float32"):
        return 0.0
    if stage == 3:
        return min(parts["gradients"], SUB_GROUP_BYTES)
    return parts["gradients"] / (trainer.ranks if stage == 1 else 1)


def reading_ranks(trainer: TrainerConfig) -> int:
    """Number of ranks that read the model: DeepSpeed broadcasts rank 0's weights, but below ZeRO-3
    each expert's weights come from the first rank that holds it."""
    return 1 if trainer.zero_stage == 3 else trainer.expert_parallel


def bucket_elements(trainer: TrainerConfig) -> int:
    """Of a bucket of gradients, at most. (ZeRO 2 on one rank was measured with the larger one.)"""
    lone = trainer.ranks == 1 and (trainer.zero_stage != 2 or trainer.offload_optimizer)
    return LONE_BUCKET_ELEMENTS if lone else BUCKET_ELEMENTS


def sums_in_float32(dtype: str, trainer: TrainerConfig) -> bool:
    """Whether DeepSpeed's optimizer for bfloat16 adds gradients up in float32
    (trainer/engine/deepspeed_internals.py)."""
    return dtype == "bfloat16" and trainer.zero_stage <= 1 and not trainer.offload_optimizer


def support_head_bytes(config: Config, facts: ModelFacts, width: int) -> float:
    """Gradients of the head's weight and of the hidden states, and what belongs to kept ids."""
    tokens = rank_tokens(config)
    gradients = width * facts.hidden_size * (facts.vocab_size + tokens)
    whole = HEAD_CHUNK_BYTES * facts.vocab_size
    if not config.rollout.sampling.truncated:
        return gradients + whole
    # Held masses: a second gradient of each, until they are added up; of all tokens of short turns.
    held = gradients + whole if config.algorithm.kept_mass_coef else 0.0
    return gradients + KEPT_ID_BYTES * MEAN_KEPT * tokens + held


def activation_elements(facts: ModelFacts, config: Config) -> float:
    """What all layers hold at most for each token, in units of the compute dtype, without tokens at
    their experts.

    At the start of the backward pass: what each layer keeps (`layer_elements`), or with
    recomputation its input, and what attention gave where that is kept; all of the last layer's,
    and its gradients, of which the MLP's two and the residual's exist at a time.
    """
    trainer, residual = config.trainer, residual_elements(facts, config)
    whole = layer_elements(facts, config)
    gradients = 2 * mlp_width(facts) + residual
    if trainer.activation_checkpointing:
        kept = residual + (facts.attention_width if trainer.keeps_attention else 0)
        return facts.layers * kept + whole + gradients
    kept = layer_elements(facts, config, compiled=trainer.compile)
    return facts.layers * kept + (whole - kept) + gradients


def residual_elements(facts: ModelFacts, config: Config) -> int:
    """A token's residual stream, in units of the compute dtype."""
    return facts.hidden_size * (1 + config.model.wide_residual)


def layer_elements(facts: ModelFacts, config: Config, *, compiled: bool = False) -> float:
    """Kept for the backward pass, for each token of a mean layer, in units of the compute dtype.

    The residual stream before and after attention, the norms' outputs (2 hidden sizes); queries
    and keys before and after norm and rotary embedding, values, and attention's output (3 attention
    widths and 3 times that of keys); gate, up, activation and product of the MLP (4 widths). Norms
    that are not one kernel also keep a float32 copy of their input, and what they normalised.

    compiled: norms' outputs, activation and product are computed again, but a block of experts is
    no part of the graph: its input is kept. Tokens at experts come on top (`expert_elements`).
    """
    hidden, stream = facts.hidden_size, 2 * residual_elements(facts, config)
    attention = 3 * facts.attention_width + 3 * key_width(facts)
    if compiled:
        inputs = facts.moe_layers / facts.layers * hidden
        return stream + inputs + attention + 2 * mlp_width(facts)
    copies = 0 if facts.fused_norms else 2 * normed_elements(facts)
    return stream + 2 * hidden + attention + 4 * mlp_width(facts) + copies


def normed_elements(facts: ModelFacts) -> float:
    """What a mean layer's norms take of each token: the residual stream twice, queries and keys."""
    return 2 * facts.hidden_size + facts.attention_width + key_width(facts)


def elementwise_numbers(facts: ModelFacts) -> float:
    """What the kernels between the GEMMs of a mean layer read and write for each token in a
    forward pass, without tokens at their experts.

    Two norms and two sums with the residual (10 hidden sizes); norms and rotary embedding of
    queries and keys (12 widths of each); activation and product of the MLP (5 widths).
    """
    heads = facts.attention_width + key_width(facts)
    return 10 * facts.hidden_size + 12 * heads + 5 * mlp_width(facts)


def expert_elements(facts: ModelFacts) -> float:
    """Kept for the backward pass, for each token of a MoE layer at its experts, in units of the
    compute dtype: its copies on the way there and back (2 hidden sizes for each expert); gate, up
    and product, and with experts that are not Keel's the activation."""
    back_and_forth = 2 * facts.experts_per_token * facts.hidden_size
    return back_and_forth + (3 if facts.fused_experts else 4) * expert_width(facts)


def key_width(facts: ModelFacts) -> float:
    """Elements of a token's keys in a layer, as attention takes them; of its values as many. What a
    latent cache holds is spread to all heads first."""
    return facts.kv_width / 2 if facts.head_size else facts.attention_width


def expert_width(facts: ModelFacts) -> float:
    """Intermediate elements of the routed experts that a token is sent to, in a MoE layer."""
    if not facts.moe_layers:
        return 0.0
    each = facts.expert_parameters / facts.moe_layers / facts.experts / (3 * facts.hidden_size)
    return facts.experts_per_token * each


def mlp_width(facts: ModelFacts) -> float:
    """Intermediate elements of a mean layer's MLP, shared experts included and routed ones not."""
    embeddings = facts.vocab_size * facts.hidden_size * (1 if facts.tied else 2)
    rest = facts.active_parameters - embeddings - facts.attention_parameters
    dense = rest / (3 * facts.hidden_size) - facts.moe_layers * expert_width(facts)
    return max(0.0, dense / facts.layers)


def largest_first(memory: Memory, but: str = "") -> str:
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in parts if size > 0 and name != but)


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.0f} MiB"
