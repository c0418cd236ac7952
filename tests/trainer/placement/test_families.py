"""Model families, dtypes and head sizes that vLLM refuses."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig

from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
)
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.placement.families import (
    _CPU_HEADS,
    FLOAT32_RESIDUAL,
    NOT_IN_FLOAT16,
    check_attention_kernels,
    check_engine_attention,
    check_engine_dtype,
    check_engine_heads,
    check_residual,
    check_sequence_parallel,
)
from keel.trainer.prepare import prepare
from tests.trainer.placement.test_memory import SUMS


def recipe(dtype: Any, engine_dtype: Any = "") -> Config:
    return Config(
        model=ModelConfig(path="some/model", dtype=dtype),
        data=DataConfig(sources=(SUMS,)),
        rollout=RolloutConfig(dtype=engine_dtype),
    )


def test_float16_table_matches_vllm() -> None:
    """Parse the source, because importing vLLM is slow."""
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    source = Path(vllm.origin).parent / "config" / "model.py"
    (table,) = (
        node.value
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Assign)
        and any(
            isinstance(target, ast.Name) and target.id == "_FLOAT16_NOT_SUPPORTED_MODELS"
            for target in node.targets
        )
    )
    assert set(ast.literal_eval(table)) == set(NOT_IN_FLOAT16)


@pytest.mark.parametrize(
    ("config", "knob"),
    [
        (recipe("float16"), "model.dtype"),
        (recipe("bfloat16", "float16"), "rollout.dtype"),
        (recipe("float16", "float16"), "rollout.dtype"),
    ],
)
def test_float16_engine_is_refused(config: Config, knob: str) -> None:
    for model_type in NOT_IN_FLOAT16:
        pattern = rf"{knob} = .*{model_type}"
        with pytest.raises(ConfigError, match=pattern):
            check_engine_dtype(config, model_type)
    check_engine_dtype(config, "qwen3")


def test_float32_residual_needs_a_supported_family() -> None:
    plain = recipe("float16")
    wide = replace(plain, model=replace(plain.model, residual_dtype="float32"))
    for model_type in FLOAT32_RESIDUAL:
        check_residual(wide, model_type)
    check_residual(plain, "gpt2")
    with pytest.raises(ConfigError, match="residual_dtype"):
        check_residual(wide, "gpt2")
    with pytest.raises(ConfigError, match=r"tensor_parallel = 2: must be 1 with model\.residual_d"):
        replace(wide, rollout=RolloutConfig(tensor_parallel=2))


def test_float16_recipe_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    Gemma3TextConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    ).save_pretrained(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}, dtype: float16}}\n"
        "data: {sources: [{name: s, source: reasoning_gym, task: chain_sum, size: 10}]}\n"
    )
    with pytest.raises(ConfigError, match=r"model.dtype = 'float16': .*of type gemma3_text"):
        prepare(str(path), ["run.device=cpu"])


def test_flash_attention_4_needs_its_kernels() -> None:
    def check(kernels: Any, *, gpu: bool, flash4: bool) -> None:
        trainer = TrainerConfig(attention_kernels=kernels)
        config = Config(data=DataConfig(sources=(SUMS,)), trainer=trainer)
        check_attention_kernels(config, gpu=gpu, flash4=flash4, machine="NVIDIA A100")

    check("flash4", gpu=True, flash4=True)
    for kernels in ("auto", "torch"):
        check(kernels, gpu=False, flash4=False)
    with pytest.raises(ConfigError, match="NVIDIA A100"):
        check("flash4", gpu=True, flash4=False)
    with pytest.raises(ConfigError, match="a CPU"):
        check("flash4", gpu=False, flash4=True)


def test_sparse_attention_needs_vllm_kernels() -> None:
    sparse = "DeepseekV32ForCausalLM"
    data = DataConfig(sources=(SUMS,))
    config = Config(model=ModelConfig(path="m"), data=data)
    check_engine_attention(config, architecture="Qwen3ForCausalLM", kv_width=128, gpu=False)
    check_engine_attention(config, architecture=sparse, kv_width=576, gpu=True)
    with pytest.raises(ConfigError, match="GPU"):
        check_engine_attention(config, architecture=sparse, kv_width=576, gpu=False)
    with pytest.raises(ConfigError, match="576"):
        check_engine_attention(config, architecture=sparse, kv_width=80, gpu=True)
    dense = Config(data=data, trainer=TrainerConfig(attention="dense"))
    with pytest.raises(ConfigError, match="attention"):
        check_engine_attention(dense, architecture=sparse, kv_width=576, gpu=True)
    check_sequence_parallel(1, architecture=sparse, heads=4)
    with pytest.raises(ConfigError, match=r"trainer\.sequence_parallel = 2: the sparse attention"):
        check_sequence_parallel(2, architecture=sparse, heads=4)


def test_head_sizes_match_vllms_cpu_backend() -> None:
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    source = Path(vllm.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    (sizes,) = (
        node.body[-1].value
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name == "get_supported_head_sizes"
        and isinstance(node.body[-1], ast.Return)
    )
    assert sizes is not None and tuple(ast.literal_eval(sizes)) == _CPU_HEADS


def test_unsupported_head_size_is_refused_on_cpu() -> None:
    for size in (0, 32, 128):
        check_engine_heads(recipe("bfloat16"), heads=4, head_size=size, gpu=False)
    check_engine_heads(recipe("bfloat16"), heads=4, head_size=16, gpu=True)
    with pytest.raises(ConfigError, match=r"model\.path = 'some/model' \(head_dim 16 .* GPU"):
        check_engine_heads(recipe("bfloat16"), heads=4, head_size=16, gpu=False)


def test_tensor_parallel_size_must_divide_the_heads() -> None:
    config = recipe("bfloat16")
    for wide, instead in ((1, 0), (2, 0), (4, 0), (3, 2), (8, 7)):
        made = replace(config, rollout=replace(config.rollout, tensor_parallel=wide))
        if not instead:
            check_engine_heads(made, heads=28, head_size=128, gpu=True)
            continue
        pattern = rf"tensor_parallel = {wide}: must divide the model's 28 .*; set it to {instead}$"
        with pytest.raises(ConfigError, match=pattern):
            check_engine_heads(made, heads=28, head_size=128, gpu=True)


def test_check_refuses_unservable_models_and_untrainable_data(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        prepare("quickstart", ["model.tiny.head_dim=16"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    source = f"{{name: rows, source: jsonl, path: {rows}, rewards: {{correct: 1}}}}"
    overrides = [f"data.sources=[{source}]", "run.eval_every=0"]
    with pytest.raises(ConfigError, match=r"data\.sources"):
        prepare("quickstart", overrides)
    prepare("quickstart", [*overrides, "model.tiny.cold_start.steps=0"])
