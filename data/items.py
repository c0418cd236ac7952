"""Prompts as loaders return them, with their origins and the skipped lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.configs.schema import ConfigError, SourceConfig
from keel.configs.system_prompts import system_prompt, with_system
from keel.rl.types import Prompt

MAX_SHOWN = 5
"""Malformed lines that an error lists."""
MAX_MALFORMED = 1000
"""Malformed lines after which reading stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A prompt and its origin."""

    prompt: Prompt
    origin: str
    """`file:line`, or task and index, for messages."""
    bare: tuple[Mapping[str, Any], ...] = ()
    """Messages before the source's template, if it adds nothing of the row."""

    @property
    def question(self) -> str:
        """Digest of the question, regardless of ID, source, template, system message and white
        space. Equal questions are not split between training and evaluation."""
        return _question(self.bare or self.prompt.messages)

    @property
    def questions(self) -> frozenset[str]:
        """The question without and with its template, which another source may have as a prompt."""
        templated = {_question(self.prompt.messages)} if self.bare else set[str]()
        return frozenset({self.question, *templated})


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    question = [dict(m) for m in messages if m.get("role") != "system"]
    for message in question:
        message["content"] = " ".join(str(message.get("content", "")).split())
    return digest(json.dumps(question, sort_keys=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The prompts of one source."""

    items: tuple[Item, ...]
    skipped: tuple[str, ...] = ()
    """One reason for each malformed line."""
    unread: Mapping[str, str] = field(default_factory=dict[str, str])
    """Unused column → where it first occurred."""
    unanswered: int = 0
    """Rows that only functions judge, if other rows have something to be judged by."""


def first_of(lines: Sequence[str], limit: int = 10) -> list[str]:
    """The first lines, and the number of further ones."""
    more = len(lines) - limit
    return [*lines[:limit], f"and {more:,} more"] if more > 0 else list(lines)


def malformed(lines: Sequence[str], knob: str) -> ConfigError:
    """Error for malformed lines, each with its place."""
    cure = "repair them, or set on_bad_line: skip"
    if len(lines) == 1:
        return ConfigError(f"{lines[0]} ({knob}; {cure})")
    listed = "\n  ".join(first_of(lines, MAX_SHOWN))
    more = " or more" * (len(lines) >= MAX_MALFORMED)
    return ConfigError(f"{knob}: {len(lines):,}{more} malformed lines; {cure}:\n  {listed}")


def with_source_system(
    source: SourceConfig, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Prepend the source's system messages. A template for an environment is added by
    `keel.agents.episode`, which knows its tools."""
    template = "none" if source.environment.enabled else source.system_template
    return with_system(system_prompt(template), with_system(source.system, messages))


def without_source_system(
    source: SourceConfig, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Inverse of `with_source_system`."""
    added, (first, *rest) = with_source_system(source, ()), messages
    if not added:
        return tuple(messages)
    content = str(first["content"]).removeprefix(added[0]["content"]).removeprefix("\n\n")
    return ({**first, "content": content}, *rest) if content else tuple(rest)


def digest(text: str) -> str:
    """A short hash that is stable across processes, unlike Python's."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
