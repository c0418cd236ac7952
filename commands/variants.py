"""Checks the variants of an evaluation (`eval.variants`) and applies them to prompts and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from keel.configs.schema import Config, ConfigError, EvalVariant
from keel.rl.types import Prompt


def check_variant(config: Config, variant: EvalVariant) -> None:
    """Raise ConfigError if a variant exceeds the engines' limits or has no effect."""
    knob, most = f"eval.variants[{variant.name}]", config.rollout.sampling.max_tokens
    if variant.max_tokens > most:
        raise ConfigError(
            f"{knob}.max_tokens = {variant.max_tokens}: must be at most "
            f"rollout.sampling.max_tokens = {most}"
        )
    endpoint = config.endpoint
    if endpoint.base_url and not endpoint.tells_thinking and variant.thinking != "as-asked":
        raise ConfigError(f"{knob}.thinking = {variant.thinking}: needs endpoint.tells_thinking")
    if variant.context != "as-in-training" and not config.with_agents:
        raise ConfigError(f"{knob}.context = {variant.context}: no source has an environment")
    try:
        as_in(variant, config)
    except ConfigError as error:
        raise ConfigError(f"{knob}: {error}") from error


def check_room(
    config: Config,
    variant: EvalVariant,
    sets: Mapping[str, Sequence[Prompt]],
    count_tokens: Callable[[Prompt], int],
) -> None:
    """Raise ConfigError for the first prompt that does not fit into the context with this variant.
    The variant's extra line and token limit need additional space. The unchanged prompts have
    already been checked."""
    if not variant.line and variant.thinking == "as-asked":
        return
    knob = f"eval.variants[{variant.name}]"
    budget = as_in(variant, config).rollout.sampling.max_tokens
    room = config.max_context - budget
    for source, prompts in sets.items():
        for prompt in prompts:
            tokens = count_tokens(as_asked(prompt, variant))
            if tokens > room:
                limit = config.data.max_prompt_tokens
                raise ConfigError(
                    f"{knob}: prompt {prompt.prompt_id} of data.sources[{source}] has {tokens} "
                    f"tokens, and a budget of {budget} leaves {room}. Raise data.max_prompt_tokens "
                    f"= {limit} by at least {tokens - room}"
                )


def as_in(variant: EvalVariant, config: Config) -> Config:
    """Return the config with the variant's limits. Raises ConfigError if they conflict with the
    recipe."""
    if variant.max_tokens:
        config = config.with_max_tokens(variant.max_tokens)
    if variant.context != "as-in-training":
        config = replace(config, agents=replace(config.agents, context=variant.context))
    return config


def as_asked(prompt: Prompt, variant: EvalVariant) -> Prompt:
    """Return the prompt with the variant's extra line and thinking mode applied."""
    thinking = prompt.thinking if variant.thinking == "as-asked" else variant.thinking == "with"
    messages = [dict(message) for message in prompt.messages]
    last = next((m for m in reversed(messages) if m.get("role") == "user"), None)
    if variant.line and last is not None:
        last["content"] = f"{last['content']}\n{variant.line}"
    return replace(prompt, thinking=thinking, messages=tuple(messages))
