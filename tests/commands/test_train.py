"""`keel check`, `keel train` and `keel.train` up to the engines."""

import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray

import keel
from keel.commands import api
from keel.commands.cli import main
from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError, SourceConfig
from keel.configs.sections.rewards import CodeConfig
from keel.data.jsonl import load_jsonl
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rewards.checks import check_prompts, check_spec
from keel.rewards.custom import load_function, pickle_functions
from keel.rl.types import FUNCTIONS
from keel.trainer.prepare import prepare
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.manifest import MANIFEST
from keel.trainer.run.signals import Interrupt
from tests.model.stand_in import stand_in
from tests.rewards.groups import group, new_scorer, score
from tests.waiting import PATIENCE_S

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
FEW = tuple(f"data.sources.{i}.{knob}" for i in (0, 1) for knob in ("size=32", "holdout=8"))


def keel_command(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    assert not ray.is_initialized()
    return code, said.out, said.err


def test_check_prints_the_plan_and_starts_nothing(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, out, _ = keel_command(capsys, "check", "quickstart", f"run.dir={folder}", *FEW)
    assert code == 0
    assert "3 MoE layers of 8 experts" in out and not folder.exists()


def test_bad_recipes_are_refused(capsys: Capture) -> None:
    for override, message in (
        ("algorithm.keep_routing=false", "mixture of experts"),
        ("data.max_prompt_tokens=8", "prompt spelling/"),
        ("data.sources[spelling].task=spell_backwards", "spell_backward"),
        ("model.tokenizer=/nowhere", "model.tokenizer"),
        ("rollout.sampling.max_tokens=4096", "max_context"),
        ("rollout.tensor_parallel=2", "on a CPU an engine is one process"),
    ):
        code, _, err = keel_command(capsys, "train", "quickstart", override)
        assert code == 2 and message in err and "Traceback" not in err, override


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("half", "def half(prompt, trajectory):\n    return 0.5\n", 0),
        ("none", "def half(prompt, trajectory):\n    1\n", 1),
        ("generator", "async def half(prompt, trajectory):\n    yield 1\n", 1),
    ],
)
def test_check_tries_reward_functions(
    name: str, code: str, status: int, capsys: Capture, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / f"checked_{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    knob = f"data.sources[spelling].rewards={{correct: 1, checked_{name}.half: 0.5}}"
    actual, out, err = keel_command(capsys, "check", "quickstart", knob, *FEW)
    assert actual == status and (f"checked_{name}.half: failed" in out + err) == bool(status)


@pytest.mark.e2e
def test_own_model_is_planned_from_its_config(capsys: Capture, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "moe_intermediate_size": 32, "head_dim": 32}
    sizes |= {"num_experts": 16, "num_experts_per_tok": 4, "max_position_embeddings": 300}
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**kind, **sizes, "vocab_size": 288}))
    build_tokenizer().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    stand_in(tmp_path)
    lines = tmp_path / "sums.jsonl"
    lines.write_text("".join(f'{{"prompt": "{i} + 1 =", "answer": "{i + 1}"}}\n' for i in range(9)))
    recipe = tmp_path / "mine.yaml"
    source = {"name": "sums", "source": "jsonl", "path": str(lines), "holdout": 2}
    data = {"sources": [source], "max_prompt_tokens": 64}
    recipe.write_text(json.dumps({"model": {"path": str(tmp_path)}, "data": data}))
    code, out, err = keel_command(capsys, "check", str(recipe), "rollout.sampling.max_tokens=200")
    assert code == 0, err
    assert "4 MoE layers of 16 experts (4 per token)" in out
    assert "7 to train on, 2 held out" in out

    weights.unlink()
    for command in ("check", "train"):
        code, _, err = keel_command(capsys, command, str(recipe), "rollout.sampling.max_tokens=200")
        assert code == 2 and "model.safetensors" in err
    stand_in(tmp_path)
    code, _, err = keel_command(capsys, "check", str(recipe), "rollout.sampling.max_tokens=400")
    assert code == 2 and "has 300 tokens" in err


def test_failed_export_is_repeated(capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    done = tmp_path / "run"
    overrides = (f"run.dir={done}", "run.steps=1", *FEW)
    task = prepare("quickstart", overrides)
    with RunFolder(task.config) as folder:
        cursor, digest = task.dataset.train.position(), config_digest(task.config)
        folder.save(State(step=1, version=1, cursor=cursor, config=digest), lambda path: {})
    (done / "metrics.jsonl").touch()
    learner = SimpleNamespace(load=lambda path: None, export=lambda path: path.mkdir() or {})

    @contextmanager
    def running(*_: object, **__: object) -> Iterator[Any]:
        yield SimpleNamespace(learner=learner)

    monkeypatch.setattr("keel.commands.train.launch", running)
    code, out, _ = keel_command(capsys, "train", "quickstart", *overrides)
    assert code == 0 and (done / "model").is_dir()
    code, out, _ = keel_command(capsys, "train", "quickstart", *overrides)
    assert code == 0 and "run.steps" in out  # nothing left to do

    (done / "model" / MANIFEST).write_text("{}")
    code, _, err = keel_command(capsys, "train", "quickstart", *overrides)
    assert code == 2 and "exported model has changed" in err
    (done / "checkpoints" / "step_000001" / "more").touch()
    for command in ("train", "check", "eval"):
        code, _, err = keel_command(capsys, command, "quickstart", *overrides)
        assert code == 2 and "every checkpoint is damaged:\n  step_000001: more: extra" in err


ROWS = [{"prompt": "1 + 1?", "answer": "2", "grade": 3}, {"prompt": "2 + 2?", "answer": "4"}]


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def requests(monkeypatch: Patch, tmp_path: Path) -> list[Config]:
    configs: list[Config] = []

    def train(recipe: str, overrides: list[str], *, after_step: Any, resume_command: str) -> None:
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


def read_source_rows(config: Config) -> list[dict[str, Any]]:
    (source,) = config.data.sources
    return [json.loads(line) for line in Path(source.path).read_text().splitlines()]


def test_rows_of_all_kinds_become_the_source(requests: list[Config], tmp_path: Path) -> None:
    knobs = {"run.dir": tmp_path / "run", "run.steps": np.int64(7)}
    run = keel.train("quickstart", prompts=(row for row in ROWS), knobs=knobs, holdout=1)
    assert read_source_rows(requests[0]) == ROWS and requests[0].data.sources[0].holdout == 1
    assert requests[0].run.steps == 7
    assert run.metrics[1]["reward/mean"] == 0.5 and run.model is None
    assert run.folder == tmp_path / "run"
    table = SimpleNamespace(columns=["prompt"], to_dict=lambda orient: ROWS[:1])  # of pandas
    keel.train("quickstart", prompts=table, knobs=knobs)
    assert read_source_rows(requests[1]) == ROWS[:1]
    turns = [{"role": "user", "content": "Hi."}]
    odd: list[Any] = [{"prompt": turns, "answer": "1", "score": np.float32(0.5)}]
    keel.train("quickstart", prompts=odd, knobs=knobs)
    assert read_source_rows(requests[2]) == [{"messages": turns, "answer": "1", "score": 0.5}]
    keel.train("quickstart", prompts=iter(ROWS), knobs=knobs, holdout=1)
    assert requests[3] == requests[0]


def test_errors_name_rows_and_arguments(tmp_path: Path) -> None:
    knobs = {"run.dir": tmp_path / "run", "model.tiny.cold_start.steps": 0}
    with pytest.raises(ConfigError, match=r"row 2 of prompts") as caught:
        keel.train("quickstart", prompts=[*ROWS[:1], {"answer": "4"}], knobs=knobs)
    assert ".jsonl" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^keel\.train: holdout=2: there are only 2"):
        keel.train("quickstart", prompts=ROWS, knobs=knobs, holdout=2)
    with pytest.raises(ConfigError, match=r"holdout=0\.5\): must be a number of prompts"):
        keel.train("quickstart", prompts=ROWS, knobs=knobs, holdout=cast(Any, 0.5))
    with pytest.raises(ConfigError, match=r"row 1: must be text or a mapping"):
        keel.train("quickstart", prompts=[("a", "b")], knobs=knobs)
    with pytest.raises(ConfigError, match=r"must take the step and its metrics"):
        keel.train("quickstart", callbacks=cast(Any, lambda metrics: None), knobs=knobs)


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
    keel.train(recipe, rewards=[brief], knobs=[*knobs, "eval.file=test.jsonl"])
    *trained, test = requests.pop(1).data.sources
    assert all(source.rewards == {"python.brief": 1.0} for source in trained)
    assert (test.name, test.rewards) == ("test", {"correct": 1.0})
    generated: Any = (knob for knob in knobs)
    keel.train("quickstart", prompts=["Say hi."], rewards=[brief], knobs=generated)
    assert requests[1].data.sources[0].rewards == {"python.brief": 1.0}
    source = {"source": "reasoning_gym", "task": "chain_sum", "size": 4}
    sources = [{"name": name, **source} for name in ("a=b", "a]b", "a[0]")]
    keel.train({**recipe, "data": {"sources": sources}}, rewards=[brief], knobs=knobs)
    assert all(s.rewards == {"python.brief": 1.0} for s in requests[-1].data.sources)
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
    source = SourceConfig(name="made", source="jsonl", path=str(path), rewards=rewards)
    (item,) = load_jsonl(source, check_spec).items
    assert item.prompt.reward == {"kind": FUNCTIONS, "columns": {"most": 3}}
    scoring = {"workers": 1, "timeout_s": PATIENCE_S}
    with pickle_functions([short, unlike]), new_scorer({"made": rewards}, **scoring) as scorer:
        check_prompts([item.prompt], rewards, code=CodeConfig())
        (scored,) = score(scorer, [group("hi", "hi", "hello", prompt=item.prompt)])
    assert [parts["python.unlike"] for parts in scored.parts_G] == [0.5, 0.5, 1.0]
    assert [parts["correct"] for parts in scored.parts_G] == [0.875, 0.875, 0.25]
    with pytest.raises(ValueError, match="nothing to judge it by"):
        check_prompts([item.prompt], {"correct": 1.0}, code=CodeConfig())


def test_callbacks_can_stop_the_run() -> None:
    steps, reached = list[int](), np.array([1.0, 2.0])
    callbacks = (lambda step, _: steps.append(step), lambda n, _: reached.max() <= n)
    after_step = api._Callbacks(callbacks).call
    assert not after_step(0, {"eval/sums/pass@1": 0.5})
    assert not after_step(1, {"time/step": 2.0, "reward/mean": 0.5})
    assert after_step(2, {"time/step": 2.0, "reward/mean": 0.5})
    assert steps == [1, 2]
    reached[:] = 9  # the run restarted before it was saved
    assert after_step(1, {"time/step": 2.0})


@pytest.mark.parametrize("raised", [KeyError("reward/best"), SystemExit(3)])
def test_raising_callback_ends_the_run_after_saving(
    raised: BaseException, monkeypatch: Patch, tmp_path: Path
) -> None:
    done: list[str] = []

    def fails(step: int, numbers: Any) -> None:
        raise raised

    def train(*_: Any, after_step: Any, resume_command: str) -> None:
        assert after_step(1, {"time/step": 2.0})
        done.append("saved")

    monkeypatch.setattr(api.main, "train", train)
    with pytest.raises(type(raised)) as caught:
        keel.train(callbacks=fails, knobs={"run.dir": tmp_path})
    assert caught.value is raised and done == ["saved"]


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, keel.Preempted)]
)
@pytest.mark.parametrize("within", [True, False])
def test_signal_raises_after_the_run(
    number: int, kind: type, within: bool, monkeypatch: Patch, tmp_path: Path
) -> None:
    def train(*_: Any, after_step: Any, resume_command: str) -> None:
        with Interrupt(lambda _: None) if within else nullcontext():
            signal.raise_signal(number)

    monkeypatch.setattr(api.main, "train", train)
    before = signal.getsignal(number)
    with pytest.raises(kind) as caught:
        keel.train(knobs={"run.dir": tmp_path})
    assert type(caught.value) is kind and signal.getsignal(number) == before


async def waits(step: int, numbers: Any) -> None: ...


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompts": []},
        {"prompts": ["Hi.", "a\ud800"]},
        {"holdout": 3},
        {"prompts": ROWS, "holdout": -1},
        {"knobs": [("run.steps", 3)]},
        {"knobs": {"run.steps": object()}},
        {"rewards": {1: 0.5}},
        {"rewards": {"correct": math.nan}},
        {"callbacks": [waits]},
        {"callbacks": lambda metrics: None},
    ],
)
def test_invalid_arguments_are_refused_before_writing(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(api.main, "train", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ConfigError):
        keel.train(**{"recipe": "quickstart", "knobs": [f"run.dir={tmp_path}"], **arguments})
    assert not (tmp_path / "passed").exists()
