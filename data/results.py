"""Summarizes an evaluation by variant and set, and compares two evaluations prompt by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from statistics import fmean, median
from typing import Any

from keel.configs.schema import ConfigError
from keel.data.eval_store import RIGHT, Asked, read_evaluation
from keel.data.statistics import (
    Difference,
    fewest_steps_at_k,
    majority_at_k,
    paired_difference,
    pass_interval,
)
from keel.rl.evaluation import pass_at_k, passed


def _summary(asked: Sequence[Asked], pass_at: Sequence[int], submissions: int) -> dict[str, Any]:
    """Summarize the completions to a set of prompts.

    `pass_at` lists the values of k for pass@k and maj@k, and for fewest@k if every completion has
    turns. No k may exceed the number of completions per prompt. `submissions` is passed to
    `contest_score`; with 0 there is no such score.
    """
    samples = [sample for one in asked for sample in one.samples]
    tokens = [sample["tokens"] for sample in samples]
    passes, numbers = [one.passes for one in asked], [one.number for one in asked]
    result: dict[str, Any] = {
        "prompts": len(asked),
        "completions": sum(numbers),
        "pass@1": sum(passes) / sum(numbers),
        "pass@1_interval": pass_interval(passes, numbers),
    }
    for k in pass_at:
        if k > 1:
            result[f"pass@{k}"] = fmean(pass_at_k(one.number, one.passes, k) for one in asked)
            result[f"maj@{k}"] = fmean(majority_at_k(one.answers, RIGHT, k) for one in asked)
            if samples and all("turns" in sample for sample in samples):
                result[f"fewest@{k}"] = fmean(
                    fewest_steps_at_k(one.steps, one.right, k) for one in asked
                )
    if submissions:
        result["contest"] = fmean(contest_score(one.samples, submissions) for one in asked)
    unscored = sum(s["error"] > 0 and not passed(s["correct"]) for s in samples)
    return result | {
        "score": fmean(s["correct"] for s in samples) if samples else None,
        "tokens_mean": fmean(tokens) if tokens else None,
        "tokens_median": median(tokens) if tokens else None,
        "tokens_most": max(tokens, default=None),
        "cut": sum(s["finish_reason"] != "stop" for s in samples) / max(1, len(samples)),
        "unscored": unscored + sum(len(one.missing) for one in asked),
    }


def contest_score(samples: Sequence[Mapping[str, Any]], submissions: int) -> float:
    """Score a prompt from 0 to 1, where the best submission counts for each subtask.

    Completions are not submitted if they fail a test shown in the task, were cut off, have no score
    or decline. Of the others, those with the longest thinking are submitted (DeepSeek-V3.2,
    appendix D).
    """
    fit = [
        sample
        for sample in samples
        if sample["error"] == 0
        and sample["finish_reason"] == "stop"
        and passed(sample["parts"].get("samples", 1.0))
        and sample["parts"].get("refusal", 0.0) < 0.5
    ]
    chosen = sorted(fit, key=lambda sample: -sample["thinking"])[:submissions]
    best: dict[str, float] = {}
    for sample in chosen:
        worths = {k: v for k, v in sample["parts"].items() if k.startswith("subtask/")}
        for name, worth in (worths or {"": sample["correct"]}).items():
            best[name] = max(worth, best.get(name, 0.0))
    return fsum(best.values())


def results(
    asked: Sequence[Asked], pass_at: Sequence[int], submissions: int = 0
) -> dict[str, dict[str, Any]]:
    """Return a summary for each variant and each set (see `_sets_of`)."""
    result: dict[str, dict[str, Any]] = {}
    for variant in dict.fromkeys(one.variant for one in asked):
        chosen = [one for one in asked if one.variant == variant]
        result[variant] = {
            name: _summary([chosen[place] for place in places], pass_at, submissions)
            for name, places in _sets_of(chosen).items()
        }
    return result


def domains_to_show(domain_of: Mapping[str, str]) -> list[str]:
    """Return the domains that are not just one source of the same name.

    `domain_of` maps each source to its domain.
    """
    domains = {d: {s for s in domain_of if domain_of[s] == d} for d in domain_of.values()}
    return sorted(domain for domain, sources in domains.items() if sources != {domain})


def _sets_of(asked: Sequence[Asked]) -> dict[str, list[int]]:
    """Group the prompts into sets and return the indices of the prompts in each.

    There is a set for each source, one for each domain with several sources (`domain …`), and
    `all`.
    """
    domain_of = {one.source: one.domain for one in asked}
    sets = {s: [n for n, one in enumerate(asked) if one.source == s] for s in domain_of}
    for domain in domains_to_show(domain_of):
        sets[f"domain {domain}"] = [n for n, one in enumerate(asked) if one.domain == domain]
    return sets | ({"all": [*range(len(asked))]} if len(domain_of) > 1 else {})


def table(result: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Format `results` as a table for the user."""
    names = dict.fromkeys(name for sets in result.values() for of in sets.values() for name in of)
    at_k = ("pass@", "maj@", "fewest@")
    more = [name for name in names if name.startswith(at_k) and "_" not in name][1:]
    more += ["contest"] if "contest" in names else []
    columns = {
        "prompts": "{:,}",
        "pass@1": "{:.3f}",
        "pass@1_interval": "{0[0]:.3f}–{0[1]:.3f}",
        **dict.fromkeys(more, "{:.3f}"),
        "score": "{:.3f}",
        "tokens_mean": "{:,.1f}",
        "tokens_most": "{:,}",
        "cut": "{:.3f}",
        "unscored": "{:,}",
    }
    titles = {"pass@1_interval": "95 %", "tokens_mean": "tokens", "tokens_most": "most"}
    rows = [["", *(titles.get(name, name) for name in columns)]]
    for variant, sets in result.items():
        for name, of in sets.items():
            cells = [
                "–" if of.get(column) is None else form.format(of[column])
                for column, form in columns.items()
            ]
            rows.append([f"{variant}: {name}" if len(result) > 1 else name, *cells])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of a text table: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'>' if n else '<'}{width}}"
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def compared(
    first: Sequence[Asked], second: Sequence[Asked]
) -> dict[str, dict[str, tuple[int, Difference]]]:
    """Compare pass@1 on the prompts that two evaluations share, for each variant and set.

    Each entry contains the number of pairs and the difference. Raises ValueError if no prompt is
    shared, or if prompts with the same name differ.
    """
    earlier = {(one.variant, one.id): one for one in first}
    pairs = [(earlier[key], one) for one in second if (key := (one.variant, one.id)) in earlier]
    if not pairs:
        raise ValueError("the two evaluations have no prompt of the same variant in common")
    for one, other in pairs:
        if one.digest != other.digest:
            raise ValueError(f"{one.id}: the two evaluations have different prompts of this name")
    result: dict[str, dict[str, tuple[int, Difference]]] = {}
    for variant in dict.fromkeys(other.variant for _, other in pairs):
        chosen = [pair for pair in pairs if pair[1].variant == variant]
        before, after = (
            [one.passes / one.number for one in some] for some in zip(*chosen, strict=True)
        )
        result[variant] = {
            name: (
                len(places),
                paired_difference([before[n] for n in places], [after[n] for n in places]),
            )
            for name, places in _sets_of([other for _, other in chosen]).items()
        }
    return result


def compared_table(result: Mapping[str, Mapping[str, tuple[int, Difference]]]) -> list[str]:
    """Format `compared` as a table for the user."""
    rows = [["", "pairs", "pass@1", "95 %", "p"]]
    for variant, sets in result.items():
        for name, (pairs, of) in sets.items():
            title = f"{variant}: {name}" if len(result) > 1 else name
            interval = f"{of.low:+.3f} … {of.high:+.3f}"
            rows.append([title, f"{pairs:,}", f"{of.mean:+.3f}", interval, f"{of.p:.4f}"])
    return aligned(rows)


def compare(first: str, second: str) -> str:
    """Compare two folders written by `keel eval` and return a table. Raises ConfigError."""
    before, after = (read_evaluation(Path(folder)) for folder in (first, second))
    try:
        lines = compared_table(compared(before, after))
    except ValueError as error:
        raise ConfigError(f"{first}, {second}: {error}") from error
    return "\n".join([f"{second} − {first}:", *lines])
