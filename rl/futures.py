"""Futures that come of other futures. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


def failed(error: BaseException) -> Future[Any]:
    """A future that has failed already."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def done() -> Future[None]:
    """A future of nothing, which is there already."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def when_all(futures: Sequence[Future[Any]], make: Callable[[], T]) -> Future[T]:
    """The result of `make`, called once all `futures` are done, in the thread that ends the last.

    Fails with what `make` raises; `make` meets their failures when it asks for their results.
    """
    made: Future[T] = Future()
    left, gate = len(futures), threading.Lock()

    def one_is_done(_: Future[Any]) -> None:
        nonlocal left
        with gate:
            left -= 1
            if left > 0:
                return
        _settle(made, make)

    if not futures:
        _settle(made, make)
    for future in futures:
        future.add_done_callback(one_is_done)
    return made


def then(first: Future[T], go_on: Callable[[T], Future[U]]) -> Future[U]:
    """The result of the future that `go_on` makes of the result of `first`.

    Fails as the one or the other does. Cancelling it cancels `first`.
    """
    last: Future[U] = Future()

    def second_is_done(second: Future[U]) -> None:
        _settle(last, second.result)

    def first_is_done(_: Future[T]) -> None:
        if last.cancelled():
            return
        try:
            go_on(first.result()).add_done_callback(second_is_done)
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
    """Set the result of `make`, or what it raises (a cancelled future's too)."""
    try:
        result = make()
    except BaseException as error:
        with suppress(InvalidStateError):  # cancelled meanwhile
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(result)
