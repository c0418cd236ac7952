"""The marks between which a model thinks. Every model family has its own pair."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts that open and close a block of thinking."""

    open: str
    close: str

    def ends_open(self, text: str) -> bool:
        """Return whether `text` ends inside a block that is not closed."""
        return text.rfind(self.open) > text.rfind(self.close)


THINK = ThinkingMarks("<think>", "</think>")
"""The pair of most families, and the one that trajectories have whatever the model's own: rollouts
translate, so rewards and saved trajectories know one pair (`keel.rollout.chat.thinking`)."""
