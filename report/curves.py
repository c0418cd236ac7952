"""Curves of a long run, with as many points as a screen can show."""

from __future__ import annotations

from collections.abc import Sequence

from keel.report.shape import RunData

PARTS = 500
"""Of a curve, about as many as it has pixels."""
STACKED = ("time/rollout", "time/reward", "time/train", "time/sync")
"""Drawn one above the other: where one of them has a value the others need theirs."""


def thin(run: RunData) -> None:
    """Leave of each metric the lowest and the highest value of each part of it, at the steps that
    had them, and say so in the notes. `summary` stays that of all steps."""
    kept = {name: extremes(values) for name, values in run.metrics.items()}
    stacked = set[int]().union(*(kept.get(name, ()) for name in STACKED))
    kept |= {name: stacked for name in STACKED if name in kept}
    fewer = {
        name: [value if at in kept[name] else None for at, value in enumerate(values)]
        for name, values in run.metrics.items()
    }
    if fewer != run.metrics:
        run.metrics = fewer
        run.notes.append(
            f"curves of {len(run.steps):,} steps have here the lowest and the highest value of "
            f"each of {PARTS} parts; `keel watch {run.path}` shows every one"
        )


def extremes(values: Sequence[float | None]) -> set[int]:
    """Where they are, and the first and the last value."""
    known = {at: value for at, value in enumerate(values) if value is not None}
    places = [*known]
    if len(places) <= 2 * PARTS:
        return {*places}
    kept = {places[0], places[-1]}
    for part in range(PARTS):
        some = places[part * len(places) // PARTS : (part + 1) * len(places) // PARTS]
        kept |= {min(some, key=known.__getitem__), max(some, key=known.__getitem__)}
    return kept
