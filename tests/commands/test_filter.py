"""`keel filter` without engines: k completions per prompt, in groups as in training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.commands.cli import main
from keel.commands.sampling import max_prompts_in_flight, sample_prompts
from keel.configs.schema import AlgorithmConfig, Config, DataConfig, FilterConfig, SourceConfig
from keel.rl.types import Group, Prompt, ScoredGroup
from keel.trainer.prepare import prepare
from tests.commands.conftest import Fake, ready
from tests.data.rates import scored
from tests.rl.rollouts import prompt

CONFIG = Config(
    data=DataConfig(sources=(SourceConfig(name="s", source="reasoning_gym", task="t", size=9),)),
    algorithm=AlgorithmConfig(prompts_per_step=2, group_size=4),
    filter=FilterConfig(samples=10),
)


class Engines:
    """A runtime that samples every group immediately."""

    def __init__(self) -> None:
        self.asked: list[tuple[Prompt, int, Future[Group]]] = []
        self.recorded: dict[str, Sequence[ScoredGroup]] = {}
        self.stopped = False
        self.scorer, self.pool = SimpleNamespace(submit=self.score), SimpleNamespace(steps=0)

    def with_watchdog(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        return stop

    def submit(self, prompt: Prompt, purpose: str, size: int) -> Future[Group]:
        group = Group(prompt=prompt, trajectories=(), dropped=("",) * size)
        self.asked.append((prompt, size, ready(group)))
        return self.asked[-1][2]

    def score(self, group: Group, purpose: str) -> Future[ScoredGroup]:
        return ready(scored(group.prompt, 1, samples=len(group.dropped)))

    def run(self, prompts: int) -> None:
        runtime: Any = self
        sample_prompts(
            runtime,
            [prompt(f"p{i}") for i in range(prompts)],
            CONFIG.filter.samples,
            CONFIG,
            record=lambda prompt, groups: self.recorded.update({prompt.prompt_id: groups}),
            note=lambda: f"{len(self.recorded)} recorded",
            stop=lambda: self.stopped,
        )


def test_completions_are_split_into_groups(capsys: pytest.CaptureFixture[str]) -> None:
    engines = Engines()
    prompts = 2 * max_prompts_in_flight(CONFIG, 10) + 1
    engines.run(prompts)
    assert [(p.prompt_id, size) for p, size, _ in engines.asked] == [
        (f"p{i}", size) for i in range(prompts) for size in (4, 4, 2)
    ]
    assert set(engines.recorded) == {f"p{i}" for i in range(prompts)}
    for groups in engines.recorded.values():
        assert [len(group.parts_G) for group in groups] == [4, 4, 2]
    assert f"sampled {prompts} of {prompts} prompts; {prompts} rec" in capsys.readouterr().out


def test_stop_keeps_complete_prompts() -> None:
    class Stops(Engines):
        def submit(self, prompt: Prompt, purpose: str, size: int) -> Future[Group]:
            if prompt.prompt_id == "p0":
                return super().submit(prompt, purpose, size)
            self.stopped = True
            self.asked.append((prompt, size, Future()))
            return self.asked[-1][2]

    engines = Stops()
    engines.run(99)
    assert list(engines.recorded) == ["p0"]
    assert len(engines.asked) == 3 * max_prompts_in_flight(CONFIG, 10), (
        "more under way than there is room for"
    )
    assert all(future.cancelled() for p, _, future in engines.asked if p.prompt_id != "p0")


# The command, with a system in the engines' place.

SMALL = ("filter.samples=3", "data.sources.0.size=20", "data.sources.1.size=20")
SMALL += ("data.sources.0.holdout=8", "data.sources.1.holdout=8")


def test_filter_writes_pass_rates(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *SMALL)
    assert main(["filter", *words]) == 0
    out = capsys.readouterr().out
    assert "prompts to sample, with model.path = tiny" in out and "pass@3" in out
    table = tmp_path / "filter" / "pass_rates.jsonl"
    rates = {line["id"]: line["pass_rate"] for line in map(json.loads, table.open())}
    assert list(rates) == [p.prompt_id for p, _ in fake.asked]
    assert rates == {name: min(int(name.rpartition("/")[2]) % 4, 3) / 3 for name in rates}
    plain = prepare("quickstart", words[1:])
    assert set(rates) == {
        p.prompt_id for some in plain.dataset.train.sources.values() for p in some
    }

    read = prepare("quickstart", (*words[1:], f"data.sources[spelling].pass_rates={table}"))
    (spelling, spiral) = read.dataset.train.sources.values()
    assert {p.prompt_id for p in spelling} == {n for n, r in rates.items() if r and "spell" in n}
    assert spiral == plain.dataset.train.sources["spiral"]
    assert "out of the bounds of pass rates" in read.text()

    # Other bounds are a matter of the table alone.
    asked = len(fake.asked)
    assert main(["filter", *words, "filter.least_pass_rate=0.5"]) == 0
    assert "passed less often than 0.5" in capsys.readouterr().out
    assert len(fake.asked) == asked
    kept = (tmp_path / "filter" / "kept" / "spelling.jsonl").read_text().splitlines()
    assert kept and min(json.loads(line)["pass_rate"] for line in kept) >= 0.5

    assert main(["filter", *words, "filter.samples=4"]) == 2
    assert "filter.samples: 3 → 4" in capsys.readouterr().err
    assert len(fake.asked) == asked
