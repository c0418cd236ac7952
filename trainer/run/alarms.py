"""What a run says by itself when a step's metrics look as if something were going wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.configs.schema import AlarmsConfig
from keel.rl.types import ScoredGroup

REASONS = 3
"""Reasons for missing completions that are said."""
MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Alarm:
    knob: str
    metric: str
    words: str
    below: bool = False

    def rings(self, value: float, limit: float) -> bool:
        if not limit:
            return False
        return value < limit if self.below else value > limit


ALARMS = (
    Alarm("truncated", "rollout/truncated_fraction", "of the completions were cut off"),
    Alarm(
        "uniform",
        "rollout/uniform_group_fraction",
        "of the groups have no completion better than another: there is little to learn from",
    ),
    Alarm(
        "reward_errors",
        "reward/error",
        "of the completions have a part of their reward that failed, and counts 0",
    ),
    Alarm(
        "mismatch",
        "mismatch/logp_abs",
        "nats a token between what engines sampled with and what the trainer computes",
    ),
    Alarm(
        "routing_fallback",
        "routing/fallback_fraction",
        "of the tokens have no recorded routes: the trainer chose their experts itself",
    ),
    Alarm("masked", "mask/sequence_fraction", "of the sequences are masked as too far off policy"),
    Alarm("kl", "kl/ref", "nats a token away from the reference policy"),
    Alarm("entropy", "entropy/kept", "nats of entropy a token: hardly anything is tried", True),
    Alarm(
        "kept_mass",
        "sampling/kept_mass",
        "of its probability the policy gives to the sampling masks: no ratio shows the rest",
        True,
    ),
    Alarm("skipped", "train/skipped_steps", "optimizer steps without a finite gradient"),
)


class Alarms:
    """Looks at each step, in order."""

    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        self.ends = ""
        """Why the run has to end, if it has."""
        self._said: dict[str, int] = {}
        """Step at which each was said last."""

    def look(
        self, step: int, numbers: Mapping[str, float], groups: Sequence[ScoredGroup]
    ) -> tuple[int, list[str]]:
        """How many alarms ring, and lines for people, of each at most one in `alarms.every` steps.
        numbers: a step's metrics; groups: all that were sampled for it."""
        ringing = {
            alarm.knob: f"{alarm.metric} {numbers[alarm.metric]:.3g}: {alarm.words}"
            for alarm in ALARMS
            if alarm.metric in numbers
            and alarm.rings(numbers[alarm.metric], getattr(self._config, alarm.knob))
        }
        if line := self._missing(numbers, groups):
            ringing[MISSING] = line
        lines = [self.ends] if self._below(step, numbers) else []
        for knob, words in ringing.items():
            if step - self._said.get(knob, -self._config.every) >= self._config.every:
                self._said[knob] = step
                limit = getattr(self._config, knob)
                lines.append(f"step {step}: {words} (alarms.{knob} = {limit:g})")
        return len(ringing) + bool(self.ends), lines

    def _below(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Whether a set that is held out has fallen too far, which `ends` then says."""
        for name, least in self._config.stop_below.items():
            found = numbers.get(f"eval/{name}/pass@1", least)
            if found < least:
                unscored = numbers.get(f"eval/{name}/unscored", 0)
                self.ends = (
                    f"step {step}: held-out {name}/pass@1 is {found:.3f}, and may not fall below "
                    f"{least:g} (alarms.stop_below)"
                )
                if unscored:
                    self.ends += f"; {unscored:.0f} completions had no score: counted wrong"
                return True
        return False

    def _missing(self, numbers: Mapping[str, float], groups: Sequence[ScoredGroup]) -> str:
        missing = numbers.get("rollout/dropped_completions", 0)
        there = sum(len(group.group.trajectories) for group in groups)
        if not self._config.missing or missing <= self._config.missing * (missing + there):
            return ""
        reasons = Counter(reason for group in groups for reason in group.group.dropped)
        said = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(REASONS))
        return f"{missing:g} completions are missing from the batch" + (f": {said}" if said else "")
