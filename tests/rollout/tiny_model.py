"""A tiny random mixture-of-experts model, and weight updates for it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from keel.model import load

DENSE_LAYER = 1
END = "<|im_end|>"
VOCABULARY = 258
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "initializer_range": 0.2,
}
HYBRID = {
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
"""Sizes that only hybrid families have."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def make_model(
    folder: Path, *, seed: int = 0, head_dim: int = 32, family: str = "qwen3_moe", **sizes: float
) -> PreTrainedModel:
    """Create a model with four layers, one of them dense, and a byte tokenizer. Saves both to
    `folder`. `sizes` replaces entries of its config. In a hybrid family, only the last layer has
    full attention. Wide initial weights and a scaled output head make its distributions as peaked
    as in trained models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((END, "<|im_start|>", *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            family,
            vocab_size=len(vocab),
            **{**SIZES, **sizes},
            num_hidden_layers=4,
            mlp_only_layers=[DENSE_LAYER],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            pad_token_id=None,
            eos_token_id=0,
            dtype="float32",
            **(HYBRID if family != "qwen3_moe" else {}),
        )
    ).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(folder)
    return model


def perturbed(model: PreTrainedModel, *, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * parameter.std() * noise)
    return checkpoint_tensors(model)


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load.checkpoint_tensors(model)}
