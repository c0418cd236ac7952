"""Rules between sections, and the knobs that take them back."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, Literal

import pytest

from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    LengthConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TinyModelConfig,
    TrainerConfig,
)
from keel.configs.sections.algorithm import PROBES

SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)


def config(
    path: str = "tiny",
    *,
    top_p: float = 1.0,
    dtype: Literal["", "float32", "bfloat16"] = "",
    **algorithm: Any,
) -> Config:
    sampling = SamplingConfig(top_p=top_p, top_k=64 if top_p < 1 else 0)
    return Config(
        model=ModelConfig(path=path, dtype="float32"),
        data=DataConfig(sources=(SOURCE,), max_prompt_tokens=64),
        rollout=RolloutConfig(sampling=sampling, dtype=dtype),
        algorithm=AlgorithmConfig(**algorithm),
    )


@pytest.mark.parametrize(
    ("changes", "knob"),
    [
        ({"max_lag": 1}, r"algorithm\.max_lag = 1: must be 0"),
        ({"publish_every": 2}, r"algorithm\.publish_every = 2: must be 1"),
    ],
)
def test_engines_that_sleep_leave_no_room_for(changes: dict[str, Any], knob: str) -> None:
    recipe = config(**changes)
    with pytest.raises(ConfigError, match=f"{knob} with rollout.time_share"):
        replace(recipe, rollout=replace(recipe.rollout, time_share=True))


@pytest.mark.parametrize(
    ("unsound", "knob"),
    [
        ({"keep_routing": False}, "keep_routing"),
        ({"keep_sampling_mask": False, "top_p": 0.9}, "keep_sampling_mask"),
    ],
)
def test_a_missing_replay_is_refused_unless_allowed(unsound: dict[str, Any], knob: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{knob} = False: .*Switch it on"):
        config(**unsound)
    allowed = config(**unsound, allow_unsound=True)
    assert not getattr(allowed.algorithm, knob)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 1.0}, r"= 1\.0: .*top_p below 1 .rollout\.sampling\.top_p = 1\.0, top_k = 0"),
        (
            {"top_p": 0.9, "keep_sampling_mask": False, "allow_unsound": True},
            r"= 1\.0: .*keep_sampling_mask .False.; or set it to 0",
        ),
        ({"top_p": 0.9, "kept_mass_coef": -1.0}, r"= -1\.0: must not be negative"),
        ({"top_p": 0.9, "kept_mass_coef": math.inf}, "= inf: must be finite"),
    ],
)
def test_masses_are_held_of_masks_that_reach_top_p_alone(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.kept_mass_coef {message}"):
        config(**{"kept_mass_coef": 1.0, **changes})
    assert config(top_p=0.9, kept_mass_coef=1.0).algorithm.probes == PROBES
    assert config(top_p=0.9).algorithm.probes == 1


def test_unsound_settings_do_not_stretch_the_other_rules() -> None:
    with pytest.raises(ConfigError, match="updates_per_batch"):
        config(updates_per_batch=0, allow_unsound=True)


def test_evaluation_is_refused_what_sampling_is() -> None:
    with pytest.raises(ConfigError, match=r"eval\.top_k = 0: must be above 0 with eval\.top_p"):
        EvalConfig(top_p=0.9)
    assert EvalConfig(top_p=0.9, top_k=20).top_k == 20


@pytest.mark.parametrize("section", [SamplingConfig, EvalConfig])
def test_temperatures_that_vllm_would_raise_are_refused(section: type[Any]) -> None:
    with pytest.raises(ConfigError, match=r"temperature = 0\.005: must be .*in \[0\.01, 10\]"):
        section(temperature=0.005)
    assert section(temperature=0.01).temperature == 0.01


def test_greedy_evaluation_takes_the_likeliest_token() -> None:
    greedy = replace(config(), eval=EvalConfig(temperature=0.0, top_p=0.5, top_k=9))
    assert greedy.sampling("eval").greedy and greedy.sampling("eval").top_p == 1
    assert not greedy.sampling("train").greedy
    with pytest.raises(ConfigError, match=r"eval\.samples = 4: must be 1"):
        EvalConfig(temperature=0.0, samples=4)


@pytest.mark.parametrize("value", [0, -1])
def test_publish_every_is_at_least_one(value: int) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.publish_every = .*at least 1"):
        config(publish_every=value)


def test_the_engines_have_the_models_precision_unless_told() -> None:
    assert config().engine_dtype == "float32"
    assert config(dtype="bfloat16").engine_dtype == "bfloat16"


def test_expert_parallelism_must_divide_ranks_and_experts() -> None:
    for value, ranks in ((0, 1), (2, 3), (2, 1)):
        with pytest.raises(ConfigError, match=rf"trainer\.expert_parallel = {value}: must "):
            TrainerConfig(ranks=ranks, expert_parallel=value)
    model = ModelConfig(path="tiny", tiny=TinyModelConfig(experts=9, max_context=4096))
    trainer = TrainerConfig(ranks=4, expert_parallel=2)
    with pytest.raises(ConfigError, match=r"trainer\.expert_parallel = 2: .*tiny\.experts = 9"):
        replace(config(), model=model, trainer=trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"offload_optimizer": True},
            r"trainer\.offload_optimizer = True: needs trainer\.zero_stage",
        ),
        (
            {"compile": True, "zero_stage": 3},
            r"trainer\.compile = True: cannot be combined with trainer\.zero_stage = 3",
        ),
    ],
)
def test_what_deepspeed_cannot_combine_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(**options)


def test_sequence_parallelism_must_divide_ranks_and_heads() -> None:
    for value, ranks in ((0, 1), (2, 3), (2, 1)):
        with pytest.raises(ConfigError, match=rf"trainer\.sequence_parallel = {value}: must "):
            TrainerConfig(ranks=ranks, sequence_parallel=value)
    trainer = TrainerConfig(ranks=8, sequence_parallel=4, expert_parallel=2)
    assert trainer.groups == 2
    tiny = TinyModelConfig(heads=6, max_context=4096)
    model = ModelConfig(path="tiny", tiny=tiny)
    with pytest.raises(ConfigError, match=r"trainer\.sequence_parallel = 4: .*tiny\.heads = 6"):
        replace(config(), model=model, trainer=trainer)


@pytest.mark.parametrize(
    ("engines", "ranks", "expected"), [(1, 1, 20), (4, 4, 20), (5, 4, 30), (8, 1, 90), (1, 4, 20)]
)
def test_a_rank_may_send_to_each_of_its_engines_for_as_long_as_one_takes(
    engines: int, ranks: int, expected: float
) -> None:
    made = replace(
        config("a/model"),
        rollout=RolloutConfig(engines=engines, update_timeout_s=10),
        trainer=TrainerConfig(ranks=ranks),
    )
    assert made.sending_timeout_s == expected


def test_draining_needs_the_time_of_a_completion() -> None:
    rollout = {"weight_updates": "drain", "timeout_s": 600.0}
    options = {"data": DataConfig(sources=(SOURCE,)), "algorithm": AlgorithmConfig(max_lag=1)}
    with pytest.raises(ConfigError, match=r"rollout\.update_timeout_s = 300.*at least .* 720"):
        Config(rollout=RolloutConfig(**rollout), **options)  # type: ignore[arg-type]
    Config(rollout=RolloutConfig(**rollout, update_timeout_s=720.0), **options)  # type: ignore[arg-type]
    options["algorithm"] = AlgorithmConfig(publish_every=2)  # the next step is sampled meanwhile
    with pytest.raises(ConfigError, match=r"rollout\.update_timeout_s = 300"):
        Config(rollout=RolloutConfig(**rollout), **options)  # type: ignore[arg-type]
    options["algorithm"] = AlgorithmConfig()
    Config(rollout=RolloutConfig(**rollout), **options)  # type: ignore[arg-type]


NOTHING = {"correct": 0.0, "format": 0.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": {"correct": 0.0, "format": -0.1}},
        {"rewards": NOTHING, "kl_coef": 0.01},
        {"rewards": NOTHING, "length": LengthConfig(linear=0.1)},
        {"rewards": NOTHING, "length": LengthConfig(overlong=0.1)},
        {"rewards": NOTHING, "weight": 0.0, "holdout": 4},
    ],
)
def test_a_source_that_trains_has_something_to_learn_from(changes: dict[str, Any]) -> None:
    other = replace(SOURCE, name="other", **changes)
    assert DataConfig(sources=(SOURCE, other)).weight_of(other) == other.weight
    idle = replace(SOURCE, name="idle", rewards=NOTHING, holdout=2)
    said = (
        r"sources\[idle\]\.rewards = \{'correct': 0\.0, .*every advantage would be 0; give a part"
    )
    with pytest.raises(ConfigError, match=said):
        DataConfig(sources=(other, SOURCE, idle))
    DataConfig(sources=(SOURCE, idle), train_on=("sums",))


@pytest.mark.parametrize(
    ("changes", "knob"),
    [
        ({"rollout": RolloutConfig(dtype="float16")}, "rollout.dtype"),
        ({"rollout": RolloutConfig(head_dtype="model")}, "rollout.head_dtype"),
        ({"rollout": RolloutConfig(tensor_parallel=2)}, "rollout.tensor_parallel"),
        (
            {"trainer": TrainerConfig(ranks=2, sequence_parallel=2)},
            "trainer.sequence_parallel",
        ),
        ({"trainer": TrainerConfig(compile=True)}, "trainer.compile"),
        ({"trainer": TrainerConfig(zero_stage=3)}, "trainer.zero_stage"),
        ({"trainer": TrainerConfig(share_prompts=True)}, "trainer.share_prompts"),
        ({"trainer": TrainerConfig(keep_attention=True)}, "trainer.keep_attention"),
        ({"trainer": TrainerConfig(attention_kernels="flash4")}, "trainer.attention_kernels"),
    ],
)
def test_what_computes_in_another_order_is_refused(changes: dict[str, Any], knob: str) -> None:
    """With the engine's own kernels in the trainer."""
    invariant = replace(config(), model=ModelConfig(path="a/model", batch_invariant=True))
    with pytest.raises(ConfigError, match=rf"^{re.escape(knob)} = .*with model\.batch_invariant"):
        replace(invariant, **changes)


def test_batch_invariant_kernels_are_for_some_models() -> None:
    with pytest.raises(ConfigError, match=r"model\.batch_invariant = True: .*tiny one is a mix"):
        ModelConfig(batch_invariant=True)
    with pytest.raises(ConfigError, match=r"model\.batch_invariant = True: needs model\.dtype"):
        ModelConfig(path="a/model", batch_invariant=True, dtype="float32")


def test_a_float32_residual_is_for_layers_that_round() -> None:
    with pytest.raises(ConfigError, match=r"model\.residual_dtype = 'float32': .*batch_invariant"):
        ModelConfig(path="a/model", batch_invariant=True, residual_dtype="float32")
    wide = {
        dtype: ModelConfig(dtype=dtype, residual_dtype="float32").wide_residual
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert wide == {"float32": False, "bfloat16": True, "float16": True}
    assert not ModelConfig().wide_residual
