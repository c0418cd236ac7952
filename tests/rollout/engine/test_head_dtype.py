"""Tests that the engine computes logits with a float32 output head, as the trainer does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.rollout.remote_engine import OPEN, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = pytest.mark.e2e


@torch.no_grad()
def test_logits_are_not_rounded(tmp_path: Path) -> None:
    vocabulary = make_model(tmp_path).config.vocab_size
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
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
    model = model.bfloat16()
    model.save_pretrained(tmp_path)
    spec = replace(engine_spec(tmp_path, sampling=OPEN, head_dtype="float32"), dtype="bfloat16")
    with running_engine(spec, gpu=False) as engine:
        groups = engine.sample(prompts(4, shared=0, own=9), group_size=2)
    for trajectory in (t for group in groups for t in group.trajectories):
        (segment,) = trajectory.segments
        ids = torch.from_numpy(segment.token_ids_T).long()
        hidden = model.model(ids[None]).last_hidden_state[0].float()
        logits = hidden @ model.lm_head.weight.float().T / OPEN.temperature
        logp = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        recorded = torch.from_numpy(segment.logp_old_T).float()[1:]
        sampled = torch.from_numpy(segment.trainable_T)[1:]
        assert float((logp - recorded)[sampled].abs().max()) < 1e-4
