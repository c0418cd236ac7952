"""What an engine's workers do over the channel for weights, and their errors. Importing this does
not import vLLM."""

from __future__ import annotations

from typing import Any

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConnectionError, TimeoutError)
}
"""A channel's, for which an engine is replaced."""


def have_workers(llm: Any, method: str, *args: Any, several: bool) -> None:
    """Call `method` of each worker. Raises what it raises; of several workers, which are processes
    of their own, vLLM passes on the text of an error alone: `ERRORS` come as data."""
    if not several:
        llm.collective_rpc(method, args=args)
        return
    for failure in llm.collective_rpc("keel_attempt", args=(method, args)):
        if failure is not None:
            kind, text = failure
            raise ERRORS[kind](text)


def attempt(worker: Any, method: str, args: tuple[Any, ...]) -> tuple[str, str] | None:
    """The worker's end: kind and text of an error of a channel."""
    try:
        getattr(worker, method)(*args)
    except tuple(ERRORS.values()) as error:
        return next(name for name, kind in ERRORS.items() if isinstance(error, kind)), str(error)
    return None
