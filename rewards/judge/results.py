"""What a judgement comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from keel.rl.metrics import Mean, Metric, Sum

FailureKind = Literal["timeout", "unreachable", "busy", "server", "too_long", "refused", "invalid"]
"""Why the judge gave no verdict: no reply in time; no connection; 429; 5xx; more than its context
holds; another HTTP error; a reply that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class CriterionVerdict:
    """How one criterion was judged, over all samples."""

    name: str
    score: float
    """0 … 1."""
    reason: str
    """Of the first sample. Written by the judge, for people to read."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a completion is worth."""

    value: float
    """0 … 1."""
    parts: Mapping[str, float]
    """0 … 1 each; the same names for every prompt of a kind. `disagreement` is the spread of the
    samples: 0 when they agree."""
    verdicts: tuple[CriterionVerdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Nobody could say what the completion is worth. It is not worth nothing: leave it out."""

    kind: FailureKind
    reason: str


class Unjudged(Exception):
    """A call to the judge that brought no verdict. Becomes `Failed`."""

    def __init__(
        self,
        kind: FailureKind,
        reason: str,
        *,
        retry: bool,
        after_s: float = 0.0,
        thinking: int = 0,
    ) -> None:
        super().__init__(reason)
        self.kind: FailureKind = kind
        self.retry = retry
        self.after_s = after_s
        """How long the endpoint wants to be left alone."""
        self.thinking = thinking
        """Characters of the policy's thinking that the call held."""


class JudgeStopped(RuntimeError):
    """The judge must not, or cannot, go on: the run has to stop."""


NONE = Mean(0.0, 0)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a judge has done so far."""

    judged: int = 0
    """Answers, the ones below and cached ones included."""
    failed: Mapping[FailureKind, int] = field(default_factory=dict[FailureKind, int])
    """Answers that could not be judged, by reason."""
    unasked: int = 0
    """Answers that scored 0 without asking: blank, too long, or not in the form of a proof."""
    calls: int = 0
    """Requests sent, retries included."""
    cached: int = 0
    """Requests answered from the cache, or by an equal one that was under way."""
    prompt_tokens: int = 0
    reply_tokens: int = 0
    retried: Mapping[FailureKind, int] = field(default_factory=dict[FailureKind, int])
    """Requests that were sent again, by what the one before came to."""
    call_s: Mean = NONE
    """Of a request that has ended, whatever came of it."""
    queue_s: Mean = NONE
    """That a question waited while `max_concurrent` others were asked."""

    def since(self, before: Counts) -> dict[str, Metric]:
        """As metrics: what has been done after `before`."""
        metrics: dict[str, Metric] = {
            f"judge/{name}": Sum(getattr(self, count) - getattr(before, count))
            for name, count in JUDGE_COUNTS.items()
        }
        failed = {kind: n - before.failed.get(kind, 0) for kind, n in self.failed.items()}
        metrics["judge/failures"] = Sum(sum(failed.values()))
        metrics |= {f"judge/failures_{kind}": Sum(n) for kind, n in failed.items() if n}
        again = {kind: n - before.retried.get(kind, 0) for kind, n in self.retried.items()}
        metrics |= {f"judge/retries_{kind}": Sum(n) for kind, n in again.items() if n}
        if call_s := _since(self.call_s, before.call_s):
            metrics["judge/call_seconds"] = call_s
        if queue_s := _since(self.queue_s, before.queue_s):
            metrics["judge/queue_seconds"] = queue_s
        return metrics


def _since(now: Mean, before: Mean) -> Mean | None:
    count = now.count - before.count
    return Mean(now.total - before.total, count) if count else None


JUDGE_COUNTS = {
    "completions": "judged",
    "skipped": "unasked",
    "calls": "calls",
    "cache_hits": "cached",
    "prompt_tokens": "prompt_tokens",
    "reply_tokens": "reply_tokens",
}
"""Metric (`judge/…`) → field of `Counts`."""


class JudgeSettings(Protocol):
    """What a judge needs to know. `keel.configs.schema.JudgeConfig` is one, and says what they
    mean."""

    @property
    def base_url(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def api_key_env(self) -> str: ...
    @property
    def samples(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def max_reply_tokens(self) -> int: ...
    @property
    def max_characters(self) -> int: ...
    @property
    def max_concurrent(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def retries(self) -> int: ...
    @property
    def max_calls(self) -> int: ...
    @property
    def max_failure_fraction(self) -> float: ...
    @property
    def cache_dir(self) -> str: ...
    @property
    def chats(self) -> str: ...
    @property
    def extra(self) -> Mapping[str, Any]: ...


class Server(Protocol):
    """A server of the judge that belongs to this run."""

    @property
    def key(self) -> str:
        """What it wants for an API key."""
        ...

    def url(self) -> str:
        """Of the server as it runs now; it is started, or started again, where it does not.

        Blocks for so long, and may be called in any thread. Raises RuntimeError saying why there
        is none.
        """
        ...
