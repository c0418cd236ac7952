"""Warnings about metrics that indicate a problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.configs.schema import AlarmsConfig
from keel.rl.types import ScoredGroup

_REASONS = 3
"""Number of reasons for missing completions in one line."""


@dataclass(frozen=True, slots=True)
class Alarm:
    knob: str
    metric: str
    problem: str
    """Message in which the value of the metric is formatted."""
    remedy: str
    below: bool = False

    def active(self, value: float, limit: float) -> bool:
        if not limit:
            return False
        return value < limit if self.below else value > limit


ALARMS = (
    Alarm(
        "truncated",
        "rollout/truncated_fraction",
        "{:.0%} of the completions hit max_tokens",
        "raise rollout.sampling.max_tokens",
    ),
    Alarm(
        "uniform",
        "rollout/uniform_group_fraction",
        "in {:.0%} of the groups all completions have the same reward",
        "use easier or harder prompts (keel filter) or a larger algorithm.group_size",
    ),
    Alarm(
        "reward_errors",
        "reward/error",
        "a reward part failed in {:.1%} of the completions and counts 0",
        "read rewards/ in the run folder",
    ),
    Alarm(
        "mismatch",
        "mismatch/logp_abs",
        "engines and trainer differ by {:.2g} nats per token",
        "see docs/alarms.md",
    ),
    Alarm(
        "routing_fallback",
        "routing/fallback_fraction",
        "{:.1%} of the tokens have no recorded routes, so the trainer chose their experts",
        "see docs/alarms.md",
    ),
    Alarm(
        "masked",
        "mask/sequence_fraction",
        "{:.0%} of the sequences are masked as too far off-policy",
        "lower trainer.lr, algorithm.max_lag or algorithm.updates_per_batch",
    ),
    Alarm(
        "kl",
        "kl/ref",
        "the policy is {:.2g} nats per token away from the reference",
        "raise data.sources[].kl_coef or lower trainer.lr",
    ),
    Alarm(
        "entropy",
        "entropy/kept",
        "entropy is down to {:.2g} nats per token",
        "lower trainer.lr or raise algorithm.clip_high",
        below=True,
    ),
    Alarm(
        "kept_mass",
        "sampling/kept_mass",
        "the policy gives the sampling masks only {:.0%} of its probability",
        "set algorithm.kept_mass_coef: 1",
        below=True,
    ),
    Alarm(
        "skipped",
        "train/skipped_steps",
        "{:.0f} optimizer steps had no finite gradient",
        "lower trainer.lr; keel replay finds the token",
    ),
)


class Alarms:
    """Checks the metrics of each step, in order."""

    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        self.ends = ""
        """Why the run should end, or an empty string."""
        self._last_line: dict[str, int] = {}
        """Maps each alarm to the step at which it last printed a line."""

    def check(
        self, step: int, numbers: Mapping[str, float], groups: Sequence[ScoredGroup]
    ) -> tuple[int, list[str]]:
        """Return the number of active alarms, and the lines to print.

        Each alarm prints one line per `alarms.every` steps. `groups` are all groups that were
        sampled in the step.
        """
        active = {
            alarm.knob: f"{alarm.problem.format(numbers[alarm.metric])}; {alarm.remedy} "
            f"({alarm.metric}, alarms.{alarm.knob} = {getattr(self._config, alarm.knob):g})"
            for alarm in ALARMS
            if alarm.metric in numbers
            and alarm.active(numbers[alarm.metric], getattr(self._config, alarm.knob))
        }
        if line := self._missing(numbers, groups):
            active["missing"] = f"{line} (alarms.missing = {self._config.missing:g})"
        lines: list[str] = []
        if reason := self._too_low(step, numbers):
            self.ends = reason
            lines.append(reason)
        for knob, text in active.items():
            if step - self._last_line.get(knob, -self._config.every) >= self._config.every:
                self._last_line[knob] = step
                lines.append(f"step {step}: {text}")
        return len(active) + bool(self.ends), lines

    def _too_low(self, step: int, numbers: Mapping[str, float]) -> str:
        """Return the held-out set whose score has fallen below `alarms.stop_below`, or an empty
        string."""
        for name, limit in self._config.stop_below.items():
            value = numbers.get(f"eval/{name}/pass@1", limit)
            if value < limit:
                unscored = numbers.get(f"eval/{name}/unscored", 0)
                note = f"; {unscored:.0f} completions had no score: counted wrong"
                return (
                    f"step {step}: held-out {name}/pass@1 is {value:.3f}, below {limit:g} "
                    f"(alarms.stop_below){note if unscored else ''}"
                )
        return ""

    def _missing(self, numbers: Mapping[str, float], groups: Sequence[ScoredGroup]) -> str:
        missing = numbers.get("rollout/dropped_completions", 0)
        present = sum(len(group.group.trajectories) for group in groups)
        if not self._config.missing or missing <= self._config.missing * (missing + present):
            return ""
        counts = Counter(reason for group in groups for reason in group.group.dropped)
        reasons = "; ".join(f"{n} {reason}" for reason, n in counts.most_common(_REASONS))
        return f"{missing:g} completions are missing from the batch{reasons and ': ' + reasons}"
