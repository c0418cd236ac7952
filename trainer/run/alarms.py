"""Warn about metrics that indicate a problem with training."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.configs.schema import AlarmsConfig
from keel.rl.types import ScoredGroup

_REASONS = 3  # maximum number of reasons for missing completions that one warning lists


@dataclass(frozen=True, slots=True)
class _Alarm:
    """A metric to watch, the knob that sets its limit, and the warning to print if the limit is
    crossed. `problem` is a format string for the metric's value."""

    knob: str
    metric: str
    problem: str
    remedy: str
    below: bool = False


_ALARMS = (
    _Alarm(
        "truncated",
        "rollout/truncated_fraction",
        "{:.0%} of the completions hit max_tokens",
        "raise rollout.sampling.max_tokens",
    ),
    _Alarm(
        "uniform",
        "rollout/uniform_group_fraction",
        "in {:.0%} of the groups all completions have the same reward",
        "use easier or harder prompts (keel filter) or a larger algorithm.group_size",
    ),
    _Alarm(
        "reward_errors",
        "reward/error",
        "a reward part failed in {:.1%} of the completions and counts 0",
        "read rewards/ in the run folder",
    ),
    _Alarm(
        "mismatch",
        "mismatch/logp_abs",
        "engines and trainer differ by {:.2g} nats per token",
        "see docs/alarms.md",
    ),
    _Alarm(
        "routing_fallback",
        "routing/fallback_fraction",
        "{:.1%} of the tokens have no recorded routes, so the trainer chose their experts",
        "see docs/alarms.md",
    ),
    _Alarm(
        "masked",
        "mask/sequence_fraction",
        "{:.0%} of the sequences are masked as too far off-policy",
        "lower trainer.lr, algorithm.max_lag or algorithm.updates_per_batch",
    ),
    _Alarm(
        "kl",
        "kl/ref",
        "the policy is {:.2g} nats per token away from the reference",
        "raise data.sources[].kl_coef or lower trainer.lr",
    ),
    _Alarm(
        "entropy",
        "entropy/kept",
        "entropy is down to {:.2g} nats per token",
        "lower trainer.lr or raise algorithm.clip_high",
        below=True,
    ),
    _Alarm(
        "kept_mass",
        "sampling/kept_mass",
        "the policy gives the sampling masks only {:.0%} of its probability",
        "set algorithm.kept_mass_coef: 1",
        below=True,
    ),
    _Alarm(
        "skipped",
        "train/skipped_steps",
        "{:.0f} optimizer steps had no finite gradient",
        "lower trainer.lr; keel replay finds the token",
    ),
)


class Alarms:
    """Checks the metrics of each step against the alarm limits. Steps must be passed in order."""

    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        self.ends = ""  # the reason the run should end, or an empty string
        self._last_line: dict[str, int] = {}  # the step at which each alarm last printed a warning

    def check(
        self, step: int, numbers: Mapping[str, float], groups: Sequence[ScoredGroup]
    ) -> tuple[int, list[str]]:
        """Return the number of active alarms and the warnings to print, at most one per alarm every
        `alarms.every` steps. `groups` are all sampled groups, including discarded ones."""
        active: dict[str, str] = {}
        for alarm in _ALARMS:
            limit, value = getattr(self._config, alarm.knob), numbers.get(alarm.metric)
            if limit and value is not None and (value < limit if alarm.below else value > limit):
                active[alarm.knob] = (
                    f"{alarm.problem.format(value)}; {alarm.remedy} "
                    f"({alarm.metric}, alarms.{alarm.knob} = {limit:g})"
                )
        missing, limit = numbers.get("rollout/dropped_completions", 0), self._config.missing
        present = sum(len(group.group.trajectories) for group in groups)
        if limit and missing > limit * (missing + present):
            counts = Counter(reason for group in groups for reason in group.group.dropped)
            reasons = "; ".join(f"{n} {reason}" for reason, n in counts.most_common(_REASONS))
            active["missing"] = (
                f"{missing:g} completions are missing from the batch{reasons and ': ' + reasons} "
                f"(alarms.missing = {limit:g})"
            )
        lines: list[str] = []
        for name, limit in self._config.stop_below.items():
            if (value := numbers.get(f"eval/{name}/pass@1", limit)) < limit:
                unscored = numbers.get(f"eval/{name}/unscored", 0)
                note = f"; {unscored:.0f} completions had no score: counted wrong"
                self.ends = (
                    f"step {step}: held-out {name}/pass@1 is {value:.3f}, below {limit:g} "
                    f"(alarms.stop_below){note if unscored else ''}"
                )
                lines = [self.ends]
                break
        for knob, text in active.items():
            if step - self._last_line.get(knob, -self._config.every) >= self._config.every:
                self._last_line[knob] = step
                lines.append(f"step {step}: {text}")
        return len(active) + bool(self.ends), lines
