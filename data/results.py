"""Summarize an evaluation by variant and prompt set, and compare two evaluations prompt by prompt.
Includes confidence intervals, paired differences, maj@k and fewest@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb, fsum
from statistics import fmean, median
from typing import Any

import numpy as np

from keel.data.eval_store import RIGHT, SampledPrompt
from keel.rl.summary import pass_at_k, passed


def _summary(
    asked: Sequence[SampledPrompt], pass_at: Sequence[int], submissions: int
) -> dict[str, Any]:
    samples = [sample for one in asked for sample in one.samples]
    tokens = [sample["tokens"] for sample in samples]
    passes, numbers = [one.passes for one in asked], [one.number for one in asked]
    result: dict[str, Any] = {
        "prompts": len(asked),
        "completions": sum(numbers),
        "pass@1": sum(passes) / sum(numbers),
        "pass@1_interval": _pass_interval(passes, numbers),
    }
    for k in pass_at:
        if k > 1:
            result[f"pass@{k}"] = fmean(pass_at_k(one.number, one.passes, k) for one in asked)
            result[f"maj@{k}"] = fmean(_majority_at_k(one.answers, RIGHT, k) for one in asked)
            if samples and all("turns" in sample for sample in samples):
                result[f"fewest@{k}"] = fmean(
                    _fewest_steps_at_k(one.steps, one.right, k) for one in asked
                )
    if submissions:
        result["contest"] = fmean(_contest_score(one.samples, submissions) for one in asked)
        needed = filter(None, (_count_submissions(one.samples, submissions) for one in asked))
        result["attempts"] = fmean(solved) if (solved := list(needed)) else None
    unscored = sum(s["error"] > 0 and not passed(s["correct"]) for s in samples)
    return result | {
        "score": fmean(s["correct"] for s in samples) if samples else None,
        "tokens_mean": fmean(tokens) if tokens else None,
        "tokens_median": median(tokens) if tokens else None,
        "tokens_most": max(tokens, default=None),
        "cut": sum(s["finish_reason"] != "stop" for s in samples) / max(1, len(samples)),
        "unscored": unscored + sum(len(one.missing) for one in asked),
    }


def scores_by_steps(asked: Sequence[SampledPrompt]) -> tuple[dict[int, float], dict[int, float]]:
    """Compute scores as a function of the mean number of steps (turns), as in Figure 6 of
    DeepSeek-V3.2 (2025).

    The first curve lets a single trajectory run for more steps. The second runs more trajectories
    in parallel (`_fewest_steps_at_k`). Both are empty for completions without turns.
    """
    samples = [sample for one in asked for sample in one.samples]
    if not samples or not all("turns" in sample for sample in samples):
        return {}, {}
    total = sum(one.number for one in asked)
    solved = [
        steps
        for one in asked
        for steps, right in zip(one.steps, one.right, strict=True)
        if right and steps is not None
    ]
    turns = [sample["turns"] for sample in samples]
    longer = {  # a trajectory counts as if it had been stopped after `most` steps
        round(fmean(min(each, most) for each in turns)): sum(s <= most for s in solved) / total
        for most in sorted({*turns})
    }
    wider = {
        round(k * fmean(turns)): fmean(_fewest_steps_at_k(one.steps, one.right, k) for one in asked)
        for k in range(1, min(one.number for one in asked) + 1)
    }
    return longer, wider


def _select_submissions(
    samples: Sequence[Mapping[str, Any]], submissions: int
) -> list[Mapping[str, Any]]:
    """Return the completions to submit, in submission order: longest thinking first (DeepSeek-V3.2,
    appendix D). Completions aren't submitted if they fail a test shown in the task, were cut off,
    have no score or decline the task."""
    fit = [
        sample
        for sample in samples
        if sample["error"] == 0
        and sample["finish_reason"] == "stop"
        and passed(sample["parts"].get("samples", 1.0))
        and sample["parts"].get("refusal", 0.0) < 0.5
    ]
    return sorted(fit, key=lambda sample: -sample["thinking"])[:submissions]


def _count_submissions(samples: Sequence[Mapping[str, Any]], submissions: int) -> int | None:
    """Return how many submissions it takes until one is accepted, or None if none is."""
    accepted = (passed(sample["correct"]) for sample in _select_submissions(samples, submissions))
    return next((number for number, right in enumerate(accepted, start=1) if right), None)


def _contest_score(samples: Sequence[Mapping[str, Any]], submissions: int) -> float:
    """Score a prompt from 0 to 1, using the best submission for each subtask."""
    best: dict[str, float] = {}
    for sample in _select_submissions(samples, submissions):
        worths = {k: v for k, v in sample["parts"].items() if k.startswith("subtask/")}
        for name, worth in (worths or {"": sample["correct"]}).items():
            best[name] = max(worth, best.get(name, 0.0))
    return fsum(best.values())


def results(
    asked: Sequence[SampledPrompt], pass_at: Sequence[int], submissions: int = 0
) -> dict[str, dict[str, Any]]:
    """Summarize the completions by variant and prompt set (`sets_of`)."""
    result: dict[str, dict[str, Any]] = {}
    for variant in dict.fromkeys(one.variant for one in asked):
        chosen = [one for one in asked if one.variant == variant]
        result[variant] = {
            name: _summary([chosen[place] for place in places], pass_at, submissions)
            for name, places in sets_of(chosen).items()
        }
    return result


def domains_to_show(domain_of: Mapping[str, str]) -> list[str]:
    """Return the domains to report: all except those that consist of a single source of the same
    name. `domain_of` maps each source to its domain."""
    domains = {d: {s for s in domain_of if domain_of[s] == d} for d in domain_of.values()}
    return sorted(domain for domain, sources in domains.items() if sources != {domain})


def sets_of(asked: Sequence[SampledPrompt]) -> dict[str, list[int]]:
    domain_of = {one.source: one.domain for one in asked}
    sets = {s: [n for n, one in enumerate(asked) if one.source == s] for s in domain_of}
    for domain in domains_to_show(domain_of):
        sets[f"domain {domain}"] = [n for n, one in enumerate(asked) if one.domain == domain]
    return sets | ({"all": [*range(len(asked))]} if len(domain_of) > 1 else {})


def format_results(result: Mapping[str, Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for sets in result.values() for of in sets.values() for name in of)
    at_k = ("pass@", "maj@", "fewest@")
    more = [name for name in names if name.startswith(at_k) and "_" not in name][1:]
    more += [name for name in ("contest", "attempts") if name in names]
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
    return align_columns(rows)


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of a text table, the first to the left and all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'>' if n else '<'}{width}}"
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_Z = 1.959964  # normal quantile for a two-sided 95 % interval
_VOTES = 200  # number of random subsets of k completions for maj@k


def _pass_interval(passes_P: Sequence[int], samples_P: Sequence[int]) -> tuple[float, float]:
    """Compute the 95 % confidence interval of pass@1 over the population of prompts.

    Completions of the same prompt are correlated, so this is Wilson's interval with an effective
    sample size of p(1−p)/v, where v is the variance of p between prompts (Dean and Pagano, 2015).
    If all or no completions pass, the sample size is the number of prompts.
    """
    passes, samples = np.asarray(passes_P, float), np.asarray(samples_P, float)
    total, prompts = samples.sum(), len(samples)
    share = passes.sum() / total
    number = float(prompts)
    if 0 < share < 1 and prompts > 1:
        residuals = passes - share * samples
        variance = prompts / (prompts - 1) * (residuals**2).sum() / total**2
        number = min(share * (1 - share) / variance, total) if variance else float(total)
    middle = (share + _Z**2 / (2 * number)) / (1 + _Z**2 / number)
    half = _Z / (1 + _Z**2 / number)
    half *= math.sqrt(share * (1 - share) / number + _Z**2 / (4 * number**2))
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def _majority_at_k(answers: Sequence[str], right: str, k: int) -> float:
    """Estimate maj@k, the probability that the most frequent of k `answers` is `right` (Wang et
    al., 2023).

    Tied answers share the probability equally, and empty answers don't count. The result is exact
    if k is the number of answers. Otherwise, it is the mean over `_VOTES` seeded draws.
    """
    if k == len(answers):
        return _vote(answers, right)
    rng = np.random.default_rng(0)
    drawn: list[list[int]] = [rng.permutation(len(answers))[:k].tolist() for _ in range(_VOTES)]
    return float(np.mean([_vote([answers[n] for n in votes], right) for votes in drawn]))


def _fewest_steps_at_k(steps: Sequence[int | None], right: Sequence[bool], k: int) -> float:
    """Compute the probability that, of k trajectories, the finished one with the fewest steps is
    correct (Parallel-fewest-step; DeepSeek-V3.2 (2025), section 4.4).

    The result is exact. Ties are broken uniformly, and k unfinished trajectories (None in `steps`)
    count as wrong.
    """
    total, chance = len(steps), 0.0
    for least in sorted({number for number in steps if number is not None}):
        of_least = [ok for number, ok in zip(steps, right, strict=True) if number == least]
        fewer = sum(number is not None and number < least for number in steps)
        # Subsets without fewer steps, minus subsets with only more steps or unfinished.
        draws = comb(total - fewer, k) - comb(total - fewer - len(of_least), k)
        chance += draws / comb(total, k) * sum(of_least) / len(of_least)
    return chance


def _vote(answers: Sequence[str], right: str) -> float:
    votes = Counter(answer for answer in answers if answer)
    most = max(votes.values(), default=0)
    leading = [answer for answer, count in votes.items() if count == most]
    return (right in leading) / len(leading) if leading else 0.0
