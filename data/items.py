"""What a loader hands over: prompts, where each came from, and what was left out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from keel.rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A prompt and its origin."""

    prompt: Prompt
    origin: str
    """For messages: `file:line`, or the task and the index."""

    @property
    def question(self) -> str:
        """Digest of what is asked: two prompts with the same one must not be split between
        training and evaluation, whatever their ids, sources, system messages and white space."""
        asked = [dict(m) for m in self.prompt.messages if m.get("role") != "system"]
        for message in asked:
            message["content"] = " ".join(str(message.get("content", "")).split())
        return digest(json.dumps(asked, sort_keys=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One source, read."""

    items: tuple[Item, ...]
    skipped: tuple[str, ...] = ()
    """One reason for each malformed line that was left out."""


def digest(text: str) -> str:
    """A short stable hash (Python's own changes with every process)."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
