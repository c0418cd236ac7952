"""Tests that block outputs stay in float32 with `model.residual_dtype: float32`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.rollout.remote_engine import OPEN, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import checkpoint_tensors, make_model

pytestmark = pytest.mark.e2e
LAYERS = 16


def make_faint(vocabulary: int, *, seed: int) -> Qwen3MoeForCausalLM:
    """Return a bfloat16 model whose blocks each add a thousandth of the stream.

    In bfloat16 the stream rounds such sums away. Layers share weights, so the sums accumulate to
    several times the rounding error of the head's input. Every other layer is dense.
    """
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=0,
        num_experts=4,
        num_experts_per_tok=4,  # all, so that rounding changes no choice
        moe_intermediate_size=64,
        mlp_only_layers=[*range(0, LAYERS, 2)],
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.normal_(std=0.1)
            if name.endswith("o_proj.weight"):
                parameter.mul_(0.005)
            if name.endswith(("down_proj.weight", "down_proj")):
                parameter.mul_(0.01)
        layers = model.model.layers
        for index in range(2, LAYERS):
            layers[index].load_state_dict(layers[index % 2].state_dict())
        model.get_input_embeddings().weight.uniform_(1, 2)
        head: Any = model.get_output_embeddings()
        head.weight.normal_(std=2.0)
        head.weight.sub_(head.weight.mean(1, keepdim=True))
    return model.to(torch.bfloat16).eval()


@torch.no_grad()
def mean_error(folder: Path, residual: Literal["model", "float32"]) -> float:
    """Return the mean error of recorded log-probabilities in nats, after a weight update.

    The reference is transformers in float32.
    """
    vocabulary = make_model(folder).config.vocab_size
    make_faint(vocabulary, seed=1).save_pretrained(folder)
    model: Any = make_faint(vocabulary, seed=2)
    spec = replace(engine_spec(folder, sampling=OPEN), dtype="bfloat16", residual_dtype=residual)
    with running_engine(spec, gpu=False) as engine:
        engine.update(1, checkpoint_tensors(model))
        groups = engine.sample(prompts(4, shared=0, own=9), group_size=2)
    model = model.float()
    errors: list[torch.Tensor] = []
    for trajectory in (t for group in groups for t in group.trajectories):
        (segment,) = trajectory.segments
        ids = torch.from_numpy(segment.token_ids_T).long()
        logits = model(ids[None]).logits[0] / OPEN.temperature
        logp = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        recorded = torch.from_numpy(segment.logp_old_T).float()[1:]
        errors.append((logp - recorded)[torch.from_numpy(segment.trainable_T)[1:]].abs())
    return float(torch.cat(errors).mean())


def test_block_outputs_are_not_rounded_away(tmp_path: Path) -> None:
    kept, rounded = (mean_error(tmp_path, "float32"), mean_error(tmp_path, "model"))
    assert kept < rounded / 3
