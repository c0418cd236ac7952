"""`keel.train`: what Python hands over, as files and overrides of the same command."""

from __future__ import annotations

import json
import re
import signal
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import keel
from keel.commands import api
from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError
from keel.data.dataset import load_dataset
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_prompts, check_spec
from keel.rewards.code.verifier import CodeSettings
from keel.rewards.custom import load_function
from keel.rewards.pickled_functions import passing
from keel.rewards.scorer import Scorer
from keel.rl.types import FUNCTIONS
from keel.trainer.run.signals import Interrupt
from tests.rewards.groups import group
from tests.waiting import PATIENCE_S

ROOT = Path(keel.__file__).resolve().parents[1]
ROWS = [{"prompt": "1 + 1?", "answer": "2", "grade": 3}, {"prompt": "2 + 2?", "answer": "4"}]


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """What `keel train` would be asked; its run is two lines of metrics."""
    seen: list[Config] = []

    def train(recipe: str, overrides: list[str], *, drive: Any, again: str) -> None:
        config = load_config(recipe, overrides)
        seen.append(config)
        folder = Path(config.run.dir)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{"step": step, "time": 1.0, "reward/mean": 0.5 * step} for step in (0, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(it) + "\n" for it in lines))
        for part in config.data.sources[0].rewards:
            if "." in part:
                assert callable(load_function(part)), "inside the run, functions are found"

    monkeypatch.setattr(api.main, "train", train)
    return seen


@pytest.mark.parametrize(
    ("rows", "knobs", "said"),
    [
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], {}, "row 2: no `answer`"),
        ([{"question": "a", "answer": "1"}], {}, " its first row has no `prompt`, it has quest"),
        (
            [{"question": "a", "answer": "1"}],
            {"data.sources[prompts].columns": {"prompt": "asked"}},
            "data.sources[prompts].columns.prompt = 'asked': keel.train(prompts=…) has no such col",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_said_of_the_row_that_was_passed(
    rows: list[dict[str, str]],
    knobs: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def train(recipe: str, overrides: list[str], **_: Any) -> None:
        load_jsonl(load_config(recipe, overrides).data.sources[0])

    monkeypatch.setattr(api.main, "train", train)
    with pytest.raises(ConfigError) as refused:
        keel.train("quickstart", prompts=rows, knobs={"run.dir": tmp_path / "run", **knobs})
    assert said in str(refused.value) and "keel.train(prompts=…)" in str(refused.value)
    assert "prompts.jsonl" not in str(refused.value)


def test_more_held_out_than_there_are_is_said_of_the_argument(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(recipe: str, overrides: list[str], **_: Any) -> None:
        load_dataset(load_config(recipe, overrides).data, seed=0)

    monkeypatch.setattr(api.main, "train", train)
    with pytest.raises(ConfigError, match=r"^keel\.train\(holdout=2\): there are only 2 distinct"):
        keel.train("quickstart", prompts=ROWS, holdout=2, knobs={"run.dir": tmp_path})


def test_columns_of_the_rows_that_are_passed_are_a_knob(
    asked: list[Config], tmp_path: Path
) -> None:
    knobs = {"run.dir": tmp_path / "run", "data.sources[prompts].columns": {"prompt": "question"}}
    rows = [{"question": "a", "answer": "1"}]
    keel.train({"defaults": "quickstart"}, prompts=rows, knobs=knobs)
    assert asked[0].data.sources[0].columns == {"prompt": "question"}
    with pytest.raises(ConfigError, match=r"knobs=data\.sources\): keep one"):
        keel.train("quickstart", prompts=rows, knobs=[f"run.dir={tmp_path}", "data.sources=[]"])


class Table:
    """What is used of a pandas table: iterating over one gives its columns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows, self.columns = rows, list(rows[0])

    def to_dict(self, *, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return self._rows

    def __iter__(self) -> Any:
        return iter(self.columns)


def rows_of(config: Config) -> list[dict[str, Any]]:
    (source,) = config.data.sources
    return [json.loads(line) for line in Path(source.path).read_text().splitlines()]


def test_rows_of_all_kinds_are_the_recipes_one_source(asked: list[Config], tmp_path: Path) -> None:
    knobs = {"run.dir": tmp_path / "run", "run.steps": np.int64(7)}
    run = keel.train("quickstart", prompts=(row for row in ROWS), knobs=knobs, holdout=1)
    assert rows_of(asked[0]) == ROWS and asked[0].data.sources[0].holdout == 1
    assert asked[0].run.steps == 7
    assert run.metrics[1]["reward/mean"] == 0.5 and run.model is None
    assert run.folder == tmp_path / "run"
    keel.train("quickstart", prompts=Table(ROWS[:1]), knobs=knobs)
    assert rows_of(asked[1]) == ROWS[:1]
    turns = [{"role": "user", "content": "Hi."}]
    odd: list[Any] = [{"prompt": turns, "answer": "1", "score": np.float32(0.5)}]
    keel.train("quickstart", prompts=odd, knobs=knobs)
    assert rows_of(asked[2]) == [{"messages": turns, "answer": "1", "score": 0.5}]
    keel.train("quickstart", prompts=iter(ROWS), knobs=knobs, holdout=1)
    assert asked[3] == asked[0], "the same again goes on with the same run"


def test_rows_of_a_table_have_arrays_for_lists_and_nulls_for_what_they_lack(
    asked: list[Config], tmp_path: Path
) -> None:
    """As `pd.read_parquet` reads the data sets of TRL."""
    asked_for = {"role": "user", "content": "Hi.", "tool_calls": None}
    turns = np.empty(1, object)
    turns[0] = asked_for
    NAType = type("NAType", (), {})
    rows = [
        {"prompt": turns, "answer": None, "grade": np.float64("nan"), "most": np.int64(3)},
        {"prompt": "Hi.", "answer": "1", "grade": float("nan"), "most": NAType()},
    ]
    keel.train("quickstart", prompts=Table(rows), knobs={"run.dir": tmp_path / "run"})
    assert rows_of(asked[0]) == [
        {"messages": [{"role": "user", "content": "Hi."}], "most": 3},
        {"prompt": "Hi.", "answer": "1"},
    ]


@pytest.mark.parametrize("base", ["quickstart", "quickstart.yaml", "mine.yaml", Path("mine.yaml")])
def test_a_recipe_in_python_is_written_into_the_run_folder_alone(
    asked: list[Config], tmp_path: Path, working_folder: Path, base: Any
) -> None:
    Path("mine.yaml").write_text(f"defaults: {ROOT}/configs/quickstart.yaml\n")
    recipe = {"defaults": base, "run": {"steps": np.int64(3), "dir": Path("elsewhere")}}
    keel.train(recipe, knobs={"run.dir": tmp_path / "r😀"})
    keel.train({**recipe, "run": {"steps": 3, "dir": str(tmp_path / "r😀")}})
    for config in asked:
        assert (config.run.steps, config.run.dir) == (3, str(tmp_path / "r😀"))
        assert config.data.sources
    assert [path.name for path in working_folder.iterdir()] == ["mine.yaml"]


def test_mistakes_in_a_recipe_in_python_are_named(tmp_path: Path, asked: list[Config]) -> None:
    knobs = {"run.dir": tmp_path / "run"}
    for recipe, words in (
        ({"run": None}, r"data\.sources = "),
        ({"defaults": "quickstart", "rn": {}}, "2: rn: no such knob; did you mean run"),
        ({"defaults": "quickstrat"}, "defaults: .*no such file"),
        ({"model": {"path": {1}}}, "a set is no value of a recipe"),
    ):
        with pytest.raises(ConfigError, match=rf"^keel\.train\(recipe={{…}}\):.*{words}"):
            keel.train(recipe, knobs=knobs)
    assert not asked


def test_functions_have_weights_beside_keels_parts(asked: list[Config], tmp_path: Path) -> None:
    def brief(prompt: Any, trajectory: Any) -> float:
        return float(len(trajectory.answer) < 5)

    recipe = {"defaults": "quickstart"}
    knobs = [f"run.dir={tmp_path}/run"]
    keel.train(recipe, rewards={"correct": 1.0, brief: 0.25}, knobs=knobs)
    for source in asked[0].data.sources:
        assert source.rewards == {"correct": 1.0, "python.brief": 0.25}
    keel.train(recipe, rewards=[brief], knobs=[*knobs, "data.only=[spiral]"])
    (source,) = asked.pop(1).data.sources
    assert (source.name, source.rewards) == ("spiral", {"python.brief": 1.0}), "and no other's"
    named = [*knobs, "data.sources.1.name=gsm8k=a[1]", "data.only=['gsm8k=a[1]']"]
    keel.train(recipe, rewards=[brief], knobs=named)
    assert asked.pop(1).data.sources[0].rewards == {"python.brief": 1.0}
    given: Any = (knob for knob in knobs)
    keel.train("quickstart", prompts=["Say hi."], rewards=[brief], knobs=given)
    assert asked[1].data.sources[0].rewards == {"python.brief": 1.0}
    with pytest.raises(ValueError, match=r"python\.brief.*was passed to keel\.train"):
        load_function("python.brief")


@dataclass
class Near:
    """Compares by value, so it cannot be hashed."""

    most: int

    def __call__(self, prompt: Any, trajectory: Any) -> float:
        return 1.0


def test_rewards_of_any_kind_and_their_weights(asked: list[Config], tmp_path: Path) -> None:
    knobs = {"run.dir": tmp_path}

    def plain(prompt: Any, trajectory: Any) -> float:
        return 1.0

    several: list[Any] = [Near(3), [Near(3), plain], {plain: np.float32(0.5)}]
    for rewards in several:
        keel.train("quickstart", rewards=rewards, knobs=knobs)
    assert [config.data.sources[0].rewards for config in asked] == [
        {"python.Near": 1.0},
        {"python.Near": 1.0, "python.plain": 1.0},
        {"python.plain": 0.5},
    ]


def test_numbers_of_numpy_are_numbers(tmp_path: Path, asked: list[Config]) -> None:
    rewards = {"correct": np.float32(0.5)}
    keel.train(prompts=ROWS, holdout=np.int64(1), rewards=rewards, knobs=[f"run.dir={tmp_path}"])
    (source,) = asked[0].data.sources
    assert (source.holdout, dict(source.rewards)) == (1, {"correct": 0.5})


def test_a_function_that_holds_on_to_a_lock_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(prompt: Any, trajectory: Any) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"python\.locked: cannot be sent"):
        keel.train("quickstart", rewards=locked, knobs=[f"run.dir={tmp_path}"])


@pytest.mark.e2e
def test_prompts_without_an_answer_are_judged_by_functions_alone(tmp_path: Path) -> None:
    """One of each completion, one of all of a group; async ones too. `correct` is their mean."""

    async def short(prompt: Any, trajectory: Any) -> float:
        return float(len(trajectory.raw) <= prompt.reward["columns"]["most"])

    def unlike(prompt: Any, trajectories: Any) -> list[float]:
        answers = [trajectory.raw for trajectory in trajectories]
        return [1 / answers.count(answer) for answer in answers]

    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Say hi.", "most": 3}\n')
    rewards = {"python.short": 3.0, "python.unlike": 1.0}
    recipe = tmp_path / "recipe.yaml"
    source = {"name": "made", "source": "jsonl", "path": str(path), "rewards": rewards}
    recipe.write_text(json.dumps({"data": {"sources": [source]}}))
    config = load_config(recipe)
    (item,) = load_jsonl(config.data.sources[0], check_spec).items
    assert item.prompt.reward == {"kind": FUNCTIONS, "columns": {"most": 3}}
    with (
        passing([short, unlike]),
        Scorer({"made": rewards}, workers=1, timeout_s=PATIENCE_S) as scorer,
    ):
        check_prompts([item.prompt], rewards, code=CodeSettings())
        (scored,) = scorer.score([group("hi", "hi", "hello", prompt=item.prompt)])
    assert [parts["python.unlike"] for parts in scored.parts_G] == [0.5, 0.5, 1.0]
    assert [parts["correct"] for parts in scored.parts_G] == [0.875, 0.875, 0.25]
    with pytest.raises(ValueError, match="has none of `answer`"):
        check_prompts([item.prompt], {"correct": 1.0}, code=CodeSettings())


def heard(*callbacks: Any) -> tuple[api._Telling, api._Heard]:
    told = api._Telling(callbacks)
    view = SimpleNamespace(record=lambda *_: None)
    return told, api._Heard(view, told)  # pyright: ignore[reportArgumentType]


def test_callbacks_hear_of_steps_and_end_the_run() -> None:
    steps, reached = list[int](), np.array([1.0, 2.0])
    told, view = heard(lambda step, _: steps.append(step), lambda step, _: reached.max() <= step)
    view.record(0, {"eval/sums/pass@1": 0.5})
    view.record(1, {"time/step": 2.0, "reward/mean": 0.5})
    assert not told.enough
    view.record(2, {"time/step": 2.0, "reward/mean": 0.5})
    view.record(2, {"eval/sums/pass@1": 0.5})  # made up for, when the run was resumed
    assert told.enough and steps == [1, 2]


@pytest.mark.parametrize("raised", [KeyError("reward/best"), SystemExit(3)])
def test_a_callback_that_raises_ends_the_run_once_it_is_saved(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []

    def fails(step: int, numbers: Any) -> None:
        raise raised

    def loop(*parts: Any, should_end: Any) -> int:
        view = parts[2]
        for step in (1, 2):
            view.record(step, {"time/step": 2.0})
            done.append(f"step {step}")
            if should_end():
                done.append("saved")
                return step
        return 2

    def train(*_: Any, drive: Any, again: str) -> None:
        drive(None, None, SimpleNamespace(record=lambda *_: None), 0)
        done.append("said")

    monkeypatch.setattr(api.main, "run_loop", loop)
    monkeypatch.setattr(api.main, "train", train)
    with pytest.raises(type(raised)) as caught:
        keel.train(callbacks=fails, knobs={"run.dir": tmp_path})
    assert caught.value is raised and done == ["step 1", "saved", "said"]


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (signal.SIGINT, KeyboardInterrupt, "^stopped; what was saved is there"),
        (signal.SIGTERM, keel.Preempted, "^stopped by SIGTERM; what was saved is there"),
    ],
)
@pytest.mark.parametrize("within", [True, False])
def test_a_run_that_a_signal_has_ended_does_not_pass_for_one_that_is_done(
    number: signal.Signals,
    kind: type[BaseException],
    words: str,
    within: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Where the loop has noted it, and where it came before or after."""
    began: list[int] = []

    def train(*_: Any, drive: Any, again: str) -> None:
        began.append(1)
        with Interrupt(lambda _: None) if within else nullcontext():
            signal.raise_signal(number)

    monkeypatch.setattr(api.main, "train", train)
    before = signal.getsignal(number)
    with pytest.raises(kind) as caught:
        for _ in range(2):
            keel.train(knobs={"run.dir": tmp_path})
    assert began == [1] and type(caught.value) is kind and signal.getsignal(number) == before
    if within or number == signal.SIGTERM:
        assert re.search(words, str(caught.value))
    monkeypatch.setattr(api.main, "train", lambda *_, drive, again: None)
    (tmp_path / "metrics.jsonl").touch()
    assert keel.train(knobs={"run.dir": tmp_path}).metrics == (), "and the next one is not told"
