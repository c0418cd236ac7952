"""Dropout and jitter are disabled for all families."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SeedOssConfig,
)

from keel.model.attention import Segments
from keel.model.transformers_internals import disable_dropout
from keel.trainer.engine.policy import PolicyNetwork

SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "modules": PhiConfig(**SMALL, resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5),
    "numbers": SeedOssConfig(**SMALL, head_dim=8, residual_dropout=0.5, attention_dropout=0.5),
    "jitter": MixtralConfig(**SMALL, num_local_experts=4, router_jitter_noise=0.5),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_train_mode_equals_eval_mode(family: str) -> None:
    model = _model(FAMILIES[family])
    ids = torch.arange(9)[None]
    before = model.eval()(input_ids=ids, use_cache=False).logits
    disable_dropout(model)
    torch.testing.assert_close(model.train()(input_ids=ids, use_cache=False).logits, before)


def test_the_policy_is_deterministic() -> None:
    network = PolicyNetwork(_model(FAMILIES["numbers"]), temperature=1.0)
    once, again = (
        network.train().model.get_decoder()(
            input_ids=torch.arange(9)[None],
            position_ids=torch.arange(9)[None],
            use_cache=False,
            segments=Segments.of([9]),
        )[0]
        for _ in range(2)
    )
    assert torch.equal(once, again)
    assert network.config.residual_dropout == 0.5


def _model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(config))  # models modify their config
