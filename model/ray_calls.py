"""Ray's calls that wait for another process, each with a deadline.

Where Ray's node process (raylet) or its control service (GCS) has stopped, `ray.put`, `ray.nodes`
and `ray.shutdown` never return, and heed no Ctrl-C; nor does an actor's method with large arguments
(`method.remote`). So each call is made on a thread of its own, which is left behind where it does
not come back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

NAME = "KEEL_PROCESS"
"""Environment variable with the name of an actor, by which its process is found."""
PUT_S = 120.0
"""Longest way into the object store, in seconds. A bucket of weights takes one."""
CALL_S = 60.0
"""Longest wait for Ray's own processes to answer."""
BEYOND_S = 10.0
"""Past the deadline of a call that has one."""
LOOK_S = 0.2

T = TypeVar("T")


class RayLost(RuntimeError):
    """One of Ray's own processes is gone, or stands still: nothing on Ray goes on."""


class Unanswered(TimeoutError):
    """Ray's own processes on this machine did not answer in time."""


LOSSES = (
    *(RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError),
    *(ObjectLostError, Unanswered),
)


def of_a_loss(error: BaseException) -> bool:
    """Whether it says that a process or a node is gone, or what it held, or a Ray that did not
    answer; here, or where the call was carried out."""
    return isinstance(cause(error), LOSSES)


def cause(error: BaseException) -> BaseException:
    """What was raised where a call was carried out; any other error itself."""
    return error.cause if isinstance(error, RayTaskError) else error


class _State:
    lost = ""
    """Why Ray is of no use any more."""


def lose(why: str) -> None:
    """From now on every call here raises `RayLost` at once, those that are under way too."""
    _State.lost = _State.lost or why


def lost() -> str:
    """What `lose` was told; "" where Ray is well, as far as is known."""
    return _State.lost


def joined() -> None:
    """There is a new cluster."""
    _State.lost = ""


def bounded(call: Callable[[], T], seconds: float, what: str) -> T:
    """What `call` returns, or raises.

    `Unanswered` naming `what` after `seconds`; `RayLost` as soon as Ray is, and without the call
    where it has been before.
    """
    if _State.lost:
        raise RayLost(_State.lost)
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # the caller's
            future.set_exception(error)

    threading.Thread(target=run, name="keel-ray-call", daemon=True).start()
    waited = 0.0
    while not future.done():
        if _State.lost:
            raise RayLost(_State.lost)
        if waited >= seconds:
            raise Unanswered(
                f"waited {seconds:g} s for Ray to {what}: one of its processes does not answer "
                "(raylet or gcs_server; their logs: session_latest/logs below RAY_TMPDIR)"
            )
        began = time.monotonic()
        futures.wait([future], min(seconds - waited, LOOK_S))
        # Where that took longer this process was itself stopped, and has not waited.
        waited += min(time.monotonic() - began, 2 * LOOK_S)
    return future.result()


def awaited(future: Future[T]) -> T:
    """The result of a future that has a deadline of its own; `RayLost` as soon as Ray is."""
    while not future.done():
        if _State.lost:
            raise RayLost(_State.lost)
        futures.wait([future], LOOK_S)
    return future.result()


def get(ref: Any, *, seconds: float) -> Any:
    """`ray.get`. Raises `ray.exceptions.GetTimeoutError`, which is a TimeoutError, after `seconds`,
    and what the call has raised."""
    return bounded(lambda: ray.get(ref, timeout=seconds), seconds + BEYOND_S, "fetch a result")


def wait(refs: Sequence[Any], *, seconds: float) -> tuple[list[Any], list[Any]]:
    """`ray.wait` for the first of `refs`."""

    def look() -> tuple[list[Any], list[Any]]:
        # What is fetched here is in the object store of this node, which another process keeps.
        return ray.wait(list(refs), timeout=seconds)

    return bounded(look, seconds + BEYOND_S, "say which calls are done")


def put(value: Any) -> Any:
    """`ray.put`."""
    return bounded(lambda: ray.put(value), PUT_S, "take an object into its store")


def call(method: Any, *arguments: Any, **named: Any) -> Any:
    """`method.remote` of an actor: a reference to what it is going to return."""
    return bounded(lambda: method.remote(*arguments, **named), CALL_S, "take a call for an actor")


def tidy(act: Callable[[], Any], seconds: float, what: str) -> None:
    """`bounded`, of what only cleans up: raises nothing, which would hide the error that there is,
    or keep the rest from being cleaned up. A Ray that does not answer is lost from then on."""
    try:
        bounded(act, seconds, what)
    except Unanswered as error:
        lose(str(error))
    except (RayLost, RayError):
        pass


def kill(actor: Any) -> None:
    """`ray.kill`, as `tidy` does it. Where Ray is lost, so is the actor, or `end_ray` ends it."""
    tidy(lambda: ray.kill(actor), CALL_S, "end an actor")


def create(
    kind: type[Any], name: str, options: Mapping[str, Any], *arguments: Any, **named: Any
) -> Any:
    """A new actor of class `kind`. name: what people know it by, which its process and all that it
    starts have in their environment (`NAME`); options: Ray's."""
    given = dict(options)
    runtime = dict(given.pop("runtime_env", {}))
    runtime["env_vars"] = {**runtime.get("env_vars", {}), NAME: name}
    remote: Any = ray.remote(kind).options(**given, runtime_env=runtime)
    return bounded(lambda: remote.remote(*arguments, **named), CALL_S, f"create {name}")
