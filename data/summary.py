"""Writes the part of a run's summary that describes the data sources."""

from __future__ import annotations

import re
from dataclasses import asdict

from keel.configs.schema import Config, SourceConfig
from keel.data.dataset import Dataset
from keel.data.items import first_of

_PLACEHOLDER = re.compile(r"(?<![\w\\^{}])\{[a-z_]\w*\}(?!\})", re.IGNORECASE)
r"""Matches a name in braces, but not in TeX such as `\boxed{answer}`."""


def literal_lines(config: Config) -> list[str]:
    """Warn about placeholders in system messages, because they are not filled in."""
    sources = [("data", s) for s in config.data.sources] + [("sft", s) for s in config.sft.sources]
    return [
        f"{section}.sources[{source.name}].system: {match[0]} is not filled in; use "
        "data.sources[].template for columns"
        for section, source in sources
        if (match := _PLACEHOLDER.search(source.system))
    ]


def unread_lines(config: Config, dataset: Dataset) -> list[str]:
    """Warn about columns that are not used."""
    return [
        f"data.sources[{source.name}]: nothing reads {', '.join(f'`{name}`' for name in unread)} "
        f"({next(iter(unread.values()))}); data.sources[].columns, a template or your reward "
        "function can"
        for source in config.data.sources
        if (unread := dataset.report[source.name].unread)
    ]


def _epochs(config: Config, source: SourceConfig, prompts: int) -> float:
    """Return for how many epochs a run trains on a source with this many prompts."""
    weights = {one.name: config.data.weight_of(one) for one in config.data.sources}
    share = weights[source.name] / (sum(weights.values()) or 1.0)
    return share * config.run.steps * config.algorithm.prompts_per_step / max(1, prompts)


def small_lines(config: Config, dataset: Dataset) -> list[str]:
    """Warn about sources so small that a batch contains the same prompt twice."""
    return [
        f"data.sources[{source.name}]: {prompts:,} prompts to train on, each {times:.3g} times in "
        "a batch; lower algorithm.prompts_per_step"
        for source in config.data.sources
        if (prompts := dataset.report[source.name].train)
        and (times := _epochs(config, source, prompts) / config.run.steps) > 1
    ]


def source_lines(config: Config, dataset: Dataset) -> list[str]:
    lines: list[str] = []
    for source in config.data.sources:
        report = dataset.report[source.name]
        epochs = _epochs(config, source, report.train)
        notes = [f"{report.train:,} to train on", f"{report.heldout:,} held out"]
        notes += [f"{epochs:.2g} epochs"] if epochs else []
        counts = {
            f"malformed line{'s' * (report.skipped != 1)} skipped": report.skipped,
            f"duplicate{'s' * (report.duplicates != 1)} dropped": report.duplicates,
            "too long, dropped": report.long,
            "held out by another source": report.leaked,
            "out of the bounds of pass rates": report.rated_out,
            "without a pass rate, dropped": len(report.unrated),
            "pass rates of unknown prompts": len(report.unknown),
            "judged by functions only": report.unanswered,
        }
        notes += [f"{number:,} {reason}" for reason, number in counts.items() if number]
        environment = source.environment
        origin = " in ".join(filter(None, [source.task or source.path, environment.label]))
        if environment.program:
            origin = ", driven by ".join(filter(None, [origin, environment.program]))
        lines.append(
            f"{source.name} ({origin}): {', '.join(notes)}; weight "
            f"{config.data.weight_of(source):g}, domain {source.domain_name}, β "
            f"{source.kl_coef:g}{_budget(source)}"
        )
        lines += [f"  skipped: {line}" for line in first_of(report.skipped_reasons)]
        lines += [f"  without a pass rate: {name}" for name in report.unrated[:3]]
        lines += [f"  in pass_rates but not in the source: {name}" for name in report.unknown[:3]]
    return lines


def _budget(source: SourceConfig) -> str:
    limits = {name: value for name, value in asdict(source.budget).items() if value}
    return "".join(f", {name} {value:g}" for name, value in limits.items())
