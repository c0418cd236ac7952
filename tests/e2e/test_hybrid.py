"""Whole runs of hybrid models, on a GPU in bfloat16."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from keel.model.tiny.tokenizer import build_tokenizer, vocab_rows
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

KEEL = [sys.executable, "-m", "keel.commands.cli"]
DTYPE, NEAR = ("bfloat16", 0.05) if torch.cuda.is_available() else ("float32", 1e-4)
IMAGES = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen3.5 needs torchvision"
)


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("qwen3_5_text", marks=IMAGES)])
def test_training_steps(tmp_path: Path, family: str) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    tokenizer = build_tokenizer()
    config = AutoConfig.for_model(
        family, vocab_size=vocab_rows(tokenizer), hidden_size=64, intermediate_size=64,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=2048, initializer_range=0.1, dtype=DTYPE,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_config(config).to(getattr(torch, DTYPE))
    network.save_pretrained(model)
    tokenizer.save_pretrained(model)
    done = subprocess.run(
        [
            *(*KEEL, "train", "quickstart", f"model.path={model}", f"run.dir={run}"),
            *("run.steps=2", f"model.dtype={DTYPE}", "rollout.sampling.max_tokens=32"),
            *("algorithm.prompts_per_step=4", "algorithm.group_size=4", "rewards.workers=1"),
            *("rollout.engines=1", f"rewards.timeout_s={PATIENCE_S}"),
            "data.max_prompt_tokens=1024",  # transformers' Qwen3.5 tokenizer splits more finely
            *(f"data.sources[{name}].size=400" for name in ("spelling", "spiral")),
            *(f"data.sources[{name}].holdout=8" for name in ("spelling", "spiral")),
        ],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learned = [step for step in steps if "mismatch/logp_abs" in step]
    assert len(learned) == 2
    for step in learned:
        assert step["mismatch/logp_abs"] < NEAR
        assert step["rollout/dropped_completions"] == 0
        assert step.get("routing/overlap", 1.0) > 0.95
