"""What a change did to its tests: F2P, P2P, P2F, and those that cannot be relied on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]
"""Of one run, as `keel.agents.environments.code.grading.Results` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Names of tests. One that is missing from a run has failed there."""

    f2p: list[str]
    p2p: list[str]
    p2f: list[str]
    flaky: list[str]
    canary: bool
    """Whether each run had it as wanted."""
    inside: bool
    """Whether each run had those in hidden test files as wanted."""
    seconds: float
    """Of the slowest run."""
    about: str
    """Numbers of the first runs, for people."""


def outcomes_of(before: Sequence[Results], after: Sequence[Results]) -> Outcomes:
    names = sorted({name for run in (*before, *after) for name in run["tests"]})
    found: dict[str, list[str]] = {"f2p": [], "p2p": [], "p2f": [], "flaky": []}
    for name in names:
        first = {run["tests"].get(name) == "passed" for run in before}
        then = {run["tests"].get(name) == "passed" for run in after}
        if len(first) > 1 or len(then) > 1:
            found["flaky"].append(name)
        elif first == {True}:
            found["p2p" if then == {True} else "p2f"].append(name)
        elif then == {True}:
            found["f2p"].append(name)
    about = " and ".join(_counted(run) for run in (before[0], after[0]))
    canary = all(run["canary"] == "as wanted" for run in (*before, *after))
    seconds = max(run["seconds"] for run in (*before, *after))
    inside = all(run["inside"] for run in (*before, *after))
    return Outcomes(**found, canary=canary, inside=inside, seconds=seconds, about=f"({about})")


def _counted(run: Results) -> str:
    counts = Counter[str](run["tests"].values())
    return ", ".join(f"{count} {result}" for result, count in sorted(counts.items())) or "none ran"
