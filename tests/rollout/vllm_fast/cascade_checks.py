"""Checks which steps and layers use cascade attention. This module imports vLLM."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from keel.configs.schema import RolloutConfig
from keel.rollout.spec import EngineSpec
from keel.rollout.vllm_fast import install
from keel.rollout.vllm_fast.cascade import backend

SPEC = EngineSpec(
    model_path="m",
    tokenizer="m",
    config=RolloutConfig(),
    dtype="bfloat16",
    max_model_len=64,
    seed=0,
    keep_routing=False,
    keep_sampling_mask=True,
)


def layer(**changes: Any) -> Any:
    impl: Any = object.__new__(backend.CascadeImpl)
    usual = {
        "attn_type": AttentionType.DECODER,
        "sliding_window": (-1, -1),
        "alibi_slopes": None,
        "sinks": None,
        "logits_soft_cap": 0,
        "batch_invariant_enabled": False,
        "kv_cache_dtype": "auto",
        "head_size": 128,
        "scale": 0.1,
    }
    vars(impl).update(usual | changes)
    return SimpleNamespace(impl=impl)


def builder(layers: dict[str, Any], **changes: Any) -> Any:
    made: Any = object.__new__(backend.CascadeBuilder)
    usual = {
        "layer_names": list(layers),
        "num_heads_q": 8,
        "num_heads_kv": 4,
        "headdim": 128,
        "block_size": 16,
        "kv_cache_dtype": torch.bfloat16,
        "dcp_world_size": 1,
        "rswa_window": None,
        "max_cudagraph_size": 4,
        "device": torch.device("cpu"),
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        "model_config": SimpleNamespace(is_mm_prefix_lm=False),
        "vllm_config": SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=6)),
    }
    vars(made).update(usual | changes)
    return made


def step(**changes: Any) -> Any:
    usual = {
        "num_actual_tokens": 4,
        "num_reqs": 4,
        "max_query_len": 1,
        "causal": True,
        "query_start_loc": None,
        "max_seq_len": 64,
        "seq_lens": torch.ones(4),
        "block_table_tensor": torch.zeros(4, 2),
        "slot_mapping": None,
    }
    return SimpleNamespace(**(usual | changes))


def built(patch: Any, layers: dict[str, Any], made: Any, **of: Any) -> bool:
    """Return True if the step uses Keel's kernels."""
    patch.setattr(backend, "get_layers_from_vllm_config", lambda *_: layers)
    patch.setattr(FlashAttentionMetadataBuilder, "build", lambda *_: "vLLM's")
    metadata = made.build(0, step(**of))
    assert metadata == "vLLM's" or isinstance(metadata.step, backend.CascadeStep)
    return metadata != "vLLM's"


def only_decode_steps_use_cascade(patch: Any) -> None:
    layers = {"a": layer(), "b": layer()}
    made = builder(layers)
    assert built(patch, layers, made)
    assert made._step.leader.shape == (6,)
    for of in ({"max_query_len": 2}, {"causal": False}, {"num_actual_tokens": 8}):
        assert not built(patch, layers, made, **of)
    assert built(patch, layers, made)


def uncovered_layers_keep_vllms_attention(patch: Any) -> None:
    plain = {"a": layer()}
    for changes in (
        {"headdim": 96},
        {"block_size": 24},
        {"num_heads_q": 20},
        {"num_heads_q": 6, "num_heads_kv": 4},
        {"kv_cache_dtype": torch.uint8},
        {"dcp_world_size": 2},
        {"rswa_window": 5},
        {"model_config": SimpleNamespace(is_mm_prefix_lm=True)},
        {"layer_names": ["a", "of another class"]},
        {"compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL)},
    ):
        assert not built(patch, plain, builder(plain, **changes)), changes
    for changes in (
        {"sliding_window": (15, 0)},
        {"sinks": torch.zeros(8)},
        {"alibi_slopes": torch.zeros(8)},
        {"logits_soft_cap": 30.0},
        {"batch_invariant_enabled": True},
        {"kv_cache_dtype": "fp8"},
        {"attn_type": AttentionType.ENCODER_ONLY},
    ):
        layers = {"a": layer(), "b": layer(**changes)}
        assert not built(patch, layers, builder(layers)), changes


def first_layer_plans_the_step(patch: Any) -> None:
    """Each forward pass must plan again, including one captured in a graph."""
    calls: list[Any] = []
    patch.setattr(backend, "plan", lambda *_: calls.append("plan"))
    patch.setattr(backend, "attend", lambda _, query, *rest: calls.append(query))
    patch.setattr(FlashAttentionImpl, "forward", lambda *_: calls.append("vLLM's"))
    layers = {"a": layer(), "b": layer()}
    made = builder(layers)
    assert built(patch, layers, made)
    metadata = made.build(0, step())
    cache = torch.zeros(3, 4, 16, 256)

    def run(name: str, metadata: Any, cache: torch.Tensor = cache) -> None:
        one = layers[name]
        one.impl.forward(one, name, None, None, cache, metadata, torch.zeros(4))

    for name in "abab":
        run(name, metadata)
    assert calls == ["plan", "a", "b", "plan", "a", "b"]
    calls.clear()
    run("a", SimpleNamespace())
    assert calls == ["vLLM's"]
    with pytest.raises(RuntimeError, match="cascade_attention"):
        run("b", metadata, torch.zeros(3, 4, 32, 256))


def nothing_is_replaced_when_disabled(logged: list[logging.LogRecord]) -> None:
    theirs = AttentionBackendEnum.FLASH_ATTN.get_class()
    for changes in (
        {"cascade_attention": False},
        {"enable_prefix_caching": False},
        {"tensor_parallel": 2},
    ):
        other = replace(SPEC, config=RolloutConfig(**changes))
        assert not install.share_prompts(other)
    assert not install.share_prompts(replace(SPEC, batch_invariant=True))
    assert not install.share_prompts(replace(SPEC, dtype="float32"))
    assert AttentionBackendEnum.FLASH_ATTN.get_class() is theirs
    assert not logged
    try:
        assert install.share_prompts(SPEC)
        assert AttentionBackendEnum.FLASH_ATTN.get_class() is backend.CascadeBackend
        assert backend.CascadeBackend.get_impl_cls() is backend.CascadeImpl
        assert backend.CascadeBackend.get_builder_cls() is backend.CascadeBuilder
        assert not install.share_prompts(replace(SPEC, dtype="float32"))
        assert AttentionBackendEnum.FLASH_ATTN.get_class() is theirs
    finally:
        AttentionBackendEnum.FLASH_ATTN.clear_override()
