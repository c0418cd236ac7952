"""For which tokens the engine ends any completion, whatever the chat format says."""

from __future__ import annotations

from transformers import GenerationConfig

from keel.model.load import load_model_config
from keel.model.source import hub_options


def ends_of(path: str) -> tuple[int, ...]:
    """`eos_token_id` of a folder's or hub model's generation_config.json, or where there is none of
    its config.json, as vLLM reads them. Raises ConfigError where there is neither."""
    try:
        given = GenerationConfig.from_pretrained(path, **hub_options(path))
    except OSError:
        given = GenerationConfig.from_model_config(load_model_config(path))
    ends = given.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends or ())
