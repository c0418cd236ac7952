from __future__ import annotations

import torch
from transformers import DeepseekV3Config, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from keel.trainer.engine.weights import from_outline, outline

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}


def test_twin_with_equal_weights_computes_the_same() -> None:
    """Buffers are copied, too: DeepSeek-V3 routes with one."""
    config = DeepseekV3Config(
        **SMALL,
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
        **{"v_head_dim": 8, "first_k_dense_replace": 1},
    )
    model = DeepseekV3ForCausalLM(config).eval()
    (bias,) = (one for name, one in model.named_buffers() if "correction_bias" in name)
    bias.normal_()
    twin = from_outline(outline(model))
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            assert mine.data_ptr() != theirs.data_ptr()
            mine.copy_(theirs)
        ids = torch.arange(12)[None]
        assert torch.equal(twin(ids).logits, model(ids).logits)


def test_ties_dtypes_and_gradients_are_preserved() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True)).bfloat16()
    model.model.norm.requires_grad_(False)
    twin = from_outline(outline(model), "meta")
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert {w.device.type for w in twin.parameters()} == {"meta"}
    for (name, mine), (other, theirs) in zip(
        twin.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert mine.requires_grad == theirs.requires_grad
