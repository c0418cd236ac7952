"""Tests that recordings under random concurrent requests equal the float32 reference."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.buckets import pack_buckets
from tests.rollout.recording.reference import Reference, Report, Tolerance, trajectory_of
from tests.rollout.recording.traffic import traffic
from tests.rollout.remote_engine import DEADLINE_S, TRUNCATED, Kind, engine_spec, running_engine
from tests.rollout.tiny_model import make_model, perturbed

pytestmark = pytest.mark.e2e
ACTIONS, TOKENS, UPDATES = 120, 500, 3


@pytest.mark.parametrize(("kind", "seed"), [("", 0), ("fast", 1)])
def test_random_interleavings(tmp_path: Path, kind: Kind, seed: int) -> None:
    model = make_model(tmp_path)
    reference, updates = Reference(model), []
    for version in range(UPDATES):
        reference.older[version] = copy.deepcopy(model)
        tensors = perturbed(model, seed=20 + version)
        updates.append(list(pack_buckets(tensors.items(), 40_000)))
    with running_engine(engine_spec(tmp_path), gpu=False, kind=kind) as engine:
        future = engine.process.submit(traffic, seed, ACTIONS, TOKENS, updates)
        outcome = future.result(timeout=DEADLINE_S)
        watch = engine.watch()
    report, tolerance = Report(), Tolerance()
    assert not outcome.errors and outcome.cancelled
    assert (outcome.stats["groups"], outcome.stats["recordings"]) == (0, 0)
    for given, group in outcome.groups:
        assert len(group.trajectories) + len(group.dropped) == given.size
        for one in group.trajectories:
            assert one.sampled_tokens <= given.sampling.max_tokens
            if given.record:
                reference.check(one, given.sampling, report, tolerance)
            else:
                assert one.segments[0].routes_TLK is None and one.segments[0].sampling_mask is None
    for segment in outcome.segments:
        reference.check(trajectory_of(segment), TRUNCATED, report, tolerance)
    report.assert_rare(tolerance)
    assert watch.preempted and report.tokens >= TOKENS
    versions = {int(v) for segment in outcome.segments for v in segment.version_T if v >= 0}
    assert len(versions) > 1
