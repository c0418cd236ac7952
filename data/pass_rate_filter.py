"""The results folder of `keel filter`, with a table of pass rates that has one line per prompt.

    {"id": "sums/7", "source": "sums", "domain": "maths", "samples": 100, "passes": 12,
     "pass_rate": 0.12, "score": 0.15, "unscored": 1, "dropped": {"late: …": 1}, "digest": "…"}

`passes` and `unscored` are counted as in `keel.rl.summary`, where a missing or unscored
completion does not pass.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.configs.diff import RESUMABLE_KNOBS, flatten_config
from keel.configs.paths import write_whole
from keel.configs.schema import Config
from keel.configs.work_folder import WorkFolder
from keel.data.items import prompt_digest, remove_source_system
from keel.data.results import align_columns, domains_to_show
from keel.rl.summary import evaluation, pass_at_k
from keel.rl.types import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassRate:
    """How often the policy solves a prompt."""

    id: str
    source: str
    domain: str
    samples: int
    passes: int
    score: float | None
    """Mean of `correct` over the completions, or None if there are no completions."""
    unscored: int
    dropped: Mapping[str, int]  # number of missing completions for each reason
    digest: str  # digest of the prompt's messages and reward spec

    @property
    def rate(self) -> float:
        return self.passes / self.samples

    @property
    def known(self) -> bool:
        """Whether any completion has a score. If none has, a pass rate of 0 says nothing about the
        prompt."""
        return self.unscored < self.samples


def _compute_pass_rate(prompt: Prompt, source: str, groups: Sequence[ScoredGroup]) -> _PassRate:
    result = evaluation(groups)
    score, passes = result["score"].value, result["pass@1"]
    samples = sum(len(group.parts_G) + len(group.group.dropped) for group in groups)
    return _PassRate(
        id=prompt.prompt_id,
        source=source,
        domain=prompt.domain,
        samples=samples,
        passes=round(passes.value * samples),
        score=score if score == score else None,
        unscored=round(result["unscored"].value),
        dropped=dict(Counter(reason for group in groups for reason in group.group.dropped)),
        digest=prompt_digest(prompt),
    )


_TABLE = "pass_rates.jsonl"
_SECTIONS = (
    *("model.", "data.", "rewards.", "rollout.sampling.", "agents.", "run.seed"),
    *("endpoint.tells_thinking", "endpoint.extra"),
)
"""Settings other than `RESUMABLE_KNOBS` that affect pass rates."""
_SAMPLING_KNOBS = (
    "eval.temperature",
    "eval.top_p",
    "eval.top_k",
    "filter.samples",
    "rollout.timeout_s",
)


class FilterFolder(WorkFolder):
    """The results folder of `keel filter`."""

    def __init__(
        self, config: Config, prompts: Mapping[str, Sequence[Prompt]], policy: str
    ) -> None:
        run = config.run.folder
        path = Path(config.filter.dir).expanduser() if config.filter.dir else run / "filter"
        super().__init__(path, "filter.dir", "filter")
        self._filter = config.filter
        self._sources = {s.name: s for s in config.data.sources if s.name in prompts}
        self._settings = {"policy": policy} | {
            knob: repr(value)
            for knob, value in flatten_config(config).items()
            if knob in _SAMPLING_KNOBS
            or (knob.startswith(_SECTIONS) and knob not in RESUMABLE_KNOBS)
        }
        self._prompts = {
            prompt.prompt_id: (prompt, name) for name, some in prompts.items() for prompt in some
        }
        self._rates: dict[str, _PassRate] = {}
        self._number = 0  # running total of kept prompts: progress is logged after each prompt

    def resume(self) -> None:
        """Read the pass rates. Raises ConfigError if they belong to a different policy, settings or
        prompts."""
        if changed := self.changed(self._settings):
            listed = "\n  ".join(changed)
            raise self.error(
                f"holds pass rates of other settings:\n  {listed}\n"
                "Choose another filter.dir, or restore these settings to resume it"
            )

        def parse(line: dict[str, Any]) -> _PassRate:
            line.pop("pass_rate", None)
            return _PassRate(**line)

        # Prompts without a scored completion are sampled again, and the last line counts.
        self._rates = {rate.id: rate for rate in self.records(_TABLE, parse)}
        for name, rate in self._rates.items():
            prompt, _ = self._prompts.get(name, (None, ""))
            if prompt is None or prompt_digest(prompt) != rate.digest:
                raise self.error(
                    f"has the pass rate of {name}, but the data (or run.seed) has changed. "
                    "Restore it, or choose another filter.dir"
                )
        self._number = len(self._kept())
        self.claim(self._settings)

    @property
    def waiting(self) -> list[Prompt]:
        known = {name for name, rate in self._rates.items() if rate.known}
        return [prompt for name, (prompt, _) in self._prompts.items() if name not in known]

    def record(self, prompt: Prompt, groups: Sequence[ScoredGroup]) -> None:
        rate = _compute_pass_rate(prompt, self._prompts[prompt.prompt_id][1], groups)
        self.append(_TABLE, {**asdict(rate), "pass_rate": rate.rate})
        self._number += self._keeps(rate) - self._keeps(self._rates.get(rate.id))
        self._rates[rate.id] = rate

    def progress(self) -> str:
        return f"{self._number:,} kept so far"

    def finish(self) -> str:
        kept = self._kept()
        folder = self.path / "kept"
        folder.mkdir(exist_ok=True)
        for name, source in self._sources.items():
            rates = [rate for rate in kept if rate.source == name]
            lines: list[str] = []
            for rate in rates:
                prompt = self._prompts[rate.id][0]
                messages = remove_source_system(source, prompt.messages)
                record = {
                    "id": prompt.prompt_id.removeprefix(f"{name}/"),
                    "messages": [dict(message) for message in messages],
                    "reward": dict(prompt.reward),
                    "pass_rate": rate.rate,
                }
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
            write_whole(folder / f"{name}.jsonl", "".join(lines))
        waiting = len(self.waiting)
        pending = f"{waiting:,} prompts are still to be sampled; the same command resumes"
        return "\n".join(
            [
                *self._table(),
                *self._left_out(),
                *([pending] if waiting else []),
                f"pass rates      {self.path / _TABLE}",
                f"kept prompts    {folder}",
            ]
        )

    def _kept(self) -> list[_PassRate]:
        rates = [self._rates[name] for name in self._prompts if name in self._rates]
        return [rate for rate in rates if self._keeps(rate)]

    def _keeps(self, rate: _PassRate | None) -> bool:
        least, most = self._filter.least_pass_rate, self._filter.most_pass_rate
        return rate is not None and rate.passes > 0 and least <= rate.rate <= most

    def _table(self) -> list[str]:
        rates = list(self._rates.values())
        domains = domains_to_show({n: s.domain_name for n, s in self._sources.items()})
        k, kept = self._filter.samples, {rate.id for rate in self._kept()}
        rows = [["", "prompts", "pass@1", f"pass@{k}", "kept"]]
        for name, mine in {
            **{name: [r for r in rates if r.source == name] for name in self._sources},
            **{f"domain {name}": [r for r in rates if r.domain == name] for name in domains},
        }.items():
            means = [
                f"{fmean(pass_at_k(r.samples, r.passes, n) for r in mine):.3f}" if mine else "–"
                for n in (1, k)
            ]
            rows.append([name, f"{len(mine):,}", *means, f"{sum(r.id in kept for r in mine):,}"])
        return align_columns(rows)

    def _left_out(self) -> list[str]:
        least, most = self._filter.least_pass_rate, self._filter.most_pass_rate
        rates = list(self._rates.values())
        counts = {
            "without a scored completion (sampled again by the next run)": [
                not rate.known for rate in rates
            ],
            "never passed": [rate.known and not rate.passes for rate in rates],
            f"passed less often than {least:g}": [0 < rate.rate < least for rate in rates],
            f"passed more often than {most:g}": [rate.rate > most for rate in rates],
        }
        lost = sum(sum(rate.dropped.values()) for rate in rates)
        lines = [f"left out: {sum(of):,} {why}" for why, of in counts.items() if any(of)]
        return lines + [f"{lost:,} completions missing, counted as wrong"] * bool(lost)
