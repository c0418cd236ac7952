"""`model.batch_invariant` with vLLM's kernels: what an engine sampled token by token, in batches of
changing size, the trainer scores in one pass with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.shape import build_tokenizer
from keel.model.invariant.layers import FAMILIES
from tests.gpu.marks import GPU

pytestmark = GPU

SIZE = {"prompts": 6, "group": 3, "prompt_tokens": 64, "tokens": 200, "gpu_memory_utilization": 0.2}
HEAD = 1e-5
"""Nats: float32 logits, added up in another order."""


def write(folder: Path, family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=2048, hidden_size=1024, intermediate_size=1280, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128, max_position_embeddings=1024,
        tie_word_embeddings=False, dtype="bfloat16", pad_token_id=0, bos_token_id=None,
        eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
        else:
            torch.nn.init.normal_(weight, std=0.06)
    model.save_pretrained(folder)
    build_tokenizer(2000).save_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_ratios_are_one(family: str, tmp_path: Path) -> None:
    write(tmp_path / "model", family)
    command = [
        sys.executable,
        "-m",
        "benchmarks.stability.mismatch",
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--model", str(tmp_path / "model"), "--size", json.dumps(SIZE)]
    done = subprocess.run(
        [*command, "--arms", "bfloat16", "bfloat16-invariant"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    found = json.loads((tmp_path / "out" / "mismatch.json").read_text())["arms"]
    assert set(found) == {"bfloat16", "bfloat16-invariant"}, done.stdout + done.stderr
    ours = found["bfloat16-invariant"]
    assert ours["tokens"] > 1000
    assert ours["logp_abs"] < HEAD
    assert ours["ratio_max"] < 1 + 10 * HEAD
    assert found["bfloat16"]["logp_abs"] > 100 * HEAD  # or this could not fail
