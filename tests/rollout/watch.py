"""Counts events in an engine process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Watch:
    """Event counts, so that a preemption test can check that preemptions happened."""

    preempted: int = 0
    cached_tokens: int = 0
    discarded: int = 0
    """Tokens sampled in unfinished prefills."""
    steps: int = 0
    pause_at: int = 0
    """Step after which the engine waits for a command."""
    fast_steps: int = 0
    """Steps by `keel.rollout.vllm_fast.scheduler` since engine start."""
    reused_steps: int = 0
    """Steps by `keel.rollout.vllm_fast.step_reuse` since engine start."""

    def update(self, scheduler: Any, worker: Any) -> None:
        """Read the counters of the scheduler and of vLLM's worker if it is in this process."""
        self.fast_steps = getattr(scheduler, "fast_steps", 0)
        if worker is not None:
            steps = worker.worker.model_runner.execute_model.__self__
            self.reused_steps = getattr(steps, "reused", 0)

    def fresh(self) -> Watch:
        """Counts that start now."""
        return Watch(fast_steps=self.fast_steps, reused_steps=self.reused_steps)
