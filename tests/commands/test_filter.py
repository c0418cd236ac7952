"""`keel filter` without engines: k completions per prompt, in groups as in training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from keel.commands import sampling as module
from keel.commands.cli import main
from keel.commands.sampling import group_timeout, max_prompts_in_flight, sample_prompts
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    EndpointConfig,
    FilterConfig,
    SourceConfig,
)
from keel.rl.types import Group, Prompt, Purpose, ScoredGroup
from keel.trainer.prepare import prepare
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.progress import Wait
from tests.data.rates import scored
from tests.rl.rollouts import prompt

CONFIG = Config(
    data=DataConfig(sources=(SourceConfig(name="s", source="reasoning_gym", task="t", size=9),)),
    algorithm=AlgorithmConfig(prompts_per_step=2, group_size=4),
    filter=FilterConfig(samples=10),
)


class Engines:
    """Records requests and results."""

    def __init__(self) -> None:
        self.asked: list[tuple[Prompt, int, Future[Group]]] = []
        self.recorded: dict[str, Sequence[ScoredGroup]] = {}
        self.said: list[str] = []
        self.stopped = False
        self.decoded: Callable[[], int] | None = None

    def sample(self, prompt: Prompt, size: int) -> Future[Group]:
        self.asked.append((prompt, size, Future()))
        return self.asked[-1][2]

    def score(self, group: Group) -> Future[ScoredGroup]:
        return ready(scored(group.prompt, 1, samples=len(group.dropped)))

    def record(self, prompt: Prompt, groups: Sequence[ScoredGroup]) -> None:
        self.recorded[prompt.prompt_id] = groups

    def stop(self) -> bool:
        return self.stopped

    def run(self, prompts: int) -> None:
        sample_prompts(
            [prompt(f"p{i}") for i in range(prompts)],
            CONFIG.filter.samples,
            CONFIG,
            sample=self.sample,
            score=self.score,
            record=self.record,
            note=lambda: f"{len(self.recorded)} recorded",
            should_stop=self.stop,
            say=self.said.append,
            count_steps=self.decoded,
        )


class AtOnce(Engines):
    """Samples every group immediately."""

    def sample(self, prompt: Prompt, size: int) -> Future[Group]:
        group = Group(prompt=prompt, trajectories=(), dropped=("",) * size)
        super().sample(prompt, size).set_result(group)
        return self.asked[-1][2]


def ready(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_completions_are_split_into_groups() -> None:
    engines = AtOnce()
    prompts = 2 * max_prompts_in_flight(CONFIG, 10) + 1
    engines.run(prompts)
    assert [(p.prompt_id, size) for p, size, _ in engines.asked] == [
        (f"p{i}", size) for i in range(prompts) for size in (4, 4, 2)
    ]
    assert set(engines.recorded) == {f"p{i}" for i in range(prompts)}
    for groups in engines.recorded.values():
        assert [len(group.parts_G) for group in groups] == [4, 4, 2]
    assert engines.said[-1] == f"sampled {prompts} of {prompts} prompts; {prompts} recorded"


def test_decoding_steps_show_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait, shown, steps = Wait("sampling"), [], count(step=7)

    @contextmanager
    def waiting(*_: Any, **__: Any) -> Iterator[Wait]:
        yield wait

    class Watched(Engines):
        def stop(self) -> bool:
            shown.append((wait.done, wait.unit))
            return len(shown) > 3

    monkeypatch.setattr(module, "waiting", waiting)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    engines = Watched()
    engines.decoded = lambda: next(steps)
    engines.run(2)
    assert shown[1:] == [(n, "decoding steps") for n in (7, 14, 21)]
    assert wait.total >= CONFIG.rollout.sampling.max_tokens and not engines.recorded


def test_stop_keeps_complete_prompts() -> None:
    class Stops(AtOnce):
        def sample(self, prompt: Prompt, size: int) -> Future[Group]:
            if prompt.prompt_id == "p0":
                return super().sample(prompt, size)
            self.stopped = True
            return Engines.sample(self, prompt, size)

    engines = Stops()
    engines.run(99)
    assert list(engines.recorded) == ["p0"]
    assert len(engines.asked) == 3 * max_prompts_in_flight(CONFIG, 10), (
        "more under way than there is room for"
    )
    assert all(future.cancelled() for p, _, future in engines.asked if p.prompt_id != "p0")


def test_engine_errors_end_sampling() -> None:
    class Breaks(Engines):
        def sample(self, prompt: Prompt, size: int) -> Future[Group]:
            future = super().sample(prompt, size)
            if len(self.asked) == 2:
                future.set_exception(ValueError("prompt p0: does not fit"))
            return future

    engines = Breaks()
    with pytest.raises(ValueError, match="prompt p0: does not fit"):
        engines.run(2)
    assert not engines.recorded


def test_silent_engines_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "GRACE_S", 0.02 - CONFIG.group_timeout_s)
    with pytest.raises(TimeoutError, match="in flight"):
        Engines().run(2)


def test_endpoint_has_its_own_limits() -> None:
    endpoint = EndpointConfig(
        base_url="http://h/v1", model="m", max_concurrent=3, timeout_s=7200.0, retries=1
    )
    there = replace(CONFIG, endpoint=endpoint)
    assert max_prompts_in_flight(there, 2) == 3  # 6 completions, for 3 at once
    timeout_s, told = group_timeout(there)
    # A group of four, three at a time.
    assert timeout_s > 2 * 2 * 7200 and "endpoint.timeout_s" in told


# The command, with a system in the engines' place.

SMALL = ("filter.samples=3", "data.sources.0.size=20", "data.sources.1.size=20")
SMALL += ("data.sources.0.holdout=8", "data.sources.1.holdout=8")


class Fake:
    """A started system; of prompts with odd ids, one completion in three passes."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.loaded: list[str] = []
        self.learner = SimpleNamespace(load=lambda path: self.loaded.append(path.name))
        self.scorer = self
        self.wake = lambda: self.loaded.append("woken")
        self.with_watchdog = lambda stop: stop
        self.agents, self.pool = None, SimpleNamespace(steps=0)

    def submit(self, what: Any, purpose: Purpose, size: int = 0) -> Future[Any]:
        assert purpose == "eval"
        if isinstance(what, Group):
            odd = int(what.prompt.prompt_id.rpartition("/")[2]) % 2
            return ready(scored(what.prompt, odd, samples=len(what.dropped)))
        self.asked.append(what.prompt_id)
        return ready(Group(prompt=what, trajectories=(), dropped=("",) * size))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    system = Fake()

    @contextmanager
    def running(*_: object, learner: bool) -> Iterator[Any]:
        before = len(system.loaded)
        yield system
        # A checkpoint's weights are the ranks' to read; a model folder's the engines'.
        assert learner == (len(system.loaded) > before)

    monkeypatch.setattr("keel.commands.sampling.launch", running)
    return system


def test_filter_writes_pass_rates(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *SMALL)
    assert main(["filter", *words]) == 0
    out = capsys.readouterr().out
    assert "prompts to sample, with model.path = tiny" in out and "pass@3" in out
    assert "ESTIMATE" not in out, "no evaluation runs"
    table = tmp_path / "filter" / "pass_rates.jsonl"
    rates = {line["id"]: line["pass_rate"] for line in map(json.loads, table.open())}
    assert list(rates) == fake.asked and set(rates.values()) == {0, 1 / 3}
    plain = prepare("quickstart", words[1:])
    assert set(rates) == {
        p.prompt_id for some in plain.dataset.train.sources.values() for p in some
    }

    read = prepare("quickstart", (*words[1:], f"data.sources[spelling].pass_rates={table}"))
    (spelling, spiral) = read.dataset.train.sources.values()
    assert {p.prompt_id for p in spelling} == {n for n, r in rates.items() if r and "spell" in n}
    assert spiral == plain.dataset.train.sources["spiral"]
    assert "out of the bounds of pass rates" in read.text()
    assert "per evaluation" in plain.text()
    unmeasured = prepare("quickstart", (*words[1:], "run.eval_every=-1")).text()
    assert "per step" in unmeasured and "per evaluation" not in unmeasured

    # Other bounds are a matter of the table alone.
    asked = len(fake.asked)
    assert main(["filter", *words, "filter.least_pass_rate=0.5"]) == 0
    assert "passed less often than 0.5" in capsys.readouterr().out
    assert len(fake.asked) == asked
    assert (tmp_path / "filter" / "kept" / "spelling.jsonl").read_text() == ""


def test_filter_uses_the_latest_checkpoint(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *SMALL)
    trained = prepare("quickstart", words[1:]).config
    with RunFolder(trained) as folder:
        state = State(step=2, version=2, cursor={}, config=config_digest(trained))
        folder.save(state, lambda path: {})
    assert main(["filter", *words, "data.only=[spiral]"]) == 0
    assert "with " in (out := capsys.readouterr().out) and "step_000002" in out
    assert fake.loaded == ["step_000002", "woken"]
    assert {name.partition("/")[0] for name in fake.asked} == {"spiral"}
    assert main(["filter", *words, "model.tiny.layers=2"]) == 2
    assert "model.tiny.layers: 3 → 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("filter.samples=0", "filter.samples = 0"),
        ("filter.sample=9", "did you mean filter.samples"),
        ("filter.least_pass_rate=2", "filter.least_pass_rate = 2.0: must be in [0, 1]"),
        ("filter.most_pass_rate=0", "filter.most_pass_rate = 0.0: must be above 0"),
        ("data.sources[spelling].rewards={}", "name at least one"),
        ("data.sources=[{name: a, source: jsonl, path: EMPTY}]", "it is empty"),
        (
            "data.sources=[{name: a, source: jsonl, path: BARE}]",
            "bare.jsonl: its first row has no `answer`",
        ),
        ("filter.dir=TAKEN", "filter.samples: 3 → 4"),
    ],
)
def test_invalid_filters_are_refused(
    override: str, message: str, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    taken = tmp_path / "taken"
    words = ["quickstart", f"run.dir={tmp_path / 'run'}", *SMALL]
    if "TAKEN" in override:
        assert main(["filter", *words, f"filter.dir={taken}"]) == 0
        fake.asked.clear()
        words.append("filter.samples=4")
    if "data.sources=" in override:
        words = words[:3]
    for name in ("empty", "bare"):
        override = override.replace(name.upper(), str(tmp_path / f"{name}.jsonl"))
    assert main(["filter", *words, override.replace("TAKEN", str(taken))]) == 2
    assert message in capsys.readouterr().err
    assert not fake.asked and not ray.is_initialized()
