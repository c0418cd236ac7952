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
    problem: str
    """What is wrong, with the metric's value in its format."""
    remedy: str
    below: bool = False

    def rings(self, value: float, limit: float) -> bool:
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
        """Return how many alarms ring, and their lines: of each alarm at most one in `alarms.every`
        steps. numbers: a step's metrics. groups: all that were sampled for it."""
        ringing = {
            alarm.knob: f"{alarm.problem.format(numbers[alarm.metric])}; {alarm.remedy} "
            f"({alarm.metric}, alarms.{alarm.knob} = {getattr(self._config, alarm.knob):g})"
            for alarm in ALARMS
            if alarm.metric in numbers
            and alarm.rings(numbers[alarm.metric], getattr(self._config, alarm.knob))
        }
        if line := self._missing(numbers, groups):
            ringing[MISSING] = f"{line} (alarms.missing = {self._config.missing:g})"
        lines = [self.ends] if self._below(step, numbers) else []
        for knob, words in ringing.items():
            if step - self._said.get(knob, -self._config.every) >= self._config.every:
                self._said[knob] = step
                lines.append(f"step {step}: {words}")
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
