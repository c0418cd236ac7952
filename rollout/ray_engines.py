"""Runs the pool's engines as Ray actors. Importing this module does not import vLLM."""

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayActorError, RayError

from keel.configs.schema import SamplingConfig
from keel.model import ray_timeouts
from keel.model.ray_timeouts import GONE
from keel.rollout.engine.worker import RolloutWorker, attach, count_completions
from keel.rollout.pool import RolloutPool
from keel.rollout.spec import EngineError, EngineProgress, EngineSpec, SampleRequest, env_vars
from keel.weights.sync import Receiver

_RAISED = re.compile(r"^\s*(?:\w+\.)*\w*(?:Error|Exception|Interrupt): ", re.MULTILINE)
_DIED = re.compile(r"\bpid: (\d+)\b.*its worker process has died", re.DOTALL)
_CONCURRENT_CALLS = 10_000  # more than an engine receives, so the actor never queues a call
_RESULT_LOST = (*GONE, ObjectLostError)  # a result was lost with the actor's node


class _RayEngine:
    """An engine that runs in a Ray actor (`RolloutWorker`)."""

    def __init__(
        self, spec: EngineSpec, index: int = 0, *, gpu: bool, options: Mapping[str, Any]
    ) -> None:
        actor_options = {
            # On a CPU, engines share the machine with the trainer; threads bound them.
            "num_cpus": 1 if gpu else 0,
            "num_gpus": spec.config.tensor_parallel if gpu else 0,
            "max_concurrency": _CONCURRENT_CALLS,
            "runtime_env": {
                "env_vars": env_vars(spec.config, gpu=gpu, batch_invariant=spec.batch_invariant)
            },
            **options,
        }
        if gpu and not actor_options["num_gpus"]:
            spec = replace(spec, spread=True)
        name = f"rollout engine {index}"
        self._actor = ray_timeouts.create(RolloutWorker, name, actor_options, spec)
        self.receiver = Receiver(index, self._actor)

    def _call(self, method: str, *args: Any) -> Future[Any]:
        return as_future(ray_timeouts.call(getattr(self._actor, method), *args), _RESULT_LOST)

    def ready(self) -> Future[tuple[str, ...]]:
        return self._call("ready")

    def sample(
        self, request: SampleRequest, *, sampling: SamplingConfig, record: bool
    ) -> Future[Any]:
        method = self._actor.sample.options(num_returns=1 + count_completions(request))
        ref, *keys = ray_timeouts.call(method, request, sampling, record)
        return as_future(ref, _RESULT_LOST, lambda result: attach(result, keys))

    def guarded(self, delivery: Future[int]) -> Future[int]:
        return _with_engine_errors(delivery)

    def progress(self) -> Future[EngineProgress]:
        return self._call("progress")

    def sleep(self) -> Future[None]:
        return self._call("sleep")

    def kill(self) -> None:
        ray_timeouts.kill(self._actor)


def ray_pool(
    spec: EngineSpec,
    *,
    gpu: bool,
    startup_timeout_s: float,
    update_timeout_s: float | None = None,
    options: Callable[[int], Mapping[str, Any]] | None = None,
) -> RolloutPool:
    """Build a pool of engines in Ray actors without starting them. `options(i)` returns extra actor
    options each time engine i is started."""
    return RolloutPool(
        spec.config,
        lambda index: _RayEngine(spec, index, gpu=gpu, options=options(index) if options else {}),
        startup_timeout_s=startup_timeout_s,
        update_timeout_s=update_timeout_s,
    )


def as_future(
    ref: ObjectRef,
    gone: tuple[type[RayError], ...] = GONE,
    convert: Callable[[Any], Any] = lambda result: result,
) -> Future[Any]:
    """Convert an actor call to a future. Cancelling the future cancels the call. The errors in
    `gone` and timeouts inside the actor become `EngineError`. The result is passed to `convert`."""
    future = _with_engine_errors(ref.future(), gone, convert)

    def cancelled(outer: Future[Any]) -> None:
        if outer.cancelled():
            ray.cancel(ref)

    future.add_done_callback(cancelled)
    return future


def _with_engine_errors(
    inner: Future[Any],
    gone: tuple[type[RayError], ...] = GONE,
    convert: Callable[[Any], Any] = lambda result: result,
) -> Future[Any]:
    """Convert a future's errors to `EngineError` if they were caused by a dead or unresponsive
    engine."""
    outer: Future[Any] = Future()

    def done(inner: Future[Any]) -> None:
        if not outer.set_running_or_notify_cancel():
            return
        error = inner.exception()
        if error is None:
            outer.set_result(convert(inner.result()))
            return
        error = ray_timeouts.cause(error)
        if isinstance(error, (*gone, TimeoutError)):
            reason = str(error) if isinstance(error, TimeoutError) else _death_reason(error)
            engine_error = EngineError(reason)
            engine_error.__cause__ = error
            error = engine_error
        outer.set_exception(error)

    inner.add_done_callback(done)
    return outer


def _death_reason(error: BaseException) -> str:
    text = (isinstance(error, RayActorError) and ray_timeouts.death_reason(error)) or str(error)
    if died := _DIED.search(text):  # Ray then adds a page of guesses
        return f"its process {died[1]} crashed or was killed. Check dmesg for out of memory"
    raised = [match.start() for match in _RAISED.finditer(text)]
    return " ".join((text[raised[-1] :] if raised else text).split())
