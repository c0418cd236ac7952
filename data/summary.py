"""Describes the data sources of a run for the user."""

from __future__ import annotations

from dataclasses import asdict

from keel.configs.schema import Config, SourceConfig
from keel.data.dataset import Dataset
from keel.data.items import first_of


def source_warnings(config: Config, dataset: Dataset) -> list[str]:
    """Warn about columns that are not used, and about sources so small that a batch contains the
    same prompt twice."""
    lines: list[str] = []
    for source in config.data.sources:
        report, knob = dataset.report[source.name], f"data.sources[{source.name}]"
        if unread := report.unread:
            names = ", ".join(f"`{name}`" for name in unread)
            lines.append(
                f"{knob}: nothing reads {names} ({next(iter(unread.values()))}); "
                "data.sources[].columns, a template or your reward function can"
            )
        times = _epochs(config, source, report.train) / config.run.steps
        if report.train and times > 1:
            lines.append(
                f"{knob}: {report.train:,} prompts to train on, each {times:.3g} times in a batch; "
                "lower algorithm.prompts_per_step"
            )
    return lines


def source_lines(config: Config, dataset: Dataset) -> list[str]:
    """Describe each source."""
    lines: list[str] = []
    for source in config.data.sources:
        report = dataset.report[source.name]
        notes = [f"{report.train:,} to train on", f"{report.heldout:,} held out"]
        if epochs := _epochs(config, source, report.train):
            notes.append(f"{epochs:.2g} epochs")
        notes += [f"{number:,} {reason}" for reason, number in report.dropped.items() if number]
        environment = source.environment
        origin = " in ".join(filter(None, [source.task or source.path, environment.label]))
        if environment.program:
            origin = ", driven by ".join(filter(None, [origin, environment.program]))
        budget = {name: value for name, value in asdict(source.budget).items() if value}
        lines.append(
            f"{source.name} ({origin}): {', '.join(notes)}; weight "
            f"{config.data.weight_of(source):g}, domain {source.domain_name}, β {source.kl_coef:g}"
            + "".join(f", {name} {value:g}" for name, value in budget.items())
        )
        lines += [f"  {note}" for note in first_of(report.notes)]
    return lines


def _epochs(config: Config, source: SourceConfig, prompts: int) -> float:
    """Return for how many epochs a run trains on a source with this many prompts."""
    total = sum(config.data.weight_of(one) for one in config.data.sources) or 1.0
    share = config.data.weight_of(source) / total
    return share * config.run.steps * config.algorithm.prompts_per_step / max(1, prompts)
