"""Model families, dtypes and head sizes that vLLM does not support."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
)
from keel.trainer.placement.families import (
    _CPU_HEADS,
    NOT_IN_FLOAT16,
    check_engine_attention,
    check_engine_dtype,
    check_engine_heads,
    check_parallel,
    check_residual,
)
from tests.trainer.placement.test_memory import SUMS


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
    assert set(ast.literal_eval(table)) == set(NOT_IN_FLOAT16)
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
        data=DataConfig(sources=(SUMS,)),
        rollout=RolloutConfig(dtype=engine),
    )


def parallel(**trainer: int) -> Config:
    config = with_model()
    width = trainer.pop("tensor_parallel", 1)
    rollout = replace(config.rollout, tensor_parallel=width)
    return replace(config, rollout=rollout, trainer=TrainerConfig(**{"ranks": 4, **trainer}))


HEADS = {"heads": 28, "head_size": 128, "gpu": True}
EXPERTS = {"architecture": "Qwen3MoeForCausalLM", "experts": 8, "heads": 4}
SPARSE_NAME = "DeepseekV32ForCausalLM"
SPARSE = {"architecture": SPARSE_NAME, "kv_width": 576, "gpu": True}


FLOAT16, PLAIN = {"model_type": "qwen3"}, with_model()
CASES: list[tuple[Callable[..., None], Config, dict[str, Any], dict[str, Any]]] = [
    (check_engine_dtype, with_model("float16"), FLOAT16, {"model_type": NOT_IN_FLOAT16[0]}),
    (check_engine_dtype, with_model(engine="float16"), FLOAT16, {"model_type": "gemma2"}),
    (check_residual, with_model(residual_dtype="float32"), FLOAT16, {"model_type": "gpt2"}),
    (check_engine_heads, parallel(tensor_parallel=2), HEADS, {"heads": 27}),
    (check_engine_heads, PLAIN, {**HEADS, "gpu": False}, {"head_size": 16}),
    (check_engine_attention, PLAIN, SPARSE, {"gpu": False}),
    (check_engine_attention, PLAIN, SPARSE, {"kv_width": 80}),
    (check_parallel, parallel(expert_parallel=2), EXPERTS, {"experts": 9}),
    (check_parallel, parallel(expert_parallel=2), EXPERTS, {"experts": 0}),
    (check_parallel, parallel(expert_parallel=2), EXPERTS, {"architecture": "OlmoeForCausalLM"}),
    (check_parallel, parallel(sequence_parallel=2), EXPERTS, {"heads": 3}),
    (check_parallel, parallel(sequence_parallel=2), EXPERTS, {"architecture": SPARSE_NAME}),
]


@pytest.mark.parametrize(("check", "config", "facts", "bad"), CASES)
def test_unsuitable_models_are_refused(
    check: Callable[..., None], config: Config, facts: dict[str, Any], bad: dict[str, Any]
) -> None:
    first = config.trainer if check is check_parallel else config
    check(first, **facts)
    with pytest.raises(ConfigError):
        check(first, **{**facts, **bad})
