"""Every prompt that a run has taken from its sources is trained on, discarded by the filter, or
still waits, and once: looked for at each step, by drawing the same prompts again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from keel.rl.buffer import Batch
from keel.rl.metrics import Metric, Sum
from keel.rl.types import Prompt, ScoredGroup

MOST_NAMED = 5


class Drawn(Protocol):
    """`keel.data.stream.Stream`"""

    def state(self, unfinished: Sequence[Prompt] = ()) -> dict[str, Any]: ...

    def draws(self, since: Mapping[str, int], until: Mapping[str, int]) -> Sequence[Prompt]:
        """What is taken between these positions, whoever has taken what."""
        ...


class PromptAudit:
    """Of one stretch of a run, from a checkpoint on."""

    def __init__(self, stream: Drawn, say: Callable[[str], Any], *, since: int = 0) -> None:
        """stream: of prompts, where the stretch begins, after step `since`; say: told of what does
        not add up."""
        self._stream, self._say, self._since = stream, say, since
        self._at, self._discarding = stream.state(), list[str]()
        self.trained = self.discarded = self.lost = self.twice = 0

    def account(
        self, batch: Batch, position: Mapping[str, Any], discarding: Sequence[Prompt]
    ) -> dict[str, Metric]:
        """Note that `batch` has been trained on. position: where the stream stands after it;
        discarding: whose groups are filtered out and in no batch yet.

        Metrics: `ledger/waiting` prompts that were taken and not trained on yet, `ledger/lost` and
        `ledger/twice` in this step.
        """
        drawn = self._stream.draws(self._at["drawn"], position["drawn"])
        before = [*self._at["unfinished"], *self._discarding]
        after = [*position["unfinished"], *(prompt.prompt_id for prompt in discarding)]
        due = Counter([*before, *(prompt.prompt_id for prompt in drawn)])
        found = Counter([*names(batch.groups), *names(batch.discarded), *after])
        lost, twice = due - found, found - due
        self.trained += len(batch.groups)
        self.discarded += len(batch.discarded)
        self.lost += lost.total()
        self.twice += twice.total()
        for what, wrong in (("lost", lost), ("trained on twice", twice)):
            if wrong:
                some = ", ".join(sorted(wrong)[:MOST_NAMED])
                self._say(f"{wrong.total()} prompt(s) {what}: {some}")
        self._at, self._discarding = dict(position), after[len(position["unfinished"]) :]
        return {
            "ledger/waiting": Sum(len(position["unfinished"])),
            "ledger/lost": Sum(lost.total()),
            "ledger/twice": Sum(twice.total()),
        }

    def words(self) -> str:
        """What it came to."""
        return (
            f"since step {self._since}: {self.trained} prompts trained on, "
            f"{self.discarded} discarded by the filter, "
            f"{len(self._at['unfinished'])} waiting, {self.lost} lost, {self.twice} twice"
        )


def names(groups: Iterable[ScoredGroup]) -> list[str]:
    return [group.group.prompt.prompt_id for group in groups]
