"""How far an evaluation is: counted as its prompts are scored."""

from __future__ import annotations

from tests.trainer.test_loop import FakeRun, config


class Counting(FakeRun):
    def begin(self, activity: str) -> None:
        self.events.append(activity)

    def reach(self, done: int, total: int, unit: str) -> None:
        self.events.append(f"{done} of {total} {unit}")


def test_an_evaluation_says_how_far_it_is() -> None:
    run = Counting()
    run.run(config(steps=1))
    first = run.events.index("evaluating")
    last = len(run.events) - 1 - run.events[::-1].index("evaluating")
    assert first != last, "before the first step, and after the last one"
    for begun in (first, last):
        assert "1 of 1 prompts" in run.events[begun:]
    assert run.events.count("1 of 1 prompts") == 2
