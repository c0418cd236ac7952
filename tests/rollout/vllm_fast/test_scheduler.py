"""Runs `scheduler_checks.py` and `routes_checks.py`, which import vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checks() -> Any:
    return import_module("tests.rollout.vllm_fast.scheduler_checks")


@pytest.fixture(scope="module")
def config(checks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return checks.make_config(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("blocks", [400, 30])
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("cuts", [False, True])
def test_outputs_equal_vllms(
    checks: Any, config: Any, ahead: bool, blocks: int, updates: bool, cuts: bool
) -> None:
    checks.outputs_equal_vllms(config, ahead, blocks, updates, cuts)


def test_most_steady_steps_are_fast(checks: Any, config: Any) -> None:
    checks.most_steady_steps_are_fast(config)


@pytest.mark.parametrize("waiting", [0, 8])
def test_most_steps_of_turns_are_fast(checks: Any, config: Any, waiting: int) -> None:
    checks.most_steps_of_turns_are_fast(config, waiting)


@pytest.mark.parametrize(("limit", "most"), [("MAX_STEPS", 16), ("MAX_IDS", 400)])
def test_batches_flush_at_their_limits(checks: Any, config: Any, limit: str, most: int) -> None:
    checks.batches_flush_at_their_limits(config, limit, most)


@pytest.mark.parametrize("ahead", [True, False])
def test_detokenized_requests_run_alongside(checks: Any, config: Any, ahead: bool) -> None:
    checks.detokenized_requests_run_alongside(config, ahead)


def test_waiting_requests_join_soon(checks: Any, config: Any) -> None:
    checks.waiting_requests_join_soon(config)


@pytest.mark.parametrize("ahead", [True, False])
def test_free_slots_start_requests_at_once(checks: Any, config: Any, ahead: bool) -> None:
    checks.free_slots_start_requests_at_once(config, ahead)


def test_rows_with_shared_prefixes_are_adjacent(checks: Any, config: Any) -> None:
    checks.rows_with_shared_prefixes_are_adjacent(config)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("blocks", [18, 30])
def test_routes_belong_to_the_sampling_weights(config: Any, ahead: bool, blocks: int) -> None:
    checks: Any = import_module("tests.rollout.vllm_fast.routes_checks")
    checks.routes_belong_to_the_sampling_weights(config, ahead, blocks)


def test_non_finite_completions_skip_route_checks(config: Any) -> None:
    checks: Any = import_module("tests.rollout.vllm_fast.routes_checks")
    checks.non_finite_completions_skip_route_checks(config)
