"""vLLM internals that the engine and its recorders use. Importing this does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keel.rollout.vllm_pin import check_parameters

if TYPE_CHECKING:
    from vllm import LLMEngine

MAX_AHEAD = 64
"""Steps that vLLM may need to drain when it is paused; it schedules one or two ahead."""
PAUSE = 0
"""vLLM's level of sleep that only stops scheduling."""


def scheduler_of(engine: LLMEngine) -> Any:
    return _core(engine).scheduler


def runs_v2(engine: LLMEngine) -> bool:
    """Whether vLLM chose Model Runner V2."""
    return engine.vllm_config.use_v2_model_runner


def pause(engine: LLMEngine, step: Callable[[], object]) -> None:
    """Schedule nothing more, and `step` until nothing is in flight: vLLM does not let its caches be
    reset before. `resume` undoes it, and so does waking up from sleep.

    vLLM's own pause leaves what is in flight to the caller, and has no word for whether there is
    any: its `EngineCore` does.
    """
    engine.sleep(level=PAUSE, mode="keep")
    core = _core(engine)
    for _ in range(MAX_AHEAD):
        if not core.scheduler.has_requests() and not core.batch_queue:
            return
        step()
    raise RuntimeError(f"vLLM still has work {MAX_AHEAD} steps after it was paused")


def resume(engine: LLMEngine) -> None:
    if not engine.wake_up(["scheduling"]):
        raise RuntimeError("vLLM cannot resume after a weight update: part of its memory is asleep")


def cut_short(scheduler: Any, request_id: str) -> bool:
    """Have a request end with its next token, or with those in flight: as if these were as many
    as it may have, so that all that a recorder reads at an end is there. False, and nothing is
    done, where no token of it has been sampled yet."""
    if (flush := getattr(scheduler, "keel_flush", None)) is not None:
        flush()
    request = scheduler.requests[request_id]
    in_flight = request.num_output_placeholders
    if request.num_output_tokens + in_flight == 0:
        return False
    limit = request.num_output_tokens + max(1, in_flight)
    request.max_tokens = min(request.max_tokens, limit)
    return True


def before_preemption(
    scheduler: Any, tell: Callable[[str, Callable[[], Sequence[int]], int], None]
) -> None:
    """Call `tell(request, blocks, tokens)` before a request that has begun to sample is preempted:
    its first `tokens` have a next one, sampled or in flight, and `blocks()` are its KV
    blocks."""
    preempt = scheduler._preempt_request
    check_parameters(preempt, "request timestamp drop_stale_output")

    def preempted(request: Any, *args: Any, **kwargs: Any) -> None:
        name = request.request_id
        # A first token that is in flight counts: it is delivered after the preemption.
        if request.num_output_tokens + request.num_output_placeholders:
            tell(
                name,
                lambda: scheduler.kv_cache_manager.get_block_ids(name)[0],
                request.num_computed_tokens,
            )
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = preempted


def _core(engine: LLMEngine) -> Any:
    client: Any = engine.engine_core  # of the kind that runs in this process
    return client.engine_core
