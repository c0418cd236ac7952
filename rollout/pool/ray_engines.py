"""Ray actors as the pool's engines. The driver that imports this does not import vLLM."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from keel.configs.schema import SamplingConfig
from keel.model import ray_timeouts
from keel.model.ray_timeouts import GONE
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Prompt
from keel.rollout.engine.worker import RolloutWorker
from keel.rollout.pool.pool import RolloutPool
from keel.rollout.spec import EngineError, EngineSpec, Progress, Started, environment

_RAISED = re.compile(r"^\s*(?:\w+\.)*\w*(?:Error|Exception|Interrupt): ", re.MULTILINE)
_DIED = re.compile(r"\bpid: (\d+)\b.*its worker process has died", re.DOTALL)
CONCURRENT_CALLS = 10_000
"""Far more groups than an engine is ever given, so that the actor never queues a call."""


class RayEngine:
    """A `RolloutWorker` in a process of its own."""

    def __init__(
        self, spec: EngineSpec, index: int = 0, *, gpu: bool, options: Mapping[str, Any]
    ) -> None:
        self.index = index
        given = {
            # On a CPU the engines share the machine with the trainer; threads bound them.
            "num_cpus": 1 if gpu else 0,
            "num_gpus": spec.config.tensor_parallel if gpu else 0,
            "max_concurrency": CONCURRENT_CALLS,
            "runtime_env": {
                "env_vars": environment(spec.config, gpu=gpu, batch_invariant=spec.batch_invariant)
            },
            **options,
        }
        self.actor = ray_timeouts.create(RolloutWorker, f"rollout engine {index}", given, spec)

    def ready(self) -> Future[Started]:
        return as_future(ray_timeouts.call(self.actor.ready))

    def generate(
        self, prompt: Prompt, *, group_size: int, sampling: SamplingConfig, record: bool, draw: int
    ) -> Future[Group]:
        called = ray_timeouts.call(self.actor.generate, prompt, group_size, sampling, record, draw)
        return as_future(called, gone=(*GONE, ObjectLostError))

    def turn(
        self, request: TurnRequest, *, sampling: SamplingConfig, record: bool
    ) -> Future[TurnResult]:
        called = ray_timeouts.call(self.actor.turn, request, sampling, record)
        return as_future(called, gone=(*GONE, ObjectLostError))

    def update(self, version: int, buckets: Sequence[ObjectRef]) -> Future[int]:
        return as_future(ray_timeouts.call(self.actor.update, version, list(buckets)))

    def progress(self) -> Future[Progress]:
        return as_future(ray_timeouts.call(self.actor.progress))

    def stats(self) -> Future[dict[str, float]]:
        """See `EngineThread.stats`."""
        return as_future(ray_timeouts.call(self.actor.stats))

    def sleep(self) -> Future[None]:
        return as_future(ray_timeouts.call(self.actor.sleep))

    def kill(self) -> None:
        ray_timeouts.kill(self.actor)


def ray_pool(
    spec: EngineSpec,
    *,
    gpu: bool,
    startup_timeout_s: float,
    update_timeout_s: float | None = None,
    options: Callable[[int], Mapping[str, Any]] | None = None,
) -> RolloutPool:
    """The engines of a run, not started yet. `options(i)` are added to those of engine i's actor,
    each time that it is started."""
    return RolloutPool(
        spec.config,
        lambda index: RayEngine(spec, index, gpu=gpu, options=options(index) if options else {}),
        startup_timeout_s=startup_timeout_s,
        update_timeout_s=update_timeout_s,
        translate=_as_engine_errors,
    )


def _as_engine_errors(sent: Future[int]) -> Future[int]:
    """The same, with an `EngineError` for an engine that died or is late."""
    future: Future[int] = Future()

    def done(sent: Future[int]) -> None:
        error = sent.exception()
        if error is not None:
            future.set_exception(_as_engine_error(error))
        else:
            future.set_result(sent.result())

    sent.add_done_callback(done)
    return future


def as_future(ref: ObjectRef, gone: tuple[type[RayError], ...] = GONE) -> Future[Any]:
    """The result of an actor's call. Cancelling the future cancels the call.

    A dead actor, or one that is late by its own clock, is an `EngineError`; any other exception of
    the call is passed on as it was raised. gone: what says so; `ObjectLostError` too where the
    actor's node had the result.
    """
    future: Future[Any] = Future()

    def arrived(inner: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        error = inner.exception()
        if error is None:
            future.set_result(inner.result())
        elif isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
            future.set_exception(_as_engine_error(error.cause, gone))
        else:
            future.set_exception(_as_engine_error(error, gone))

    def cancelled(outer: Future[Any]) -> None:
        if outer.cancelled():
            ray.cancel(ref)

    future.add_done_callback(cancelled)
    ref.future().add_done_callback(arrived)
    return future


def _as_engine_error(
    error: BaseException, gone: tuple[type[RayError], ...] = GONE
) -> BaseException:
    """The same, or an `EngineError` if it says that an engine died or is late."""
    if isinstance(error, gone):
        reason = _reason(error)
    elif isinstance(error, TimeoutError):
        reason = str(error)
    else:
        return error
    engine_error = EngineError(reason)
    engine_error.__cause__ = error
    return engine_error


def _reason(error: RayError) -> str:
    """Why an actor died, without the traceback of its constructor."""
    text = (isinstance(error, RayActorError) and ray_timeouts.death_reason(error)) or str(error)
    if died := _DIED.search(text):  # then all that Ray has is guesses, a page of them
        return (
            f"its process {died[1]} has died: it was killed, by the kernel perhaps where memory is "
            "short (dmesg), or has crashed"
        )
    raised = [found.start() for found in _RAISED.finditer(text)]
    return " ".join(text[raised[-1] :].split()) if raised else " ".join(text.split())
