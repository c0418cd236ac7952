"""Engine against trainer on a small model, by `benchmarks.mismatch`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.shape import build_tokenizer

SIZE = {"prompts": 6, "group": 3, "prompt_tokens": 64, "tokens": 200, "gpu_memory_utilization": 0.2}


def mismatch(folder: Path, family: str, *arms: str) -> dict[str, dict[str, Any]]:
    """Run the arms one by one and return their measurements."""
    write(folder / "model", family)
    module, out = "benchmarks.mismatch", folder / "out"
    model = ["--out", str(out), "--model", str(folder / "model"), "--size", json.dumps(SIZE)]
    done = subprocess.run(
        [sys.executable, "-m", module, *model, "--arms", *arms],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    found: dict[str, dict[str, Any]] = json.loads((out / "mismatch.json").read_text())["arms"]
    assert set(found) == set(arms), done.stdout + done.stderr
    assert all(arm["tokens"] > 1000 for arm in found.values())
    return found


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
