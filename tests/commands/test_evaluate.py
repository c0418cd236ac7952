"""`keel eval`, `compare`, `filter` and `replay` with scripted engines."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keel.commands import evaluate
from keel.commands import replay as module
from keel.commands.cli import main
from keel.commands.evaluate import _max_prompts_in_flight, sample_prompts
from keel.configs.load import load_config
from keel.rl.metrics import Mean, Sum
from keel.rl.types import Group, Prompt, ScoredGroup, StepResult, Trajectory
from keel.trainer.prepare import prepare
from keel.trainer.run import checkpoint
from keel.trainer.run.bad_batches import save_batch
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from tests.rl.rollouts import prompt, scored, segment, trajectory

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@dataclass
class Fake:
    """Prompt n of a set has n correct completions, one of them late in its last group."""

    skill: int = 0
    asked: list[tuple[Prompt, int]] = field(default_factory=list[Any])
    loaded: list[str] = field(default_factory=list[str])
    stop_after: int = 10**9

    def __post_init__(self) -> None:
        self.learner = SimpleNamespace(load=lambda path: self.loaded.append(path.name))
        self.scorer = SimpleNamespace(submit=self.score)
        self.wake = lambda: None
        self.with_watchdog = lambda stop: stop
        self.agents, self.pool = None, SimpleNamespace(steps=0)
        self.counts: dict[str, int] = {}

    def submit(self, prompt: Prompt, purpose: str, size: int) -> Future[Any]:
        assert purpose == "eval"
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append((prompt, size))
        late = size < 3
        made = tuple(completion(prompt, n) for n in range(size - late))
        dropped = ("late: too slow",) * late
        return ready(Group(prompt=prompt, trajectories=made, dropped=dropped))

    def score(self, group: Group, purpose: str) -> Future[ScoredGroup]:
        number = len(group.trajectories)
        right = int(group.prompt.prompt_id.rpartition("/")[2]) % 4 + self.skill
        values = [float(n < right) for n in range(number)]
        return ready(
            ScoredGroup(
                group=group,
                rewards_G=np.array(values, np.float32),
                parts_G=tuple({"correct": value, "error": 0.0} for value in values),
                advantages_G=np.zeros(number, np.float32),
            )
        )


def completion(prompt: Prompt, sibling: int) -> Trajectory:
    sampled = segment(tokens=6, context=sibling + 1, name=prompt.prompt_id)
    finish = "stop" if sibling else "length"
    message = {"role": "assistant", "content": f"so \\boxed{{ no {sibling}}}", "raw": ""}
    message["reasoning_content"] = "a<think>"  # two tokens
    return replace(trajectory(sampled, sibling=sibling, finish=finish), messages=(message,))


def ready(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@pytest.fixture
def fake(monkeypatch: Patch) -> Fake:
    system = Fake()

    @contextmanager
    def running(task: object, log: Path, *, learner: bool) -> Iterator[Any]:
        assert log.name == "rewards" and log.parent.is_dir(), "what functions print has a place"
        before = len(system.loaded)
        yield system
        # A checkpoint's weights are the ranks' to read; a model folder's the engines'.
        assert learner == (len(system.loaded) > before)

    monkeypatch.setattr("keel.commands.evaluate.launch", running)
    return system


FEW = (
    *(f"data.sources[{n}].{k}" for n in ("spelling", "spiral") for k in ("size=12", "holdout=4")),
    *("eval.samples=4", "algorithm.group_size=3"),
)


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())["results"]


def test_results_of_each_set_and_domain(fake: Fake, tmp_path: Path, capsys: Capture) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW, "eval.submissions=1")
    assert main(["eval", *words]) == 0
    report = results_of(tmp_path / "eval" / "base")["recipe"]
    heldout = prepare("quickstart", words[1:]).dataset.heldout
    assert [size for _, size in fake.asked] == [3, 1] * 8
    # By hand: the last completion of the group of one is late.
    passes = [int(p.prompt_id.rpartition("/")[2]) % 4 for p in heldout["spelling"]]
    spelling = report["spelling"]
    assert spelling["pass@1"] == pytest.approx(sum(passes) / 16)
    assert spelling["pass@4"] == pytest.approx(np.mean([n > 0 for n in passes]))
    assert spelling["unscored"] == 4 and spelling["completions"] == 16
    assert (spelling["tokens_mean"], spelling["tokens_most"]) == (4, 5)
    assert spelling["cut"] == pytest.approx(1 / 3)
    low, high = spelling["pass@1_interval"]
    assert low < spelling["pass@1"] < high
    # The first is cut off, and the second is then the one that is handed in.
    assert spelling["contest"] == pytest.approx(np.mean([n > 1 for n in passes]))
    assert report["all"]["prompts"] == 8 and set(report) >= {"spelling", "spiral", "all"}
    assert f"run.dir = {tmp_path}: no checkpoint" in capsys.readouterr().out
    line = json.loads((tmp_path / "eval/base/samples.jsonl").read_text().splitlines()[0])
    assert line["samples"][1]["thinking"] == 2
    assert line["samples"][1]["answer"] == "no 1" and line["missing"] == ["late: too slow"]


def test_stopped_evaluation_resumes(fake: Fake, tmp_path: Path, capsys: Capture) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    fake.stop_after = 7  # in the middle of a prompt
    assert main(["eval", *words]) == 130
    table = tmp_path / "eval/base/samples.jsonl"
    with table.open("ab") as file:
        file.write('{"variant": "é'.encode()[:-1])  # in the middle of a character
    done = table.read_bytes().count(b"\n")
    fake.stop_after, before = 10**9, len(fake.asked)
    assert main(["eval", *words]) == 0
    assert len(fake.asked) - before == 2 * (8 - done)
    assert len(table.read_text().splitlines()) == 8
    ended = table.read_bytes()
    assert main(["eval", *words, "eval.temperature=0.5"]) == 0
    assert main(["eval", *words]) == 0
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {"base", "base.2", "base.3"}
    assert table.read_bytes() == ended
    capsys.readouterr()
    assert main(["eval", *words, f"eval.dir={tmp_path / 'eval/base'}"]) == 2
    assert "holds an evaluation that has ended" in capsys.readouterr().err


def test_checkpoints_by_name(fake: Fake, tmp_path: Path, capsys: Capture) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    trained = prepare("quickstart", words[1:]).config
    with RunFolder(trained) as folder:
        for step in (2, 4):
            digest, results_of = config_digest(trained), "another" if step == 4 else ""
            state = State(step=step, version=step, cursor={}, config=digest, tokenizer=results_of)
            folder.save(state, lambda path: {})
    assert main(["eval", *words]) == 0
    message = "warning: model.path = 'tiny' has another tokenizer or chat template than when step_"
    assert message in capsys.readouterr().out
    assert main(["eval", *words, "eval.checkpoint='2'"]) == 0
    assert main(["eval", *words, "eval.checkpoint=base", "data.only=[spiral]"]) == 0
    assert fake.loaded == ["step_000004", "step_000002"]
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {"step_000004", "step_000002", "base"}
    assert main(["eval", *words, "eval.checkpoint='3'"]) == 2


def test_two_evaluations_compared(fake: Fake, tmp_path: Path, capsys: Capture) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["eval", *words, f"eval.dir={one}"]) == 0
    fake.skill = 1
    assert main(["eval", *words, f"eval.dir={two}"]) == 0
    capsys.readouterr()
    assert main(["compare", str(one), str(two)]) == 0
    head, *table = capsys.readouterr().out.splitlines()
    assert head == f"{two} − {one}:"
    name, pairs, difference = table[-1].split()[:3]
    rates = [results_of(folder)["recipe"]["all"]["pass@1"] for folder in (one, two)]
    assert (name, pairs) == ("all", "8") and rates[1] > rates[0]
    assert float(difference) == pytest.approx(rates[1] - rates[0], abs=1e-3)
    assert main(["compare", str(one), str(tmp_path)]) == 2


def test_training_prompts_can_be_evaluated(fake: Fake, tmp_path: Path) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    assert main(["eval", *words, "eval.prompts=train", "eval.size=3"]) == 0
    dataset = prepare("quickstart", words[1:]).dataset
    asked = {prompt.prompt_id for prompt, _ in fake.asked}
    assert asked == {p.prompt_id for some in dataset.train.sources.values() for p in some[:3]}
    assert not asked & {p.prompt_id for some in dataset.heldout.values() for p in some}


def test_completions_are_split_into_groups() -> None:
    config = load_config("quickstart", ["algorithm.group_size=4"])
    prompts = [prompt(f"p/{n}") for n in range(2 * _max_prompts_in_flight(config, 10) + 1)]
    recorded: dict[str, list[int]] = {}

    def record(prompt: Prompt, groups: list[ScoredGroup]) -> None:
        completions = [(g.group.trajectories, g.group.dropped) for g in groups]
        recorded[prompt.prompt_id] = [len(made) + len(lost) for made, lost in completions]

    engines: Any = Fake()
    sample_prompts(engines, prompts, 10, config, record=record, note=str, stop=lambda: False)
    assert engines.asked == [(each, size) for each in prompts for size in (4, 4, 2)]
    assert recorded == {each.prompt_id: [4, 4, 2] for each in prompts}


def test_stop_keeps_complete_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_POLL_S", 0.01)
    config = load_config("quickstart", ["algorithm.group_size=4"])
    recorded: list[str] = []
    unfinished: list[Future[Any]] = []

    class Stops(Fake):
        def submit(self, prompt: Prompt, purpose: str, size: int) -> Future[Any]:
            group = super().submit(prompt, purpose, size)
            if prompt.prompt_id == "p/0":
                return group
            unfinished.append(Future())
            return unfinished[-1]

    engines: Any = Stops()
    sample_prompts(
        engines,
        [prompt(f"p/{n}") for n in range(99)],
        10,
        config,
        record=lambda prompt, groups: recorded.append(prompt.prompt_id),
        note=str,
        stop=lambda: bool(unfinished),
    )
    assert recorded == ["p/0"]
    assert len(engines.asked) == 3 * _max_prompts_in_flight(config, 10)
    assert all(future.cancelled() for future in unfinished)


SMALL = ("filter.samples=3",)
SMALL += tuple(f"data.sources.{i}.{knob}" for i in (0, 1) for knob in ("size=20", "holdout=8"))


def test_filter_writes_pass_rates(fake: Fake, tmp_path: Path, capsys: Capture) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *SMALL)
    assert main(["filter", *words]) == 0
    table = tmp_path / "filter" / "pass_rates.jsonl"
    rates = {line["id"]: line["pass_rate"] for line in map(json.loads, table.open())}
    assert list(rates) == [p.prompt_id for p, _ in fake.asked]
    assert rates == {name: min(int(name.rpartition("/")[2]) % 4, 3) / 3 for name in rates}
    plain = prepare("quickstart", words[1:])
    trained = plain.dataset.train.sources.values()
    assert set(rates) == {prompt.prompt_id for some in trained for prompt in some}

    # Other bounds are a matter of the table alone.
    asked = len(fake.asked)
    assert main(["filter", *words, "filter.least_pass_rate=0.5"]) == 0
    assert len(fake.asked) == asked
    kept = (tmp_path / "filter" / "kept" / "spelling.jsonl").read_text().splitlines()
    assert kept and min(json.loads(line)["pass_rate"] for line in kept) >= 0.5

    assert main(["filter", *words, "filter.samples=4"]) == 2
    assert "filter.samples: 3 → 4" in capsys.readouterr().err
    assert len(fake.asked) == asked


GROUPS = [scored([trajectory(segment(20 * s, 6), sibling=s) for s in (0, 1)], [0.0, 1.0])]


REPLAYED = """
model: {path: base}
trainer: {lr: 1.0}
data:
  sources: [{name: sums, source: reasoning_gym, task: chain_sum, size: 10, rewards: {evil.f: 1}}]
"""


class FakeLearner:
    made: list[Any]

    def __init__(self, model: str, config: Any, **_: Any) -> None:
        self.events: list[Any] = [model, config.trainer.lr]
        FakeLearner.made.append(self)

    def start(self) -> list[str]:
        return []

    def load(self, folder: Path) -> None:
        self.events.append(folder.name)

    def step(self, groups: Any) -> StepResult:
        (group,) = groups
        self.events.append(group.group.prompt.prompt_id)
        findings = () if len(FakeLearner.made) > 1 else ("p, token 3: nan",)
        metrics = {"loss": Mean(3.0, 2), "train/skipped_steps": Sum(float(bool(findings)))}
        return StepResult(version=1, metrics=metrics, findings=findings)

    def shutdown(self) -> None:
        self.events.append("end")


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    (tmp_path / "config.yaml").write_text(REPLAYED)
    FakeLearner.made = []

    def plan_model(config: Any, left: Any, hardware: Any, *, chats: bool) -> Any:
        return SimpleNamespace(config=config, hardware=SimpleNamespace(gpu=False))

    monkeypatch.setattr(module, "start_ray", lambda: None)
    monkeypatch.setattr(module, "stop_ray", lambda: None)
    monkeypatch.setattr(module, "start_watchdog", lambda say, hang_timeout_s: nullcontext())
    monkeypatch.setattr(module, "plan_model", plan_model)
    monkeypatch.setattr(module, "Learner", FakeLearner)
    monkeypatch.setattr("keel.commands.cli.find_spec", lambda name: name)
    return tmp_path


def save_state(run_folder: Path, step: int) -> Path:
    state = State(step=step, version=step, config="c")
    return checkpoint.save(run_folder / "checkpoints", state, lambda _: {}, keep=9)


def test_newest_batch_uses_the_checkpoint_before_it(run_folder: Path, capsys: Capture) -> None:
    for step in (3, 7):
        save_batch(run_folder, step, GROUPS, ["p, token 3: was nan"])
    for step in (2, 6, 7):
        save_state(run_folder, step)
    assert main(["replay", str(run_folder)]) == 0
    output = capsys.readouterr().out
    assert "step_000007.npz: 1 groups, 2 completions, from step_000006, the weights" in output
    assert "saved with the batch: p, token 3: was nan\n" in output
    assert "replayed: p, token 3: nan\n" in output
    assert "loss                             1.5\n" in output
    assert main(["replay", str(run_folder), "3", "trainer.lr=2"]) == 0
    assert "replayed: the gradient is finite\n" in capsys.readouterr().out
    assert main(["replay", str(run_folder), "trainer.lr=3"]) == 0
    assert "step_000007.npz" in capsys.readouterr().out and FakeLearner.made.pop().events[1] == 3.0
    assert "evil" not in sys.modules
    first, second = (learner.events for learner in FakeLearner.made)
    assert first == ["base", 1.0, "step_000006", "p", "end"]
    assert second == ["base", 2.0, "step_000002", "p", "end"]
