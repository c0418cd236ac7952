"""Add deadlines to Ray calls that wait for another process.

If Ray's node process (raylet) or control service (GCS) hangs, some calls never return, and Ctrl-C
does not interrupt them: `ray.put`, `ray.nodes`, `ray.shutdown`, and an actor's `method.remote` with
large arguments. Each call therefore runs on another thread, which is abandoned if the call never
returns.
"""

import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from keel.rl.futures import POLL_S, on_thread
from keel.rl.supervisor import GRACE_S

NAME = "KEEL_PROCESS"
"""Environment variable that identifies an actor's process (see `process_name`)."""
CALL_S = 60.0
"""Maximum number of seconds to wait for an answer from Ray's own processes."""
_PUT_S = 120.0
"""Maximum number of seconds to store an object. A bucket of weights takes about a second."""
_MARGIN_S = 10.0  # added to Ray's own limits; short, because only this machine's raylet must answer
NODE_LOST_S = 90.0
"""Seconds after which Ray has declared an unresponsive node lost. It takes 65 s."""
_NODE_GONE = re.compile(
    r"ip: (?P<address>\S+).*its node has died.*actor's node was terminated \w+: (?P<why>[^.\n]*)",
    re.DOTALL,
)

T = TypeVar("T")


class RayLost(RuntimeError):
    """Raised if one of Ray's own processes has died or hung. Ray is unusable from then on."""


class Unanswered(TimeoutError):
    """Raised if Ray's own processes on this machine don't respond in time."""


GONE = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError)
"""Errors that Ray raises for an actor that no longer exists. `OutOfMemoryError` means that Ray
killed the actor because its machine ran out of memory."""


def is_loss(error: BaseException) -> bool:
    """Return True if the error means that a process, node or object was lost, or that Ray didn't
    respond."""
    return isinstance(cause(error), (*GONE, ObjectLostError, Unanswered))


def cause(error: BaseException) -> BaseException:
    """Return the original error behind a failed remote call. Other errors are returned
    unchanged."""
    return error.cause if isinstance(error, RayTaskError) else error


def death_reason(error: RayError) -> str:
    """Return why an actor died, or "" if Ray doesn't know."""
    text = str(error)
    if isinstance(error, ActorUnavailableError):
        details = text.partition("RPC error: ")[2].partition(" rpc_code")[0]
        return f"the connection to it is lost{details and f' ({details})'}"
    if node := _NODE_GONE.search(text):
        return f"its node ({node['address']}) is gone: {node['why'].strip()}"
    return "" if "worker process has died" in text else text


class _State:
    lost = ""
    leaving = left = False
    session = secrets.token_hex(4)


class PollClock:
    """Measures the time between polls, counting at most twice the planned interval. It therefore
    ignores most of the time that the process was stopped or its machine was asleep."""

    def __init__(self, poll_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock, self._last = 2 * poll_s, clock, clock()

    def elapsed(self) -> float:
        last, self._last = self._last, self._clock()
        return min(self._last - last, self._limit)


class Deadline(PollClock):
    """Tracks the time remaining in a polling loop."""

    def __init__(
        self, seconds: float, poll_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(poll_s, clock)
        self._remaining = seconds

    def remaining(self) -> float:
        """Return the number of seconds left. Call this exactly once per poll."""
        self._remaining -= self.elapsed()
        return max(0.0, self._remaining)


def mark_lost(reason: str) -> None:
    """Make all current and future Ray calls raise `RayLost` with this reason. The first reason
    wins."""
    _State.lost = _State.lost or reason


def lost_reason() -> str:
    """Return the reason passed to `mark_lost`, or "" if Ray is not lost."""
    return _State.lost


def new_session() -> None:
    """Start a new session and forget that Ray was lost. Call this after joining a cluster or
    restarting on the same one."""
    _State.lost, _State.session, _State.left = "", secrets.token_hex(4), False


def shut_down(act: Callable[[], Any], seconds: float, what: str) -> None:
    """Leave the cluster by calling `act`, suppressing any errors. From then on, other calls raise
    `RayLost` until a cluster is joined again, because a late call would make Ray start a new
    cluster."""
    _State.leaving = _State.left = ray.is_initialized()
    try:
        clean_up(act, seconds, what, leaving=True)
    finally:
        _State.leaving = False


def _check_usable(leaving: bool = False) -> None:
    gone = not leaving and (_State.leaving or (_State.left and not ray.is_initialized()))
    if reason := _State.lost or ("this process has left its cluster" if gone else ""):
        raise RayLost(reason)


def session_id() -> str:
    """Return an id that changes whenever this process joins a cluster. Actors can also read the id
    from their environment."""
    return _State.session


def process_name(mark: str, session: str) -> str:
    """Extract an actor's name from its `NAME` variable. Returns "" if the actor belongs to another
    session."""
    owner, _, name = mark.partition("/")
    return name if owner == session else ""


def bounded(call: Callable[[], T], seconds: float, what: str, *, leaving: bool = False) -> T:
    """Run `call` on another thread with a deadline, then return its result or raise its error.
    Raises `Unanswered` after `seconds`, and `RayLost` as soon as Ray is lost. `what` describes the
    call in errors. Set `leaving` for a call that shuts Ray down."""
    _check_usable(leaving)
    future = on_thread(call, "keel-ray-call")
    deadline = Deadline(seconds, POLL_S)
    while not future.done():
        remaining = deadline.remaining()
        _check_usable(leaving)
        if not remaining:
            raise Unanswered(
                f"waited {seconds:g} s for Ray to {what}, but raylet or gcs_server does not "
                "answer. See their logs in session_latest/logs under RAY_TMPDIR"
            )
        futures.wait([future], min(remaining, POLL_S))
    return future.result()


def await_future(future: Future[T]) -> T:
    """Wait for a future that has its own timeout, and return its result. Raises `RayLost` as soon
    as Ray is lost."""
    while not future.done():
        _check_usable()
        futures.wait([future], POLL_S)
    return future.result()


def get(ref: Any, *, seconds: float) -> Any:
    """Call `ray.get` with a deadline. Raises `GetTimeoutError` after `seconds`."""
    ready, _ = wait([ref], seconds=seconds)
    if not ready:
        raise GetTimeoutError(f"no answer within {seconds:g} s")
    return bounded(lambda: ray.get(ref, timeout=_PUT_S), _PUT_S + _MARGIN_S, "fetch a result")


def wait(refs: Sequence[Any], *, seconds: float | Deadline) -> tuple[list[Any], list[Any]]:
    """Call `ray.wait` with a deadline. Returns the finished and pending references as soon as one
    of `refs` is ready."""

    def wait_for(seconds: float) -> tuple[list[Any], list[Any]]:
        return ray.wait(list(refs), timeout=seconds)

    deadline = seconds if isinstance(seconds, Deadline) else Deadline(seconds)
    remaining = deadline.remaining()
    while True:
        poll = partial(wait_for, min(remaining, 1.0))
        # A raylet that was stopped answers after it resumes, if it does.
        ready, pending = bounded(poll, remaining + _MARGIN_S, "report which calls are done")
        remaining = deadline.remaining()
        if ready or not remaining:
            return ready, pending


def alive_nodes(seconds: float = CALL_S) -> list[dict[str, Any]]:
    """Return Ray's descriptions of the cluster's live nodes."""
    return [node for node in bounded(ray.nodes, seconds, "list its nodes") if node["Alive"]]


def put(value: Any) -> Any:
    """Call `ray.put` with a deadline."""
    return bounded(lambda: ray.put(value), _PUT_S, "store an object")


def fetch(refs: Sequence[Any], *, seconds: float) -> dict[Any, Any]:
    """Fetch objects in parallel. Returns those that arrive within `seconds`, without any that were
    lost because their node died."""
    found: dict[Any, Any] = {}

    def wait_for_all() -> list[Any]:
        return ray.wait(list(refs), num_returns=len(refs), timeout=seconds)[0] if refs else []

    for ref in bounded(wait_for_all, seconds + _MARGIN_S, "fetch recordings"):
        with suppress(ObjectLostError):
            found[ref] = ray.get(ref, timeout=_PUT_S)
    return found


def call(method: Any, *arguments: Any, **named: Any) -> Any:
    """Call an actor's method, with a deadline for submitting the call. Returns a reference to the
    result."""
    return bounded(lambda: method.remote(*arguments, **named), CALL_S, "accept a call of an actor")


def clean_up(act: Callable[[], Any], seconds: float, what: str, *, leaving: bool = False) -> None:
    """Run a cleanup call with a deadline, suppressing errors that would hide the original one.
    Marks Ray as lost if it doesn't respond."""
    try:
        bounded(act, seconds, what, leaving=leaving)
    except Unanswered as error:
        mark_lost(str(error))
    except (RayLost, RayError):
        pass


def kill(actor: Any) -> None:
    """Call `ray.kill` with a deadline, suppressing errors."""
    clean_up(lambda: ray.kill(actor), CALL_S, "end an actor")


def stop(actors: Sequence[Any]) -> None:
    """Call `end` on actors and wait up to `GRACE_S` seconds for all of them, then kill them."""
    with suppress(RayError, RayLost, Unanswered):
        fetch([call(actor.end) for actor in actors], seconds=GRACE_S)
    for actor in actors:
        kill(actor)


def create(
    kind: type[Any], name: str, options: Mapping[str, Any], *arguments: Any, **named: Any
) -> Any:
    """Create an actor with Ray `options` and a deadline. The `NAME` environment variable of its
    process contains `name`."""
    runtime = dict(options.get("runtime_env", {}))
    runtime["env_vars"] = {**runtime.get("env_vars", {}), NAME: f"{_State.session}/{name}"}
    remote: Any = ray.remote(kind).options(**{**options, "runtime_env": runtime})
    return bounded(lambda: remote.remote(*arguments, **named), CALL_S, f"create {name}")


def exit_with_raylet() -> None:
    """Exit soon after the raylet that started this actor. Ray's own check may come hours late if
    the wall clock is set back. Does nothing outside of actors."""
    raylet = os.getppid()

    def wait_for_exit() -> None:
        while os.getppid() == raylet:
            time.sleep(1.0)
        os._exit(1)

    if NAME in os.environ:
        on_thread(wait_for_exit, "keel-raylet")
