"""Runs `step_reuse_checks.py`, which imports vLLM. The kernels are tested in
tests/gpu/test_step_reuse.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checks() -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    return import_module("tests.rollout.vllm_fast.step_reuse_checks")


@pytest.mark.parametrize(
    "check",
    [
        "steps_with_other_work_are_not_reused",
        "uncovered_models_keep_vllms_steps",
        "known_steps_are_reused",
        "only_graph_decode_steps_are_reused",
        "failed_steps_are_forgotten",
    ],
)
def test_steps(checks: Any, monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    getattr(checks, check)(monkeypatch)
