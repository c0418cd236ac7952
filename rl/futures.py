"""Combinators for `concurrent.futures.Future`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


def failed(error: BaseException) -> Future[Any]:
    """Return a failed future."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def done() -> Future[None]:
    """Return a completed future without a value."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def when_all(futures: Sequence[Future[Any]], make: Callable[[], T]) -> Future[T]:
    """Return a future of `make()`, called in the thread that completes the last of `futures`.

    `make` sees their errors when it requests their results. Its own errors fail the future.
    """
    made: Future[T] = Future()
    pending, lock = len(futures), threading.Lock()

    def one_is_done(_: Future[Any]) -> None:
        nonlocal pending
        with lock:
            pending -= 1
            if pending > 0:
                return
        _settle(made, make)

    if not futures:
        _settle(made, make)
    for future in futures:
        future.add_done_callback(one_is_done)
    return made


def then(first: Future[T], start: Callable[[T], Future[U]]) -> Future[U]:
    """Chain `first` with the future that `start` makes from its result.

    Fails if either fails. Cancelling the result cancels `first`.
    """
    last: Future[U] = Future()

    def second_is_done(second: Future[U]) -> None:
        _settle(last, second.result)

    def first_is_done(_: Future[T]) -> None:
        if last.cancelled():
            return
        try:
            start(first.result()).add_done_callback(second_is_done)
        except BaseException as error:
            with suppress(InvalidStateError):
                last.set_exception(error)

    def last_is_done(_: Future[U]) -> None:
        if last.cancelled():
            first.cancel()

    last.add_done_callback(last_is_done)
    first.add_done_callback(first_is_done)
    return last


def _settle(future: Future[T], make: Callable[[], T]) -> None:
    """Set the result of `make`, or its error."""
    try:
        result = make()
    except BaseException as error:
        with suppress(InvalidStateError):  # cancelled in the meantime
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(result)
