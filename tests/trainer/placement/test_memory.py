"""Compares the memory model with calculations by hand and with measurements."""

import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.training.cases import Case, estimates, model_of
from keel.configs.load import load_config
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from keel.configs.sections.sft import ConversationsConfig, SftConfig
from keel.model.load import ModelFacts, facts_of
from keel.rl.prefix_sharing import prefix_group_size
from keel.trainer.placement.families import check_engine
from keel.trainer.placement.hardware import GpuSpec, Hardware, idle_nodes
from keel.trainer.placement.memory import (
    _FRAGMENTED,
    ENGINE_CUDA_GIB,
    GIB,
    RANK_SPARE,
    DoesNotFit,
    Memory,
    OffloadPlan,
    _held_bytes,
    cached_sequences,
    check_trainer_fits,
    count_micro_batches,
    engine_sequences,
    guaranteed_cache_bytes,
    kv_token_bytes,
    needed_bytes,
    offload_plan,
    peak_bytes,
    recordings_host_bytes,
    recordings_store_bytes,
    trainer_memory,
)
from keel.trainer.placement.plan import Plan, make_plan, plan_on
from keel.trainer.placement.step_time import (
    Rates,
    compute_seconds,
    step_time,
    traffic_seconds,
)
from tests.trainer.placement.shapes import DENSE, MOE, SOURCE, v32_facts


def recipe(*, beta: float = 0.0, rollout: dict[str, Any] | None = None, **trainer: Any) -> Config:
    options = {"max_num_seqs": 16, "sampling": SamplingConfig(top_k=64, max_tokens=7_000)}
    return Config(
        model=ModelConfig(path="some/model"),
        data=DataConfig(sources=(replace(SOURCE, kl_coef=beta),), max_prompt_tokens=1000),
        algorithm=AlgorithmConfig(prompts_per_step=8, group_size=8),
        rollout=RolloutConfig(**{**options, **(rollout or {})}),
        trainer=TrainerConfig(**trainer),
    )


def plan(
    config: Config, facts: ModelFacts = DENSE, *, shared: bool = False, **hardware: Any
) -> Plan:
    return make_plan(config, facts, Hardware(gpu=True, **hardware), shared=shared)


def billions(config: Config, *names: str) -> list[float]:
    parts = plan(config).trainer.parts
    return [round(parts.get(name, 0.0) / 1e9, 6) for name in names]


@pytest.mark.parametrize(
    ("stage", "state"),
    [  # bytes a parameter: bfloat16 weights and reference, float32 gradients, master and moments
        (0, [2, 4, 12 / 4, 2]),  # DeepSpeed has master weights from stage 1 up, so 0 is 1
        (1, [2, 4, 12 / 4, 2]),
        (2, [2, 4 / 4, 12 / 4, 2]),
        (3, [2 / 4, 4 / 4, 12 / 4, 2 / 4]),
    ],
)
def test_zero_stage_determines_sharding(stage: Any, state: list[float]) -> None:
    config = recipe(ranks=4, zero_stage=stage, beta=0.1)
    assert billions(config, "weights", "gradients", "optimizer", "reference") == state


def test_hpz_adds_a_copy_per_node_and_gathers_there() -> None:
    layout: dict[str, Any] = {"ranks": 16, "zero_stage": 3, "beta": 0.1}
    plain, hpz = recipe(**layout), recipe(**layout, hpz_partition_size=8)
    for part in ("weights", "reference"):
        (more,), (less,) = billions(hpz, part), billions(plain, part)
        assert more == pytest.approx(less + 2 / 8)
    spec = GpuSpec(node_gpus=8)
    slower, faster = (traffic_seconds(each, DENSE, 4, spec) for each in (plain, hpz))
    # Of three gathers in each of 4 micro-batches, one crosses nodes.
    near = 2 * 1e9 * (3 * 4 - 1)
    saved = near * (15 / 16 / (8 * 50e9) - 7 / 8 / 450e9)
    assert slower - faster == pytest.approx(saved)


MLP = (1e9 - 2e8 - 4e7) / 10 / 3000
WHOLE = 4 * 1000 + 3 * 1000 + 3 * 256 + 4 * MLP
"""Elements per token saved by a layer of `DENSE`: residual and norms, queries and attention output,
keys and values, MLP."""
FLOWING = 2 * MLP + 1000
"""Gradient elements in flight inside a layer."""
RECOMPUTED = {"activation_checkpointing": True}


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, 10 * WHOLE + FLOWING),
        (RECOMPUTED, 10 * 1000 + WHOLE + FLOWING),
        ({"compile": True}, 10 * WHOLE - 9 * (2 * 1000 + 2 * MLP) + FLOWING),
        ({**RECOMPUTED, "compile": True}, 10 * 1000 + WHOLE + FLOWING),
        ({**RECOMPUTED, "keep_attention": True}, 10 * (1000 + 1000) + WHOLE + FLOWING),
        ({**RECOMPUTED, "keep_attention": True, "zero_stage": 3}, 10 * 1000 + WHOLE + FLOWING),
    ],
)
def test_saved_activations(options: dict[str, Any], numbers: float) -> None:
    (kept,) = billions(recipe(micro_batch_tokens=8000, **options), "activations")
    assert kept == pytest.approx(numbers * 2 * 8000 / 1e9)


def test_kv_cache_holds_completions_and_shared_prompts() -> None:
    token = 10 * 512 * 2
    parts = plan(recipe()).engine.parts
    assert parts["KV cache"] == token * (16 * 7000 + 3 * 1000)  # they may span three groups
    each = plan(recipe(rollout={"enable_prefix_caching": False})).engine.parts
    assert each["KV cache"] == token * 16 * 8000
    two = plan(recipe(rollout={"tensor_parallel": 4})).engine.parts
    assert two["KV cache"] == parts["KV cache"] / 2  # only two heads to share out
    assert two["weights"] == parts["weights"] / 4


def test_quantised_engine_holds_a_byte_per_weight() -> None:
    options = {"tensor_parallel": 2, "quantization": "fp8"}
    config = recipe(rollout=options)
    engine = plan(config, MOE).engine.parts
    tables = 2 * 100_000 * 1000
    layers = MOE.parameters - tables
    assert engine["weights"] == (2 * tables + layers * (1 + 4 / 128**2)) / 2
    # A layer's experts in bfloat16, and a GPU's half of them in bfloat16 and FP8.
    assert engine["experts to quantize"] == (2 + 3 / 2) * 8 * 3 * 1000 * 500
    whole = plan(recipe(rollout={**options, "expert_parallel": True}), MOE).engine
    assert whole.parts == engine
    plain = recipe(rollout={"tensor_parallel": 2})
    assert "experts to quantize" not in str(plan(plain, MOE).engine)
    facts = replace(MOE, parameters=100_000_000_000, expert_parameters=90_000_000_000)
    full, half = (
        step_time(each, facts, micro_batches=1, spec=GpuSpec()).decode for each in (plain, config)
    )
    assert 0.5 < half / full < 0.6
    # It never measures its cache, because an update needs memory that vLLM would use.
    cache = engine["KV cache"]
    rest = 1.1 * (sum(engine.values()) - cache) + GIB
    size = (rest + cache / 2) / (0.85 * GIB)
    assert guaranteed_cache_bytes(config, MOE, size) == pytest.approx(cache / 2, abs=1)
    assert guaranteed_cache_bytes(plain, MOE, size) == 0
    one = cache / engine_sequences(config)
    assert cached_sequences(config, plan(config, MOE).engine, size + 0.01) == cache // (2 * one)
    for gpu_gib in (0.0, (rest + 0.9 * one) / (0.85 * GIB)):
        with pytest.raises(DoesNotFit, match="reserve"):
            guaranteed_cache_bytes(config, MOE, gpu_gib)


def test_parallelism_shards_experts_or_tokens() -> None:
    parts = plan(recipe(ranks=4, expert_parallel=4), MOE).trainer.parts
    assert parts["weights"] == 2 * (MOE.parameters - 3 / 4 * MOE.expert_parameters)
    long = recipe(ranks=4, sequence_parallel=2, micro_batch_tokens=16_000)
    alone = recipe(ranks=2, micro_batch_tokens=8000)
    assert billions(long, "activations") == billions(alone, "activations")


def cluster(nodes: int) -> Hardware:
    return Hardware(gpu=True, nodes=tuple(idle_nodes(nodes, 8)), gpu_gib=139.0)


@pytest.mark.parametrize(("nodes", "fits"), [(16, False), (32, True)])
def test_deepseek_v32_is_planned_as_by_hand(nodes: int, fits: bool) -> None:
    facts = v32_facts()
    sizes = {"zero_stage": 3, "activation_checkpointing": True, "micro_batch_tokens": 16_384}
    trainer = TrainerConfig(ranks=8 * nodes, **sizes)
    source = ConversationsConfig(name="text", source="text", path="text")
    sft = SftConfig(sources=(source,), max_context_tokens=16_384)
    text = Config(model=ModelConfig(path="some/model"), trainer=trainer, sft=sft)
    parts = trainer_memory(text, facts, gpu=True).parts
    count, ranks = 671_877_929_216, 8 * nodes
    assert (parts["weights"], parts["gradients"]) == (2 * count / ranks, 4 * count / ranks)
    assert parts["optimizer"] == 12 * count / ranks
    # The experts of a layer are gathered, and their gradients are as large.
    experts = 58 * 256 * 3 * 2048 * 7168
    assert parts["gathered"] == pytest.approx(2 * 2 * (experts / 58 + (count - experts) / 61))
    latents = 16_384 * 128 * 576
    inputs = 16_384 * 61 * 7168
    assert parts["activations"] / 2 == pytest.approx(inputs + 5.25 * latents, rel=0.2)
    if fits:
        plan_on(text, facts, cluster(nodes))
        text = replace(text, sft=replace(sft, max_context_tokens=131_072))
    with pytest.raises(ConfigError, match="sequence_parallel" if fits else "offload_optimizer"):
        plan_on(text, facts, cluster(nodes))
    if fits:  # a slice has as many tokens as a context before, and the keys of seven others
        text = replace(text, trainer=replace(trainer, sequence_parallel=8))
        plan_on(text, facts, cluster(nodes))
        split = trainer_memory(text, facts, gpu=True).parts["activations"]
        assert split - parts["activations"] == 2 * 131_072 // 8 * 5 * 7 * (576 + 128)

    rollout = {"tensor_parallel": 8, "max_num_seqs": 4}
    config = recipe(rollout=rollout)
    cache = plan(config, facts).engine.parts["KV cache"]
    assert cache == 4 * 8000 * 61 * (576 * 2 + 128 + 4)
    with pytest.raises(ConfigError, match=r"156\.4 GiB.*tensor_parallel = 8; above 8"):
        plan_on(config, facts, cluster(nodes))
    sizes |= {"micro_batch_tokens": 8000, "offload_optimizer": not fits}
    config = recipe(rollout={**rollout, "tensor_parallel": 16}, ranks=8 * nodes - 16, **sizes)
    planned = plan_on(config, facts, cluster(nodes))
    assert planned.engine.parts["weights"] == 2 * count / 16

    rollout |= {"quantization": "fp8", "gpu_memory_utilization": 0.9}
    config = recipe(rollout=rollout, ranks=8 * nodes - 8, **sizes)
    check_engine(config, facts, gpu=True)
    planned = plan_on(config, facts, cluster(nodes))
    assert planned.cached is not None and planned.cached > 4
    assert planned.engine.parts["experts to quantize"] == (2 + 3 / 8) * experts / 58


def test_recorded_selections_take_memory_on_engines_ranks_and_hosts() -> None:
    """A bitmap of 8,000 positions per layer: for each slot of the cache, for one layer of a
    micro-batch (twice), and for all layers of a rank's trajectories in host memory."""
    facts = replace(MOE, index_top_k=64, index_width=128)
    rollout = {"gpu_memory_utilization": 0.1}
    plain = recipe(ranks=4, micro_batch_tokens=8000, rollout=rollout)
    config = replace(plain, algorithm=replace(plain.algorithm, keep_selection=True))
    without, engine = plan(plain, facts).engine.parts, plan(config, facts).engine.parts
    cached = 16 * 7000 + 3 * 1000
    assert without["selections"] == 0
    assert engine == {**without, "selections": 10 * 1000 * cached}
    routes = 2 * 10 * 2
    ranks = [trainer_memory(each, facts, gpu=True).parts for each in (plain, config)]
    assert [each["recordings"] / 8000 for each in ranks] == [routes, routes + 2 * 1000]
    hosts = [recordings_host_bytes(each, facts) for each in (plain, config)]
    assert hosts == [64 / 4 * 8000 * each for each in (routes, routes + 10 * 1000)]
    stored = [recordings_store_bytes(each, facts) for each in (plain, config)]
    assert stored == [64 * 8000 * each for each in (routes / 2, routes / 2 + 10 * 1000)]
    # Its share of the GPU is divided between the cache and the selections.
    rest = 1.1 * sum(without[name] for name in without if name != "KV cache") + GIB
    cache = engine["KV cache"] + engine["selections"]
    for part in (1.0, 0.5):
        size = (rest + part * cache) / (0.1 * GIB) + 1e-6
        fixed = guaranteed_cache_bytes(config, facts, size)
        assert fixed == pytest.approx(part * engine["KV cache"])
        held = plan(config, facts, gpu_gib=size)
        assert held.cached == 16 * part
        assert held.engine.parts["selections"] == pytest.approx(part * engine["selections"])
    assert guaranteed_cache_bytes(plain, facts, size) == 0  # vLLM measures its cache
    with pytest.raises(ConfigError, match=r"selections of one trajectory.*keep_selection=false"):
        plan_on(config, facts, replace(cluster(1), gpu_gib=50.0))
    short = replace(facts, index_top_k=8000)  # attends to everything
    assert plan(config, short).engine.parts["selections"] == 0
    # A sleeping engine keeps them.
    config = turns(0.5)
    rank = memory(config)
    gpu_gib = (needed_bytes(config, rank, shared=True) / GIB + ENGINE_CUDA_GIB) + 1
    check_trainer_fits(config, rank, gpu_gib, shared=True, selections=0.9 * GIB)
    with pytest.raises(DoesNotFit):
        check_trainer_fits(config, rank, gpu_gib, shared=True, selections=1.1 * GIB)


@pytest.mark.parametrize(
    ("context", "kernels", "measured"),
    [(16_384, True, 18.4), (65_536, True, 22.7), (131_072, True, 26.2), (65_536, False, 117.5)],
)
def test_sparse_attention_takes_its_measured_time(
    context: int, kernels: bool, measured: float
) -> None:
    """docs/sparse-attention.md: µs per token of a layer, forward and backward."""
    facts = v32_facts()
    config = recipe(ranks=8, micro_batch_tokens=context)
    sampling = SamplingConfig(max_tokens=context - 1000)
    config = replace(config, rollout=replace(config.rollout, sampling=sampling))
    spec, rates = GpuSpec(sparse_kernels=kernels), Rates()
    tokens = 64 * context
    nothing = replace(
        rates, sparse_s=0.0, sparse_token_s=0.0, slow_sparse_s=0.0, slow_sparse_token_s=0.0
    )
    timed, untimed = (
        compute_seconds(config, facts, tokens, 1, spec, each) for each in (rates, nothing)
    )
    each_us = (timed - untimed) / (tokens / 8 * 61) * 1e6
    assert each_us == pytest.approx(measured, rel=0.05)


def test_engine_on_several_nodes_waits_for_their_network() -> None:
    config = recipe(rollout={"tensor_parallel": 16, "max_num_seqs": 4})
    facts = replace(DENSE, parameters=100_000_000_000)  # else the host is slower
    wide, narrow = (
        step_time(config, facts, micro_batches=1, spec=GpuSpec(node_gpus=gpus)) for gpus in (16, 8)
    )
    sums, size = 2 * 10, 2 * 2 * 1000 / (8 * 50e9)  # per layer two sums; seconds per token
    slower = (narrow.decode - wide.decode) / config.rollout.sampling.max_tokens
    assert slower == pytest.approx(16 * sums * (50e-6 + 4 * size))  # 64 completions in 16 waves
    assert narrow.prefill - wide.prefill == pytest.approx(sums * (2 * 50e-6 + 8000 * size))


def test_what_does_not_fit_is_refused_by_name() -> None:
    for config, gib in ((recipe(), 4), (recipe(ranks=8, zero_stage=1), 8)):
        with pytest.raises(DoesNotFit):
            plan(config, gpu_gib=gib)
    config = recipe(micro_batch_tokens=8000, rollout={"gpu_memory_utilization": 0.5})
    plan(config, gpu_gib=48)
    with pytest.raises(DoesNotFit, match="shared"):
        plan(config, gpu_gib=48, shared=True)
    rollout = {"gpu_memory_utilization": 0.9, "time_share": True}
    config = recipe(micro_batch_tokens=8000, rollout=rollout)
    rank = plan(config).trainer
    need = (rank.total - rank.parts["optimizer"]) / GIB
    plan(config, gpu_gib=need + 2, shared=True)
    with pytest.raises(DoesNotFit):
        plan(config, gpu_gib=need + 1, shared=True)


def test_lora_keeps_gradients_of_adapters_only() -> None:
    full = recipe(beta=0.1, offload_optimizer=False)
    lora = LoraConfig(rank=10, targets=("q_proj", "up_proj"))
    config = replace(full, model=replace(full.model, lora=lora))
    facts = replace(DENSE, projections={"q_proj": 20_000, "up_proj": 40_000, "down_proj": 40_000})
    before, after = (trainer_memory(each, facts, gpu=True).parts for each in (full, config))
    assert after["weights"] == before["weights"] == before["reference"] == 2e9
    assert (after["gradients"], after["optimizer"], after["reference"]) == (2.4e6, 7.2e6, 0)


def test_adapters_of_experts_need_merged_copies() -> None:
    facts = replace(MOE, projections={"experts": 40_000})
    lora = LoraConfig(rank=10, targets=("experts",))
    layer = 2 * facts.expert_parameters / facts.moe_layers
    for recomputed, layers in ((False, facts.moe_layers + 1), (True, 2)):
        full = recipe(activation_checkpointing=recomputed)
        parts = trainer_memory(
            replace(full, model=replace(full.model, lora=lora)), facts, gpu=True
        ).parts
        assert parts["merged experts"] == pytest.approx(layers * layer)
        assert parts["gradients"] == 4 * 10 * 40_000


def test_teachers_are_held_beside_the_reference() -> None:
    facts = replace(DENSE, teacher_parameters=3_000_000_000, teacher_passes=3.0)
    parts = trainer_memory(recipe(beta=0.1), facts, gpu=True).parts
    assert parts["reference"] == 2e9 + 6e9
    alone, taught = (step_time(recipe(beta=0.1), f, micro_batches=1) for f in (DENSE, facts))
    assert taught.launch / alone.launch == pytest.approx(7 / 4)  # forward, backward, reference


def turns(share: float, *, updates: int = 1, beta: float = 0.0, **trainer: Any) -> Config:
    rollout = {"time_share": True, "gpu_memory_utilization": share}
    config = recipe(beta=beta, micro_batch_tokens=8000, rollout=rollout, **trainer)
    algorithm = replace(config.algorithm, updates_per_batch=updates)
    return replace(config, algorithm=algorithm)


def memory(config: Config) -> Memory:
    return trainer_memory(config, DENSE, gpu=True)


def test_nothing_is_offloaded_without_need() -> None:
    config = turns(0.1)
    roomy = offload_plan(config, memory(config), 1000.0, shared=True)
    assert roomy == OffloadPlan()
    assert peak_bytes(config, memory(config), roomy) == memory(config).total
    for other in (turns(0.9, offload_while_sampling=False), recipe()):
        assert offload_plan(other, memory(other), 80.0, shared=True) == OffloadPlan()
    apart = turns(0.9)
    assert offload_plan(apart, memory(apart), 80.0, shared=False) == OffloadPlan()
    assert needed_bytes(apart, memory(apart), shared=False) == memory(apart).total


@pytest.mark.parametrize(
    ("lacking", "state", "weights"),
    [(0.5e9, 4e9, 0), (3.9e9, 4e9, 0), (4.1e9, 8e9, 0), (11e9, 12e9, 0), (13e9, 12e9, 1e9)],
)
def test_offloads_only_the_bytes_the_engine_needs(
    lacking: float, state: float, weights: float
) -> None:
    """Weights take 2 GB, the optimizer 12 GB in three pieces under ZeRO-1. The reference is dropped
    first; its copy in host memory makes that a one-way move."""
    for beta, reference in ((0.0, 0.0), (0.1, 2e9)):
        config = turns(0.5, beta=beta)
        held = _held_bytes(memory(config))
        assert held == pytest.approx(14e9 + reference)
        beside = 1.3 + 0.25  # CUDA and a block in transfer
        gpu_gib = ((held - lacking - reference) / GIB + beside) / (0.5 - _FRAGMENTED)
        waits = offload_plan(config, memory(config), gpu_gib, shared=True)
        assert waits.sampling == pytest.approx(state + weights + reference, rel=1e-6)


@pytest.mark.parametrize(("updates", "beta"), [(1, 0.0), (3, 0.1)])
def test_optimizer_is_offloaded_for_activations(updates: int, beta: float) -> None:
    """The GPU lacks 3 GB for everything at once, with 6 % spare, but fits an update. Each update of
    a batch reloads the optimizer."""
    config = turns(0.01, beta=beta, updates=updates)
    rank = memory(config)
    parts, lacks = rank.parts, 3e9
    gpu_gib = (RANK_SPARE * rank.total - lacks) / GIB + ENGINE_CUDA_GIB
    update = sum(parts[n] for n in ("weights", "gradients", "optimizer", "unused", "CUDA"))
    assert update + parts["reference"] < rank.total - lacks
    waits = offload_plan(config, rank, gpu_gib, shared=True)
    assert (waits.sampling, waits.training, waits.host) == pytest.approx((0, lacks, lacks))
    assert waits.moved == pytest.approx(2 * updates * lacks)
    assert peak_bytes(config, rank, waits) == pytest.approx(rank.total - lacks)


def test_shared_prompt_is_computed_once_per_group() -> None:

    def made(tokens: int, *, share: bool = True) -> Config:
        return recipe(share_prompts=share, micro_batch_tokens=tokens)

    plain, shared = made(65_536, share=False), made(65_536)
    each = plain.max_context
    assert count_micro_batches(plain) == (math.ceil(64 / (65_536 // each)), 64 * each)
    assert count_micro_batches(made(each)) == (64, 64 * each)
    assert count_micro_batches(shared)[1] == 8 * 1000 + 64 * (each - 1000)
    halves = prefix_group_size(4, 1000, each)
    assert count_micro_batches(made(halves)) == (16, 2 * 8 * 1000 + 64 * (each - 1000))
    times = [step_time(one, MOE, micro_batches=4).compute for one in (plain, shared)]
    assert times[1] < times[0]


def test_windows_of_episodes_share_no_prompt() -> None:
    config = load_config("agent-guess", ["trainer.share_prompts=true"])
    assert config.max_context < config.data.max_prompt_tokens and count_micro_batches(config)[1] > 0
    for window, tokens in ((192, 192), (0, 256 + 32)):
        changed = replace(config, agents=replace(config.agents, window=window))
        parts = plan(changed, MOE).engine.parts
        assert parts["KV cache"] == 64 * tokens * kv_token_bytes(changed, MOE)


USUAL = Case(shape="", length=1024, micro_batch_tokens=16_384, step_tokens=65_536)
WIDE = {"micro_batch_tokens": 32_768}
LONG = {"length": 4096, **WIDE}
SLICE: list[tuple[float, float, dict[str, Any]]] = [
    (0.523, 89.8, {}),
    (0.592, 103.6, LONG),
    (0.672, 78.7, {"recompute": True}),
    (0.452, 89.3, {"compiled": True}),
    (0.420, 102.7, {"compiled": True, **WIDE}),
]
QWEN3_17B: list[tuple[float, float, dict[str, Any]]] = [
    (1.655, 106.0, LONG),
    (1.806, 36.1, {"recompute": True}),
    (1.180, 55.6, {"compiled": True}),
]
MIXTURE: list[tuple[float, float, dict[str, Any]]] = [
    (0.357, 53.6, WIDE),
    (0.645, 29.6, {"recompute": True}),
]
COPIED = replace(Rates(), summed_bytes=Rates().gradient_bytes)
"""Rates of the commit behind the last two tables, which copied gradients before adding them."""
STEPS = [
    pytest.param(seconds, gib, replace(USUAL, shape=shape, **changes), rates, id=f"{shape}-{index}")
    for shape, rates, rows in (
        ("30b-a3b-slice", Rates(), SLICE),
        ("qwen3-1.7b", COPIED, QWEN3_17B),
        ("moe-1.6b", COPIED, MIXTURE),
    )
    for index, (seconds, gib, changes) in enumerate(rows)
]
"""Seconds, GiB of GPU memory, and the case of `python -m benchmarks.training`."""


@pytest.mark.parametrize(("seconds", "gib", "case", "rates"), STEPS)
def test_estimates_are_within_a_tenth(seconds: float, gib: float, case: Case, rates: Rates) -> None:
    facts = facts_of(model_of(case.shape, small=False))
    estimated_s, estimated_bytes = estimates(case, facts, gpu=True, rates=rates)
    assert 0.9 <= estimated_s / seconds <= 1.1
    assert 0.97 <= estimated_bytes / GIB / gib <= 1.1
