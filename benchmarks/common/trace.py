"""What the events of a torch.profiler trace add up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LISTED = 30
"""Lines of each table."""


def spent(events: Iterator[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    """Seconds and number by name."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for name, duration in events:
        total, count = found[name]
        found[name] = (total + duration / 1e9, count + 1)
    return found


def own_time(events: Sequence[Any]) -> dict[str, tuple[float, int]]:
    """As `spent`, of each event without the events inside it on the same thread."""
    threads: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        threads[event.start_thread_id()].append(event)
    own: list[list[Any]] = []
    for each in threads.values():
        open_: list[tuple[float, list[Any]]] = []
        for event in sorted(each, key=lambda e: (e.start_ns(), -e.duration_ns())):
            while open_ and open_[-1][0] <= event.start_ns():
                open_.pop()
            if open_:
                open_[-1][1][1] -= event.duration_ns()
            entry = [event.name(), event.duration_ns()]
            own.append(entry)
            open_.append((event.start_ns() + event.duration_ns(), entry))
    return spent((name, duration) for name, duration in own)


def table(title: str, rows: Mapping[str, tuple[float, int]], seconds: float) -> list[str]:
    first = sorted(rows.items(), key=lambda row: -row[1][0])[:LISTED]
    return [
        f"\n{title}\n{'ms':>9} {'share':>6} {'calls':>7}",
        *(f"{1e3 * t:9.2f} {t / seconds:6.1%} {n:7d}  {name[:150]}" for name, (t, n) in first),
    ]


def covered(events: Sequence[Any]) -> float:
    """Seconds in which at least one of the events was under way."""
    total, reached = 0, 0
    for start, duration in sorted((e.start_ns(), e.duration_ns()) for e in events):
        total += max(0, start + duration - max(start, reached))
        reached = max(reached, start + duration)
    return total / 1e9
