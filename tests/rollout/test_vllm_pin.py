"""Tests that engines require the pinned vLLM version and that patches check vLLM's signatures."""

from __future__ import annotations

import pytest

from keel.rollout import vllm_pin


@pytest.mark.parametrize(
    ("installed", "fits"),
    [("0.32.0", True), ("0.32.0+cpu", True), ("0.33.0", False), ("none", False)],
)
def test_only_the_pinned_version_is_accepted(
    installed: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_pin, "installed_version", lambda: installed)
    if fits:
        vllm_pin.require_version()
    else:
        with pytest.raises(RuntimeError, match=r"0\.32\.0"):
            vllm_pin.require_version()


def test_installed_vllm_is_the_pinned_one() -> None:
    vllm_pin.require_version()


def test_changed_parameters_are_refused() -> None:
    def patched(request: str, priority: int) -> None: ...

    vllm_pin.check_parameters(patched, "request priority")
    with pytest.raises(RuntimeError, match="patched"):
        vllm_pin.check_parameters(patched, "request")
