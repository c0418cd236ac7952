"""Results of judgements, their counts, and the interface of a judge's server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from keel.rl.metrics import Mean, Metric, Sum

FailureKind = Literal["timeout", "unreachable", "busy", "server", "too_long", "refused", "invalid"]
"""No reply in time; no connection; 429; 5xx; longer than the judge's context; another HTTP error;
a reply that does not match its schema."""


@dataclass(frozen=True, slots=True)
class CriterionVerdict:
    """Judgement of one criterion over all samples."""

    name: str
    score: float
    """0 … 1."""
    reason: str
    """The judge's reason in the first sample."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Judgement of a completion."""

    value: float
    """0 … 1."""
    parts: Mapping[str, float]
    """0 … 1 each, with the same names for every prompt of a kind. `disagreement` is the spread
    between the samples."""
    verdicts: tuple[CriterionVerdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The completion could not be judged. It has no score and leaves its group."""

    kind: FailureKind
    reason: str


class Unjudged(Exception):
    """Raised for a call to the judge that gave no verdict. Becomes `Failed`."""

    def __init__(
        self,
        kind: FailureKind,
        reason: str,
        *,
        retry: bool,
        after_s: float = 0.0,
        thinking: int = 0,
    ) -> None:
        """after_s: the endpoint's minimum pause; thinking: characters of thinking in the call."""
        super().__init__(reason)
        self.kind: FailureKind = kind
        self.retry = retry
        self.after_s = after_s
        self.thinking = thinking


class JudgeStopped(RuntimeError):
    """Raised if the judge's calls are spent, it fails too often, or its server is gone."""


NO_MEAN = Mean(0.0, 0)


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of a judge since its start."""

    judged: int = 0
    """Answers judged, including cached and unasked ones."""
    failed: Mapping[FailureKind, int] = field(default_factory=dict[FailureKind, int])
    """Answers that could not be judged, by reason."""
    unasked: int = 0
    """Answers that scored 0 without a call: blank, too long, or malformed."""
    calls: int = 0
    """Requests sent, including retries."""
    cached: int = 0
    """Requests answered from the cache or by an equal request in flight."""
    prompt_tokens: int = 0
    reply_tokens: int = 0
    retried: Mapping[FailureKind, int] = field(default_factory=dict[FailureKind, int])
    """Retries by the reason of the previous attempt."""
    call_s: Mean = NO_MEAN
    """Duration of a request, failed or not."""
    queue_s: Mean = NO_MEAN
    """Time that a question waited for one of `max_concurrent` slots."""

    def since(self, previous: Counts) -> dict[str, Metric]:
        """Metrics of what happened after `previous`."""
        metrics: dict[str, Metric] = {
            f"judge/{name}": Sum(getattr(self, count) - getattr(previous, count))
            for name, count in JUDGE_COUNTS.items()
        }
        failed = {kind: n - previous.failed.get(kind, 0) for kind, n in self.failed.items()}
        metrics["judge/failures"] = Sum(sum(failed.values()))
        metrics |= {f"judge/failures_{kind}": Sum(n) for kind, n in failed.items() if n}
        retried = {kind: n - previous.retried.get(kind, 0) for kind, n in self.retried.items()}
        metrics |= {f"judge/retries_{kind}": Sum(n) for kind, n in retried.items() if n}
        for name, now, before in (
            ("call", self.call_s, previous.call_s),
            ("queue", self.queue_s, previous.queue_s),
        ):
            if count := now.count - before.count:
                metrics[f"judge/{name}_seconds"] = Mean(now.total - before.total, count)
        return metrics


JUDGE_COUNTS = {
    "completions": "judged",
    "skipped": "unasked",
    "calls": "calls",
    "cache_hits": "cached",
    "prompt_tokens": "prompt_tokens",
    "reply_tokens": "reply_tokens",
}
"""Metric (`judge/…`) → field of `Counts`."""


class ServedJudge(Protocol):
    """A judge's server that belongs to this run."""

    @property
    def key(self) -> str:
        """API key."""
        ...

    def url(self) -> str:
        """Return the URL of the running server, starting or restarting it if needed.

        Blocks meanwhile; callable from any thread. Raises RuntimeError if it does not start.
        """
        ...
