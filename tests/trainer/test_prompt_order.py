"""Each prompt that is drawn is trained on or discarded exactly once, also across a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from keel.rl.metrics import Metric
from keel.rl.types import Prompt, ScoredGroup
from tests.data.test_stream import stream
from tests.trainer.test_loop import FakeRun, config


class CountedRun(FakeRun):
    """Takes its prompts from a stream, and counts what happens to them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stream, self.cursor = stream(), dict[str, Any]()
        self.drawn, self.trained, self.filtered = (Counter[str]() for _ in range(3))

    def take(self, n: int) -> Sequence[Prompt]:
        prompts = self.stream.take(n)
        self.drawn.update(prompt.prompt_id for prompt in prompts)
        return prompts

    def state(self, unfinished: Sequence[Prompt]) -> Mapping[str, Any]:
        return self.stream.state(unfinished)

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        groups: Sequence[ScoredGroup],
        discarded: Sequence[ScoredGroup] = (),
    ) -> None:
        super().record(step, metrics, groups, discarded)
        self.trained.update(group.group.prompt.prompt_id for group in groups)
        self.filtered.update(group.group.prompt.prompt_id for group in discarded)

    def save(self, step: int, cursor: Mapping[str, Any]) -> bool:
        self.cursor = dict(cursor)
        return super().save(step, cursor)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("easy", [(), ("a/1", "a/3", "b/2"), ("a/0", "a/1", "a/2", "a/3", "a/4")])
def test_resumed_run_loses_and_repeats_no_prompt(lag: int, easy: tuple[str, ...]) -> None:
    """Also with groups sampled ahead, and with filtered groups of a batch that is not full yet."""
    algorithm = {"max_lag": lag, "filter_groups": "correct", "max_refills": 2.0}
    first = CountedRun(easy=easy, stop_after=3)
    first.run(config(algorithm, steps=8))
    second = CountedRun(easy=easy, version=3)
    second.stream.restore(first.cursor)
    second.run(config(algorithm, steps=8), start=3)
    assert first.trained.total() == 6 and second.trained.total() == 10
    assert len(first.cursor["unfinished"]) == 2 * (lag + 1) or easy, "sampled ahead"
    for run, drawn in ((first, first.drawn), (second, second.drawn)):
        ends = run.trained + run.filtered + Counter(run.cursor["unfinished"])
        assert not ends - drawn, "a prompt was trained on twice"
        # Filtered groups of a batch that was never full are not reported.
        assert set(drawn - ends) <= set(easy), "a prompt was lost"
