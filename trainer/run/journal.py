"""Record a run: its metrics, events, TensorBoard curves and trajectories.

When a run is resumed, everything written after its checkpoint is removed, so that each step is
recorded once. The cost of a run is given in GPU-hours and in FLOPs of the model: 2 FLOPs per active
parameter and token for a forward pass, and twice as much for a backward pass. Training therefore
costs 6·N·D, as in the usual budgets for pre-training. Attention scores, activation recomputation
and start-up are not counted.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.configs.paths import write_whole
from keel.configs.schema import AlarmsConfig
from keel.rl.metrics import Metric, values
from keel.rl.records import scored_record
from keel.rl.types import ScoredGroup
from keel.trainer.run.bad_batches import BATCHES
from keel.trainer.run.manifest import sync
from keel.trainer.run.trajectory_files import TOKENS, TokenFile, choose_trajectories
from keel.trainer.run.view import View

EVENTS = "events.jsonl"
"""Name of the file to which events are appended. The kinds of events are `resume`, `restart` (of
engines and trainer), `alarm`, `engine` (an engine was restarted), `frozen` (a process hangs),
`lost` (groups are left out because their recordings were lost), `fewer` (the run has fewer ranks),
`node` (changes of the cluster's nodes), `out of memory` (a step is retried with less memory),
`tracker`, and `end` (the error that ended the run). If a step is repeated, its events are recorded
again."""
_GPU_HOURS, _TRAINING, _SAMPLING = "cost/gpu_hours", "cost/train_flops", "cost/rollout_flops"
_TOKENS = {_TRAINING: "train/tokens", _SAMPLING: "rollout/tokens"}
HEADER = ("", "GPU-hours", "training FLOPs", "sampling FLOPs", "share of FLOPs")


@dataclass(frozen=True, slots=True)
class CostRates:
    """The GPUs a run occupies and its FLOPs per token, from which its cost is computed."""

    gpus: int  # number of GPUs that the run occupies, including a judge's
    train_flops: float  # FLOPs for each token in training
    rollout_flops: float  # FLOPs for each token in an engine

    def metrics(self, numbers: Mapping[str, float], seconds: float) -> dict[str, float]:
        costs = {_GPU_HOURS: self.gpus * seconds / 3600}
        flops = {_TRAINING: self.train_flops, _SAMPLING: self.rollout_flops}
        return costs | {
            name: flops[name] * numbers[tokens]
            for name, tokens in _TOKENS.items()
            if tokens in numbers
        }


_REASONS = 3  # maximum number of reasons for missing completions that one warning lists


_ALARMS = {
    "truncated": (
        "rollout/truncated_fraction",
        "{:.0%} of the completions hit max_tokens; raise rollout.sampling.max_tokens",
    ),
    "uniform": (
        "rollout/uniform_group_fraction",
        "in {:.0%} of the groups all completions have the same reward; use easier or harder "
        "prompts (keel filter) or a larger algorithm.group_size",
    ),
    "reward_errors": (
        "reward/error",
        "a reward part failed in {:.1%} of the completions and counts 0; read rewards/ in the run "
        "folder",
    ),
    "mismatch": (
        "mismatch/logp_abs",
        "engines and trainer differ by {:.2g} nats per token; see docs/alarms.md",
    ),
    "routing_fallback": (
        "routing/fallback_fraction",
        "{:.1%} of the tokens have no recorded routes, so the trainer chose their experts; see "
        "docs/alarms.md",
    ),
    "masked": (
        "mask/sequence_fraction",
        "{:.0%} of the sequences are masked as too far off-policy; lower trainer.lr, "
        "algorithm.max_lag or algorithm.updates_per_batch",
    ),
    "kl": (
        "kl/ref",
        "the policy is {:.2g} nats per token away from the reference; raise "
        "data.sources[].kl_coef or lower trainer.lr",
    ),
    "entropy": (
        "entropy/kept",
        "entropy is down to {:.2g} nats per token; lower trainer.lr or raise algorithm.clip_high",
    ),
    "kept_mass": (
        "sampling/kept_mass",
        "the policy gives the sampling masks only {:.0%} of its probability; set "
        "algorithm.kept_mass_coef: 1",
    ),
    "skipped": (
        "train/skipped_steps",
        "{:.0f} optimizer steps had no finite gradient; lower trainer.lr; keel replay finds the "
        "token",
    ),
}
"""Maps the knob of each alarm's limit to the metric to watch and a warning. The warning is a format
string for the metric's value."""
_BELOW = ("entropy", "kept_mass")  # alarms for metrics that are too low


class _Alarms:
    """Checks each step's metrics against the alarm limits. Steps must be passed in order."""

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
        for knob, (metric, text) in _ALARMS.items():
            limit, value = getattr(self._config, knob), numbers.get(metric)
            if limit and value is not None and (value < limit if knob in _BELOW else value > limit):
                active[knob] = f"{text.format(value)} ({metric}, alarms.{knob} = {limit:g})"
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


class Journal:
    """Writes each step to the run folder and displays it in the terminal."""

    def __init__(
        self,
        folder: Path,
        view: View,
        *,
        trajectories: int,
        save_all: bool = False,
        tokenizer: str = "",
        tokens: TokenFile | None = None,
        alarms: AlarmsConfig | None = None,
        resumed_at: int = 0,
        costs: CostRates | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open a run's records and remove everything after step `resumed_at`. `trajectories` is the
        number of trajectories to save per step. With `save_all`, all of them are saved. Their file
        also stores `tokenizer`, the digest of the model's tokenizer. `tokens` writes the per-token
        values."""
        self._view, self._clock = view, clock
        self._alarms = _Alarms(alarms) if alarms is not None else None
        self._costs, self._recorded_at = costs, clock()
        self.on_write: Callable[[], None] = lambda: None
        """Called after each recorded step and event."""
        self.on_record: Callable[[int, Mapping[str, float]], None] = lambda step, numbers: None
        """Called after each recorded step with its metrics."""
        self._save_all, self._tokenizer = save_all, tokenizer
        self._per_step, self._tokens = trajectories, tokens
        self._folder, self._metrics = folder, folder / "metrics.jsonl"
        self.step = resumed_at  # the last recorded step
        self._trajectories = folder / "trajectories"
        self._trajectories.mkdir(parents=True, exist_ok=True)
        _truncate(self._metrics, resumed_at)
        for path in (*self._trajectories.glob("step_*"), *(folder / BATCHES).glob("step_*")):
            step = path.name.partition(".")[0].removeprefix("step_")
            if step.isdecimal() and int(step) > resumed_at:
                path.unlink()
        if resumed_at:
            self.note("resume", f"resumed after step {resumed_at}")
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (0.3 s, unused by check)

        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1)

    def begin(self, activity: str) -> None:
        self._view.begin(activity)

    def show_progress(self, done: int, total: int, unit: str) -> None:
        self._view.show_progress(done, total, unit)

    def say(self, kind: str, text: str) -> None:
        self.note(kind, text)
        self._view.say(text)

    @property
    def ends(self) -> str:
        return self._alarms.ends if self._alarms is not None else ""

    def note(self, kind: str, text: str) -> None:
        note(self._folder, self.step, kind, text, self._clock())
        self.on_write()

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        groups: Sequence[ScoredGroup],
        discarded: Sequence[ScoredGroup] = (),
    ) -> None:
        """Record a step. Raises `OSError` naming the folder if it can't be written to."""
        numbers = {name: value for name, value in values(metrics).items() if math.isfinite(value)}
        lines: list[str] = []
        if self._costs is not None:
            now = self._clock()
            numbers |= self._costs.metrics(numbers, now - self._recorded_at)
            self._recorded_at = now
        if self._alarms is not None and step > 0:
            numbers["alarms"], lines = self._alarms.check(step, numbers, [*groups, *discarded])
        try:
            self._write(step, numbers, groups)
        except OSError as error:
            raise OSError(
                f"run.dir = {self._folder}: step {step} cannot be written ({error}). Free some "
                "space, then resume from the last checkpoint"
            ) from error
        self.step = step
        self.on_write()
        for line in lines:
            self.say("alarm", line)
        self._view.record(step, numbers)
        self.on_record(step, numbers)

    def evaluated(self, step: int) -> bool:
        return any(name.startswith("eval/") for name in steps_of(self._metrics).get(step, {}))

    def _write(
        self, step: int, numbers: Mapping[str, float], groups: Sequence[ScoredGroup]
    ) -> None:
        line = {"step": step, "time": round(self._clock(), 3), **dict(sorted(numbers.items()))}
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()
        path = self._trajectories / f"step_{step:06d}"
        chosen = choose_trajectories(groups, self._per_step)
        if chosen and self._tokens is not None:
            self._tokens.write(path.with_suffix(TOKENS), groups)
        if self._save_all:
            chosen = [(group, i) for group in groups for i in range(len(group.rewards_G))]
        if chosen:
            records = [scored_record(group, i, tokenizer=self._tokenizer) for group, i in chosen]
            lines = "".join(json.dumps({"step": step, **record}) + "\n" for record in records)
            write_whole(path.with_suffix(".jsonl"), lines)

    def close(self) -> None:
        try:
            self._board.close()
        except OSError as error:  # must not hide the error that ended the run
            self._view.say(f"warning: the end of TensorBoard's curves is missing ({error})")


def note(folder: Path, step: int, kind: str, text: str, at: float | None = None) -> None:
    """Append an event to `events.jsonl`, timestamped with `at` or the current time."""
    when = round(time.time() if at is None else at, 3)
    line = {"step": step, "time": when, "kind": kind, "text": text}
    # A full disk ends the run at the next step, with a better message.
    with suppress(OSError), (folder / EVENTS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _truncate(path: Path, step: int) -> None:
    """Delete all lines in `metrics.jsonl` after `step`, and the last line if it is incomplete."""
    if not path.exists():
        return
    lines = [line for at, line in metric_lines(path) if step and at <= step]
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(line + "\n" for line in lines))
    sync(partial)
    partial.replace(path)


def metric_lines(path: Path) -> list[tuple[int, str]]:
    """Return the step and text of each line in `metrics.jsonl`, except for an incomplete last line.
    Raises ValueError with the file name and line number if a line is invalid."""
    texts = path.read_text().splitlines() if path.exists() else []
    lines: list[tuple[int, str]] = []
    for number, text in enumerate(texts, start=1):
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(texts):
                break
            raise ValueError(f"{path}:{number}: not JSON: {error.msg}; repair the line") from error
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int):
            raise ValueError(f"{path}:{number}: no integer `step`; repair or delete the line")
        lines.append((step, text))
    return lines


def steps_of(path: Path) -> dict[int, dict[str, Any]]:
    """Return each step's metrics, including those from evaluations made after a resume."""
    steps: dict[int, dict[str, Any]] = {}
    for step, text in metric_lines(path):
        steps[step] = {**json.loads(text), **steps.get(step, {})}
    return steps


def _total_costs(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for part in parts:
        for name in (_GPU_HOURS, *_TOKENS):
            if name in part:
                totals[name] = totals.get(name, 0.0) + part[name]
    return totals


def costs_of(folder: Path) -> dict[str, float]:
    """Return the total cost of the run in `folder`, or an empty dict if it has no records."""
    return _total_costs(json.loads(text) for _, text in metric_lines(folder / "metrics.jsonl"))


def cost_rows(runs: Mapping[str, Mapping[str, float]]) -> list[Sequence[str]]:
    """Return a table row for each run plus one for the total, with the columns in `HEADER`."""
    every = _total_costs(runs.values())
    flops = every.get(_TRAINING, 0.0) + every.get(_SAMPLING, 0.0)

    def row(name: str, costs: Mapping[str, float]) -> Sequence[str]:
        trained, sampled = costs.get(_TRAINING, 0.0), costs.get(_SAMPLING, 0.0)
        share = (trained + sampled) / flops if flops else 0.0
        hours = f"{costs.get(_GPU_HOURS, 0.0):.3g}"
        return (name, hours, f"{trained:.2e}", f"{sampled:.2e}", f"{share:.1%}")

    return [HEADER, *(row(*item) for item in runs.items()), row("together", every)]
