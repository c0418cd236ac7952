"""`alarms`: metric thresholds at which a run warns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keel.configs.sections.base import Section, knob, require


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmsConfig(Section):
    """Thresholds for metrics. A run that crosses one prints a warning and continues. Only
    `stop_below` stops it. 0 turns an alarm off. docs/alarms.md"""

    PATH = "alarms"

    missing: float = knob(0.001, ge=0)
    """Warn if `rollout/dropped_completions` exceeds this share of the batch."""
    truncated: float = knob(0.5, ge=0)
    """Warn if `rollout/truncated_fraction` exceeds this."""
    uniform: float = knob(0.0, ge=0)
    """Warn if `rollout/uniform_group_fraction` exceeds this. Off by default, because it rises on
    any task that is learned."""
    reward_errors: float = knob(0.05, ge=0)
    """Warn if `reward/error` exceeds this."""
    mismatch: float = knob(0.3, ge=0)
    """Warn if `mismatch/logp_abs` exceeds this, in nats per token. 0.1 to 0.2 is normal in bfloat16
    for models with sharp distributions."""
    routing_fallback: float = knob(0.01, ge=0)
    """Warn if `routing/fallback_fraction` exceeds this."""
    masked: float = knob(0.5, ge=0)
    """Warn if `mask/sequence_fraction` exceeds this."""
    kl: float = knob(1.0, ge=0)
    """Warn if `kl/ref` exceeds this, in nats per token."""
    entropy: float = knob(0.0, ge=0)
    """Warn if `entropy/kept` falls below this, in nats per token. Off by default, because it falls
    on any task that is learned."""
    kept_mass: float = knob(0.0, ge=0)
    """Warn if `sampling/kept_mass` falls below this. Off by default, because the healthy value
    depends on `rollout.sampling.top_p`."""
    skipped: float = knob(0.5, ge=0)
    """Warn if `train/skipped_steps` (optimizer steps without a finite gradient) exceeds this."""
    every: int = knob(20, ge=1)
    """Number of steps before an alarm that persists or returns is reported again."""
    stop_below: Mapping[str, float] = field(default_factory=dict[str, float])
    """Minimum `eval/<source>/pass@1` for each source. If the value falls below it, the run saves a
    checkpoint and stops. Use it for abilities that must not be lost, such as refusing harmful
    requests. docs/alarms.md"""

    def check(self) -> None:
        for name, least in self.stop_below.items():
            require(0 < least <= 1, f"alarms.stop_below.{name}", least, "must be in (0, 1]")
