"""Selects completions by specialist models to train on: correct, complete, distinct and
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
from keel.data.eval_store import read_evaluation
from keel.data.results import aligned
from keel.rl.evaluation import FAIL

Kind = tuple[str, bool]
"""A domain, and whether the completion was sampled in thinking mode."""
SAMPLED = ("wrong", "not scored", "cut off", "other parts", "said before")
LEFT_OUT = (*SAMPLED, "longer ones", "for balance")
"""Why a completion may be left out, in the order of the checks."""


@dataclass(frozen=True, slots=True)
class DistilledCandidate:
    """A completion by a specialist model."""

    kind: Kind
    prompt: str
    tokens: int
    why_not: str
    """Why the completion is left out: a reason from `LEFT_OUT`, or "" if it is kept."""
    line: Mapping[str, Any]
    """The line to write for `keel sft` (`source: trajectories`). It names the specialist."""


def select(sampled: Mapping[str, Path], config: SelectConfig, out: Path) -> list[str]:
    """Write the selected completions to `out`, one per line, and return a report for the user.

    `sampled` maps each specialist to the folder in which `keel eval` stored its completions to the
    training prompts. Raises ConfigError if a folder cannot be read, a named reward part does not
    occur, or no completion is left.
    """
    bounds = _bounds(config)
    parts: set[str] = set()
    counts: defaultdict[Kind, Counter[str]] = defaultdict(Counter)
    chosen: list[tuple[int, DistilledCandidate]] = []
    seen: set[str] = set()
    prompts: defaultdict[str, list[DistilledCandidate]] = defaultdict(list)
    for candidate in candidates(sampled, config.least):
        why, content = candidate.why_not, _content(candidate)
        of: Mapping[str, float] = candidate.line["parts"]
        parts.update(of)
        if not why and not all(low <= of.get(name, low) <= high for name, low, high in bounds):
            why = "other parts"
        if not why and content in seen:
            why = "said before"
        if not why:
            seen.add(content)
        counts[candidate.kind][why or "sampled"] += 1
        if not why:
            prompts[candidate.prompt].append(candidate)
    for name, _, _ in bounds:
        if name not in parts:
            known = ", ".join(sorted(parts - {"correct"})) or "none"
            raise ConfigError(
                f"select: no completion has a part {name!r} (least_parts, most_parts); they have "
                f"{known}"
            )
    for some in prompts.values():
        some.sort(key=lambda one: one.tokens)
        kept = some[: config.most_per_prompt or None]
        counts[some[0].kind]["longer ones"] += len(some) - len(kept)
        chosen += enumerate(kept)
    chosen = _balanced(chosen, config.balance, counts)
    if not chosen:
        raise ConfigError(
            f"no completion of the specialists is left to learn from:\n{_text(counts, Counter())}"
        )
    lines = (json.dumps(one.line, ensure_ascii=False) + "\n" for _, one in chosen)
    fresh = out.with_suffix(".tmp")
    with fresh.open("wb") as file:
        file.writelines(line.encode("utf-8", "surrogatepass") for line in lines)
    fresh.replace(out)
    learned = Counter(one.kind for _, one in chosen)
    return [_text(counts, learned), f"to learn        {out}"]


def candidates(sampled: Mapping[str, Path], least: float) -> Iterator[DistilledCandidate]:
    """Yield all completions, ordered by specialist and then by prompt. Raises ConfigError."""
    for specialist, folder in sampled.items():
        for request in read_evaluation(folder):
            for sample in request.samples:
                record = dict(sample["record"])
                line = {
                    **record,
                    "messages": [*record.pop("asked"), *sample["messages"]],
                    "reward": sample["correct"],
                    "parts": {"correct": sample["correct"], **sample["parts"]},
                    "source": request.source,
                    "specialist": specialist,
                }
                line.pop("asked")
                why = "wrong" if sample["correct"] < least - FAIL else ""
                why = "cut off" if sample["finish_reason"] != "stop" else why
                why = "not scored" if sample["error"] else why
                yield DistilledCandidate(
                    kind=(request.domain, bool(record["thinking"])),
                    prompt=request.id,
                    tokens=sample["tokens"],
                    why_not=why,
                    line=line,
                )


def _bounds(config: SelectConfig) -> list[tuple[str, float, float]]:
    """Return the name of a reward part with its lower and upper bound."""
    least, most = config.least_parts, config.most_parts
    names = dict.fromkeys((*least, *most))
    return [(name, least.get(name, -math.inf), most.get(name, math.inf)) for name in names]


def _balanced(
    chosen: Sequence[tuple[int, DistilledCandidate]],
    balance: float,
    counts: Mapping[Kind, Counter[str]],
) -> list[tuple[int, DistilledCandidate]]:
    """Keep at most `balance` times as many completions of each kind as the rarest kind has.

    The first completion to each prompt is preferred over further ones.
    """
    sizes = Counter(one.kind for _, one in chosen)
    if not balance or not sizes:
        return list(chosen)
    most, taken = int(balance * min(sizes.values())), Counter[Kind]()
    kept: list[tuple[int, DistilledCandidate]] = []
    for place, one in sorted(chosen, key=lambda pair: pair[0]):
        if taken[one.kind] < most:
            taken[one.kind] += 1
            kept.append((place, one))
        else:
            counts[one.kind]["for balance"] += 1
    return kept


def _content(candidate: DistilledCandidate) -> str:
    """Return a text that is the same for duplicate conversations."""
    messages: Sequence[Mapping[str, Any]] = candidate.line["messages"]
    return json.dumps([candidate.kind[1], messages], sort_keys=True)


def _text(counts: Mapping[Kind, Counter[str]], learned: Counter[Kind]) -> str:
    rows = [["", "sampled", *LEFT_OUT, "to learn"]]
    for kind, of in counts.items():
        name = f"{kind[0]}, {'thinking' if kind[1] else 'not thinking'}"
        total = sum(of[why] for why in ("sampled", *SAMPLED))
        rows.append([name, f"{total:,}", *(f"{of[why]:,}" for why in LEFT_OUT)])
        rows[-1].append(f"{learned[kind]:,}")
    return "\n".join(aligned(rows))
