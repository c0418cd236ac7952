"""Finds the tokens that end every completion in the engine, regardless of the chat format."""

from __future__ import annotations

from transformers import GenerationConfig

from keel.model.hub import hub_options
from keel.model.load import load_model_config


def ends_of(path: str) -> tuple[int, ...]:
    """Return the `eos_token_id`s of a model, as vLLM reads them.

    They are read from generation_config.json or, if that does not exist, from config.json. `path`
    is a folder or a hub name. Raises ConfigError if there is neither file.
    """
    try:
        config = GenerationConfig.from_pretrained(path, **hub_options(path))
    except OSError:
        config = GenerationConfig.from_model_config(load_model_config(path))
    ends = config.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends or ())
