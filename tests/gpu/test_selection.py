"""DeepSeek-V3.2's sparse attention on vLLM: the trainer replays the engine's selections."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.shape import build_tokenizer
from tests.gpu.marks import GPU

pytestmark = GPU

TOP_K = 512
LATENT = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": TOP_K}
ROUTER = {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def write(folder: Path, *, layers: int = 4, context: int = 8192, norm_std: float = 0.0) -> None:
    """Write a random model with the latents and heads of DeepSeek-V3.2's attention. The weights of
    its norms have mean 1 and standard deviation `norm_std`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v32", architectures=["DeepseekV32ForCausalLM"], vocab_size=2048,
        hidden_size=1024, intermediate_size=1024, moe_intermediate_size=256,
        num_hidden_layers=layers, mlp_layer_types=["dense"] + ["sparse"] * (layers - 1),
        first_k_dense_replace=1, num_attention_heads=64, num_key_value_heads=64, v_head_dim=128,
        n_routed_experts=32, n_shared_experts=1, num_experts_per_tok=4, norm_topk_prob=True,
        routed_scaling_factor=1.0, max_position_embeddings=context, tie_word_embeddings=False,
        dtype="bfloat16", pad_token_id=0, bos_token_id=None, eos_token_id=2,
        **LATENT, **INDEXER, **ROUTER,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.constant_(weight, float("norm" in name and "bias" not in name))
            weight.data.mul_(1 + norm_std * torch.randn_like(weight) if norm_std else 1.0)
        elif "embed" in name or "lm_head" in name:
            torch.nn.init.normal_(weight, std=0.06 if "lm_head" in name else 1.0)
        else:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    build_tokenizer(2000).save_pretrained(folder)


def test_bitmaps_hold_the_selected_positions() -> None:
    from keel.rollout.recording.selection import _SelectionTable  # noqa: PLC0415  (imports vLLM)

    generator = torch.Generator().manual_seed(0)
    cache = torch.zeros(4, 64, 132, dtype=torch.uint8, device="cuda")
    table = _SelectionTable(cache, 1000)
    table.bitmaps.fill_(-1)
    chosen = torch.stack([torch.randperm(1000, generator=generator)[:300] for _ in range(20)])
    chosen[3, 100:] = -1
    slots = torch.randperm(256, generator=generator)[:20]
    slots[5] = -1
    table.store(chosen.int().cuda(), slots.cuda())
    rows = table.bitmaps.cpu().numpy().view(np.uint8)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            stored = np.flatnonzero(np.unpackbits(rows[slot], bitorder="little"))
            assert stored.tolist() == sorted(x for x in chosen[row].tolist() if x >= 0)
    others = np.setdiff1d(np.arange(256), slots.numpy())
    assert (rows[others] == 255).all()


def test_replayed_selections_reduce_the_mismatch(tmp_path: Path) -> None:
    write(tmp_path / "model")
    size = {"prompts": 4, "group": 4, "prompt_tokens": 1500, "tokens": 300}
    command = [sys.executable, "-m", "benchmarks.mismatch", "--model", str(tmp_path / "model")]
    options = ["--out", str(tmp_path / "out"), "--size", json.dumps(size), "--words"]
    run = subprocess.run(
        [*command, *options, "--arms", "bfloat16"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (report,) = json.loads((tmp_path / "out" / "mismatch.json").read_text())["arms"].values()
    assert report["logp_abs"] < 0.9 * report["own_selection"]["logp_abs"]
