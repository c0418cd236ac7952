"""`keel.train`: arguments become files and overrides of `keel train`."""

from __future__ import annotations

import json
import math
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
from keel.configs.schema import Config, ConfigError, RolloutConfig
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
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """Configs passed to a fake `keel train` that writes two lines of metrics."""
    configs: list[Config] = []

    def train(recipe: str, overrides: list[str], *, drive: Any, again: str) -> None:
        config = load_config(recipe, overrides)
        configs.append(config)
        folder = Path(config.run.dir)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{"step": step, "time": 1.0, "reward/mean": 0.5 * step} for step in (0, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(it) + "\n" for it in lines))
        for part in config.data.sources[0].rewards:
            if "." in part:
                assert callable(load_function(part))

    monkeypatch.setattr(api.main, "train", train)
    return configs


@pytest.mark.parametrize(
    ("rows", "knobs", "match"),
    [
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], {}, "row 2"),
        ([{"question": "a", "answer": "1"}], {}, "no `prompt`"),
        (
            [{"question": "a", "answer": "1"}],
            {"data.sources[prompts].columns": {"prompt": "wanted"}},
            "data.sources[prompts].columns.prompt",
        ),
    ],
)
def test_errors_name_the_passed_row(
    rows: list[dict[str, str]],
    knobs: dict[str, Any],
    match: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def train(recipe: str, overrides: list[str], **_: Any) -> None:
        load_jsonl(load_config(recipe, overrides).data.sources[0])

    monkeypatch.setattr(api.main, "train", train)
    with pytest.raises(ConfigError) as caught:
        keel.train("quickstart", prompts=rows, knobs={"run.dir": tmp_path / "run", **knobs})
    assert match in str(caught.value) and "keel.train(prompts=…)" in str(caught.value)
    assert "prompts.jsonl" not in str(caught.value)


def test_too_large_holdout_names_the_argument(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(recipe: str, overrides: list[str], **_: Any) -> None:
        load_dataset(load_config(recipe, overrides).data, seed=0)

    monkeypatch.setattr(api.main, "train", train)
    with pytest.raises(ConfigError, match=r"^keel\.train\(holdout=2\)"):
        keel.train("quickstart", prompts=ROWS, holdout=2, knobs={"run.dir": tmp_path})


def test_columns_of_passed_rows_are_a_knob(requests: list[Config], tmp_path: Path) -> None:
    knobs = {"run.dir": tmp_path / "run", "data.sources[prompts].columns": {"prompt": "question"}}
    rows = [{"question": "a", "answer": "1"}]
    keel.train({"defaults": "quickstart"}, prompts=rows, knobs=knobs)
    assert requests[0].data.sources[0].columns == {"prompt": "question"}
    with pytest.raises(ConfigError, match=r"knobs=data\.sources"):
        keel.train("quickstart", prompts=rows, knobs=[f"run.dir={tmp_path}", "data.sources=[]"])


class Table:
    """Fake pandas table; iterating over it yields its columns."""

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


def test_rows_of_all_kinds_become_the_source(requests: list[Config], tmp_path: Path) -> None:
    knobs = {"run.dir": tmp_path / "run", "run.steps": np.int64(7)}
    run = keel.train("quickstart", prompts=(row for row in ROWS), knobs=knobs, holdout=1)
    assert rows_of(requests[0]) == ROWS and requests[0].data.sources[0].holdout == 1
    assert requests[0].run.steps == 7
    assert run.metrics[1]["reward/mean"] == 0.5 and run.model is None
    assert run.folder == tmp_path / "run"
    keel.train("quickstart", prompts=Table(ROWS[:1]), knobs=knobs)
    assert rows_of(requests[1]) == ROWS[:1]
    turns = [{"role": "user", "content": "Hi."}]
    odd: list[Any] = [{"prompt": turns, "answer": "1", "score": np.float32(0.5)}]
    keel.train("quickstart", prompts=odd, knobs=knobs)
    assert rows_of(requests[2]) == [{"messages": turns, "answer": "1", "score": 0.5}]
    keel.train("quickstart", prompts=iter(ROWS), knobs=knobs, holdout=1)
    assert requests[3] == requests[0]


def test_table_rows_have_arrays_and_nulls(requests: list[Config], tmp_path: Path) -> None:
    message = {"role": "user", "content": "Hi.", "tool_calls": None}
    turns = np.empty(1, object)
    turns[0] = message
    NAType = type("NAType", (), {})
    rows = [
        {"prompt": turns, "answer": None, "grade": np.float64("nan"), "most": np.int64(3)},
        {"prompt": "Hi.", "answer": "1", "grade": float("nan"), "most": NAType()},
    ]
    keel.train("quickstart", prompts=Table(rows), knobs={"run.dir": tmp_path / "run"})
    assert rows_of(requests[0]) == [
        {"messages": [{"role": "user", "content": "Hi."}], "most": 3},
        {"prompt": "Hi.", "answer": "1"},
    ]


@pytest.mark.parametrize("base", ["quickstart", "quickstart.yaml", "mine.yaml", Path("mine.yaml")])
def test_python_recipe_is_saved(
    requests: list[Config], tmp_path: Path, working_folder: Path, base: Any
) -> None:
    Path("mine.yaml").write_text(f"defaults: {ROOT}/configs/quickstart.yaml\n")
    recipe = {"defaults": base, "run": {"steps": np.int64(3), "dir": Path("elsewhere")}}
    keel.train(recipe, knobs={"run.dir": tmp_path / "r😀"})
    keel.train({**recipe, "run": {"steps": 3, "dir": str(tmp_path / "r😀")}})
    for config in requests:
        assert (config.run.steps, config.run.dir) == (3, str(tmp_path / "r😀"))
        assert config.data.sources
    assert [path.name for path in working_folder.iterdir()] == ["mine.yaml"]


def test_errors_in_a_python_recipe_are_named(tmp_path: Path, requests: list[Config]) -> None:
    knobs = {"run.dir": tmp_path / "run"}
    for recipe, match in (
        ({"run": None}, r"data\.sources = "),
        ({"defaults": "quickstart", "rn": {}}, "2: rn: "),
        ({"defaults": "quickstrat"}, "defaults: .*no such file"),
        ({"model": {"path": {1}}}, "set"),
    ):
        with pytest.raises(ConfigError, match=rf"^keel\.train\(recipe={{…}}\):.*{match}"):
            keel.train(recipe, knobs=knobs)
    assert not requests


def test_functions_have_weights_like_parts(requests: list[Config], tmp_path: Path) -> None:
    def brief(prompt: Any, trajectory: Any) -> float:
        return float(len(trajectory.answer) < 5)

    recipe = {"defaults": "quickstart"}
    knobs = [f"run.dir={tmp_path}/run"]
    keel.train(recipe, rewards={"correct": 1.0, brief: 0.25}, knobs=knobs)
    for source in requests[0].data.sources:
        assert source.rewards == {"correct": 1.0, "python.brief": 0.25}
    keel.train(recipe, rewards=[brief], knobs=[*knobs, "data.only=[spiral]"])
    (source,) = requests.pop(1).data.sources
    assert (source.name, source.rewards) == ("spiral", {"python.brief": 1.0})
    renamed = [*knobs, "data.sources.1.name=gsm8k=a[1]", "data.only=['gsm8k=a[1]']"]
    keel.train(recipe, rewards=[brief], knobs=renamed)
    assert requests.pop(1).data.sources[0].rewards == {"python.brief": 1.0}
    generated: Any = (knob for knob in knobs)
    keel.train("quickstart", prompts=["Say hi."], rewards=[brief], knobs=generated)
    assert requests[1].data.sources[0].rewards == {"python.brief": 1.0}
    with pytest.raises(ValueError, match=r"python\.brief"):
        load_function("python.brief")


@dataclass
class Near:
    """Compares by value, so it cannot be hashed."""

    most: int

    def __call__(self, prompt: Any, trajectory: Any) -> float:
        return 1.0


def test_rewards_of_any_kind_and_their_weights(requests: list[Config], tmp_path: Path) -> None:
    knobs = {"run.dir": tmp_path}

    def plain(prompt: Any, trajectory: Any) -> float:
        return 1.0

    several: list[Any] = [Near(3), [Near(3), plain], {plain: np.float32(0.5)}]
    for rewards in several:
        keel.train("quickstart", rewards=rewards, knobs=knobs)
    assert [config.data.sources[0].rewards for config in requests] == [
        {"python.Near": 1.0},
        {"python.Near": 1.0, "python.plain": 1.0},
        {"python.plain": 0.5},
    ]


def test_numpy_numbers_are_accepted(tmp_path: Path, requests: list[Config]) -> None:
    rewards = {"correct": np.float32(0.5)}
    keel.train(prompts=ROWS, holdout=np.int64(1), rewards=rewards, knobs=[f"run.dir={tmp_path}"])
    (source,) = requests[0].data.sources
    assert (source.holdout, dict(source.rewards)) == (1, {"correct": 0.5})


def test_unpicklable_function_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(prompt: Any, trajectory: Any) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"python\.locked"):
        keel.train("quickstart", rewards=locked, knobs=[f"run.dir={tmp_path}"])


@pytest.mark.e2e
def test_functions_alone_judge_prompts_without_answers(tmp_path: Path) -> None:

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
    with pytest.raises(ValueError, match="answer"):
        check_prompts([item.prompt], {"correct": 1.0}, code=CodeSettings())


def listening(*callbacks: Any) -> tuple[api._Telling, api._Heard]:
    callbacks_ = api._Telling(callbacks)
    view = SimpleNamespace(record=lambda *_: None)
    return callbacks_, api._Heard(view, callbacks_)  # pyright: ignore[reportArgumentType]


def test_callbacks_can_stop_the_run() -> None:
    steps, reached = list[int](), np.array([1.0, 2.0])
    state, view = listening(lambda step, _: steps.append(step), lambda n, _: reached.max() <= n)
    view.record(0, {"eval/sums/pass@1": 0.5})
    view.record(1, {"time/step": 2.0, "reward/mean": 0.5})
    assert not state.enough
    view.record(2, {"time/step": 2.0, "reward/mean": 0.5})
    view.record(2, {"eval/sums/pass@1": 0.5})  # a late evaluation of a resumed run
    assert state.enough and steps == [1, 2]


@pytest.mark.parametrize("raised", [KeyError("reward/best"), SystemExit(3)])
def test_raising_callback_ends_the_run_after_saving(
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
        (signal.SIGINT, KeyboardInterrupt, "^stopped"),
        (signal.SIGTERM, keel.Preempted, "SIGTERM"),
    ],
)
@pytest.mark.parametrize("within", [True, False])
def test_signal_raises_after_the_run(
    number: signal.Signals,
    kind: type[BaseException],
    words: str,
    within: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
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
    assert keel.train(knobs={"run.dir": tmp_path}).metrics == ()


async def waits(step: int, numbers: Any) -> None: ...


def yields(step: int, numbers: Any) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"prompts": []}, r"prompts=…"),
        ({"prompts": "Say hi."}, r"prompts=….*str"),
        ({"prompts": [3]}, "row 1"),
        ({"prompts": ["Hi.", "a\ud800"]}, "row 2"),
        ({"prompts": [{"prompt": "a", (1, 2): 3}]}, "row 1"),
        ({"holdout": 3}, r"holdout=…"),
        *(
            ({"prompts": ROWS, "holdout": holdout}, r"\(holdout=")
            for holdout in (-1, 0.5, "3", True, None, ROWS * 9)
        ),
        ({"recipe": ""}, r"recipe=''"),
        *(({"knobs": knobs}, r"knobs=") for knobs in ("run.steps=3", None, [("run.steps", 3)])),
        ({"knobs": {"run.steps": object()}}, r"knobs=run\.steps"),
        *(
            ({"rewards": rewards}, r"rewards=")
            for rewards in ("correct", 3, [], {}, [None], {1: 0.5}, [lambda p, t: 1.0])
        ),
        ({"rewards": {"correct": "1"}}, "weight of correct"),
        ({"rewards": {"correct": math.nan}}, "weight of correct"),
        ({"rewards": {yields: True}}, "weight of yields"),
        ({"rewards": {"mine": yields}}, "weight of mine"),
        *(
            ({"callbacks": callbacks}, r"callbacks=")
            for callbacks in (3, [waits], lambda metrics: None, [dict], [yields])
        ),
        ({"callbacks": [lambda step, metrics, *, view: None]}, "view"),
    ],
)
def test_invalid_arguments_are_refused_before_writing(
    arguments: dict[str, Any], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.main, "train", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ConfigError, match=match):
        keel.train(**{"recipe": "quickstart", "knobs": [f"run.dir={tmp_path}"], **arguments})
    assert not (tmp_path / "passed").exists()


@pytest.mark.parametrize(
    "recipe", ["mine.yaml", {"run": {"steps": 3}}, {"data": {"max_prompt_tokens": 64}}]
)
def test_recipe_needs_no_source_with_prompts(
    recipe: Any, requests: list[Config], tmp_path: Path
) -> None:
    Path("mine.yaml").write_text("run: {steps: 3}\n")
    keel.train(recipe, prompts=ROWS, knobs={"run.dir": tmp_path / "run"})
    assert rows_of(requests[0]) == ROWS


def test_knobs_by_section_leave_others_unchanged(requests: list[Config], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    nested = {"run": {"dir": folder, "steps": 7}, "rollout": {"sampling": {"max_tokens": 99}}}
    dotted = {"run.dir": folder, "run.steps": 7, "rollout.sampling.max_tokens": 99}
    for knobs in (nested, dotted, {"run": nested["run"], "rollout.sampling": {"max_tokens": 99}}):
        keel.train("quickstart", knobs=knobs)
    assert requests[0] == requests[1] == requests[2]
    assert requests[0].run.steps == 7 and requests[0].rollout.sampling.max_tokens == 99
    rollout = load_config("quickstart").rollout
    assert requests[0].rollout.engines == rollout.engines != RolloutConfig().engines
    assert requests[0].rollout.sampling.top_k == rollout.sampling.top_k != 0
    keel.train("quickstart", prompts=ROWS, knobs={**nested, "data": {"max_prompt_tokens": 99}})
    assert [source.name for source in requests[3].data.sources] == ["prompts"]
    for knobs in ({**nested, "data": {"sources": []}}, [f"run.dir={folder}", "data={sources: []}"]):
        with pytest.raises(ConfigError, match=r"knobs=data\.sources"):
            keel.train("quickstart", prompts=ROWS, knobs=knobs)
