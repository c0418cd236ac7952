"""Future combinators: results, errors, cancellation."""

from concurrent.futures import CancelledError, Future

import pytest

from keel.rl.futures import failed, then, when_all


def done(value: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return future


def test_when_all_runs_once_after_the_last() -> None:
    parts, calls = [Future[int](), Future[int]()], []
    both = when_all(parts, lambda: calls.append(1) or sum(part.result() for part in parts))
    parts[1].set_result(3)
    assert not both.done()
    parts[0].set_result(4)
    assert both.result(timeout=1) == 7 and calls == [1]
    assert when_all([], lambda: 5).result(timeout=1) == 5


def test_when_all_propagates_errors() -> None:
    parts = [done(1), failed(ValueError("no"))]
    with pytest.raises(ValueError, match="no"):
        when_all(parts, lambda: [part.result() for part in parts]).result(timeout=1)
    cancelled: Future[int] = Future()
    whole = when_all([cancelled], cancelled.result)
    cancelled.cancel()
    with pytest.raises(CancelledError):
        whole.result(timeout=1)


def test_then_chains_results_and_errors() -> None:
    assert then(done(2), lambda two: done(two + 1)).result(timeout=1) == 3
    for broken in (
        then(failed(KeyError("first")), done),
        then(done(1), lambda _: failed(KeyError("second"))),
        then(done(1), lambda _: {}["raised"]),
    ):
        with pytest.raises(KeyError):
            broken.result(timeout=1)
