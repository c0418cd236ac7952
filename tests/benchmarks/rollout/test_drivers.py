"""What the arms of the rollout benchmark go without."""

from __future__ import annotations

from benchmarks.rollout.drivers import ARMS


def test_only_keels_engines_on_a_gpu_go_without_a_part() -> None:
    """The stand-ins are of `rollout/fastpath`, which nobody else has."""
    without = [arm for arm in ARMS.values() if not (arm.graph and arm.steady and arm.bursts)]
    assert without and all(arm.keel and arm.gpu_only for arm in without)
