"""No call of Ray's is waited for without an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from keel.model.ray_calls import RayLost, bounded, joined, kill, lose, lost
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def well() -> Iterator[None]:
    joined()
    yield
    joined()


def test_what_comes_back_is_handed_on() -> None:
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7
    with pytest.raises(KeyError, match="absent"):
        bounded(lambda: {}["absent"], PATIENCE_S, "look")


def test_what_does_not_come_back_is_named() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"waited 0\.01 s for Ray to list its nodes"):
        bounded(never.wait, 0.01, "list its nodes")
    never.set()


def test_a_lost_ray_ends_what_waits_for_it_and_is_asked_no_more() -> None:
    never = threading.Event()

    def hangs() -> bool:
        lose("its raylet is gone")
        return never.wait()

    with pytest.raises(RayLost, match="its raylet is gone"):
        bounded(hangs, PATIENCE_S, "take an object into its store")
    never.set()
    lose("so is the rest")
    assert lost() == "its raylet is gone", "the first is the cause"
    kill("an actor")  # gone with it
