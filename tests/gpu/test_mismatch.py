"""Engine against trainer on a small model: batch-invariant kernels and the float32 residual."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.shape import build_tokenizer
from keel.model.batch_invariant.layers import FAMILIES
from tests.gpu.marks import GPU

EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
SIZE = {"prompts": 6, "group": 3, "prompt_tokens": 64, "tokens": 200, "gpu_memory_utilization": 0.2}


def mismatch(folder: Path, family: str, *arms: str, **sizes: int) -> dict[str, dict[str, Any]]:
    """Run the arms one by one and return their measurements."""
    write(folder / "model", family, sizes)
    module, out = "benchmarks.mismatch", folder / "out"
    model = ["--out", str(out), "--model", str(folder / "model"), "--size", json.dumps(SIZE)]
    done = subprocess.run(
        [sys.executable, "-m", module, *model, "--arms", *arms],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    results = out / "mismatch.json"
    assert results.exists(), done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = json.loads(results.read_text())["arms"]
    assert set(found) == set(arms), done.stdout + done.stderr
    assert all(arm["tokens"] > 1000 for arm in found.values())
    return found


def write(folder: Path, family: str, sizes: Mapping[str, int]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=2048, hidden_size=1024, intermediate_size=1280, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128, max_position_embeddings=1024,
        tie_word_embeddings=False, dtype="bfloat16", pad_token_id=0, bos_token_id=None,
        eos_token_id=2, **sizes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
        else:
            torch.nn.init.normal_(weight, std=0.06)
    model.save_pretrained(folder)
    build_tokenizer(2000).save_pretrained(folder)


pytestmark = GPU

HEAD = 1e-5
"""Nats: float32 logits, added up in another order."""


@pytest.mark.parametrize("family", FAMILIES)
def test_ratios_are_one(family: str, tmp_path: Path) -> None:
    sizes = EXPERTS if family == "qwen3_moe" else {}
    found = mismatch(tmp_path, family, "bfloat16", "bfloat16-invariant", **sizes)
    ours = found["bfloat16-invariant"]
    assert ours["logp_abs"] < HEAD
    assert ours["ratio_max"] < 1 + 10 * HEAD
    assert found["bfloat16"]["logp_abs"] > 100 * HEAD  # or this could not fail


def test_engine_and_trainer_differ_less(tmp_path: Path) -> None:
    found = mismatch(tmp_path, "qwen3", "float16-compiled", "float16-residual")
    ours, plain = (found[name]["logp_abs"] for name in ("float16-residual", "float16-compiled"))
    assert ours < 0.9 * plain
