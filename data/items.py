"""The prompts that loaders return, with their origins and the lines that were skipped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.configs.schema import ConfigError, SourceConfig
from keel.configs.system_prompts import system_prompt, with_system
from keel.rl.types import Prompt

MAX_MALFORMED = 1000
"""How many malformed lines are collected before reading stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A prompt, with the place that it comes from."""

    prompt: Prompt
    origin: str
    """The source of the prompt, for messages: `file:line`, or the task and index."""
    bare: tuple[Mapping[str, Any], ...] = ()
    """The messages before the source's template is applied, if it adds nothing else from the
    row."""

    @property
    def question(self) -> str:
        """A digest of the question that ignores ID, source, template, system message and white
        space.

        Prompts with the same question are never split between training and evaluation.
        """
        return _question(self.bare or self.prompt.messages)

    @property
    def questions(self) -> frozenset[str]:
        """The question with and without its template, since another source may have either one."""
        templated = {_question(self.prompt.messages)} if self.bare else set[str]()
        return frozenset({self.question, *templated})


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    question = [dict(m) for m in messages if m.get("role") != "system"]
    for message in question:
        message["content"] = " ".join(str(message.get("content", "")).split())
    return digest(json.dumps(question, sort_keys=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """All prompts from one source."""

    items: tuple[Item, ...]
    skipped: tuple[str, ...] = ()
    """The reason for each malformed line."""
    unread: Mapping[str, str] = field(default_factory=dict[str, str])
    """Maps each unused column to the place where it first occurred."""


def first_of(lines: Sequence[str], limit: int = 10) -> list[str]:
    """Return the first few lines, followed by one that says how many more there are."""
    more = len(lines) - limit
    return [*lines[:limit], f"and {more:,} more"] if more > 0 else list(lines)


def malformed(lines: Sequence[str], knob: str) -> ConfigError:
    """Build the error for malformed lines, which lists where they are."""
    cure = "repair it, or set on_bad_line: skip"
    if len(lines) == 1:
        return ConfigError(f"{lines[0]} ({knob}; {cure})")
    listed = "\n  ".join(first_of(lines, 5))
    return ConfigError(f"{knob}: {len(lines):,} malformed lines; {cure}:\n  {listed}")


def with_source_system(
    source: SourceConfig, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Prepend the source's system messages to a prompt.

    If there is an environment, `keel.agents.episode` adds its template instead, because it knows
    the tools.
    """
    template = "none" if source.environment.enabled else source.system_template
    return with_system(system_prompt(template), with_system(source.system, messages))


def without_source_system(
    source: SourceConfig, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Undo `with_source_system`."""
    added, (first, *rest) = with_source_system(source, ()), messages
    if not added:
        return tuple(messages)
    content = str(first["content"]).removeprefix(added[0]["content"]).removeprefix("\n\n")
    return ({**first, "content": content}, *rest) if content else tuple(rest)


def digest(text: str) -> str:
    """Return a short hash that, unlike Python's own, is the same in every process."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
