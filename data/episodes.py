"""Tasks that an environment makes itself: a name and a number each."""

from __future__ import annotations

from keel.configs.schema import SourceConfig
from keel.data.items import Item, Loaded
from keel.rl.types import ENVIRONMENT, Prompt


def load_episodes(source: SourceConfig) -> Loaded:
    """Tasks 0 … size − 1. The environment opens the conversation: the message here says only, for
    people, which task it is; `keel.agents.probe` refuses an environment that leaves it there."""
    return Loaded(items=tuple(_item(source, index) for index in range(source.size)))


def _item(source: SourceConfig, index: int) -> Item:
    name = f"{source.name}/{index}"
    prompt = Prompt(
        prompt_id=name,
        domain=source.domain_name,
        messages=({"role": "user", "content": f"(task {name})"},),
        thinking=source.thinking,
        reward={"kind": ENVIRONMENT},
        kl_coef=source.kl_coef,
        environment=source.name,
    )
    return Item(prompt=prompt, origin=name)
