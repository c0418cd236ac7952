"""Supported model families, dtypes and head sizes, and the tables of docs/models.md."""

import ast
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from keel.configs.load import load_config
from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
)
from keel.model.attention import UnsupportedAttention, use_packed_attention
from keel.model.hub import check_config
from keel.model.load import ModelFacts, _check_causal, facts_of
from keel.model.routing import is_moe
from keel.model.trainable import _check_trainable, _try_packed
from keel.trainer.placement import families
from keel.trainer.placement.families import (
    _CPU_HEADS,
    _EXPERT_PARALLEL,
    _NOT_IN_FLOAT16,
    _check_parallel,
    check_engine,
    check_model_type,
    check_trainer,
    no_sharing_reason,
    stale_mask_warning,
)
from keel.trainer.placement.hardware import GpuSpec
from tests.model.families import build
from tests.trainer.placement.shapes import DENSE, SOURCE


def vllm_source(*path: str) -> ast.Module:
    """Parse vLLM's source code, because importing vLLM is slow."""
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    return ast.parse(Path(vllm.origin).parent.joinpath(*path).read_text())


def test_tables_match_vllm() -> None:
    (table,) = (
        node.value
        for node in ast.walk(vllm_source("config", "model.py"))
        if isinstance(node, ast.Assign)
        and "_FLOAT16_NOT_SUPPORTED_MODELS" in map(ast.unparse, node.targets)
    )
    assert set(ast.literal_eval(table)) == set(_NOT_IN_FLOAT16)
    (sizes,) = (
        node.body[-1].value
        for node in ast.walk(vllm_source("v1", "attention", "backends", "cpu_attn.py"))
        if isinstance(node, ast.FunctionDef)
        and node.name == "get_supported_head_sizes"
        and isinstance(node.body[-1], ast.Return)
    )
    assert sizes is not None and tuple(ast.literal_eval(sizes)) == _CPU_HEADS


def with_model(dtype: Any = "bfloat16", engine: Any = "", **model: Any) -> Config:
    return Config(
        model=ModelConfig(path="some/model", dtype=dtype, **model),
        data=DataConfig(sources=(SOURCE,)),
        rollout=RolloutConfig(dtype=engine),
    )


PLAIN = with_model()


def parallel(**trainer: int) -> Config:
    config = with_model()
    width = trainer.pop("tensor_parallel", 1)
    rollout = replace(config.rollout, tensor_parallel=width)
    return replace(config, rollout=rollout, trainer=TrainerConfig(**{"ranks": 4, **trainer}))


def with_rollout(**rollout: Any) -> Config:
    return replace(PLAIN, rollout=RolloutConfig(**rollout))


HEADS = {"attention_heads": 28, "head_size": 128}
EXPERTS = {"architecture": "Qwen3MoeForCausalLM", "experts": 8, "attention_heads": 4}
LINEAR_NAME = "Qwen3NextForCausalLM"
INDEXED = {"attention_heads": 6, "index_top_k": 4}
WHOLE = with_rollout(tensor_parallel=2, expert_parallel=True)
FP8 = with_rollout(tensor_parallel=2, quantization="fp8")
DRAFTS = with_rollout(draft_tokens=3)
BLOCKS = {"hidden_size": 896, "row_inputs": 256}
SLICES = {**BLOCKS, "moe_layer_ids": (0,), "experts": 2, "expert_parameters": 2 * 3 * 896 * 256}
"""Experts with an intermediate size of 256."""
SPARSE = {"architecture": "DeepseekV32ForCausalLM", "kv_width": 576}
REPLAYED = replace(PLAIN, algorithm=replace(PLAIN.algorithm, keep_selection=True))


_on_gpu, _on_cpu = partial(check_engine, gpu=True), partial(check_engine, gpu=False)


def _in_trainer(config: Config, facts: ModelFacts) -> None:
    _check_parallel(config.trainer, facts)


CASES: list[tuple[Callable[..., None], Config, dict[str, Any], dict[str, Any]]] = [
    (_on_gpu, parallel(tensor_parallel=2), HEADS, {"attention_heads": 27}),
    (_on_cpu, PLAIN, HEADS, {"head_size": 16}),
    (_on_gpu, WHOLE, EXPERTS, {"experts": 9}),
    (_on_gpu, WHOLE, EXPERTS, {"experts": 0}),
    (_on_gpu, FP8, BLOCKS, {"hidden_size": 896 + 64}),
    (_on_gpu, FP8, BLOCKS, {"row_inputs": 128}),
    (_on_gpu, FP8, SLICES, {"expert_parameters": 2 * 3 * 896 * 128}),
    (_on_gpu, DRAFTS, HEADS, {"architecture": LINEAR_NAME}),
    (_on_cpu, PLAIN, HEADS, SPARSE),
    (_on_gpu, PLAIN, SPARSE, {"kv_width": 80}),
    (_on_gpu, REPLAYED, {**SPARSE, "index_top_k": 4}, {"index_top_k": 0}),
    (_in_trainer, parallel(expert_parallel=2), EXPERTS, {"experts": 9}),
    (_in_trainer, parallel(expert_parallel=2), EXPERTS, {"experts": 0}),
    (_in_trainer, parallel(expert_parallel=2), EXPERTS, {"architecture": "OlmoeForCausalLM"}),
    (_in_trainer, parallel(sequence_parallel=2), EXPERTS, {"attention_heads": 3}),
    (_in_trainer, parallel(sequence_parallel=2), EXPERTS, {"architecture": LINEAR_NAME}),
    (_in_trainer, parallel(sequence_parallel=4), INDEXED, {"index_top_k": 0}),
]


def test_qwen3_5_needs_torchvision_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "find_spec", lambda _: None)
    facts = replace(DENSE, **HEADS, architecture="Qwen3_5ForCausalLM")
    check_engine(PLAIN, facts, gpu=True)
    with pytest.raises(ConfigError, match="needs torchvision, in the version for PyTorch"):
        check_engine(PLAIN, facts, gpu=False)


@pytest.mark.parametrize("hardware", [{"gpu": False}, {"gpu": True, "fp8": False}])
def test_quantised_engines_need_a_gpu_with_fp8_units(hardware: dict[str, bool]) -> None:
    config = with_rollout(quantization="fp8")
    with pytest.raises(ConfigError, match=r"rollout\.quantization = 'fp8': needs a GPU with FP8"):
        check_engine(config, replace(DENSE, **BLOCKS), **hardware)


@pytest.mark.parametrize(
    ("config", "gpu"),
    [(DRAFTS, False), (with_rollout(draft_tokens=3, recorder="packed"), True)],
)
def test_drafts_need_a_gpu_and_the_native_recorder(config: Config, gpu: bool) -> None:
    with pytest.raises(ConfigError, match="draft_tokens = 3: needs"):
        check_engine(config, replace(DENSE, **HEADS), gpu=gpu)
    assert not DRAFTS.rollout.packs(full_attention=True)


def test_packed_recorder_records_no_selections() -> None:
    facts = replace(DENSE, **SPARSE, index_top_k=4)
    config = replace(REPLAYED, rollout=RolloutConfig(recorder="packed"))
    with pytest.raises(ConfigError, match=r"rollout\.recorder = 'packed'.*keep_selection"):
        check_engine(config, facts, gpu=True)


@pytest.mark.parametrize(("size", "suits"), [(128, True), (192, False)])
def test_whole_experts_are_blocks_when_quantised(size: int, suits: bool) -> None:
    config = with_rollout(tensor_parallel=2, quantization="fp8", expert_parallel=True)
    facts = replace(DENSE, **{**SLICES, "expert_parameters": 2 * 3 * 896 * size})
    assert facts.expert_size == size
    if suits:
        check_engine(config, facts, gpu=True)
        return
    with pytest.raises(ConfigError, match=r"experts, 192, must be a multiple of 128"):
        check_engine(config, facts, gpu=True)


@pytest.mark.parametrize(("check", "config", "facts", "bad"), CASES)
def test_unsuitable_models_are_refused(
    check: Callable[..., None], config: Config, facts: dict[str, Any], bad: dict[str, Any]
) -> None:
    check(config, replace(DENSE, **facts))
    with pytest.raises(ConfigError):
        check(config, replace(DENSE, **{**facts, **bad}))


@pytest.mark.parametrize(
    ("config", "bad"),
    [
        (with_model("float16"), "glm4"),
        (with_model(engine="float16"), "gemma2"),
        (with_model(residual_dtype="float32"), "gpt2"),
    ],
)
def test_unsuitable_model_types_are_refused(config: Config, bad: str) -> None:
    check_model_type(config, "qwen3")
    with pytest.raises(ConfigError):
        check_model_type(config, bad)


PAGE = Path(__file__).parents[3] / "docs" / "models.md"
LAYERS = 4
SPREAD = TrainerConfig(ranks=2, sequence_parallel=2)


def rows(heading: str) -> list[list[str]]:
    table = PAGE.read_text("utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines[2:]]


def config_of(model_type: str) -> PreTrainedConfig:
    config = CONFIG_MAPPING[model_type]()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "Other")]
    text = config.get_text_config()
    if text is not config:  # published with other inputs than text
        config.architectures = ["ForConditionalGeneration"]
    text.num_hidden_layers = LAYERS
    if model_type == "lfm2":  # the default has attention layers only
        text.layer_types = ["conv", "full_attention"] * 2
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(text, name, None):
            with suppress(AttributeError):  # a computed property of some
                setattr(text, name, kinds[:LAYERS])
    return config


@pytest.mark.parametrize("row", rows("Trained"), ids=lambda row: row[1])
def test_trained_families(row: list[str]) -> None:
    _, model_type, kind, routing, sequence, expert, notes = row
    config = config_of(model_type)
    check_config(model_type, json.loads(json.dumps(config.to_dict(), default=str)))
    _check_causal(config, model_type)
    _check_trainable(model_type, config)
    moe, (architecture,) = is_moe(config), config.architectures or ()
    assert (kind, routing) == (("MoE", "yes") if moe else ("dense", "–"))
    assert expert == ("–" if not moe else "yes" if architecture in _EXPERT_PARALLEL else "no")
    assert ("engines not in float16" in notes) == (model_type in _NOT_IN_FLOAT16)
    try:
        _check_parallel(SPREAD, replace(DENSE, architecture=architecture, experts=8))
    except ConfigError:
        assert sequence == "no"
    else:
        assert sequence == "yes"


@pytest.mark.parametrize("row", rows("Refused"), ids=lambda row: row[1])
def test_refused_families(row: list[str]) -> None:
    config = config_of(row[1])
    assert is_moe(config) == (row[2] == "MoE")
    with pytest.raises(ConfigError):
        _check_causal(config, row[1])
        _check_trainable(row[1], config)


def test_every_kind_of_layer_is_tried() -> None:
    model = build("qwen3").to("meta")
    use_packed_attention(model)
    model.model.layers[2].self_attn.is_causal = False
    with pytest.raises(UnsupportedAttention, match="later tokens"):
        _try_packed(model)


def test_shipped_recipes_have_no_stale_masks() -> None:
    for path in (Path(__file__).parents[3] / "configs/recipes").glob("*.yaml"):
        assert stale_mask_warning(load_config(path)) == "", path


def test_old_completions_with_masks_alone_warn() -> None:
    fresh, stale = (load_config("quickstart", [f"algorithm.max_lag={n}"]) for n in (15, 16))
    assert stale_mask_warning(fresh) == ""
    assert "kept_mass_coef" in stale_mask_warning(stale)


def test_hybrid_models_share_no_prompts() -> None:
    config = CONFIG_MAPPING["qwen3_next"](num_hidden_layers=8)
    facts = facts_of(config)
    assert facts.linear_layers == 6 and not facts.full_attention
    recipe = load_config("quickstart", ["trainer.share_prompts=true"])
    assert "state" in no_sharing_reason(recipe, facts)
    with pytest.raises(ConfigError, match="share_prompts = true: the state"):
        check_trainer(recipe, facts, GpuSpec(), gpu=False)


def test_flash4_is_refused_without_its_gpu_or_heads() -> None:
    config = replace(with_model(), trainer=TrainerConfig(attention_kernels="flash4"))
    hopper = GpuSpec(name="NVIDIA H200", flash4=True)
    check_trainer(config, DENSE, hopper, gpu=True)
    with pytest.raises(ConfigError, match="latent attention of Qwen3ForCausalLM"):
        check_trainer(config, replace(DENSE, head_size=0), hopper, gpu=True)
    with pytest.raises(ConfigError, match="Hopper or Blackwell GPU, not a CPU"):
        check_trainer(config, DENSE, hopper, gpu=False)
