"""Whether transformers still computes sparse attention as `keel.model.sparse` does."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from keel.model.attention import Segments, use_packed_attention
from keel.model.sparse.attention import use_sparse_attention

TOLERANCE = 1e-4


@cache
def check_sparse_attention() -> None:
    """Run both on a model of a few hundred weights (a few hundredths of a second, once a process).

    Raises RuntimeError if they differ, or if transformers' modules have other names than in 5.17 to
    5.19: training would be of another model than the checkpoint's.
    """
    wrong = (
        f"transformers {transformers.__version__} computes deepseek_v32's attention otherwise than "
        "5.17 to 5.19 do, so Keel's would be another model's: install one of those"
    )
    try:
        difference = _difference()
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RuntimeError(f"{wrong} ({type(error).__name__}: {error})") from error
    if not difference < TOLERANCE:
        raise RuntimeError(f"{wrong} (its output differs by {difference:.1e})")


@torch.no_grad()
def _difference() -> float:
    """The largest of the hidden states, over one segment of which a third is selected."""
    tokens, kept = 12, 4
    config = AutoConfig.for_model(
        "deepseek_v32",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        mlp_layer_types=["dense"],
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        index_n_heads=8,
        index_head_dim=8,
        index_topk=kept,
        initializer_range=0.5,
        max_position_embeddings=64,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        ids, positions = torch.randint(0, 16, (1, tokens)), torch.arange(tokens)[None]
    ours = deepcopy(theirs)
    use_sparse_attention(ours)
    use_packed_attention(ours)
    expected, actual = (
        model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False, **more)
        for model, more in ((theirs, {}), (ours, {"segments": Segments.of([tokens])}))
    )
    return float((expected.last_hidden_state - actual.last_hidden_state).abs().max())
