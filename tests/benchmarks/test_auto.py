"""What `benchmarks.auto` says of arms that did not end."""

from __future__ import annotations

from benchmarks.auto import Arm, report


def test_only_whole_arms_are_compared() -> None:
    default = Arm(name="defaults", knobs={}, seconds=[1.0] * 3, rates=[95.0, 90.0, 100.0])
    wide = Arm(name="wide", knobs={}, seconds=[1.0] * 3, rates=[100.0] * 3)
    cut = Arm(name="cut", knobs={}, seconds=[0.5], rates=[200.0], failed="1 of 3 steps; stopped")
    assert "defaults reach 95.0 % of the best (wide)" in report({"a shape": [default, wide, cut]})
    assert "no verdict" in report({"a shape": [default, cut]})
    none = Arm(name="defaults", knobs={}, failed="0 of 3 steps; stopped")
    found = report({"a shape": [none, wide, default]})
    assert "no verdict" in found
    assert "%" not in found
