"""Checks that each prompt that was drawn is trained on, discarded or waiting, exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from keel.rl.buffer import Batch
from keel.rl.metrics import Metric, Sum
from keel.rl.types import Prompt, ScoredGroup

_MAX_NAMED = 5


class _Stream(Protocol):
    """The part of `keel.data.stream.Stream` that the audit uses."""

    def state(self, unfinished: Sequence[Prompt] = ()) -> dict[str, Any]: ...

    def draws(self, since: Mapping[str, int], until: Mapping[str, int]) -> Sequence[Prompt]:
        """Return the prompts that were drawn between two positions."""
        ...


class PromptAudit:
    """Compares the prompts in each step with the prompts that the stream should have drawn for
    it."""

    def __init__(self, stream: _Stream, say: Callable[[str], Any], *, since: int = 0) -> None:
        """`since` is the step after which `stream` is positioned."""
        self._stream, self._say, self._since = stream, say, since
        self._position, self._discarding = stream.state(), list[str]()
        self._trained = self._discarded = self._lost = self._repeated = 0

    def check(
        self, batch: Batch, position: Mapping[str, Any], discarding: Sequence[Prompt]
    ) -> dict[str, Metric]:
        """Check the prompts of a batch that was trained on, and count them.

        `position` is the position of the stream after the batch. `discarding` lists prompts whose
        groups were filtered but that no batch has reported yet.
        """
        drawn = self._stream.draws(self._position["drawn"], position["drawn"])
        waiting, pending = position["unfinished"], [prompt.prompt_id for prompt in discarding]
        before = [*self._position["unfinished"], *self._discarding]
        expected = Counter([*before, *(prompt.prompt_id for prompt in drawn)])
        ids = [*_ids(batch.groups), *_ids(batch.discarded), *waiting, *pending]
        lost, repeated = expected - Counter(ids), Counter(ids) - expected
        self._trained += len(batch.groups)
        self._discarded += len(batch.discarded)
        self._lost += lost.total()
        self._repeated += repeated.total()
        for problem, prompts in (("lost", lost), ("trained on twice", repeated)):
            if prompts:
                names = ", ".join(sorted(prompts)[:_MAX_NAMED])
                self._say(f"{prompts.total()} prompt(s) {problem}: {names}")
        self._position, self._discarding = dict(position), pending
        return {
            "ledger/waiting": Sum(len(waiting)),
            "ledger/lost": Sum(lost.total()),
            "ledger/twice": Sum(repeated.total()),
        }

    def summary(self) -> str:
        return (
            f"since step {self._since}: {self._trained} prompts trained on, "
            f"{self._discarded} discarded by the filter, "
            f"{len(self._position['unfinished'])} waiting, {self._lost} lost, "
            f"{self._repeated} twice"
        )


def _ids(groups: Iterable[ScoredGroup]) -> list[str]:
    return [group.group.prompt.prompt_id for group in groups]
