"""Who takes an update, and what became of it. Imports nothing heavy: the driver knows these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Receiver:
    """An engine that weights are sent to: the actor of a
    `keel.rollout.engine.worker.RolloutWorker`."""

    index: int
    actor: Any


Outcome = int | Exception
"""The version that an engine samples from now, or why it does not."""
