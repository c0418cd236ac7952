"""Ray's calls that wait for another process, each with a deadline.

Where Ray's node process (raylet) or its control service (GCS) has stopped, `ray.put`, `ray.nodes`
and `ray.shutdown` never return, and heed no Ctrl-C; nor does an actor's method with large arguments
(`method.remote`). So each call is made on another thread, which is left behind if the call never
returns.
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
"""Environment variable by which the process of an actor is found: `name_of`."""
PUT_S = 120.0
"""Longest way into the object store, in seconds. A bucket of weights takes one."""
CALL_S = 60.0
"""Longest wait for Ray's own processes to answer."""
BEYOND_S = 10.0
"""Past the deadline of a call that has one."""
LOOK_S = 0.2
LEFT = "this process has left its cluster"
TURN_S = 1.0
"""Longest single call of a wait that is made in turns."""

_NODE_GONE = re.compile(
    r"ip: (?P<address>\S+).*its node has died.*actor's node was terminated \w+: (?P<why>[^.\n]*)",
    re.DOTALL,
)

T = TypeVar("T")


class RayLost(RuntimeError):
    """One of Ray's own processes is gone, or stands still: nothing on Ray goes on."""


class Unanswered(TimeoutError):
    """Ray's own processes on this machine did not answer in time."""


GONE = (
    RayActorError,
    WorkerCrashedError,
    OutOfMemoryError,
    NodeDiedError,
    LocalRayletDiedError,
)
"""What Ray says of an actor that is no more. (`OutOfMemoryError`: that Ray killed it, because its
machine ran out of memory.)"""
LOSSES = (*GONE, ObjectLostError, Unanswered)


def of_a_loss(error: BaseException) -> bool:
    """Whether it says that a process or a node is gone, or what it held, or a Ray that did not
    answer; here, or where the call was carried out."""
    return isinstance(cause(error), LOSSES)


def cause(error: BaseException) -> BaseException:
    """What was raised where a call was carried out; any other error itself."""
    return error.cause if isinstance(error, RayTaskError) else error


def of_death(error: RayError) -> str:
    """Why an actor died, as far as Ray knows; "" where all it says is guesses."""
    text = str(error)
    if isinstance(error, ActorUnavailableError):
        how = text.partition("RPC error: ")[2].partition(" rpc_code")[0]
        return f"the connection to it is lost{how and f' ({how})'}"
    if node := _NODE_GONE.search(text):
        return f"its node ({node['address']}) is gone: {node['why'].strip()}"
    return "" if "worker process has died" in text else text


class _State:
    lost = ""
    """Why Ray is of no use any more."""
    ending = ended = False
    """Whether this process is about to leave its cluster, and whether it has left it."""
    start = secrets.token_hex(4)
    """Tells the actors of this start from those of others on the cluster."""


class Turns:
    """What the turns of a loop took, each counted as at most twice what it is meant to take: a
    process that is stopped, and its machine that sleeps, has not waited meanwhile."""

    def __init__(self, turn_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock, self._last = 2 * turn_s, clock, clock()

    def passed(self) -> float:
        """Seconds that count, of the turn that ends now."""
        last, self._last = self._last, self._clock()
        return min(self._last - last, self._most)


class Patience:
    """Seconds that a wait in turns may take."""

    def __init__(
        self, seconds: float, turn_s: float = TURN_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._turns, self._left = Turns(turn_s, clock), seconds

    def left(self) -> float:
        """Called once a turn. At least 0."""
        self._left -= self._turns.passed()
        return max(0.0, self._left)


def lose(why: str) -> None:
    """From now on every call here raises `RayLost` at once, those that are under way too."""
    _State.lost = _State.lost or why


def lost() -> str:
    """What `lose` was told; "" where Ray is well, as far as is known."""
    return _State.lost


def joined() -> None:
    """There is a new cluster, or a new start on it."""
    _State.lost, _State.start, _State.ended = "", secrets.token_hex(4), False


def shut_down(act: Callable[[], Any], seconds: float, what: str) -> None:
    """`tidy`, of how this process leaves its cluster. From now on every call here raises `RayLost`,
    those that are under way in other threads too, until there is another cluster: Ray would start
    one for whoever comes late."""
    _State.ending = _State.ended = ray.is_initialized()
    try:
        tidy(act, seconds, what, last=True)
    finally:
        _State.ending = False


def _of_no_use() -> str:
    """Why no call is to be made, or waited for; "" where there is nothing against it."""
    left = _State.ending or (_State.ended and not ray.is_initialized())
    return _State.lost or (LEFT if left else "")


def start() -> str:
    """By which the actors that are created from now on are told from those of other starts."""
    return _State.start


def name_of(mark: str, start: str) -> str:
    """Of the actor whose process has this in `NAME`; "" if another start has created it."""
    whose, _, name = mark.partition("/")
    return name if whose == start else ""


def bounded(call: Callable[[], T], seconds: float, what: str, *, last: bool = False) -> T:
    """What `call` returns, or raises. last: it is how this process leaves its cluster.

    `Unanswered` naming `what` after `seconds`; `RayLost` as soon as Ray is, and without the call
    where it has been before.
    """

    def check() -> None:
        if why := _State.lost if last else _of_no_use():
            raise RayLost(why)

    check()
    task = _Task(call)
    _Caller.run(task)
    patience = Patience(seconds, LOOK_S)
    while not task.done.is_set():
        left = patience.left()
        check()
        if not left:
            raise Unanswered(
                f"waited {seconds:g} s for Ray to {what}: one of its processes does not answer "
                "(raylet or gcs_server; their logs: session_latest/logs below RAY_TMPDIR)"
            )
        task.done.wait(min(left, LOOK_S))
    if task.error is not None:
        raise task.error
    return task.result


class _Task:
    """A call to make on another thread, and what came of it."""

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
    """A daemon thread that makes one call after another; a call that hangs keeps its thread."""

    _idle: ClassVar[list[_Caller]] = []

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="keel-ray-call", daemon=True).start()

    @classmethod
    def run(cls, task: _Task) -> None:
        """Start `task` on an idle thread, or on a new one."""
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
    """The result of a future that has a deadline of its own; `RayLost` as soon as Ray is."""
    while not future.done():
        if why := _of_no_use():
            raise RayLost(why)
        futures.wait([future], LOOK_S)
    return future.result()


def get(ref: Any, *, seconds: float) -> Any:
    """`ray.get`. Raises `ray.exceptions.GetTimeoutError`, which is a TimeoutError, after `seconds`,
    and what the call has raised."""
    ready, _ = wait([ref], seconds=seconds)
    if not ready:
        raise GetTimeoutError(f"no answer within {seconds:g} s")
    return bounded(lambda: ray.get(ref, timeout=PUT_S), PUT_S + BEYOND_S, "fetch a result")


def wait(refs: Sequence[Any], *, seconds: float | Patience) -> tuple[list[Any], list[Any]]:
    """`ray.wait` for the first of `refs`."""
    patience = seconds if isinstance(seconds, Patience) else Patience(seconds)
    left = patience.left()
    while True:
        turn = min(left, TURN_S)

        def look(turn: float = turn) -> tuple[list[Any], list[Any]]:
            # What is fetched is in the object store of this node, which another process keeps.
            return ray.wait(list(refs), timeout=turn)

        # A raylet that stands still answers once it goes on, if it does.
        ready, waiting = bounded(look, left + BEYOND_S, "say which calls are done")
        left = patience.left()
        if ready or not left:
            return ready, waiting


def put(value: Any) -> Any:
    """`ray.put`."""
    return bounded(lambda: ray.put(value), PUT_S, "take an object into its store")


def call(method: Any, *arguments: Any, **named: Any) -> Any:
    """`method.remote` of an actor: a reference to what it is going to return."""
    return bounded(lambda: method.remote(*arguments, **named), CALL_S, "take a call for an actor")


def tidy(act: Callable[[], Any], seconds: float, what: str, *, last: bool = False) -> None:
    """`bounded`, of what only cleans up: raises nothing, which would hide the error that there is,
    or keep the rest from being cleaned up. A Ray that does not answer is lost from then on."""
    try:
        bounded(act, seconds, what, last=last)
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
    starts have in their environment, with `start` (`NAME`); options: Ray's."""
    given = dict(options)
    runtime = dict(given.pop("runtime_env", {}))
    runtime["env_vars"] = {**runtime.get("env_vars", {}), NAME: f"{_State.start}/{name}"}
    remote: Any = ray.remote(kind).options(**given, runtime_env=runtime)
    return bounded(lambda: remote.remote(*arguments, **named), CALL_S, f"create {name}")
