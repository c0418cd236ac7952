"""`keel.train`: arguments become files and overrides of `keel train`."""

from __future__ import annotations

import json
import math
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import keel
from keel.commands import api
from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_prompts, check_spec
from keel.rewards.code.verifier import CodeSettings
from keel.rewards.custom import load_function, passing
from keel.rewards.scorer import Scorer
from keel.rl.types import FUNCTIONS
from keel.trainer.run.signals import Interrupt
from tests.rewards.groups import group
from tests.waiting import PATIENCE_S

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


def test_errors_name_the_passed_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train(recipe: str, overrides: list[str], **_: Any) -> None:
        load_jsonl(load_config(recipe, overrides).data.sources[0])

    monkeypatch.setattr(api.main, "train", train)
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b"}]
    with pytest.raises(ConfigError, match=r"keel\.train\(prompts=…\): row 2"):
        keel.train("quickstart", prompts=rows, knobs={"run.dir": tmp_path / "run"})


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
    table = SimpleNamespace(columns=["prompt"], to_dict=lambda orient: ROWS[:1])  # of pandas
    keel.train("quickstart", prompts=table, knobs=knobs)
    assert rows_of(requests[1]) == ROWS[:1]
    turns = [{"role": "user", "content": "Hi."}]
    odd: list[Any] = [{"prompt": turns, "answer": "1", "score": np.float32(0.5)}]
    keel.train("quickstart", prompts=odd, knobs=knobs)
    assert rows_of(requests[2]) == [{"messages": turns, "answer": "1", "score": 0.5}]
    keel.train("quickstart", prompts=iter(ROWS), knobs=knobs, holdout=1)
    assert requests[3] == requests[0]


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
    generated: Any = (knob for knob in knobs)
    keel.train("quickstart", prompts=["Say hi."], rewards=[brief], knobs=generated)
    assert requests[1].data.sources[0].rewards == {"python.brief": 1.0}
    with pytest.raises(ValueError, match=r"python\.brief"):
        load_function("python.brief")


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


def listening(*callbacks: Any) -> tuple[api._Callbacks, api._CallbackView]:
    callbacks_ = api._Callbacks(callbacks)
    view = SimpleNamespace(record=lambda *_: None)
    return callbacks_, api._CallbackView(view, callbacks_)  # pyright: ignore[reportArgumentType]


def test_callbacks_can_stop_the_run() -> None:
    steps, reached = list[int](), np.array([1.0, 2.0])
    state, view = listening(lambda step, _: steps.append(step), lambda n, _: reached.max() <= n)
    view.record(0, {"eval/sums/pass@1": 0.5})
    view.record(1, {"time/step": 2.0, "reward/mean": 0.5})
    assert not state.enough
    view.record(2, {"time/step": 2.0, "reward/mean": 0.5})
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
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, keel.Preempted)]
)
@pytest.mark.parametrize("within", [True, False])
def test_signal_raises_after_the_run(
    number: signal.Signals,
    kind: type[BaseException],
    within: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def train(*_: Any, drive: Any, again: str) -> None:
        with Interrupt(lambda _: None) if within else nullcontext():
            signal.raise_signal(number)

    monkeypatch.setattr(api.main, "train", train)
    before = signal.getsignal(number)
    with pytest.raises(kind) as caught:
        keel.train(knobs={"run.dir": tmp_path})
    assert type(caught.value) is kind and signal.getsignal(number) == before


async def waits(step: int, numbers: Any) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"prompts": []}, r"prompts=…"),
        ({"prompts": ["Hi.", "a\ud800"]}, "row 2"),
        ({"holdout": 3}, r"holdout=…"),
        ({"prompts": ROWS, "holdout": -1}, r"\(holdout="),
        ({"knobs": [("run.steps", 3)]}, r"knobs="),
        ({"knobs": {"run.steps": object()}}, r"knobs=run\.steps"),
        ({"rewards": {1: 0.5}}, r"rewards="),
        ({"rewards": {"correct": math.nan}}, "weight of correct"),
        ({"callbacks": [waits]}, r"callbacks="),
        ({"callbacks": lambda metrics: None}, r"callbacks="),
    ],
)
def test_invalid_arguments_are_refused_before_writing(
    arguments: dict[str, Any], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.main, "train", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ConfigError, match=match):
        keel.train(**{"recipe": "quickstart", "knobs": [f"run.dir={tmp_path}"], **arguments})
    assert not (tmp_path / "passed").exists()
