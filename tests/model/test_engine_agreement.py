"""The trainer's model agrees with the engine: no dropout, and the engine's LongRoPE."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SeedOssConfig,
)

from keel.model.attention import Segments, use_packed_attention
from keel.model.transformers_internals import disable_dropout, fix_long_rope

PRETRAINED = 16
SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NOISY = {
    "modules": PhiConfig(**SMALL, resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5),
    "numbers": SeedOssConfig(**SMALL, head_dim=8, residual_dropout=0.5, attention_dropout=0.5),
    "jitter": MixtralConfig(**SMALL, num_local_experts=4, router_jitter_noise=0.5),
}
CONFIG = Phi3Config(
    **SMALL,
    max_position_embeddings=64,
    original_max_position_embeddings=PRETRAINED,
    pad_token_id=0,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": PRETRAINED,
    },
)
SHORT, LONG = torch.arange(9), torch.arange(24)


@pytest.mark.parametrize("context", [PRETRAINED, PRETRAINED + 1])
def test_results_do_not_depend_on_packing(context: int) -> None:
    model = _model()
    plain = _model()
    use_packed_attention(model)
    fix_long_rope(model, context)
    alone = _hidden(model, SHORT)
    torch.testing.assert_close(_hidden(model, SHORT, LONG)[: len(SHORT)], alone)

    # transformers on an input of the engine's context length.
    ids = torch.cat([SHORT, torch.zeros(context - len(SHORT), dtype=torch.long)])[None]
    expected = plain.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(alone, expected[: len(SHORT)])


@pytest.mark.parametrize("family", NOISY)
def test_train_mode_equals_eval_mode(family: str) -> None:
    model = _model(NOISY[family])
    ids = torch.arange(9)[None]
    before = model(input_ids=ids, use_cache=False).logits
    disable_dropout(model)
    torch.testing.assert_close(model.train()(input_ids=ids, use_cache=False).logits, before)


def _model(config: PreTrainedConfig = CONFIG) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def _hidden(model: PreTrainedModel, *parts: Tensor) -> Tensor:
    return model.get_decoder()(
        input_ids=torch.cat(parts)[None],
        position_ids=torch.cat([torch.arange(len(part)) for part in parts])[None],
        use_cache=False,
        segments=Segments.of([len(part) for part in parts]),
    ).last_hidden_state[0]
