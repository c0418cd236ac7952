"""Memory model: estimate how many bytes an engine and a trainer rank use, and what for.

The estimates are computed from the model's config. docs/scaling.md compares them with measurements.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from keel.configs.schema import Config, ConfigError
from keel.rl.prefix_sharing import estimate_packing

if TYPE_CHECKING:
    from keel.model.load import ModelFacts  # so that light modules do not load torch

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FP8_BYTES = 1 + 4 / 128**2  # per weight, with a float32 scale per block
_ENGINE_PROCESS_GIB, _TRAINER_PROCESS_GIB = 1.3, 1.2  # on a CPU, with vLLM or DeepSpeed loaded
ENGINE_CUDA_GIB, _TRAINER_CUDA_GIB = 1.5, 1.3
"""GPU memory for the CUDA context, kernels, NCCL and CUDA graphs. The value for engines is assumed,
the one for ranks is measured."""
STEP_PARTS = (
    "activations",
    "experts' tokens",
    "merged experts",
    "support head",
    "recordings",
    "new gradients",
)
"""The parts of a rank's memory that are used only during forward and backward passes."""
_JOINED = "gradients joined"
"""Memory that an update needs beyond what the activations have freed."""
_SUB_GROUP_BYTES = 4e9  # master weights that ZeRO-3 updates at a time (DeepSpeed's default)
RANK_SPARE = 1.06
"""Safety factor for a rank's memory. Estimates are up to 2 % too low, and trajectories vary."""
ENGINE_SPARE, ENGINE_SPARE_GIB = 1.1, 1.0
"""Safety factor and reserve for an engine's memory without the KV cache. Both are assumed."""
ENGINE_BEYOND_GIB = 1.0
"""Memory that an engine uses beyond its share, for CUDA graphs and buffers: 0.6 to 1.0 GiB in four
of five randomly drawn workloads."""
_TRAINER_UNUSED_GIB = 1.5  # held by PyTorch's allocator beyond a step's tensors: 0.2 to 2.4 GiB
_SAMPLER_BYTES = 20  # per vocabulary id and sequence: logits, probabilities, both sorted with ids
_ZERO_2_BUCKETS = 4  # buckets and copies under ZeRO-2, fitted to three measured steps
_LIVE_ELEMENTS = 1_000_000_000  # parameters that ZeRO-3 keeps gathered (DeepSpeed's default)
_KEPT_ID_BYTES, _MEAN_KEPT = 60, 8
"""Bytes per kept token id in the support head (measured: 45 to 60, see docs/performance.md), and
mean number of kept ids per token."""
_HEAD_CHUNK_BYTES = 2048 * 4 * 1.2  # per vocabulary id, for a chunk of untruncated tokens
_LINEAR_WIDTHS = 6  # kept by a layer of linear attention, in units of `linear_width` (assumed)
_SPARSE_KEPT, _SPARSE_WHOLE = 2.9, 5.8
"""Elements that sparse attention keeps for its backward pass, and elements that it holds during
that pass, per token, head and latent entry. Measured on a CPU with 64 to 144 latent entries, with
the kernels of Hopper GPUs under Triton's interpreter. In the MQA form, queries and outputs are as
wide as the latents."""
_GATHERED_WHOLE = 5.0
"""Elements that the backward pass holds per element of gathered keys: the keys, and their gradients
in float32 and twice in the compute dtype (counted in the code, not measured)."""
_FRAGMENTED = 0.08  # share of a GPU lost to fragmentation while an engine samples: 11 of 140 GiB
_RESIDUE_GIB = 0.5  # held by the allocator after offloading: 0.3 to 0.8 GiB in four workloads


MemoryLimit = Literal["rank", "engine", "host"]


class DoesNotFit(ConfigError):
    """Raised if there are too few GPUs, or a GPU or a host doesn't have enough memory."""

    def __init__(self, message: str, limit: MemoryLimit = "rank") -> None:
        super().__init__(message)
        self.limit: MemoryLimit = limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory use of one GPU, or of one actor on a CPU, in bytes, broken down by purpose."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        inside = " + ".join(f"{name} {gib(size)}" for name, size in self.parts.items() if size > 0)
        return f"{gib(self.total)} each ({inside})"

    def largest_first(self, but: Collection[str] = ()) -> str:
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(
            f"{name} {gib(size)}" for name, size in parts if size > 0 and name not in but
        )


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.0f} MiB"


# Engine


def engine_sequences(config: Config) -> int:
    sequences = config.algorithm.prompts_per_step * config.algorithm.group_size
    return min(config.rollout.max_num_seqs, -(-sequences // config.rollout.engines))


def kv_token_bytes(config: Config, facts: ModelFacts) -> float:
    shares = min(config.rollout.tensor_parallel, facts.kv_heads)
    layers = facts.layers - facts.linear_layers
    # vLLM's indexers cache keys in FP8, with a float32 scale, on every GPU of an engine.
    index = facts.index_width + 4 if facts.index_top_k else 0
    return layers * (facts.kv_width * BYTES[config.engine_dtype] / shares + index)


def selection_bytes(config: Config, facts: ModelFacts) -> int:
    """Return the bytes per token of the recorded selections of sparse attention, which are a bitmap
    of the context for each layer, in words of 32 bits."""
    recorded = config.algorithm.keep_selection and 0 < facts.index_top_k < config.max_context
    return facts.layers * 4 * -(-config.max_context // 32) * recorded


def engine_layer_bytes(config: Config) -> float:
    """Return the bytes per weight of an engine's linear layers and experts."""
    return _FP8_BYTES if config.rollout.quantization else BYTES[config.engine_dtype]


def engine_memory(config: Config, facts: ModelFacts, *, gpu: bool) -> Memory:
    """Estimate an engine's memory on one GPU, including a KV cache for all its completions."""
    rollout, width = config.rollout, BYTES[config.engine_dtype]
    tables = facts.embedding_parameters
    weights = tables * width + (facts.parameters - tables) * engine_layer_bytes(config)
    weights /= rollout.tensor_parallel
    if not gpu:
        cache, process = rollout.kv_cache_gib * GIB, _ENGINE_PROCESS_GIB * GIB
        return Memory(parts={"weights": weights, "process": process, "KV cache": cache})
    layer = layer_elements(facts, config) + (expert_elements(facts) if facts.moe_layers else 0.0)
    layer *= width * rollout.max_num_batched_tokens / rollout.tensor_parallel
    sequences, longest = engine_sequences(config), config.max_context
    tokens, prompt = sequences * longest, config.data.max_prompt_tokens
    shares = rollout.enable_prefix_caching and facts.full_attention
    # A window of episodes may fill with turns, whatever the prompt's length.
    if shares and config.data.sources and not config.with_agents:
        # The last group of a batch may be split between engines.
        groups = min(sequences, -(-sequences // config.algorithm.group_size) + 1)
        tokens = sequences * (longest - prompt) + groups * prompt
    drawn = 1 + rollout.draft_tokens  # tokens of a sequence per step
    # float32 states of linear attention.
    states = 4 * sequences * facts.linear_layers * facts.state_size / rollout.tensor_parallel
    return Memory(
        parts={
            "weights": weights,
            # An update keeps all experts of a layer until the last one has come. Then each GPU
            # copies its share and quantizes it.
            "experts to quantize": bool(rollout.quantization)
            * (width + (width + 1) / rollout.tensor_parallel)
            * (facts.expert_parameters / max(1, facts.moe_layers)),
            "KV cache": kv_token_bytes(config, facts) * tokens + states,
            # Of every token in the cache, on each GPU (keel.rollout.recording.selection).
            "selections": selection_bytes(config, facts) * tokens,
            "activations": layer,
            "sampler": _SAMPLER_BYTES * rollout.max_num_seqs * drawn * facts.vocab_size,
            "CUDA": ENGINE_CUDA_GIB * GIB,
        }
    )


def needs_fixed_cache(config: Config, memory: Memory) -> bool:
    """Return True if vLLM can't measure the memory for its KV cache, because the cache would take
    the memory that updates of quantized weights or recorded selections need."""
    return bool(config.rollout.quantization) or memory.parts["selections"] > 0


def cache_bytes(memory: Memory) -> float:
    """Return the size of an engine's KV cache, including the recorded selections of its tokens."""
    return memory.parts["KV cache"] + memory.parts["selections"]


def cached_sequences(config: Config, memory: Memory, gpu_gib: float) -> int:
    """Return how many full-length completions fit in an engine's KV cache. Raises DoesNotFit if not
    even one fits."""
    share = config.rollout.gpu_memory_utilization
    one = cache_bytes(memory) / engine_sequences(config)
    reserved = needs_fixed_cache(config, memory)
    room = cache_room(config, memory, gpu_gib, reserve=reserved)
    sequences = int(room / one) if one else engine_sequences(config)
    if sequences < 1:
        budget = share * gpu_gib * GIB
        parts = memory.largest_first(but=("KV cache", "selections"))
        cached = "KV cache" + " and selections" * (memory.parts["selections"] > 0)
        reserve = budget - room - (memory.total - cache_bytes(memory))
        parts += f", reserve {gib(reserve)}" * reserved
        raise DoesNotFit(
            f"an engine's GPU needs {gib(budget - room + one)} ({parts}, {cached} of one "
            f"trajectory {gib(one)}), and rollout.gpu_memory_utilization = {share:g} of a GPU "
            f"(run.gpu_gib) is {gib(budget)}",
            "engine",
        )
    return sequences


def cache_room(config: Config, memory: Memory, gpu_gib: float, *, reserve: bool) -> float:
    """Return how many bytes of an engine's share of its GPU remain for the KV cache and the
    selections of its tokens. A `reserve` for errors of the estimate is needed if vLLM does not
    measure its memory use."""
    rest = memory.total - cache_bytes(memory)
    if reserve:
        rest = ENGINE_SPARE * rest + ENGINE_SPARE_GIB * GIB
    return config.rollout.gpu_memory_utilization * gpu_gib * GIB - rest


def guaranteed_cache_bytes(config: Config, facts: ModelFacts, gpu_gib: float) -> int:
    """Return how many bytes are guaranteed to be available for an engine's KV cache, or 0 if they
    can't hold all completions, in which case vLLM has to measure its memory use.

    An engine that `needs_fixed_cache` never measures it. Raises DoesNotFit if its cache can't hold
    a single full-length completion.
    """
    memory = engine_memory(config, facts, gpu=True)
    room = cache_room(config, memory, gpu_gib, reserve=True)
    if needs_fixed_cache(config, memory):
        cached_sequences(config, memory, gpu_gib)
        return int(room * memory.parts["KV cache"] / cache_bytes(memory))
    return int(room) if room >= memory.parts["KV cache"] else 0


# Trainer rank


def count_micro_batches(config: Config, replicas: int = 0, capacity: int = 0) -> tuple[int, int]:
    """Return the number of micro-batches a rank runs per optimizer step, and the number of tokens
    it computes per step. Assumes that all trajectories reach their length limits. A shared prompt
    counts once per micro-batch. `replicas` and `capacity` override the recipe's values."""
    a, context = config.algorithm, config.max_context
    groups = -(-a.prompts_per_step // a.updates_per_batch)
    shared = min(context, config.data.max_prompt_tokens) if config.trainer.share_prompts else 0
    replicas = replicas or config.trainer.data_parallel
    count, tokens = estimate_packing(
        groups,
        a.group_size,
        shared=shared,
        own=context - shared,
        replicas=replicas,
        capacity=capacity or config.trainer.micro_batch_tokens,
    )
    return count, tokens * replicas * a.prompts_per_step // groups


def _rank_tokens(config: Config) -> float:
    longest = max(config.trainer.micro_batch_tokens, config.max_context)
    return longest / config.trainer.sequence_parallel


def _learned_parameters(config: Config, facts: ModelFacts) -> tuple[int, int]:
    if config.model.lora.enabled:
        return config.model.lora.parameters(facts.projections), 0
    if config.trainer.attention == "warm-up":  # only the indexer learns
        return facts.indexer_parameters, 0
    return facts.parameters, facts.expert_parameters


def stage_in_use(config: Config, *, gpu: bool) -> int:
    """Return the ZeRO stage that a rank uses on a GPU or a CPU."""
    return config.trainer.used_zero_stage(float32=not gpu or config.model.dtype == "float32")


def trainer_memory(config: Config, facts: ModelFacts, *, gpu: bool) -> Memory:
    """Estimate the memory of one rank.

    ZeRO shards the optimizer state from stage 1 on, the gradients from stage 2 on, and the
    parameters in stage 3, where hpZ adds a copy per node. Expert parallelism shards the experts in
    every stage, and sequence parallelism shards the tokens in a micro-batch.
    """
    trainer, count = config.trainer, facts.parameters
    ranks, tokens = trainer.ranks, _rank_tokens(config)
    mixed = gpu and config.model.dtype != "float32"
    stage = stage_in_use(config, gpu=gpu)
    width = BYTES[config.model.dtype] if gpu else 4
    routed = facts.expert_parameters
    held = count - routed * (1 - 1 / trainer.expert_parallel)
    sharded = count / ranks
    if trainer.hpz_partition_size > 1:
        sharded += count / trainer.hpz_partition_size
    learned, of_experts = _learned_parameters(config, facts)
    local = learned - of_experts * (1 - 1 / trainer.expert_parallel)
    # Adam's two moments, and from stage 1 up float32 master weights.
    state = 12 * learned / ranks if stage >= 1 else 8 * local
    frozen_copy = config.data.uses_initial_model and not config.model.lora.enabled
    if not gpu:  # transformers' own norms and experts run there
        facts = replace(facts, fused_norms=False, fused_experts=False)
    elif trainer.expert_parallel > 1 or config.model.dtype != "bfloat16":
        facts = replace(facts, fused_experts=False)
    recomputed = trainer.activation_checkpointing or config.model.batch_invariant
    kept_layers = 1 if recomputed else facts.moe_layers
    offloaded = gpu and trainer.offload_optimizer
    parts = {
        "weights": width * (sharded if stage == 3 else held),
        "gradients": 4
        * (learned / ranks if stage >= 2 else local)
        * (not (offloaded and stage == 3)),
        "optimizer": state * (not offloaded),
        "reference": width
        * (
            frozen_copy * (sharded if stage == 3 else held)
            + facts.teacher_parameters * (sharded / count if stage == 3 else 1)
        ),
        "activations": _activation_elements(facts, config) * width * tokens,
        "experts' tokens": kept_layers * expert_elements(facts) * width * tokens,
        "support head": _support_head_bytes(config, facts, width),
        "recordings": _recording_bytes(config, facts) * tokens,
    }
    if ranks > 1 or (stage >= 1 and not trainer.sums_in_float32(config.model.dtype)):
        buckets = _ZERO_2_BUCKETS if stage == 2 else 1
        parts["buckets"] = 4 * buckets * min(local, trainer.bucket_elements)
        # One gradient on its way to host memory, at most as large as the embeddings.
        parts["buckets"] += width * facts.vocab_size * facts.hidden_size * (offloaded and stage < 3)
    if config.model.lora.adapts_experts:  # and the gradient of one layer
        parts["merged experts"] = width * routed / facts.moe_layers * (kept_layers + 1)
    # Parameters are gathered tensor by tensor, and a layer's experts are one tensor.
    largest = (count - routed) / facts.layers
    largest += routed / max(1, facts.moe_layers) / trainer.expert_parallel
    if stage == 3 and ranks > 1:
        parts["gathered"] = width * (max(min(held, _LIVE_ELEMENTS), largest) + largest)
    elif mixed:
        # One layer's, before they join the float32 sum.
        parts["new gradients"] = width * min(local, largest)
    of_a_step = sum(parts.get(name, 0.0) for name in (*STEP_PARTS, "gathered"))
    parts[_JOINED] = max(0.0, update_copy_bytes(config, parts, gpu=gpu) - of_a_step)
    if gpu:
        parts["unused"] = _TRAINER_UNUSED_GIB * GIB
        parts["CUDA"] = _TRAINER_CUDA_GIB * GIB
    else:
        parts["process"] = _TRAINER_PROCESS_GIB * GIB
    return Memory(parts=parts)


def update_copy_bytes(config: Config, parts: Mapping[str, float], *, gpu: bool) -> float:
    """Return the size of the second copy of the gradients made during an update.

    A rank makes this copy when it concatenates its gradients into a single tensor. ZeRO-3
    concatenates the gradients of only a few layers at a time. (DeepSpeed 0.19.8:
    `_build_compact_grad_partition_buffer` and `flatten_dense_tensors_aligned`.)
    """
    trainer, stage = config.trainer, stage_in_use(config, gpu=gpu)
    dtype = config.model.dtype if gpu else "float32"
    if stage == 0 or trainer.sums_in_float32(dtype) or (stage == 2 and dtype != "float32"):
        return 0.0
    if stage == 3:
        return min(parts["gradients"], _SUB_GROUP_BYTES)
    return parts["gradients"] / (trainer.ranks if stage == 1 else 1)


def _support_head_bytes(config: Config, facts: ModelFacts, width: int) -> float:
    """Estimate the bytes needed for the support head's weight and hidden-state gradients, plus the
    kept ids."""
    tokens = _rank_tokens(config)
    gradients = width * facts.hidden_size * (facts.vocab_size + tokens)
    whole = _HEAD_CHUNK_BYTES * facts.vocab_size
    if not config.rollout.sampling.truncated:
        return gradients + whole
    # Kept mass: a second gradient until both are summed, and whole rows of tokens.
    mass = gradients + whole if config.algorithm.kept_mass_coef else 0.0
    return gradients + _KEPT_ID_BYTES * _MEAN_KEPT * tokens + mass


def _routes_bytes(config: Config, facts: ModelFacts) -> int:
    """Return the bytes per token of recorded experts, as int16."""
    return 2 * facts.moe_layers * facts.experts_per_token * config.algorithm.keep_routing


def _recording_bytes(config: Config, facts: ModelFacts) -> float:
    """Return the bytes per token of routes and selections on a rank's GPU: the routes of all
    layers, and the selections of one layer twice, because they are copied to the GPU and then
    arranged in blocks. `_KEPT_ID_BYTES` covers sampling masks."""
    if not config.data.sources:
        return 0.0
    return _routes_bytes(config, facts) + 2 * selection_bytes(config, facts) / facts.layers


def recordings_host_bytes(config: Config, facts: ModelFacts) -> float:
    """Return the bytes of host memory that the routes and selections of a batch take on each rank
    once they are packed."""
    if not config.data.sources:
        return 0.0
    tokens = count_micro_batches(config)[1] / config.trainer.data_parallel
    return tokens * (_routes_bytes(config, facts) + selection_bytes(config, facts))


def recordings_store_bytes(config: Config, facts: ModelFacts) -> float:
    """Return the bytes of a step's routes and selections that an engine's node keeps in Ray's
    object store until the ranks fetch them."""
    sequences = config.algorithm.prompts_per_step * config.algorithm.group_size
    tokens = -(-sequences // config.rollout.engines) * config.max_context
    # Ids of up to 256 experts take one byte there (keel.rl.recordings).
    routes = _routes_bytes(config, facts) / (2 if facts.experts <= 256 else 1)
    return tokens * (routes + selection_bytes(config, facts))


# Elements per token of a layer, in units of the compute dtype


def _activation_elements(facts: ModelFacts, config: Config) -> float:
    """Return the peak number of elements per token that all layers hold together, excluding
    experts.

    The peak is at the start of the backward pass, when each layer holds its saved activations. With
    checkpointing, these are only its input and possibly the attention output. The last layer also
    holds all its activations and their gradients (two for the MLP and one for the residual stream).
    """
    trainer, residual = config.trainer, facts.hidden_size * (1 + config.model.wide_residual)
    whole = layer_elements(facts, config)
    latents, plain = facts.attention_heads * facts.kv_width, 6 * facts.attention_width
    sparse = facts.index_top_k > 0
    gathered = gathered_elements(facts, config)
    whole += sparse * (_SPARSE_WHOLE * latents - plain) + _GATHERED_WHOLE * gathered
    gradients = 2 * _mlp_width(facts) + residual
    if trainer.activation_checkpointing:
        kept = residual + (facts.attention_width if trainer.keeps_attention else 0)
        return facts.layers * kept + whole + gradients
    kept = layer_elements(facts, config, compiled=trainer.compile)
    kept += sparse * (_SPARSE_KEPT * latents - plain) + gathered
    return facts.layers * kept + (whole - kept) + gradients


def gathered_elements(facts: ModelFacts, config: Config) -> float:
    """Return the number of key elements that a sparse attention layer gathers from other ranks, per
    token of this rank."""
    others = (config.trainer.sequence_parallel - 1) * (facts.index_top_k > 0)
    return others * (facts.kv_width + facts.index_width)


def layer_elements(facts: ModelFacts, config: Config, *, compiled: bool = False) -> float:
    """Return the number of elements per token that an average layer keeps for its backward pass,
    excluding experts.

    These are the residual stream before and after attention; the outputs of norms (2 ×
    hidden_size); queries and keys before and after norm and RoPE, values and the attention output
    (3 × the attention width, 3 × the key width); and the gate, up projection, activation and
    product of the MLP (4 × the MLP width).

    Norms that aren't fused also keep a float32 input and the normalized values. Linear attention
    also keeps float32 copies for its convolution, gates and norm. A `compiled` layer recomputes the
    outputs of norms, the activation and the product, but keeps the input of a block of experts.
    """
    hidden = facts.hidden_size
    stream = 2 * hidden * (1 + config.model.wide_residual)
    linear = facts.linear_layers / facts.layers
    attention = (1 - linear) * (3 * facts.attention_width + 3 * key_width(facts))
    attention += linear * _LINEAR_WIDTHS * facts.linear_width
    if compiled:
        inputs = facts.moe_layers / facts.layers * hidden
        return stream + inputs + attention + 2 * _mlp_width(facts)
    copies = 0 if facts.fused_norms else 2 * normed_elements(facts)
    return stream + 2 * hidden + attention + 4 * _mlp_width(facts) + copies


def normed_elements(facts: ModelFacts) -> float:
    """Return the number of elements per token that pass through an average layer's norms: the
    residual stream (twice), the queries and the keys."""
    return 2 * facts.hidden_size + facts.attention_width + key_width(facts)


def elementwise_elements(facts: ModelFacts) -> float:
    """Return the number of elements per token that an average layer moves between its GEMMs in a
    forward pass, excluding experts. Two norms and two residual adds move 10 × hidden_size elements,
    QK norm and RoPE move 12 × the widths of the queries and keys, and the MLP's activation and
    product move 5 × the MLP width."""
    heads = facts.attention_width + key_width(facts)
    return 10 * facts.hidden_size + 12 * heads + 5 * _mlp_width(facts)


def expert_elements(facts: ModelFacts) -> float:
    """Return the number of elements per token that a MoE layer's experts keep: copies of the token
    to and from each expert (2 × hidden_size), the gate, the up projection, the product, and the
    activation if experts aren't fused."""
    copies = 2 * facts.experts_per_token * facts.hidden_size
    return copies + (3 if facts.fused_experts else 4) * _expert_width(facts)


def key_width(facts: ModelFacts) -> float:
    """Return the number of key elements per token in one layer, with a latent cache expanded to all
    heads."""
    return facts.kv_width / 2 if facts.head_size else facts.attention_width


def _expert_width(facts: ModelFacts) -> float:
    """Return the total intermediate size of a token's routed experts in a MoE layer."""
    return facts.experts_per_token * facts.expert_size


def _mlp_width(facts: ModelFacts) -> float:
    """Return the intermediate size of an average layer's MLP, counting shared experts but not
    routed ones."""
    rest = facts.active_parameters - facts.embedding_parameters - facts.attention_parameters
    dense = rest / (3 * facts.hidden_size) - facts.moe_layers * _expert_width(facts)
    return max(0.0, dense / facts.layers)


# An engine and a rank that time-share a GPU (`rollout.time_share`): `keel.trainer.engine.offload`


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """How many bytes a rank moves to host memory when it time-shares its GPU with an engine."""

    sampling: float = 0.0  # bytes in host memory while the engine samples
    training: float = 0.0
    """Bytes of optimizer state moved to host memory to make room for activations."""
    host: float = 0.0  # Peak number of bytes in host memory
    moved: float = 0.0  # bytes transferred per step in both directions together


def offloads(config: Config, *, shared: bool) -> bool:
    return shared and config.rollout.time_share and config.trainer.offload_while_sampling


def needed_bytes(config: Config, memory: Memory, *, shared: bool) -> float:
    """Return how many bytes of GPU memory a rank needs, not counting state it can offload."""
    return least_bytes(config, memory) if offloads(config, shared=shared) else memory.total


def least_bytes(config: Config, memory: Memory) -> float:
    """Return how many bytes a rank needs on the GPU if it offloads optimizer state during forward
    and backward passes, and the reference model during an update."""
    return max(memory.total - memory.parts["optimizer"], _update_bytes(config, memory))


def peak_bytes(config: Config, memory: Memory, plan: OffloadPlan) -> float:
    return max(memory.total - plan.training, min(memory.total, _update_bytes(config, memory)))


def _update_bytes(config: Config, memory: Memory) -> float:
    names = ("weights", "gradients", "optimizer", "unused", "CUDA")
    held = sum(memory.parts[name] for name in names)
    return held + update_copy_bytes(config, memory.parts, gpu=True)


def _held_bytes(memory: Memory) -> float:
    return sum(memory.parts[name] for name in ("weights", "optimizer", "reference"))


def offload_plan(config: Config, memory: Memory, gpu_gib: float, *, shared: bool) -> OffloadPlan:
    """Decide how much a rank offloads to host memory. If the size of the GPU memory is unknown (0),
    it offloads everything."""
    if not offloads(config, shared=shared):
        return OffloadPlan()
    parts, state = memory.parts, memory.parts["optimizer"]
    free = gpu_gib * GIB
    share = config.rollout.gpu_memory_utilization + _FRAGMENTED
    room = free - (share * gpu_gib + _fixed_gib(config)) * GIB
    excess = max(0.0, _held_bytes(memory) - max(0.0, room))
    reference = min(excess, parts["reference"])
    excess -= reference
    if stage_in_use(config, gpu=True) in (1, 2):  # flat tensors: moments and master weights
        pieces = min(3.0, -(-excess // (state / 3))) if state else 0.0
        away = pieces * state / 3
    else:
        away = min(excess, state)
    weights = max(0.0, excess - away)
    # Room for activations, and for an update.
    free -= ENGINE_CUDA_GIB * GIB
    lacks = min(state, max(0.0, RANK_SPARE * memory.total - free)) if gpu_gib else state
    alone = not gpu_gib or _update_bytes(config, memory) + parts["reference"] > free
    updates, training = config.algorithm.updates_per_batch, max(away, lacks)
    updated = parts["reference"] * alone
    return OffloadPlan(
        sampling=reference + away + weights,
        training=training,
        host=max(reference + away + weights, training + max(reference, updated)),
        moved=2 * (weights + training + (updates - 1) * lacks)
        + (updates * updated if alone else reference),
    )


def staying_gib(config: Config, memory: Memory) -> float:
    """Return how many GiB a rank keeps on the GPU while an engine samples, at least."""
    if config.trainer.offload_while_sampling:
        return _fixed_gib(config) + _RESIDUE_GIB
    # PyTorch's cached memory stays, too: 23.4 GiB where weights, optimizer and reference are 19.1.
    return _fixed_gib(config) + (_held_bytes(memory) + memory.parts["unused"]) / GIB


def _fixed_gib(config: Config) -> float:
    return _TRAINER_CUDA_GIB + config.trainer.publish_bucket_mib / 1024


def host_bytes(config: Config, facts: ModelFacts, plan: OffloadPlan) -> float:
    """Return the least host memory a rank needs. This includes an offloaded optimizer's master
    weights, moments, gradients and outgoing weights, everything that is offloaded for time-sharing,
    and the recordings of a batch."""
    trainer = config.trainer
    learned, _ = _learned_parameters(config, facts)
    each = 20 if trainer.zero_stage == 3 else 18
    optimizer = each * learned / trainer.ranks if trainer.offload_optimizer else 0.0
    return optimizer + plan.host + recordings_host_bytes(config, facts)


def can_start_together(config: Config, facts: ModelFacts, gpu_gib: float) -> bool:
    """Return True if an engine and a rank can start on the same GPU at the same time. An engine
    that has to measure its KV cache must start alone (`guaranteed_cache_bytes`)."""
    if config.rollout.time_share or not guaranteed_cache_bytes(config, facts, gpu_gib):
        return False
    rank = trainer_memory(config, facts, gpu=True)
    holds = rank.total - sum(rank.parts.get(name, 0.0) for name in (*STEP_PARTS, _JOINED))
    share = config.rollout.gpu_memory_utilization * gpu_gib
    return share + RANK_SPARE * holds / GIB <= gpu_gib


def check_trainer_fits(
    config: Config, memory: Memory, gpu_gib: float, *, shared: bool, selections: float = 0.0
) -> None:
    """Raise DoesNotFit if a rank doesn't fit on its GPU, along with the engine if they share it.
    `selections` is the number of bytes of recorded selections that a sleeping engine keeps."""
    share = config.rollout.gpu_memory_utilization
    needs = needed_bytes(config, memory, shared=shared)
    if shared and config.rollout.time_share:
        room = gpu_gib - ENGINE_CUDA_GIB - selections / GIB
        stays = staying_gib(config, memory)
        if share > 1 - stays / gpu_gib:
            raise DoesNotFit(
                f"rollout.gpu_memory_utilization = {share:g}: {gib(stays * GIB)} of a GPU's "
                f"{gib(gpu_gib * GIB)} (run.gpu_gib) stay with the trainer while the engine samples"
            )
    else:
        room = gpu_gib * (1 - share * shared)
    if needs <= room * GIB:
        return
    raise DoesNotFit(
        f"a trainer rank needs {gib(needs)} ({memory.largest_first()}), and has {gib(room * GIB)} "
        f"of a GPU's {gib(gpu_gib * GIB)} (run.gpu_gib)" + ", shared with an engine" * shared
    )
