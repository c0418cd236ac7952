"""Comparison of `benchmarks.auto`."""

from __future__ import annotations

from benchmarks.auto import Arm, report


def test_only_complete_arms_are_compared() -> None:
    default = Arm(name="defaults", knobs={}, seconds=[1.0] * 3, rates=[95.0, 90.0, 100.0])
    wide = Arm(name="wide", knobs={}, seconds=[1.0] * 3, rates=[100.0] * 3)
    cut = Arm(name="cut", knobs={}, seconds=[0.5], rates=[200.0], failed="1 of 3 steps; stopped")
    assert "95.0 %" in report({"a shape": [default, wide, cut]})
    assert "no verdict" in report({"a shape": [default, cut]})
    failed = Arm(name="defaults", knobs={}, failed="0 of 3 steps; stopped")
    assert "no verdict" in report({"a shape": [failed, wide, default]})
