"""Loaded prompts and their origins, the digests that identify them, and messages about malformed
lines."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.configs.schema import ConfigError, SourceConfig
from keel.configs.system_prompts import system_prompt, with_system
from keel.rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A prompt and where it comes from in the data."""

    prompt: Prompt
    origin: str  # location of the prompt for messages: `file:line`, or the task and index
    bare: tuple[Mapping[str, Any], ...] = ()
    """Messages before the prompt template is applied. Empty if there is no template, or if the
    template also uses other columns of the row."""

    @property
    def question(self) -> str:
        """A digest of the question, ignoring ID, source, template, system message and whitespace.
        Prompts that share a question are either all used for training or all held out."""
        return question_digest(self.bare or self.prompt.messages)

    @property
    def questions(self) -> frozenset[str]:
        templated = {question_digest(self.prompt.messages)} if self.bare else set[str]()
        return frozenset({self.question, *templated})


def question_digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of the messages, ignoring system messages and whitespace."""
    question = [dict(m) for m in messages if m.get("role") != "system"]
    for message in question:
        message["content"] = " ".join(str(message.get("content") or "").split())
    return digest(json.dumps(question, sort_keys=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    items: tuple[Item, ...]
    skipped: tuple[str, ...] = ()  # reason for skipping each malformed line


def first_lines(lines: Sequence[str], limit: int = 10) -> list[str]:
    """Return the first `limit` lines. If there are more, add a line saying how many."""
    more = len(lines) - limit
    return [*lines[:limit], f"and {more:,} more"] if more > 0 else list(lines)


def malformed_error(line: str, knob: str) -> ConfigError:
    """Create an error about a malformed line, which begins with its location."""
    return ConfigError(f"{line} ({knob}; repair it, or set on_bad_line: skip)")


def make_prompt(
    source: SourceConfig,
    label: object,
    messages: Sequence[Mapping[str, Any]],
    reward: Mapping[str, Any],
) -> Prompt:
    """Create a prompt for a source. `label` makes its ID unique within the source."""
    return Prompt(
        prompt_id=f"{source.name}/{label}",
        domain=source.domain_name,
        messages=tuple(messages),
        thinking=source.thinking,
        reward=reward,
        kl_coef=source.kl_coef,
        environment=source.name if source.environment.enabled else "",
        raw=source.raw,
    )


def add_source_system(
    source: SourceConfig, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Prepend the source's system messages to a prompt. For sources with an environment,
    `keel.agents.episode.Episode` adds the system template once the tools are known."""
    template = "none" if source.environment.enabled else source.system_template
    return with_system(system_prompt(template), with_system(source.system, messages))


def remove_source_system(
    source: SourceConfig, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Remove the system messages added by `add_source_system`."""
    added, (first, *rest) = add_source_system(source, ()), messages
    if not added:
        return tuple(messages)
    content = str(first["content"]).removeprefix(added[0]["content"]).removeprefix("\n\n")
    return ({**first, "content": content}, *rest) if content else tuple(rest)


def digest(text: str) -> str:
    """Return a short hash that, unlike Python's `hash`, is the same in every process."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def prompt_digest(prompt: Prompt) -> str:
    content: list[Any] = [[dict(message) for message in prompt.messages], dict(prompt.reward)]
    return digest(json.dumps(content, sort_keys=True, default=str))
