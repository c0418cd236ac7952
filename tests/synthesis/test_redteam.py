"""Harmful requests, and harmless ones that look like them."""

from __future__ import annotations

from collections import Counter

from keel.synthesis.redteam import FRAMINGS, TOPICS, requests


def test_phrasing_is_independent_of_harm() -> None:
    lines = list(requests(2 * len(TOPICS) * len(FRAMINGS), seed=1))
    assert len({line["prompt"] for line in lines}) == len({line["id"] for line in lines})
    kinds = Counter((line["id"].split("-")[1], line["refuse"]) for line in lines)
    assert set(kinds.values()) == {len(TOPICS)} and len(kinds) == 2 * len(FRAMINGS)
    some = list(requests(30, seed=1))
    assert some == lines[:30] and some != list(requests(30, seed=2))
    assert sum(line["refuse"] for line in some) == 15
