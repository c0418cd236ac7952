"""What a recipe's sources come to, in lines for people."""

from __future__ import annotations

import re
from dataclasses import asdict

from keel.configs.schema import Config, SourceConfig
from keel.data.dataset import Dataset
from keel.data.items import first_of

PLACE = re.compile(r"(?<![\w\\^{}])\{[a-z_]\w*\}(?!\})", re.IGNORECASE)
"""A name in braces that is not TeX's, such as `\\boxed{answer}`."""


def literal_lines(config: Config) -> list[str]:
    """System messages with what looks like a column of a template's."""
    sources = [("data", s) for s in config.data.sources] + [("sft", s) for s in config.sft.sources]
    return [
        f"{section}.sources[{source.name}].system: {found[0]} stands there as it is written: "
        "columns are put into prompts alone, by data.sources[].template"
        for section, source in sources
        if (found := PLACE.search(source.system))
    ]


def unread_lines(config: Config, dataset: Dataset) -> list[str]:
    """Columns of files that nothing reads."""
    return [
        f"data.sources[{source.name}]: nothing reads {', '.join(f'`{name}`' for name in unread)} "
        f"({next(iter(unread.values()))}); data.sources[].columns, a template or a reward function "
        "of your own can"
        for source in config.data.sources
        if (unread := dataset.report[source.name].unread)
    ]


def passes(config: Config, source: SourceConfig, prompts: int) -> float:
    """How often a run trains on each of so many prompts."""
    weights = {one.name: config.data.weight_of(one) for one in config.data.sources}
    share = weights[source.name] / (sum(weights.values()) or 1.0)
    return share * config.run.steps * config.algorithm.prompts_per_step / max(1, prompts)


def small_lines(config: Config, dataset: Dataset) -> list[str]:
    """Sources of which a prompt stands several times in a batch."""
    return [
        f"data.sources[{source.name}]: {prompts:,} prompts to train on, each {times:.3g} times in "
        "a batch; lower algorithm.prompts_per_step"
        for source in config.data.sources
        if (prompts := dataset.report[source.name].train)
        and (times := passes(config, source, prompts) / config.run.steps) > 1
    ]


def source_lines(config: Config, dataset: Dataset) -> list[str]:
    lines: list[str] = []
    for source in config.data.sources:
        report = dataset.report[source.name]
        times = passes(config, source, report.train)
        notes = [f"{report.train:,} to train on", f"{report.heldout:,} held out"]
        notes += [f"{times:.2g} epochs"] if times else []
        counted = {
            f"malformed line{'s' * (report.skipped != 1)} skipped": report.skipped,
            f"duplicate{'s' * (report.duplicates != 1)} dropped": report.duplicates,
            "too long, dropped": report.long,
            "held out by another source": report.leaked,
            "out of the bounds of pass rates": report.rated_out,
            "without a pass rate, left out": len(report.unrated),
            "pass rates of prompts that it does not have": len(report.unknown),
            "read without anything to judge by but functions": report.unanswered,
        }
        notes += [f"{number:,} {what}" for what, number in counted.items() if number]
        environment = source.environment
        what = " in ".join(filter(None, [source.task or source.path, environment.label]))
        if environment.program:
            what = ", driven by ".join(filter(None, [what, environment.program]))
        lines.append(
            f"{source.name} ({what}): {', '.join(notes)}; weight "
            f"{config.data.weight_of(source):g}, domain {source.domain_name}, β "
            f"{source.kl_coef:g}{_budget_said(source)}"
        )
        lines += [f"  skipped: {line}" for line in first_of(report.skipped_reasons)]
        lines += [f"  without a pass rate: {name}" for name in report.unrated[:3]]
        lines += [f"  in pass_rates and not in the source: {name}" for name in report.unknown[:3]]
    return lines


def _budget_said(source: SourceConfig) -> str:
    """Where it has one of its own."""
    own = {name: value for name, value in asdict(source.budget).items() if value}
    return "".join(f", {name} {value:g}" for name, value in own.items())
