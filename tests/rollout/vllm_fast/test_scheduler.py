"""Runs `scheduler_checks.py`, which imports vLLM."""

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


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        # Asynchronous scheduling, number of blocks, weight updates, deadlines.
        ("outputs_equal_vllms", (True, 400, False, False)),
        ("outputs_equal_vllms", (True, 400, True, True)),
        ("outputs_equal_vllms", (True, 30, False, True)),
        ("outputs_equal_vllms", (True, 30, True, False)),
        ("outputs_equal_vllms", (False, 400, True, False)),
        ("outputs_equal_vllms", (False, 30, False, True)),
        ("routes_belong_to_the_sampling_weights", (True, 18)),
        ("routes_belong_to_the_sampling_weights", (False, 30)),
        ("non_finite_completions_skip_route_checks", ()),
    ],
)
def test_scheduler(checks: Any, config: Any, check: str, arguments: tuple[Any, ...]) -> None:
    getattr(checks, check)(config, *arguments)
