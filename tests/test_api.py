"""`keel.train`: what Python hands over, as files and overrides of the same command."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import keel
from keel import api
from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_prompts, check_spec
from keel.rewards.code.verifier import CodeSettings
from keel.rewards.custom import load_function
from keel.rewards.passed import passing
from keel.rewards.scorer import Scorer
from keel.rl.types import FUNCTIONS
from tests.rewards.groups import group

ROWS = [{"prompt": "1 + 1?", "answer": "2", "grade": 3}, {"prompt": "2 + 2?", "answer": "4"}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """What `keel train` would be asked; its run is two lines of metrics."""
    seen: list[Config] = []

    def train(recipe: str, overrides: list[str], *, drive: Any) -> None:
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
    knobs = {"run.dir": str(tmp_path / "run"), "run.steps": 7}
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


def test_functions_have_weights_beside_keels_parts(asked: list[Config], tmp_path: Path) -> None:
    def brief(prompt: Any, trajectory: Any) -> float:
        return float(len(trajectory.answer) < 5)

    recipe = {"defaults": str(Path("configs/quickstart.yaml").resolve())}
    knobs = [f"run.dir={tmp_path}/run"]
    keel.train(recipe, rewards={"correct": 1.0, brief: 0.25}, knobs=knobs)
    for source in asked[0].data.sources:
        assert source.rewards == {"correct": 1.0, "python.brief": 0.25}
    keel.train("quickstart", prompts=["Say hi."], rewards=[brief], knobs=knobs)
    assert asked[1].data.sources[0].rewards == {"python.brief": 1.0}
    with pytest.raises(ValueError, match=r"python\.brief.*was passed to keel\.train"):
        load_function("python.brief")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": []}, "there is none"),
        ({"prompts": "Say hi."}, "must be rows, is one str"),
        ({"prompts": [3]}, "row 1 is a int"),
        ({"holdout": 3}, "is for prompts"),
        ({"knobs": "run.steps=3"}, "must be a list"),
        ({"rewards": [lambda prompt, trajectory: 1.0]}, "<lambda>: has no name"),
    ],
)
def test_what_cannot_be_handed_over_is_said(
    given: Mapping[str, Any], words: str, tmp_path: Path, asked: list[Config]
) -> None:
    with pytest.raises(ConfigError, match=words):
        keel.train("quickstart", **{"knobs": [f"run.dir={tmp_path}"], **given})


def test_a_function_that_holds_on_to_a_lock_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(prompt: Any, trajectory: Any) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"python\.locked: cannot be sent"):
        keel.train("quickstart", rewards=locked, knobs=[f"run.dir={tmp_path}"])


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
    with passing([short, unlike]), Scorer({"made": rewards}, workers=1) as scorer:
        check_prompts([item.prompt], rewards, code=CodeSettings())
        (scored,) = scorer.score([group("hi", "hi", "hello", prompt=item.prompt)])
    assert [parts["python.unlike"] for parts in scored.parts_G] == [0.5, 0.5, 1.0]
    assert [parts["correct"] for parts in scored.parts_G] == [0.875, 0.875, 0.25]
    with pytest.raises(ValueError, match="has none of `answer`"):
        check_prompts([item.prompt], {"correct": 1.0}, code=CodeSettings())


def test_callbacks_hear_of_steps_and_end_the_run() -> None:
    heard: list[int] = []
    told = api._Telling([lambda step, _: heard.append(step), lambda step, _: step >= 2])
    view = api._Heard(SimpleNamespace(record=lambda *_: None), told)  # pyright: ignore[reportArgumentType]
    for step in (0, 1):
        view.record(step, {})
    assert not told.enough
    view.record(2, {})
    assert told.enough and heard == [0, 1, 2]
