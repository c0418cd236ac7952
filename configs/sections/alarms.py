"""When a run says that something may be going wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from keel.configs.sections.base import require


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmsConfig:
    """Thresholds of a step's metrics: beyond one, the run says so and, but for `stop_below`, goes
    on. 0 switches an alarm off. What each means and what to do: docs/alarms.md."""

    missing: float = 0.001
    """`rollout/dropped_completions`, as a share of the batch, above."""
    truncated: float = 0.5
    """`rollout/truncated_fraction`, above."""
    uniform: float = 0.0
    """`rollout/uniform_group_fraction`, above. Off: tasks that are learnt come to it."""
    reward_errors: float = 0.05
    """`reward/error`, above."""
    mismatch: float = 0.3
    """`mismatch/logp_abs`, in nats per token, above. In bfloat16 0.1 to 0.2 is usual with models
    that are sharp."""
    routing_fallback: float = 0.01
    """`routing/fallback_fraction`, above."""
    masked: float = 0.5
    """`mask/sequence_fraction`, above."""
    kl: float = 1.0
    """`kl/ref`, in nats per token, above."""
    entropy: float = 0.0
    """`entropy/kept`, in nats per token, below. Off: as for `uniform`."""
    kept_mass: float = 0.0
    """`sampling/kept_mass`, below. Off: what is healthy is up to `rollout.sampling.top_p`."""
    skipped: float = 0.5
    """`train/skipped_steps`: optimizer steps without a finite gradient, above: any at all."""
    every: int = 20
    """Steps after which one that goes on, or returns, is said again."""
    stop_below: Mapping[str, float] = field(default_factory=dict[str, float])
    """Source → least `eval/<source>/pass@1`. Below it the run saves a checkpoint and ends: what may
    not be lost, such as refusals of what is harmful (docs/alarms.md)."""

    def __post_init__(self) -> None:
        for name, least in self.stop_below.items():
            require(0 < least <= 1, f"alarms.stop_below.{name}", least, "must be in (0, 1]")
        for known in fields(self):
            if known.name == "stop_below":
                continue
            value = getattr(self, known.name)
            require(value >= 0, f"alarms.{known.name}", value, "must not be negative (0: off)")
        require(self.every >= 1, "alarms.every", self.every, "must be at least 1")
