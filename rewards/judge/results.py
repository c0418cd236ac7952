"""Data types for the results and counters of the judge, and the interface to a judge server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from keel.rl.metrics import Mean, Metric, Sum

FailureKind = Literal["timeout", "unreachable", "busy", "server", "too_long", "refused", "invalid"]
"""Why a call failed. In order: no reply in time, no connection, status 429, status 5xx, a request
that exceeds the judge's context, another HTTP error, or a reply that does not match its schema."""


@dataclass(frozen=True, slots=True)
class CriterionVerdict:
    """How well an answer meets a criterion, averaged over all samples."""

    name: str
    score: float
    """The mean score, from 0 to 1."""
    reason: str
    """The reason that the judge gave in the first sample."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The judge's result for one completion."""

    value: float
    """The total score, from 0 to 1."""
    parts: Mapping[str, float]
    """The reward components, each from 0 to 1. They are the same for all prompts of one kind.
    `disagreement` measures how much the samples differ."""
    verdicts: tuple[CriterionVerdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Returned if a completion could not be judged. The completion is dropped from its group."""

    kind: FailureKind
    reason: str


class Unjudged(Exception):
    """Raised if a call to the judge gave no usable result. `after_s` is the time that the endpoint
    asks to wait, and `thinking` the number of characters of thinking in the request."""

    def __init__(
        self, kind: FailureKind, reason: str, *, retry: bool, after_s: float = 0, thinking: int = 0
    ) -> None:
        super().__init__(reason)
        self.kind: FailureKind = kind
        self.retry, self.after_s, self.thinking = retry, after_s, thinking


class JudgeStopped(RuntimeError):
    """Raised if the call limit is reached, too many calls failed, or a server did not start."""


@dataclass(slots=True)
class Counts:
    """Counts the work of the judge. Each integer is reported as a metric `judge/NAME`."""

    completions: int = 0
    """Number of answers judged, including cached ones and those that needed no call."""
    failed: Counter[FailureKind] = field(default_factory=Counter[FailureKind])
    """Number of answers that could not be judged, by kind of failure."""
    skipped: int = 0
    """Number of answers that scored 0 without a judgement: blank, too long or malformed."""
    calls: int = 0
    cache_hits: int = 0
    """Number of questions answered from the cache or by an identical request in progress."""
    prompt_tokens: int = 0
    reply_tokens: int = 0
    retried: Counter[FailureKind] = field(default_factory=Counter[FailureKind])
    restarts: int = 0
    """Number of times that one of the run's own servers was restarted."""
    call_s: Mean = Mean(0.0, 0)  # noqa: RUF009
    queue_s: Mean = Mean(0.0, 0)  # noqa: RUF009

    def since(self, previous: Counts) -> dict[str, Metric]:
        """Return metrics for the time since the counts in `previous` were recorded."""
        metrics: dict[str, Metric] = {
            f"judge/{name}": Sum(count - getattr(previous, name))
            for name in self.__slots__
            if isinstance(count := getattr(self, name), int)
        }
        failed, retried = self.failed - previous.failed, self.retried - previous.retried
        metrics["judge/failures"] = Sum(failed.total())
        metrics |= {f"judge/failures_{kind}": Sum(n) for kind, n in failed.items()}
        metrics |= {f"judge/retries_{kind}": Sum(n) for kind, n in retried.items()}
        for name in ("call", "queue"):
            now, before = getattr(self, f"{name}_s"), getattr(previous, f"{name}_s")
            if count := now.count - before.count:
                metrics[f"judge/{name}_seconds"] = Mean(now.total - before.total, count)
        return metrics


class ServedJudge(Protocol):
    """A judge server that this run starts and stops."""

    @property
    def key(self) -> str:
        """The API key that the server expects."""
        ...

    def url(self) -> str:
        """Return the URL of the server. This starts or restarts it if necessary, and blocks until
        it is ready. Raises RuntimeError if it does not start."""
        ...
