"""Preparation of a run: its model, its data, and the verdicts of `keel check` and `keel train`."""

import contextlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen3Config

from keel.commands.cli import main
from keel.commands.train import run_loop
from keel.configs.dump import dump_config
from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.data.dataset import Dataset
from keel.model.load import ModelFacts
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.metrics import Mean
from keel.rollout.chat.render import render_prompt
from keel.rollout.spec import EngineSpec
from keel.trainer.engine.weights import _write_tokenizer
from keel.trainer.prepare import Task, prepare
from keel.trainer.run.checkpoint import SaveError, State, config_digest
from keel.trainer.run.errors import CollectiveTimeout
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.view import View
from tests.model.stand_in import stand_in
from tests.trainer.machines import NOTHING, Accepted, Machine, at
from tests.trainer.placement.shapes import DENSE

FEW = tuple(f"data.sources.{i}.{knob}" for i in (0, 1) for knob in ("size=32", "holdout=8"))


def system_of(task: Task, **parts: Any) -> Any:
    """The parts of a started system that the loop uses."""
    unused = {name: SimpleNamespace() for name in ("learner", "agents", "watchdog", "nodes")}
    scorer = SimpleNamespace(report_to=lambda say: None)
    fakes = {
        "pool": SimpleNamespace(),
        "weights": SimpleNamespace(push=lambda _: None),
        "scorer": scorer,
        "gpus": 0,
    }
    how = {"with_watchdog": lambda hurry: hurry}
    return SimpleNamespace(task=task, **{**unused, **fakes, **how, **parts})


def test_stop_below_alarm_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = ("run.eval_every=1", "alarms.stop_below={spelling: 0.5}")
    words = (f"run.dir={tmp_path}", *below, *FEW)
    task = prepare("quickstart", words)

    def full(folder: Path) -> object:
        raise SaveError(f"{folder}: no space")

    system = system_of(task, learner=SimpleNamespace(tokens={}, version=2, save=full))

    def two_steps(parts: Any, config: object, *, start: int) -> int:
        parts.journal.record(1, {"eval/spelling/pass@1": Mean(5, 10)}, [])
        assert not parts.handle_failure(CollectiveTimeout("rank 0 failed"))
        assert not parts.should_stop()
        parts.journal.record(2, {"eval/spelling/pass@1": Mean(4, 10)}, [])
        assert parts.should_stop()
        with pytest.raises(SaveError):  # no other evaluation follows
            parts.save(2, {})
        return 2

    monkeypatch.setattr("keel.trainer.loop.train", two_steps)
    with (
        RunFolder(task.config) as folder,
        pytest.raises(RuntimeError, match=r"spelling/pass@1 is 0.400.* checkpoint of step 2"),
    ):
        run_loop(system, folder, View(60), 0)
    assert '"kind": "alarm"' in (tmp_path / "events.jsonl").read_text()
    folder.check_heldout(1)
    with pytest.raises(ConfigError, match=r"spelling = 0.5: pass@1 was 0.400 at step 2"):
        folder.check_heldout(2)


def write_sums(path: Path, count: int) -> None:
    lines = [json.dumps({"prompt": f"Say {n}.", "answer": str(n)}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("command", ["check", "train"])
def test_resume_with_other_data_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run, recipe = tmp_path / "sums.jsonl", tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(
        "defaults: quickstart\n"
        f"run: {{dir: {run}, steps: 3}}\n"
        "model: {tiny: {cold_start: {steps: 0}}}\n"
        "data:\n"
        f"  sources: [{{name: sums, source: jsonl, path: {data}}}]\n"
    )
    write_sums(data, 20)
    task = prepare(str(recipe), ())
    with RunFolder(task.config) as folder:
        cursor, digest = task.dataset.train.position(), config_digest(task.config)
        folder.save(State(step=1, version=1, cursor=cursor, config=digest), lambda _: {})
    (run / "metrics.jsonl").touch()
    assert main(["check", str(recipe)]) == 0
    write_sums(data, 15)
    capsys.readouterr()
    assert main([command, str(recipe)]) == 2
    output = capsys.readouterr().err
    assert f"run.dir = {run}: step 1: the saved state belongs to other data" in output
    assert "model.path" in output


@pytest.mark.parametrize(
    ("knob", "reason"),
    [("rewards={corect: 1}", "did you mean correct"), ("length.target=100000", "must be below")],
)
def test_rewards_are_checked_before_the_model_loads(knob: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        prepare("quickstart", ("model.path=/nowhere/at-all", f"data.sources[spiral].{knob}"))


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
ROWS = '{"problem": "1 + 1 =", "answer": "2", "level": 1}\n'


@pytest.fixture
def base_recipe(tmp_path: Path) -> Path:
    shape = {"vocab_size": 288, "hidden_size": 64, "num_hidden_layers": 2}
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **shape).save_pretrained(tmp_path)
    stand_in(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "sums.jsonl").write_text(ROWS)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    source = {"name": "sums", "source": "file", "path": str(tmp_path / "sums.jsonl")}
    source |= {"columns": {"prompt": "problem"}}  # type: ignore[dict-item]
    whole: dict[str, Any] = {
        "model": {"path": str(tmp_path)},
        "data": {"sources": [source]},
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "rollout": {"sampling": {"stop": ["\n\n"]}},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(whole))
    return path


def test_chat_template_reaches_engines_and_export(base_recipe: Path, tmp_path: Path) -> None:
    task = prepare(str(base_recipe), [f"model.chat_template={tmp_path}/chat.jinja"])
    assert "chats: written by model.chat_template" in task.text()
    config, (prompt,) = task.config, task.dataset.train.sources["sums"]
    ids = render_prompt(task.tokenizer, prompt)[0]
    assert task.tokenizer.decode(ids) == "<user>1 + 1 =\n<assistant>"
    assert EngineSpec.of(config, "model").chat_template == TEMPLATE
    _write_tokenizer(tmp_path / "out", str(tmp_path), config.model.chat_template)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    _write_tokenizer(tmp_path / "as it is", str(tmp_path))
    assert AutoTokenizer.from_pretrained(tmp_path / "as it is").chat_template is None
    (tmp_path / "chat.jinja").unlink()  # the run saved its text
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(config))
    assert load_config(written) == config


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data")
    write_recipe(folder)
    task = prepare(str(folder / "recipe.yaml"), ["run.device=cpu"])
    return task.dataset


def write_recipe(folder: Path) -> Path:
    (folder / "sums.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    path = folder / "recipe.yaml"
    path.write_text(
        f"run: {{dir: {folder / 'run'}}}\n"
        "model: {tiny: {cold_start: {steps: 0}}}\n"
        f"data: {{sources: [{{name: sums, source: jsonl, path: {folder / 'sums.jsonl'}}}]}}\n"
    )
    return path


@contextlib.contextmanager
def on(machine: Machine, dataset: Dataset, facts: ModelFacts) -> Iterator[None]:
    """Run on this machine with this data and a model of this shape."""
    with at(machine) as patch:
        patch.setattr("keel.trainer.prepare.load_dataset", lambda *_, **__: dataset)
        patch.setattr("keel.trainer.prepare.facts_of", lambda config: facts)
        yield


def verdict(command: str, path: Path, overrides: Sequence[str]) -> tuple[str, str]:
    """Return the start of the command's error, if any, and its output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([command, str(path), *overrides])
        except Accepted:
            status = 0
    error = err.getvalue().removeprefix(f"keel {command}: ")
    assert (status == 2) == bool(error), error
    start = error if "override" in error else re.split(r" \(| it is|:", error)[0]
    return start, out.getvalue()


COLOCATED = {
    "rollout.colocated": True,
    "rollout.gpu_memory_utilization": 0.3,
    "rollout.engines": 2,
    "rollout.tensor_parallel": 1,
    "trainer.ranks": 2,
}


@pytest.mark.parametrize(
    ("machine", "device", "layout", "refused"),
    [
        (Machine(gpus=1, gib=139.0), "auto", {"rollout.gpu_memory_utilization": 0.85}, ""),
        (Machine(gpus=8, gib=80.0), "gpu", {"trainer.ranks": 4, "trainer.zero_stage": 3}, ""),
        (Machine(gpus=1, nodes=2, gib=16.0), "auto", {**COLOCATED, "rollout.time_share": True}, ""),
        (Machine(gpus=1, nodes=2, gib=16.0), "gpu", {**COLOCATED, "rollout.time_share": True}, ""),
        (Machine(gpus=2, gib=48.0), "auto", COLOCATED, ""),
        (
            Machine(gpus=2, gib=4.0),
            "gpu",
            {
                "rollout.gpu_memory_utilization": 0.97,
                "rollout.engines": 1,
                "trainer.ranks": 1,
                "trainer.zero_stage": 1,
                "trainer.compile": False,
            },
            "an engine's GPU needs 4.2 GiB",
        ),
    ],
)
def test_check_refuses_what_train_refuses(
    machine: Machine,
    device: str,
    layout: dict[str, Any],
    refused: str,
    dataset: Dataset,
    tmp_path: Path,
) -> None:
    path = write_recipe(tmp_path)
    plain = [f"run.device={device}", *(f"{k}={str(v).lower()}" for k, v in layout.items())]
    hardware = [f"run.gpu_gib={machine.gib}", f"run.gpus_per_node={machine.gpus}"]
    hardware += [f"run.nodes={machine.nodes}"]
    with on(machine, dataset, DENSE):
        trained, _ = verdict("train", path, plain)
        assert trained == refused
        assert verdict("train", path, [*plain, *hardware])[0] == trained
        assert verdict("check", path, plain)[0] == trained
    with on(NOTHING, dataset, DENSE):
        checked, plan = verdict("check", path, [*plain, *hardware])
    assert checked == trained
    if not checked:
        memory = plan[plan.index("\nmemory") : plan.index("\ntime")]
        peaks = re.findall(r"peak ([\d.]+) GiB", memory)  # time sharing: parts are not held at once
        shown = [float(number) for number in peaks or re.findall(r"([\d.]+) GiB", memory)]
        assert shown and max(shown) <= machine.gib, memory
