"""Deadlines for Ray calls that wait for another process.

If Ray's node process (raylet) or control service (GCS) hangs, `ray.put`, `ray.nodes`,
`ray.shutdown` and an actor's `method.remote` with large arguments never return and ignore Ctrl-C.
So each call runs on another thread, which is abandoned if the call never returns.
"""

from __future__ import annotations

import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

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

NAME = "KEEL_PROCESS"
"""Environment variable that identifies an actor's process; see `process_name`."""
CALL_S = 60.0
"""Timeout for an answer from Ray's own processes."""
POLL_S = 0.2
_PUT_S = 120.0
"""Timeout for a transfer to or from the object store. A bucket of weights takes about a second."""
_GRACE_S = 10.0
"""Extra time for a call that has its own timeout."""
_WAIT_POLL_S = 1.0
"""Longest single `ray.wait`."""
_LEFT = "this process has left its cluster"
_NODE_GONE = re.compile(
    r"ip: (?P<address>\S+).*its node has died.*actor's node was terminated \w+: (?P<why>[^.\n]*)",
    re.DOTALL,
)

T = TypeVar("T")


class RayLost(RuntimeError):
    """One of Ray's own processes died or hangs, so Ray is unusable."""


class Unanswered(TimeoutError):
    """Ray's own processes on this machine did not answer in time."""


GONE = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError)
"""Errors for an actor that no longer exists. `OutOfMemoryError`: Ray killed it because its machine
ran out of memory."""


def is_loss(error: BaseException) -> bool:
    """Return whether a process, node or object was lost, or Ray failed to answer."""
    return isinstance(cause(error), (*GONE, ObjectLostError, Unanswered))


def cause(error: BaseException) -> BaseException:
    """Return the error that a remote call raised, or `error` if it is not from a remote call."""
    return error.cause if isinstance(error, RayTaskError) else error


def death_reason(error: RayError) -> str:
    """Return why an actor died, or "" if Ray's message only guesses."""
    text = str(error)
    if isinstance(error, ActorUnavailableError):
        details = text.partition("RPC error: ")[2].partition(" rpc_code")[0]
        return f"the connection to it is lost{details and f' ({details})'}"
    if node := _NODE_GONE.search(text):
        return f"its node ({node['address']}) is gone: {node['why'].strip()}"
    return "" if "worker process has died" in text else text


class _State:
    lost = ""
    """Why Ray is unusable; "" while it works."""
    leaving = left = False
    """True while this process leaves its cluster, and after it has left."""
    start = secrets.token_hex(4)
    """Id that distinguishes this start's actors from others on the cluster."""


class PollClock:
    """Measures the time between polls, each capped at twice its nominal length.

    The time during which this process was stopped or its machine slept therefore does not count.
    """

    def __init__(self, poll_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock, self._last = 2 * poll_s, clock, clock()

    def elapsed(self) -> float:
        """Seconds since the previous poll, capped."""
        last, self._last = self._last, self._clock()
        return min(self._last - last, self._limit)


class Deadline:
    """Time budget of a wait that polls."""

    def __init__(
        self,
        seconds: float,
        poll_s: float = _WAIT_POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._polls, self._remaining = PollClock(poll_s, clock), seconds

    def remaining(self) -> float:
        """Seconds left, at least 0. Call it once per poll."""
        self._remaining -= self._polls.elapsed()
        return max(0.0, self._remaining)


def mark_lost(reason: str) -> None:
    """Make all current and future calls raise `RayLost`. The first reason is kept."""
    _State.lost = _State.lost or reason


def lost_reason() -> str:
    """Return the reason passed to `mark_lost`, or "" if Ray is believed to work."""
    return _State.lost


def joined() -> None:
    """Reset the state for a new cluster, or a new start on one."""
    _State.lost, _State.start, _State.left = "", secrets.token_hex(4), False


def shut_down(act: Callable[[], Any], seconds: float, what: str) -> None:
    """Leave the cluster by `act`, with errors suppressed as in `attempt`.

    All other calls then raise `RayLost` until there is another cluster: Ray itself would start one
    for a late caller.
    """
    _State.leaving = _State.left = ray.is_initialized()
    try:
        attempt(act, seconds, what, leaving=True)
    finally:
        _State.leaving = False


def _unusable() -> str:
    """Return why calls must not be made or waited for, or ""."""
    left = _State.leaving or (_State.left and not ray.is_initialized())
    return _State.lost or (_LEFT if left else "")


def start() -> str:
    """Return the id of this start, which its actors carry in their environment."""
    return _State.start


def process_name(mark: str, start: str) -> str:
    """Return the actor name in a process's `NAME` variable, or "" if another start created it."""
    owner, _, name = mark.partition("/")
    return name if owner == start else ""


def bounded(call: Callable[[], T], seconds: float, what: str, *, leaving: bool = False) -> T:
    """Return the result of `call`, or raise its error.

    Raises `Unanswered` naming `what` after `seconds`, and `RayLost` as soon as Ray is lost.
    leaving: `call` shuts Ray down, and is exempt from the check for that.
    """

    def check() -> None:
        if reason := _State.lost if leaving else _unusable():
            raise RayLost(reason)

    check()
    task = _Task(call)
    _Caller.run(task)
    deadline = Deadline(seconds, POLL_S)
    while not task.done.is_set():
        remaining = deadline.remaining()
        check()
        if not remaining:
            raise Unanswered(
                f"waited {seconds:g} s for Ray to {what}, but raylet or gcs_server does not "
                "answer. See their logs in session_latest/logs under RAY_TMPDIR"
            )
        task.done.wait(min(remaining, POLL_S))
    if task.error is not None:
        raise task.error
    return task.result


class _Task:
    """A call for another thread, with its result or error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.done = call, threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:  # raised to the caller
            self.error = error
        self.done.set()


class _Caller:
    """A reusable daemon thread for calls; a call that hangs keeps its thread."""

    _idle: ClassVar[list[_Caller]] = []

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="keel-ray-call", daemon=True).start()

    @classmethod
    def run(cls, task: _Task) -> None:
        """Start `task` on an idle or new thread."""
        try:
            caller = cls._idle.pop()
        except IndexError:
            caller = cls()
        caller._tasks.put(task)

    def _loop(self) -> None:
        while True:
            self._tasks.get().run()
            self._idle.append(self)


def awaited(future: Future[T]) -> T:
    """Wait for a future that has its own timeout. Raises `RayLost` as soon as Ray is lost."""
    while not future.done():
        if reason := _unusable():
            raise RayLost(reason)
        futures.wait([future], POLL_S)
    return future.result()


def get(ref: Any, *, seconds: float) -> Any:
    """Call `ray.get`. Raises `GetTimeoutError` after `seconds`, or the remote call's error."""
    ready, _ = wait([ref], seconds=seconds)
    if not ready:
        raise GetTimeoutError(f"no answer within {seconds:g} s")
    return bounded(lambda: ray.get(ref, timeout=_PUT_S), _PUT_S + _GRACE_S, "fetch a result")


def wait(refs: Sequence[Any], *, seconds: float | Deadline) -> tuple[list[Any], list[Any]]:
    """Call `ray.wait` for the first of `refs`."""
    deadline = seconds if isinstance(seconds, Deadline) else Deadline(seconds)
    remaining = deadline.remaining()
    while True:
        poll_s = min(remaining, _WAIT_POLL_S)

        def poll(poll_s: float = poll_s) -> tuple[list[Any], list[Any]]:
            # The results are in the object store of this node, which another process keeps.
            return ray.wait(list(refs), timeout=poll_s)

        # A raylet that was stopped answers after it resumes, if it does.
        ready, pending = bounded(poll, remaining + _GRACE_S, "report which calls are done")
        remaining = deadline.remaining()
        if ready or not remaining:
            return ready, pending


def put(value: Any) -> Any:
    """Call `ray.put`."""
    return bounded(lambda: ray.put(value), _PUT_S, "store an object")


def call(method: Any, *arguments: Any, **named: Any) -> Any:
    """Call `method.remote` of an actor and return the reference to its result."""
    return bounded(lambda: method.remote(*arguments, **named), CALL_S, "accept a call of an actor")


def attempt(act: Callable[[], Any], seconds: float, what: str, *, leaving: bool = False) -> None:
    """Run a clean-up call like `bounded`, but suppress its errors.

    An error here would hide the original one, or skip the remaining clean-up. If Ray does not
    answer, it counts as lost from then on.
    """
    try:
        bounded(act, seconds, what, leaving=leaving)
    except Unanswered as error:
        mark_lost(str(error))
    except (RayLost, RayError):
        pass


def kill(actor: Any) -> None:
    """Call `ray.kill` and suppress errors. If Ray is lost, `end_ray` ends the actor."""
    attempt(lambda: ray.kill(actor), CALL_S, "end an actor")


def create(
    kind: type[Any], name: str, options: Mapping[str, Any], *arguments: Any, **named: Any
) -> Any:
    """Create an actor of class `kind`.

    name: human-readable name, which the environment of its process has in `NAME`;
    options: Ray's actor options.
    """
    actor_options = dict(options)
    runtime = dict(actor_options.pop("runtime_env", {}))
    runtime["env_vars"] = {**runtime.get("env_vars", {}), NAME: f"{_State.start}/{name}"}
    remote: Any = ray.remote(kind).options(**actor_options, runtime_env=runtime)
    return bounded(lambda: remote.remote(*arguments, **named), CALL_S, f"create {name}")
