"""Refusals and text of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataConfig,
    JudgeConfig,
    ModelConfig,
    RewardsConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.model.load import ModelFacts
from keel.trainer.placement.hardware import Hardware
from keel.trainer.placement.plan import describe, make_plan

GPU, CPU = Hardware(gpu=True), Hardware(gpu=False)

SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
MOE = ModelFacts(
    architecture="Qwen3MoeForCausalLM",
    layers=2,
    moe_layer_ids=(0, 1),
    experts=8,
    experts_per_token=2,
    vocab_size=320,
    hidden_size=64,
    attention_heads=4,
    max_context=4096,
    parameters=1_000_000,
    active_parameters=400_000,
    tied=False,
    expert_parameters=800_000,
    attention_parameters=60_000,
    attention_width=128,
    kv_width=128,
    kv_heads=2,
)


def config(*, dtype: Any = "", **algorithm: Any) -> Config:
    return Config(
        model=ModelConfig(path="some/moe", dtype="float32"),
        data=DataConfig(sources=(SOURCE,)),
        rollout=RolloutConfig(sampling=SamplingConfig(top_p=0.9, top_k=64), dtype=dtype),
        algorithm=AlgorithmConfig(**algorithm),
    )


def stabilisers(config: Config) -> str:
    text = describe(config, MOE, make_plan(config, MOE, gpu=False), ["sums"], hardware=CPU)
    return next(line for line in text.splitlines() if line.startswith("stabilisers"))


def test_moe_without_routing_replay_is_refused_by_default() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.keep_routing = False: some/moe"):
        make_plan(config(keep_routing=False), MOE, gpu=False)
    make_plan(config(keep_routing=False, allow_unsound=True), MOE, gpu=False)


def test_disabled_stabilisers_are_shown_as_off() -> None:
    assert "OFF" not in stabilisers(config())
    line = stabilisers(config(keep_routing=False, keep_sampling_mask=False, allow_unsound=True))
    assert line.count("OFF (algorithm.allow_unsound: never for training)") == 2


def test_mass_penalty_is_shown() -> None:
    assert "mass" not in stabilisers(config())
    assert stabilisers(config(kept_mass_coef=0.5)).endswith(", its mass held with weight 0.5")


def test_evaluation_plan_omits_training() -> None:
    of = (config(), MOE, make_plan(config(), MOE, gpu=False), ["sums", "words"])
    whole = describe(*of, hardware=CPU).splitlines()
    shown = describe(*of, hardware=CPU, trains=False).splitlines()
    assert [line for line in shown if line not in whole] == []
    assert {line.split()[0] for line in shown if line[0] != " "} == {
        *("model", "data", "sampling", "actors", "hardware", "memory", "run")
    }
    assert len(shown) == len(whole) - 4  # a batch has two lines, steps and stabilisers one


def test_engine_memory_uses_rollout_dtype() -> None:
    full, half = (
        make_plan(config(dtype=dtype), MOE, gpu=False).engine.parts["weights"]
        for dtype in ("", "bfloat16")
    )
    assert (full, half) == (4_000_000, 2_000_000)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"architecture": "OlmoeForCausalLM"}, "OlmoeForCausalLM"),
        ({"architecture": "Qwen3ForCausalLM", "experts": 0}, "is dense and has no experts. Set"),
        ({"experts": 9}, "must divide the 9 experts of a layer of Qwen3MoeForCausalLM"),
    ],
)
def test_unsupported_expert_parallelism_is_refused(facts: dict[str, Any], message: str) -> None:
    recipe = replace(config(), trainer=TrainerConfig(ranks=4, expert_parallel=2))
    with pytest.raises(ConfigError, match=f"^trainer.expert_parallel = 2: .*{message}"):
        make_plan(recipe, replace(MOE, **facts), gpu=False)


def test_expert_parallelism_shards_expert_memory_only() -> None:
    """6 of 8 experts are idle with 600,000 parameters, so all experts have 800,000."""
    recipe = replace(config(), trainer=TrainerConfig(ranks=4, expert_parallel=4))
    parts = make_plan(recipe, MOE, gpu=True).trainer.parts
    assert parts["weights"] == 4 * (200_000 + 800_000 / 4)
    assert parts["optimizer"] == 2 * parts["weights"]
    assert "expert parallelism 4" in describe(
        recipe, MOE, make_plan(recipe, MOE, gpu=True), [], hardware=GPU
    )


def test_served_judge_is_shown() -> None:
    judge = JudgeConfig(model="a/judge", serve=True)
    served = replace(config(), rewards=RewardsConfig(judge=judge))
    plan = make_plan(served, MOE, gpu=True)
    assert "the judge's vLLM server of a/judge\n" in describe(served, MOE, plan, [], hardware=GPU)


def test_sequence_parallelism_shards_activations() -> None:
    recipe = replace(config(), trainer=TrainerConfig(ranks=4, sequence_parallel=2))
    plan = make_plan(recipe, MOE, gpu=True)
    alone = make_plan(replace(recipe, trainer=TrainerConfig(ranks=2)), MOE, gpu=True)
    assert plan.micro_batches == alone.micro_batches
    assert plan.trainer.parts["activations"] == alone.trainer.parts["activations"] / 2
    assert "sequence parallelism 2" in describe(recipe, MOE, plan, [], hardware=GPU)
    with pytest.raises(
        ConfigError, match=r"^trainer.sequence_parallel = 2: .*3 attention heads of"
    ):
        make_plan(recipe, replace(MOE, attention_heads=3), gpu=True)


def test_offloaded_optimizer_uses_no_gpu_memory() -> None:
    recipe = replace(config(), trainer=TrainerConfig(zero_stage=2, offload_optimizer=True))
    plan = make_plan(recipe, MOE, gpu=True)
    assert plan.trainer.parts["optimizer"] == 0
    assert make_plan(recipe, MOE, gpu=False).trainer.parts["optimizer"] == 12 * MOE.parameters
    assert "optimizer in host memory" in describe(recipe, MOE, plan, [], hardware=GPU)


def test_effective_zero_stage_is_shown() -> None:
    recipe = config()
    for dtype, gpu, stage in (("bfloat16", True, 1), ("bfloat16", False, 0), ("float32", True, 0)):
        used = replace(recipe, model=replace(recipe.model, dtype=dtype))
        text = describe(used, MOE, make_plan(used, MOE, gpu=gpu), [], hardware=Hardware(gpu=gpu))
        assert f"trainer rank(s) with ZeRO {stage}\n" in text
        assert ("on CPU" in text) != gpu
