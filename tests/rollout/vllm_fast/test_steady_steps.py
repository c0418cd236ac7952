"""Which steps are those of the one before, by `steady_checks.py`, which imports vLLM.

The kernel has its tests in tests/gpu/test_steady_steps.py, whole engines have theirs in
tests/rollout/recording/test_packed.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checks() -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    return import_module("tests.rollout.vllm_fast.steady_checks")


@pytest.mark.parametrize(
    "what",
    [
        "a_step_with_anything_else_in_it_is_another",
        "models_and_layouts_that_are_not_covered_stay_vllms",
        "a_step_that_is_known_is_taken_once_and_leads_to_the_next",
        "whatever_is_not_a_decoding_step_by_a_graph_is_not_known",
        "a_step_that_fails_is_forgotten",
    ],
)
def test_steps(checks: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    getattr(checks, what)(monkeypatch)
