"""Helpers for `concurrent.futures.Future`, threads and event loops."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, TypeVar

from keel.rl.supervisor import JOIN_S

POLL_S = 0.2  # seconds between two calls of `should_abort` during a wait
T = TypeVar("T")
U = TypeVar("U")


class Cancelled(Exception):
    """Raised when the run is aborted while waiting."""


def never_abort() -> bool:
    return False


def wait_for(future: Future[T], should_abort: Callable[[], bool]) -> T:
    """Wait for a future and return its result. Raises `Cancelled` if the run is aborted."""
    while not future.done():
        if should_abort():
            raise Cancelled
        wait([future], POLL_S)
    return future.result()


def failed(error: BaseException) -> Future[Any]:
    """Return a future that has already failed with `error`."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def done() -> Future[None]:
    """Return a future that has already completed with None."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def on_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run `call` on a new daemon thread and return a future for its result. The caller can abandon
    the thread if `call` hangs."""
    result: Future[T] = Future()
    threading.Thread(target=settle, args=(result, call), name=name, daemon=True).start()
    return result


class LoopThread:
    """An asyncio event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self, finish: Coroutine[Any, Any, object], seconds: float = JOIN_S) -> bool:
        """Run `finish` for up to `seconds`, then end the thread. Returns False on timeout."""
        future = self.submit(finish)
        try:
            if not wait([future], seconds).done:
                return False
            future.result()
            return True
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(JOIN_S)
            if not self.loop.is_running():
                self.loop.close()


async def cancel_tasks() -> None:
    """Cancel all other tasks of the running event loop and wait for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def when_all(futures: Sequence[Future[Any]], make: Callable[[], T]) -> Future[T]:
    """Call `make` once all `futures` have completed, and return a future for its result. `make`
    runs in the thread that completes the last future. Reading a failed future in `make` raises its
    error, which then fails the returned future."""
    made: Future[T] = Future()
    pending, lock = len(futures), threading.Lock()

    def one_is_done(_: Future[Any]) -> None:
        nonlocal pending
        with lock:
            pending -= 1
            if pending > 0:
                return
        settle(made, make)

    if not futures:
        settle(made, make)
    for future in futures:
        future.add_done_callback(one_is_done)
    return made


def then(first: Future[T], start: Callable[[T], Future[U]]) -> Future[U]:
    """Chain two asynchronous steps: call `start` with the result of `first`, and return a future
    for the result of the second step. The future fails if either step fails, and cancelling it
    cancels `first`."""
    last: Future[U] = Future()

    def first_is_done(_: Future[T]) -> None:
        if last.cancelled():
            return
        try:
            start(first.result()).add_done_callback(lambda done: settle(last, done.result))
        except BaseException as error:
            with suppress(InvalidStateError):
                last.set_exception(error)

    last.add_done_callback(lambda last: last.cancelled() and first.cancel())
    first.add_done_callback(first_is_done)
    return last


def settle(future: Future[T], make: Callable[[], T]) -> None:
    """Complete a future with the result of `make`, or with the error that `make` raises. A future
    that is already done keeps its result."""
    try:
        result = make()
    except BaseException as error:
        with suppress(InvalidStateError):
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(result)
