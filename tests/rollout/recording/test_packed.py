"""Compares the packed recorder on Model Runner V2, with interpreted kernels, to the float32
reference.

This covers the parts of the contract that depend on route storage and scheduling; the GPU tests
cover all of it. The tests take minutes and run only with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.recording.contract import RecorderContract
from tests.rollout.recording.reference import Reference, Tolerance
from tests.rollout.remote_engine import RemoteEngine, engine_spec, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="takes minutes; TRITON_INTERPRET=1 runs it",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(make_model(folder))


@pytest.fixture(scope="module")
def engine(folder: Path, reference: Reference) -> Iterator[RemoteEngine]:
    with running_engine(engine_spec(folder), gpu=False, kind="packed") as engine:
        yield engine
        watch = engine.watch()
        assert watch.fast_steps > 10 and watch.reused_steps > 10


@pytest.fixture(scope="module")
def tolerance() -> Tolerance:
    return Tolerance()


class TestPackedRecorder:
    way = RecorderContract.way
    check = RecorderContract.check
    check_cut = RecorderContract.check_cut
    test_chunked_prefill = RecorderContract.test_chunked_prefill
    test_prefix_cache_hits = RecorderContract.test_prefix_cache_hits
    test_preemption = RecorderContract.test_preemption
    test_evaluation = RecorderContract.test_evaluation_records_only_logprobs
    test_cut = RecorderContract.test_deadline_cuts
    test_cut_waiting = RecorderContract.test_deadline_cuts_while_preempted_or_waiting
    test_weights_change = RecorderContract.test_weight_update_during_sampling
    test_cut_across = RecorderContract.test_deadline_cuts_during_a_weight_update
    test_weight_update = RecorderContract.test_weight_update
    test_not_finite = RecorderContract.test_non_finite_completions_are_dropped
