"""Evaluation variants of the same prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keel.commands.variants import as_asked, check_room
from keel.configs.load import load_config
from keel.configs.schema import ConfigError, EvalVariant
from keel.rl.types import Prompt


def test_variant_changes_the_prompt() -> None:
    original = Prompt(
        prompt_id="p",
        domain="d",
        messages=({"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "Hm"}),
        thinking=True,
    )
    other = as_asked(original, EvalVariant(name="v", thinking="without", ask="In words."))
    assert other.messages[0]["content"] == "1 + 1\nIn words." and other.thinking is False
    assert as_asked(original, EvalVariant(name="v")) == original
    assert as_asked(other, EvalVariant(name="v", thinking="with")) == replace(other, thinking=True)


def test_variant_must_fit_the_context() -> None:
    config = load_config("quickstart", ["data.max_prompt_tokens=10"])
    assert config.rollout.sampling.max_tokens == 48
    prompt = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "12345"},))

    def check(variant: EvalVariant) -> None:
        check_room(config, variant, {"s": [prompt]}, lambda p: len(p.messages[0]["content"]))

    check(EvalVariant(name="v", ask="678"))
    check(EvalVariant(name="v", ask="6789 and more", max_tokens=24))
    with pytest.raises(ConfigError) as caught:
        check(EvalVariant(name="v", ask="6789 and more"))
    message = str(caught.value)
    assert message.startswith("eval.variants[v]: prompt p of data.sources[s] has 19 tokens")
    assert message.endswith("Raise data.max_prompt_tokens = 10 by at least 9")
