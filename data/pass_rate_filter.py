"""What `keel filter` leaves behind, prompt by prompt, so that a stopped one goes on where it was.

pass_rates.jsonl   the table (`keel.data.pass_rates`), a line as each prompt is done
kept/<source>.jsonl   the prompts worth training on, as `source: jsonl` reads them
settings.json      what the rates depend on
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Self

from keel.configs.diff import RESUMABLE_KNOBS, flatten_config
from keel.configs.schema import Config, SourceConfig
from keel.configs.work_folder import WorkFolder
from keel.data.items import untold
from keel.data.pass_rates import PassRate, check_same, pass_rate_of, read_pass_rates
from keel.rl.evaluation import pass_at_k
from keel.rl.types import Prompt, ScoredGroup

SECTIONS = (
    *("model.", "data.", "rewards.", "rollout.sampling.", "agents.", "eval.", "run.seed"),
    *("endpoint.tells_thinking", "endpoint.extra"),
)
"""Knobs that a pass rate depends on, RESUMABLE_KNOBS left out, and besides these …"""
MEASURED = ("eval.temperature", "eval.top_p", "eval.top_k", "filter.samples", "rollout.timeout_s")
REASONS = 5
"""Reasons for missing completions that are listed."""


def settings_of(config: Config, policy: str) -> dict[str, str]:
    """What the pass rates depend on: knob → value, and whose completions they are of."""
    knobs = {
        knob: repr(value)
        for knob, value in flatten_config(config).items()
        if knob in MEASURED or (knob.startswith(SECTIONS) and knob not in RESUMABLE_KNOBS)
    }
    return {"policy": policy, **knobs}


class FilterFolder:
    """Open as a context: creates the folder, refuses another filter's, and holds it while open."""

    def __init__(
        self, config: Config, prompts: Mapping[str, Sequence[Prompt]], policy: str
    ) -> None:
        """prompts: source that trains → those to sample; policy: whose completions, for people."""
        given = config.filter.dir
        self.path = (
            Path(given).expanduser() if given else Path(config.run.dir).expanduser() / "filter"
        )
        self.table = self.path / "pass_rates.jsonl"
        self._filter = config.filter
        self._sources = {s.name: s for s in config.data.sources if s.name in prompts}
        self._idle = [s.name for s in config.data.sources if s.name not in prompts]
        """Sources that train nothing."""
        self._settings = settings_of(config, policy)
        self._prompts = {
            prompt.prompt_id: (prompt, name) for name, some in prompts.items() for prompt in some
        }
        self._rates: dict[str, PassRate] = {}
        self._number = 0
        """Kept so far: said after each, and too many to be counted each time."""

    def __enter__(self) -> Self:
        """Raises ConfigError if the folder cannot be written, is in use, or holds pass rates of
        another policy, of other settings or of other prompts."""
        with ExitStack() as stack:
            folder = stack.enter_context(WorkFolder(self.path, "filter.dir", "filter"))
            if changed := folder.changed(self._settings):
                listed = "\n  ".join(changed)
                raise folder.error(
                    f"holds pass rates of other settings:\n  {listed}\n"
                    "Choose another filter.dir, or set these back to go on with it"
                )
            self._lines = folder.lines(self.table.name)
            try:
                self._rates = self._read()
                self._number = len(self._kept())
            except ValueError as error:
                raise folder.error(str(error)) from error
            folder.claim(self._settings)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def waiting(self) -> list[Prompt]:
        """Prompts without a pass rate, in the sources' order; those of whose completions none could
        be scored count as such."""
        known = {name for name, rate in self._rates.items() if rate.known}
        return [prompt for name, (prompt, _) in self._prompts.items() if name not in known]

    def record(self, prompt: Prompt, groups: Sequence[ScoredGroup]) -> None:
        """Write down what came of a prompt."""
        rate = pass_rate_of(prompt, self._prompts[prompt.prompt_id][1], groups)
        self._lines.add(rate.line())
        self._number += self._keeps(rate) - self._keeps(self._rates.get(rate.id))
        self._rates[rate.id] = rate

    def said(self) -> str:
        """How it stands, in few words."""
        return f"{self._number:,} kept so far"

    def finish(self) -> str:
        """Write the kept prompts, as far as there are pass rates; what came of it, for people."""
        kept = self._kept()
        folder = self.path / "kept"
        folder.mkdir(exist_ok=True)
        for name, source in self._sources.items():
            mine = [rate for rate in kept if rate.source == name]
            lines = [_line(self._prompts[rate.id][0], source, rate) for rate in mine]
            fresh = folder / f".{name}.tmp"
            fresh.write_text("".join(lines), encoding="utf-8")
            fresh.replace(folder / f"{name}.jsonl")
        return "\n".join([*self._table(), *self._left_out(), *self._where()])

    def _read(self) -> dict[str, PassRate]:
        rates = read_pass_rates(self.table)
        for name, rate in rates.items():
            if name not in self._prompts:
                raise ValueError(
                    f"{self.table} has the pass rate of {name}, which the recipe's sources do not "
                    "have: the data has changed. Choose another filter.dir, or bring it back"
                )
            check_same(self._prompts[name][0], rate, self.table)
        return rates

    def _kept(self) -> list[PassRate]:
        rates = [self._rates[name] for name in self._prompts if name in self._rates]
        return [rate for rate in rates if self._keeps(rate)]

    def _keeps(self, rate: PassRate | None) -> bool:
        bounds = (self._filter.least_pass_rate, self._filter.most_pass_rate)
        return rate is not None and rate.within(*bounds)

    def _table(self) -> list[str]:
        """A row for each source, and for each domain that is not just one source."""
        rates = list(self._rates.values())
        rows = {name: [r for r in rates if r.source == name] for name in self._sources}
        of = Counter(source.domain_name for source in self._sources.values())
        own = {name for name, one in self._sources.items() if one.domain_name == name}
        domains = {name for name, sources in of.items() if sources > 1 or name not in own}
        rows |= {
            f"domain {name}": [r for r in rates if r.domain == name] for name in sorted(domains)
        }
        k, kept = self._filter.samples, {rate.id for rate in self._kept()}
        width = max(map(len, rows))
        lines = [f"{'':{width}}  prompts  pass@1  {f'pass@{k}':>8}  kept"]
        for name, mine in rows.items():
            means = [
                f"{fmean(pass_at_k(r.samples, r.passes, n) for r in mine):.3f}" if mine else "–"
                for n in (1, k)
            ]
            lines.append(
                f"{name:{width}}  {len(mine):7,}  {means[0]:>6}  {means[1]:>8}  "
                f"{sum(rate.id in kept for rate in mine):,}"
            )
        return lines

    def _left_out(self) -> list[str]:
        """Why prompts are not kept, and completions missing."""
        least, most = self._filter.least_pass_rate, self._filter.most_pass_rate
        rates = list(self._rates.values())
        counted = {
            "without a scored completion (sampled again the next time)": [
                rate for rate in rates if not rate.known
            ],
            "never passed": [rate for rate in rates if rate.known and not rate.passes],
            f"passed less often than {least:g}": [
                rate for rate in rates if rate.passes and rate.rate < least
            ],
            f"passed more often than {most:g}": [rate for rate in rates if rate.rate > most],
        }
        lines = [f"left out: {len(some):,} {why}" for why, some in counted.items() if some]
        if self._idle:
            lines.append(
                f"left out: {', '.join(self._idle)}, of which nothing trains "
                "(data.sources[].weight, data.train_on)"
            )
        reasons = Counter[str]()
        for rate in rates:
            reasons.update(rate.dropped)
        lines += [
            f"{count:,} completions missing, counted as wrong: {reason}"
            for reason, count in reasons.most_common(REASONS)
        ]
        if more := sum(reasons.values()) - sum(n for _, n in reasons.most_common(REASONS)):
            lines.append(f"{more:,} completions missing for other reasons (in the table)")
        return lines

    def _where(self) -> list[str]:
        waiting = len(self.waiting)
        return [
            *[f"{waiting:,} prompts are still to be sampled; the same command goes on"]
            * bool(waiting),
            f"pass rates      {self.table}",
            f"kept prompts    {self.path / 'kept'}",
        ]


def _line(prompt: Prompt, source: SourceConfig, rate: PassRate) -> str:
    """A line that, read by `source: jsonl` under the same name, system messages and environment,
    is the prompt again."""
    record = {
        "id": prompt.prompt_id.removeprefix(f"{source.name}/"),
        "messages": [dict(message) for message in untold(source, prompt.messages)],
        "reward": dict(prompt.reward),
        "pass_rate": rate.rate,
    }
    return json.dumps(record, ensure_ascii=False) + "\n"
