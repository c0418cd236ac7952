"""Prompts are neither lost nor trained on twice, and the audit would notice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from keel.configs.schema import Config
from keel.rl.buffer import Batch
from keel.rl.metrics import values
from keel.rl.types import Prompt
from keel.trainer.loop import Parts, train
from keel.trainer.run.prompt_audit import PromptAudit
from tests.data.test_stream import stream
from tests.rl.rollouts import prompt
from tests.trainer.test_loop import FakeRun, config


class AuditedRun(FakeRun):
    """Takes its prompts from a stream, and audits them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stream, self.lines = stream(), list[str]()

    def take(self, n: int) -> Sequence[Prompt]:
        return self.stream.take(n)

    def state(self, unfinished: Sequence[Prompt]) -> Mapping[str, Any]:
        return self.stream.state(unfinished)

    def run(self, config: Config, start: int = 0) -> int:
        self.audit = PromptAudit(self.stream, self.lines.append)
        parts = Parts(
            **dict.fromkeys(("prompts", "rollouts", "rewards", "learner", "journal"), self),
            push=self.push,
            save=self.save,
            should_stop=self.stop,
            dump_bad_batch=self.keep,
            heldout={"sums": [prompt("held")]},
            audit=self.audit.check,
        )
        return train(parts, config, start=start)

    def save(self, step: int, cursor: Mapping[str, Any]) -> bool:
        self.cursor = cursor
        return super().save(step, cursor)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("easy", [(), ("a/1", "a/3", "b/2"), ("a/0", "a/1", "a/2", "a/3", "a/4")])
def test_resumed_run_loses_and_repeats_no_prompt(lag: int, easy: tuple[str, ...]) -> None:
    """Also with groups sampled ahead, and with filtered groups of a batch that is not full yet."""
    algorithm = {"max_lag": lag, "filter_groups": "correct", "max_refills": 2.0}
    first = AuditedRun(easy=easy, stop_after=3)
    first.run(config(algorithm, steps=8))
    sequel = AuditedRun(easy=easy, version=3)
    sequel.stream.restore(first.cursor)
    sequel.run(config(algorithm, steps=8), start=3)
    for run, trained in ((first, 6), (sequel, 10)):
        assert run.lines == []
        assert f" {trained} prompts trained on" in run.audit.summary()
        metrics = [values(m) for step, m in run.records.items() if step]
        assert all(m["ledger/lost"] == m["ledger/twice"] == 0 for m in metrics)
    assert values(first.records[1])["ledger/waiting"] == 2 * (lag + 1), "sampled ahead"
    assert bool(easy) == (" 0 discarded" not in first.audit.summary())
    assert sequel.audit.summary().endswith("0 waiting, 0 lost, 0 twice")


def test_lost_and_repeated_prompts_are_named() -> None:
    taken, lines = stream(), list[str]()
    audit = PromptAudit(taken, lines.append)
    groups = FakeRun()
    first, second = taken.take(2)
    batch = Batch(groups=(groups.scored(groups.sampled(first, "train")),) * 2)
    metrics = audit.check(batch, taken.state(), ())
    assert second.prompt_id in lines[0] and first.prompt_id in lines[1]
    assert values(metrics) == {"ledger/waiting": 0, "ledger/lost": 1, "ledger/twice": 1}
    assert audit.summary().endswith("0 waiting, 1 lost, 1 twice")
