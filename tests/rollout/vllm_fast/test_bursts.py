"""Several steps at once, by `burst_checks.py`, which imports vLLM.

The scheduler's part is in test_scheduler.py, the model runner's in test_steady_steps.py; whole
engines with them are in tests/gpu/test_steady_steps.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checks() -> Any:
    return import_module("tests.rollout.vllm_fast.burst_checks")


@pytest.mark.parametrize(("masks", "room"), [(False, 0), (True, 30), (True, 9)])
def test_all_tokens_come_with_what_was_recorded_of_them(
    checks: Any, masks: bool, room: int
) -> None:
    checks.all_tokens_come_with_what_was_recorded_of_them(masks, room)


def test_a_burst_lasts_no_longer_than_it_may(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.a_burst_lasts_no_longer_than_it_may(monkeypatch)
