"""Which steps and layers attention reads prompts once for, by `cascade_checks.py`, which imports
vLLM. The kernels have their tests in tests/gpu/test_cascade.py."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checks() -> Any:
    return import_module("tests.rollout.vllm_fast.cascade_checks")


@pytest.mark.parametrize(
    "what",
    [
        "only_steps_that_decode_go_keels_way",
        "layers_that_are_not_covered_stay_vllms",
        "the_first_layer_of_a_step_plans_for_all",
    ],
)
def test_attention(checks: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    getattr(checks, what)(monkeypatch)


def test_where_it_is_not_wanted_nothing_is_replaced(
    checks: Any, logged: list[logging.LogRecord]
) -> None:
    checks.where_it_is_not_wanted_nothing_is_replaced(logged)
