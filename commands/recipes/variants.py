"""Another way of asking the same prompts (`eval.variants`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from keel.configs.schema import Config, ConfigError, EvalVariant
from keel.rl.types import Prompt


def check_variant(config: Config, variant: EvalVariant) -> None:
    """Raises ConfigError for one that the engines have no room for, or that asks nothing."""
    knob, most = f"eval.variants[{variant.name}]", config.rollout.sampling.max_tokens
    if variant.max_tokens > most:
        raise ConfigError(
            f"{knob}.max_tokens = {variant.max_tokens}: the engines have room for "
            f"rollout.sampling.max_tokens = {most}; raise that"
        )
    there, told = bool(config.endpoint.base_url), config.endpoint.tells_thinking
    if there and not told and variant.thinking != "as-asked":
        raise ConfigError(
            f"{knob}.thinking = {variant.thinking}: the endpoint is not told; set "
            "endpoint.tells_thinking, if it takes that"
        )
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
    """Raises ConfigError for the first prompt that in the variant's words, with its budget, is more
    than the engines have room for. The recipe's own words have been counted already."""
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
                    f"tokens in its words, and the engines have room for {room} beside a budget "
                    f"of {budget}; raise data.max_prompt_tokens = {limit} by {tokens - room} or "
                    "more"
                )


def as_in(variant: EvalVariant, config: Config) -> Config:
    """The budgets that it changes. Raises ConfigError where they do not go together."""
    if variant.max_tokens:
        config = config.with_max_tokens(variant.max_tokens)
    if variant.context != "as-in-training":
        config = replace(config, agents=replace(config.agents, context=variant.context))
    return config


def as_asked(prompt: Prompt, variant: EvalVariant) -> Prompt:
    """The prompt in the variant's words."""
    thinking = prompt.thinking if variant.thinking == "as-asked" else variant.thinking == "with"
    messages = [dict(message) for message in prompt.messages]
    last = next((m for m in reversed(messages) if m.get("role") == "user"), None)
    if variant.line and last is not None:
        last["content"] = f"{last['content']}\n{variant.line}"
    return replace(prompt, thinking=thinking, messages=tuple(messages))
