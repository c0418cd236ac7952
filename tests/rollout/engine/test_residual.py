"""Engines add blocks' outputs up in float32 where the recipe says so (`model.residual_dtype`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.rollout.remote_engine import OPEN, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = pytest.mark.e2e


def make_faint(folder: Path) -> Qwen3ForCausalLM:
    """A model of many blocks that add a thousandth of the stream each, which is rounded away there
    in bfloat16. In float32, of weights in bfloat16."""
    vocabulary = make_model(folder).config.vocab_size
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter.normal_(std=0.1)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.3)
        model.model.embed_tokens.weight.uniform_(1, 2)
        model.lm_head.weight.normal_(std=20.0)
        model.lm_head.weight.sub_(model.lm_head.weight.mean(1, keepdim=True))
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    return model.float()


@torch.no_grad()
def mean_error(folder: Path, residual: Literal["model", "float32"]) -> float:
    """Of the recorded log-probabilities, in nats, against float32."""
    model = make_faint(folder)
    spec = replace(engine_spec(folder, sampling=OPEN), dtype="bfloat16", residual_dtype=residual)
    errors: list[torch.Tensor] = []
    with running_engine(spec, gpu=False) as engine:
        for group in engine.sample(prompts(4, shared=0, own=9), group_size=2):
            for trajectory in group.trajectories:
                (segment,) = trajectory.segments
                ids = torch.from_numpy(segment.token_ids_T).long()
                logits = model(ids[None]).logits[0] / OPEN.temperature
                logp = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
                recorded = torch.from_numpy(segment.logp_old_T).float()[1:]
                sampled = torch.from_numpy(segment.trainable_T)[1:]
                errors.append((logp - recorded)[sampled].abs())
    return float(torch.cat(errors).mean())


def test_what_blocks_add_is_not_rounded_away(tmp_path: Path) -> None:
    kept, rounded = mean_error(tmp_path, "float32"), mean_error(tmp_path, "model")
    assert kept < rounded / 4
