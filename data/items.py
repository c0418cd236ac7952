"""What a loader hands over: prompts, where each came from, and what was left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.configs.schema import ConfigError, SourceConfig
from keel.configs.system_prompts import system_prompt, with_system
from keel.rl.types import Prompt

REFUSED, COUNTED = 5, 1000
"""Malformed lines that an error shows, and after how many nobody reads on for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A prompt and its origin."""

    prompt: Prompt
    origin: str
    """For messages: `file:line`, or the task and the index."""
    bare: tuple[Mapping[str, Any], ...] = ()
    """What is asked without a template of its source, where there is such a thing."""

    @property
    def question(self) -> str:
        """Digest of what is asked: two prompts with the same one must not be split between
        training and evaluation, whatever their ids, sources, templates, system messages and white
        space."""
        return _question(self.bare or self.prompt.messages)

    @property
    def asked(self) -> frozenset[str]:
        """The same, and with the words of its template: so another source may have it as a prompt
        of its own."""
        told = {_question(self.prompt.messages)} if self.bare else set[str]()
        return frozenset({self.question, *told})


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    asked = [dict(m) for m in messages if m.get("role") != "system"]
    for message in asked:
        message["content"] = " ".join(str(message.get("content", "")).split())
    return digest(json.dumps(asked, sort_keys=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One source, read."""

    items: tuple[Item, ...]
    skipped: tuple[str, ...] = ()
    """One reason for each malformed line that was left out."""
    unread: Mapping[str, str] = field(default_factory=dict[str, str])
    """Column that nothing reads → where it was first met."""
    unanswered: int = 0
    """Of rows with and without something to judge by, those without, which only functions judge."""


def first_of(lines: Sequence[str], most: int = 10) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(lines) - most
    return [*lines[:most], f"and {more:,} more"] if more > 0 else list(lines)


def malformed(lines: Sequence[str], knob: str) -> ConfigError:
    """The error of these lines, each with its place, where they are not to be skipped."""
    if len(lines) == 1:
        return ConfigError(
            f"{lines[0]} ({knob}; repair the line, or set on_bad_line: skip to leave such lines "
            "out)"
        )
    listed = "\n  ".join(first_of(lines, REFUSED))
    further = " and perhaps more" * (len(lines) >= COUNTED)
    return ConfigError(
        f"{knob}: {len(lines):,} malformed lines{further}; repair them, or set on_bad_line: skip "
        f"to leave such lines out:\n  {listed}"
    )


def told(
    source: SourceConfig, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """`messages` after the system messages of their source. A template for an environment waits for
    its tools (`keel.agents.episode`)."""
    template = "none" if source.environment.enabled else source.system_template
    return with_system(system_prompt(template), with_system(source.system, messages))


def untold(
    source: SourceConfig, messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """The messages that `told` made `messages` of."""
    added, (first, *rest) = told(source, ()), messages
    if not added:
        return tuple(messages)
    own = str(first["content"]).removeprefix(added[0]["content"]).removeprefix("\n\n")
    return ({**first, "content": own}, *rest) if own else tuple(rest)


def digest(text: str) -> str:
    """A short stable hash (Python's own changes with every process)."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
