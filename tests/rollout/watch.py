"""What happened in an engine's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    """Steps that `keel.rollout.vllm_fast.scheduler` did by itself, since the engine was started."""
    steady_steps: int = 0
    """Those that `keel.rollout.vllm_fast.step_reuse` took, since then."""

    def look(self, scheduler: Any, worker: Any) -> None:
        """At the scheduler, and at vLLM's worker where it is in this process."""
        self.fast_steps = getattr(scheduler, "fast_steps", 0)
        if worker is not None:
            steps = worker.worker.model_runner.execute_model.__self__
            self.steady_steps = getattr(steps, "reused", 0)

    def onwards(self) -> Watch:
        """For what happens from now on."""
        return Watch(fast_steps=self.fast_steps, steady_steps=self.steady_steps)
