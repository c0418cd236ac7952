"""The support head inside transformers models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keel.model.head.module import SupportHead, install_support_head, logit_shape
from tests.model.families import VOCAB, build

TOKENS = torch.arange(12).reshape(1, 12) * 5 % VOCAB


def scored(model, head: SupportHead, temperature: float = 1.0):
    """Log-probabilities of tokens 1 … 11 from the backbone's hidden states."""
    hidden = model.model(TOKENS, use_cache=False).last_hidden_state[0, :-1]
    offsets = torch.zeros(len(hidden) + 1, dtype=torch.long)
    empty = torch.zeros(0, dtype=torch.long)
    return head(hidden, TOKENS[0, 1:], empty, offsets, temperature=temperature)[0]


FAMILIES = {
    "qwen3_moe": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"logits_scaling": 4.0, "num_local_experts": 4},
    "hyperclovax": {"logits_scaling": 3.0},
    "falcon_h1": {
        "lm_head_multiplier": 3.0,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 2,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_match_the_models_logits(family):
    """Includes scaling and capping after the output layer."""
    model = build(family, tie_word_embeddings=False, **FAMILIES[family])
    nn.init.normal_(model.lm_head.weight, std=0.5)
    logits = model(TOKENS, use_cache=False).logits[0, :-1].float()
    expected = (logits / 0.7).log_softmax(-1).gather(1, TOKENS[0, 1:, None])[:, 0]
    head = install_support_head(model)
    torch.testing.assert_close(scored(model, head, 0.7), expected, rtol=1e-4, atol=1e-5)
    changes_logits = logit_shape(model.config) != {"scale": 1.0, "softcap": None}
    assert changes_logits == (family != "qwen3_moe")


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_keep_their_identity_and_names(tied):
    model = build("qwen3_moe", tie_word_embeddings=tied)
    names, parameter = list(model.state_dict()), model.lm_head.weight
    plain = model(TOKENS).logits
    head = install_support_head(model)
    assert model.lm_head is head is model.get_output_embeddings()
    assert head.weight is parameter and list(model.state_dict()) == names
    assert (head.weight is model.get_input_embeddings().weight) == tied
    assert torch.equal(model(TOKENS).logits, plain)
    assert install_support_head(model) is head

    model.tie_weights()
    assert (head.weight is model.get_input_embeddings().weight) == tied
    scored(model, head).sum().backward()
    assert head.weight.grad.abs().max() > 0
