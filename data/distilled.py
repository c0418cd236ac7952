"""Selects completions from specialist models for training. They are correct, complete, distinct and
balanced."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.configs.distillation import SelectConfig
from keel.configs.schema import ConfigError
from keel.data.eval_store import read_evaluation, trajectory_of
from keel.data.results import aligned
from keel.rl.evaluation import FAIL

_Kind = tuple[str, bool]
"""A domain, and whether thinking mode is on."""
_SAMPLED = ("wrong", "not scored", "cut off", "other parts", "said before")
_LEFT_OUT = (*_SAMPLED, "same prompt", "for balance")
"""Reasons for rejecting a completion, in the order in which they are checked."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A completion from a specialist model."""

    kind: _Kind
    prompt: str
    why_not: str
    """The first reason from `_LEFT_OUT` that applies, or "" if none does."""
    line: Mapping[str, Any]
    """The JSON line for `keel sft` (`source: trajectories`). It includes the specialist's name."""


def select(sampled: Mapping[str, Path], config: SelectConfig, out: Path) -> list[str]:
    """Write the selected completions to `out`, one per line, and return a report for the user.

    `sampled` maps each specialist to its `keel eval` folder for the training prompts. Raises
    ConfigError if a folder cannot be read, a named reward part does not occur, or no completion is
    left.
    """
    least, most = config.least_parts, config.most_parts
    bounds = [(n, least.get(n, -math.inf), most.get(n, math.inf)) for n in {**least, **most}]
    parts: set[str] = set()
    counts: defaultdict[_Kind, Counter[str]] = defaultdict(Counter)
    seen: set[str] = set()
    prompts: defaultdict[str, list[_Candidate]] = defaultdict(list)
    for candidate in _candidates(sampled, config.least):
        why, of = candidate.why_not, candidate.line["parts"]
        content = json.dumps([candidate.kind[1], candidate.line["messages"]], sort_keys=True)
        parts.update(of)
        if not why and not all(low <= of.get(name, low) <= high for name, low, high in bounds):
            why = "other parts"
        if not why and content in seen:
            why = "said before"
        counts[candidate.kind][why or "sampled"] += 1
        if not why:
            seen.add(content)
            prompts[candidate.prompt].append(candidate)
    for name, _, _ in bounds:
        if name not in parts:
            known = ", ".join(sorted(parts - {"correct"})) or "none"
            raise ConfigError(
                f"select: no completion has a part {name!r} (least_parts, most_parts); they have "
                f"{known}"
            )
    chosen: list[tuple[int, _Candidate]] = []
    for some in prompts.values():
        kept = some[: config.most_per_prompt or None]
        counts[some[0].kind]["same prompt"] += len(some) - len(kept)
        chosen += enumerate(kept)
    selected = _balanced(chosen, config.balance, counts)
    table = _table(counts, Counter(one.kind for one in selected))
    if not selected:
        raise ConfigError(f"no completion of the specialists is left to learn from:\n{table}")
    fresh = out.with_suffix(".tmp")
    with fresh.open("wb") as file:
        for one in selected:
            line = json.dumps(one.line, ensure_ascii=False) + "\n"
            file.write(line.encode("utf-8", "surrogatepass"))
    fresh.replace(out)
    return [table, f"to learn        {out}"]


def _candidates(sampled: Mapping[str, Path], least: float) -> Iterator[_Candidate]:
    """Yield all completions, ordered by specialist and then by prompt."""
    for specialist, folder in sampled.items():
        for request in read_evaluation(folder):
            for sample in request.samples:
                line = {
                    **trajectory_of(sample),
                    "source": request.source,
                    "specialist": specialist,
                }
                why = "wrong" if sample["correct"] < least - FAIL else ""
                why = "cut off" if sample["finish_reason"] != "stop" else why
                why = "not scored" if sample["error"] else why
                kind = (request.domain, bool(line["thinking"]))
                yield _Candidate(kind, request.id, why, line)


def _balanced(
    chosen: Sequence[tuple[int, _Candidate]], balance: float, counts: Mapping[_Kind, Counter[str]]
) -> list[_Candidate]:
    """Limit each kind to `balance` times as many completions as the rarest kind has. The first
    completions for each prompt are preferred."""
    sizes = Counter(one.kind for _, one in chosen)
    if not balance or not sizes:
        return [one for _, one in chosen]
    most, taken = int(balance * min(sizes.values())), Counter[_Kind]()
    kept: list[_Candidate] = []
    for _, one in sorted(chosen, key=lambda pair: pair[0]):
        if taken[one.kind] < most:
            taken[one.kind] += 1
            kept.append(one)
        else:
            counts[one.kind]["for balance"] += 1
    return kept


def _table(counts: Mapping[_Kind, Counter[str]], learned: Counter[_Kind]) -> str:
    rows = [["", "sampled", *_LEFT_OUT, "to learn"]]
    for kind, of in counts.items():
        name = f"{kind[0]}, {'thinking' if kind[1] else 'not thinking'}"
        total = sum(of[why] for why in ("sampled", *_SAMPLED))
        numbers = [total, *(of[why] for why in _LEFT_OUT), learned[kind]]
        rows.append([name, *(f"{number:,}" for number in numbers)])
    return "\n".join(aligned(rows))
