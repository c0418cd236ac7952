"""No prompt is lost or trained on twice, and what is would be seen."""

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


class Accounted(FakeRun):
    """Prompts from a stream, and a ledger of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stream, self.said = stream(), list[str]()

    def take(self, n: int) -> Sequence[Prompt]:
        return self.stream.take(n)

    def state(self, unfinished: Sequence[Prompt]) -> Mapping[str, Any]:
        return self.stream.state(unfinished)

    def run(self, config: Config, start: int = 0) -> int:
        self.ledger = PromptAudit(self.stream, self.said.append)
        parts = Parts(
            **dict.fromkeys(("prompts", "rollouts", "rewards", "learner", "journal"), self),
            **{name: getattr(self, name) for name in ("save", "stop", "hurry", "keep")},
            heldout={"sums": [prompt("held")]},
            account=self.ledger.account,
        )
        return train(parts, config, start=start)

    def save(self, step: int, cursor: Mapping[str, Any]) -> bool:
        self.cursor = cursor
        return super().save(step, cursor)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("easy", [(), ("a/1", "a/3", "b/2"), ("a/0", "a/1", "a/2", "a/3", "a/4")])
def test_a_run_and_its_sequel_account_for_every_prompt(lag: int, easy: tuple[str, ...]) -> None:
    """With groups ahead, and with groups that are filtered, of a batch that is not full yet."""
    how = {"max_lag": lag, "filter_groups": "correct", "max_refills": 2.0}
    first = Accounted(easy=easy, stop_after=3)
    first.run(config(how, steps=8))
    sequel = Accounted(easy=easy, version=3)
    sequel.stream.restore(first.cursor)
    sequel.run(config(how, steps=8), start=3)
    for run, trained in ((first, 6), (sequel, 10)):
        assert (run.said, run.ledger.lost, run.ledger.twice) == ([], 0, 0)
        assert run.ledger.trained == trained
        assert all(values(m)["ledger/lost"] == 0 for step, m in run.records.items() if step)
    assert values(first.records[1])["ledger/waiting"] == 2 * (lag + 1), "sampled ahead"
    assert bool(easy) == bool(first.ledger.discarded)
    assert sequel.ledger.words().endswith("0 waiting, 0 lost, 0 twice")
    assert sequel.ledger.words().startswith("since step 0: 10 prompts trained on, ")


def test_what_does_not_add_up_is_named() -> None:
    taken, said = stream(), list[str]()
    ledger = PromptAudit(taken, said.append)
    groups = FakeRun()
    first, second = taken.take(2)
    batch = Batch(groups=(groups.scored(groups.sampled(first, "train")),) * 2)
    metrics = ledger.account(batch, taken.state(), ())
    assert said == [
        f"1 prompt(s) lost: {second.prompt_id}",
        f"1 prompt(s) trained on twice: {first.prompt_id}",
    ]
    assert values(metrics) == {"ledger/waiting": 0, "ledger/lost": 1, "ledger/twice": 1}
    assert ledger.words().endswith("0 waiting, 1 lost, 1 twice")
