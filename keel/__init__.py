"""Keel: RL post-training for language models.

Sub-packages are links to the top folders of the checkout. `keel.train` starts a run from
Python (`keel.commands.api`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.commands.api import Preempted, Run, train

__all__ = ["Preempted", "Run", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'keel' has no attribute {name!r}")
    # The sub-packages are imported without torch and Ray, which this brings along.
    from keel.commands import api  # noqa: PLC0415

    return getattr(api, name)
