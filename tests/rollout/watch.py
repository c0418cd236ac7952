"""What happened in an engine's process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Watch:
    """What really happened, so that a test of preemption has preempted something."""

    preempted: int = 0
    cached_tokens: int = 0
    thrown_away: int = 0
    """Tokens drawn from unfinished prefills."""
    steps: int = 0
    stops_at: int = 0
    """The step after which the engine waits for a command."""
    fast_steps: int = 0
    """Steps that `keel.rollout.fastpath.scheduler` did by itself, since the engine was started."""
