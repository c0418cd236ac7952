"""Results of evaluations: contests, turns, and differences by domain."""

from __future__ import annotations

from typing import Any

import pytest

from keel.data.eval_store import Asked
from keel.data.results import compared, contest_score, results, table


def sample(thinking: int, small: float, large: float, **more: Any) -> dict[str, Any]:
    parts = {"subtask/small": small, "subtask/large": large, **more.pop("parts", {})}
    known = {"correct": small + large, "error": 0.0, "finish_reason": "stop"}
    return {**known, "thinking": thinking, "parts": parts, **more}


def test_contest_score() -> None:
    samples = [sample(10, 0.3, 0), sample(50, 0, 0.7), sample(90, 0, 0), sample(40, 0.3, 0)]
    scores = [contest_score(samples, n) for n in (1, 2, 3, 4)]
    assert scores == pytest.approx([0, 0.7, 1, 1])  # by hand: 90; then 50, then 40
    assert contest_score([], 3) == 0


def test_unfit_completions_are_not_submitted() -> None:
    later = sample(1, 0.3, 0)
    for unfit in (
        *({"parts": {"samples": 0.0}}, {"parts": {"refusal": 1.0}}),
        *({"finish_reason": "length"}, {"error": 1.0}),
    ):
        assert contest_score([sample(99, 0.3, 0.7, **unfit), later], 1) == pytest.approx(0.3)
    fit = sample(99, 0.3, 0.7, parts={"samples": 1.0, "refusal": 0.0})
    assert contest_score([fit, later], 1) == pytest.approx(1)


def asked(source: str, samples: list[dict[str, Any]], missing: int = 0, number: int = 0) -> Asked:
    known = {"error": 0.0, "answer": "a", "tokens": 3, "finish_reason": "stop"}
    return Asked(
        variant="recipe",
        source=source,
        domain="agents" if source in ("a", "b") else source,
        id=f"{source}/{number}",
        digest="d",
        samples=[{**known, **one} for one in samples],
        missing=["late"] * missing,
    )


def test_fewest_turns() -> None:
    trips = [
        {"correct": 0.0, "turns": 1, "finish_reason": "length"},
        {"correct": 1.0, "turns": 2},
        {"correct": 0.0, "turns": 3},
    ]
    plain = [{"correct": 1.0}] * 4
    found = results([asked("trip", trips, missing=1), asked("sums", plain)], [1, 2, 4])
    trip, sums, everything = (found["recipe"][name] for name in ("trip", "sums", "all"))
    assert trip["fewest@4"] == 1.0 and trip["pass@1"] == 0.25
    assert trip["fewest@2"] == pytest.approx(1 / 2)  # three of the six pairs have the second
    assert not any(name.startswith("fewest") for of in (sums, everything) for name in of)
    head, *rows = table(found)
    cells = {row.split()[0]: row.split()[head.split().index("fewest@4")] for row in rows}
    assert cells == {"trip": "1.000", "sums": "–", "all": "–"}


def test_compared_by_domain() -> None:
    def both(rate: float) -> list[Asked]:
        of = [("a", 1.0), ("b", rate), ("b", rate), ("c", 0.0)]
        return [asked(name, [{"correct": right}], 0, n) for n, (name, right) in enumerate(of)]

    (sets,) = compared(both(0), both(1)).values()
    assert {name: (n, d.mean) for name, (n, d) in sets.items()} == {
        "a": (1, 0),
        "b": (2, 1),
        "c": (1, 0),
        "domain agents": (3, pytest.approx(2 / 3)),
        "all": (4, 0.5),
    }
    assert sets.keys() == results(both(0), [1])["recipe"].keys()
