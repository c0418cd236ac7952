"""The fast scheduler beside vLLM's own, by `scheduler_checks.py` and
`routes_checks.py`, which import vLLM."""

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
def test_answers_and_recordings_are_whole(
    checks: Any, config: Any, ahead: bool, blocks: int, updates: bool, cuts: bool
) -> None:
    checks.answers_and_recordings_are_whole(config, ahead, blocks, updates, cuts)


def test_most_steps_of_a_quiet_engine_are_fast(checks: Any, config: Any) -> None:
    checks.most_steps_of_a_quiet_engine_are_fast(config)


@pytest.mark.parametrize("waiting", [0, 8])
def test_most_steps_of_turns_are_fast(checks: Any, config: Any, waiting: int) -> None:
    checks.most_steps_of_turns_are_fast(config, waiting)


@pytest.mark.parametrize(("limit", "most"), [("MAX_STEPS", 16), ("MAX_IDS", 400)])
def test_a_run_is_written_back_before_it_holds_too_much(
    checks: Any, config: Any, limit: str, most: int
) -> None:
    checks.a_run_is_written_back_before_it_holds_too_much(config, limit, most)


@pytest.mark.parametrize("ahead", [True, False])
def test_one_that_vllm_reads_goes_on_beside_the_run(checks: Any, config: Any, ahead: bool) -> None:
    checks.one_that_vllm_reads_goes_on_beside_the_run(config, ahead)


def test_nobody_waits_for_long(checks: Any, config: Any) -> None:
    checks.nobody_waits_for_long(config)


@pytest.mark.parametrize("ahead", [True, False])
def test_nothing_waits_for_an_answer_to_end_while_there_is_room(
    checks: Any, config: Any, ahead: bool
) -> None:
    checks.nothing_waits_for_an_answer_to_end_while_there_is_room(config, ahead)


def test_rows_that_begin_alike_stand_side_by_side(checks: Any, config: Any) -> None:
    checks.rows_that_begin_alike_stand_side_by_side(config)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("blocks", [18, 30])
def test_every_row_is_of_the_weights_that_sampled_the_next_token(
    config: Any, ahead: bool, blocks: int
) -> None:
    checks: Any = import_module("tests.rollout.vllm_fast.routes_checks")
    checks.every_row_is_of_the_weights_that_sampled_the_next_token(config, ahead, blocks)


def test_of_a_completion_that_is_not_finite_nothing_else_is_looked_at(config: Any) -> None:
    checks: Any = import_module("tests.rollout.vllm_fast.routes_checks")
    checks.of_a_completion_that_is_not_finite_nothing_else_is_looked_at(config)
