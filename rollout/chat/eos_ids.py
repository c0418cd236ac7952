"""Tokens that end any completion in the engine, whatever the chat format."""

from __future__ import annotations

from transformers import GenerationConfig

from keel.model.hub import hub_options
from keel.model.load import load_model_config


def ends_of(path: str) -> tuple[int, ...]:
    """Return a model's `eos_token_id`s as vLLM reads them.

    They come from generation_config.json, else config.json, of the folder or hub name `path`.
    Raises ConfigError without either file.
    """
    try:
        config = GenerationConfig.from_pretrained(path, **hub_options(path))
    except OSError:
        config = GenerationConfig.from_model_config(load_model_config(path))
    ends = config.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends or ())
