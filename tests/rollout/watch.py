"""Counts events in an engine process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Watch:
    """Event counts, with which a preemption test can check that preemptions really happened."""

    preempted: int = 0
    cached_tokens: int = 0
    discarded: int = 0
    """Number of tokens sampled in unfinished prefills, which vLLM discards."""
    steps: int = 0
    pause_at: int = 0
    """Step after which the engine waits for a command."""
    fast_steps: int = 0
    """Number of steps by `keel.rollout.vllm_fast.scheduler` since the engine started."""
    reused_steps: int = 0
    """Number of steps by `keel.rollout.vllm_fast.step_reuse` since the engine started."""

    def update(self, scheduler: Any, worker: Any) -> None:
        """Read the counters of the scheduler and, if it runs in this process, of vLLM's worker."""
        self.fast_steps = getattr(scheduler, "fast_steps", 0)
        if worker is not None:
            steps = worker.worker.model_runner.execute_model.__self__
            self.reused_steps = getattr(steps, "reused", 0)

    def fresh(self) -> Watch:
        """Return counts that start from now."""
        return Watch(fast_steps=self.fast_steps, reused_steps=self.reused_steps)
