"""Fixtures of the judge's tests."""

import pytest

from keel.rewards.judge import servers


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_BACKOFF_S", 0.005)
