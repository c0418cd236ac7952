"""The packed recorder on Model Runner V2 with interpreted kernels, held to transformers in float32.

The parts of the contract that depend on where routes are filed and on how steps are scheduled; the
whole of it runs on GPUs (`tests/gpu/test_recorders_native.py`). Takes minutes: asked for by
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.recording.contract import RecorderContract
from tests.rollout.recording.reference import Reference, Tolerance
from tests.rollout.remote_engine import (
    RemoteEngine,
    engine_spec,
    running_engine,
)
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
        assert watch.fast_steps > 10 and watch.steady_steps > 10


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
    test_evaluation = RecorderContract.test_evaluation_records_log_probabilities_alone
    test_cut = RecorderContract.test_answers_that_are_cut_at_the_deadline
    test_cut_waiting = RecorderContract.test_answers_that_are_cut_while_they_are_preempted_or_wait
    test_weights_change = RecorderContract.test_weights_change_while_answers_are_sampled
    test_cut_across = RecorderContract.test_answers_are_cut_while_weights_change
    test_weight_update = RecorderContract.test_weight_update
    test_not_finite = RecorderContract.test_completions_that_are_not_finite_are_dropped
