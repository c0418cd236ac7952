"""Another vLLM than Keel was written for: the one that is installed, with parts of it changed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from keel.rollout.vllm_contract import NEEDS
from keel.rollout.vllm_contract import changes as missing

Change = tuple[str, str]
"""What (`module:name.name`), and how: "renamed", or "another signature"."""


def make(changes: Sequence[Change]) -> None:
    """A function of another signature does what it did, and vLLM itself goes on with what is
    renamed."""
    for part in (
        NEEDS if changes else ()
    ):  # imports all that changes may be made to, and what that imports
        assert not missing(part)
    for where, how in changes:
        owner, name = parent(where)
        original = getattr(owner, name)
        if how == "renamed":
            setattr(owner, f"{name}_renamed", original)
            delattr(owner, name)
        else:
            setattr(owner, name, _with_more(original))


def parent(where: str) -> tuple[Any, str]:
    module, _, path = where.partition(":")
    *names, last = path.split(".")
    owner: Any = import_module(module)
    for name in names:
        owner = getattr(owner, name)
    return owner, last


def _with_more(original: Any) -> Any:
    def changed(*args: Any, something_new: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return changed
