"""Runs `cascade_checks.py`, which imports vLLM. The kernels are tested in
tests/gpu/test_cascade.py."""

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
    "check",
    [
        "only_decode_steps_use_cascade",
        "uncovered_layers_keep_vllms_attention",
        "first_layer_plans_the_step",
    ],
)
def test_attention(checks: Any, monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    getattr(checks, check)(monkeypatch)


def test_nothing_is_replaced_when_disabled(checks: Any, logged: list[logging.LogRecord]) -> None:
    checks.nothing_is_replaced_when_disabled(logged)
