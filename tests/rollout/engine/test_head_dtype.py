"""Tests that the engine computes logits with a float32 head, as the trainer does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from keel.configs.schema import Dtype
from tests.rollout.remote_engine import OPEN, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = pytest.mark.e2e


def make_head_only(folder: Path, dtype: Dtype) -> Qwen3ForCausalLM:
    """Make a model whose layer adds nothing, so that only the head can cause a difference."""
    vocabulary = make_model(folder).config.vocab_size
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=1.0,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def largest_error(folder: Path, dtype: Dtype, head: Literal["float32", "model"]) -> float:
    """Return the largest error of the recorded log-probabilities in nats, compared with a float32
    head."""
    model = make_head_only(folder, dtype)
    spec = replace(engine_spec(folder, sampling=OPEN, head_dtype=head), dtype=dtype)
    worst = 0.0
    with running_engine(spec, gpu=False) as engine:
        for group in engine.sample(prompts(4, shared=0, own=9), group_size=2):
            for trajectory in group.trajectories:
                (segment,) = trajectory.segments
                ids = torch.from_numpy(segment.token_ids_T).long()
                hidden = model.model(ids[None]).last_hidden_state[0].float()
                logits = hidden @ model.lm_head.weight.float().T / OPEN.temperature
                logp = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
                recorded = torch.from_numpy(segment.logp_old_T).float()[1:]
                sampled = torch.from_numpy(segment.trainable_T)[1:]
                worst = max(worst, float((logp - recorded)[sampled].abs().max()))
    return worst


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_not_rounded(tmp_path: Path, dtype: Dtype) -> None:
    assert largest_error(tmp_path, dtype, "float32") < 1e-4


def test_head_dtype_may_follow_the_engine(tmp_path: Path) -> None:
    assert largest_error(tmp_path, "bfloat16", "model") > 1e-2
