"""Refusals before anything starts, and the output of `keel check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from keel.commands.cli import main
from keel.commands.dispatch import COMMANDS
from keel.commands.train import dump_bad_batch
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.launch import model_folder
from keel.trainer.placement.hardware import Hardware
from keel.trainer.prepare import Task, prepare
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.manifest import MANIFEST, write_manifest
from tests.model.stand_in import stand_in
from tests.rollout.chat.families import tokenizer_of
from tests.trainer.engine.batches import write_model

ROOT = Path(__file__).parents[2]
FEW = tuple(f"data.sources.{i}.{knob}" for i in (0, 1) for knob in ("size=32", "holdout=8"))
"""Making and measuring thousands of prompts takes seconds."""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    assert not ray.is_initialized()
    return code, said.out, said.err


def test_check_prints_the_plan_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    code, out, _ = run(capsys, "check", "quickstart", f"run.dir={folder}", *FEW)
    assert code == 0
    assert "3 MoE layers of 8 experts" in out and "16 prompts × 8 completions = 128" in out
    assert "2 vLLM engine(s)" in out
    assert not folder.exists()


def test_unwritable_run_folder_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    folder = f"run.dir={file / 'run'}"
    knob = f"run.dir = {file / 'run'}"
    code, _, err = run(capsys, "check", "quickstart", folder, *FEW)
    assert code == 2 and knob in err
    # A run planned for another machine only gets a warning.
    there = ("run.gpus_per_node=8", "run.gpu_gib=80")
    code, out, err = run(capsys, "check", "quickstart", folder, *FEW, *there)
    assert code == 0, err
    assert knob in out
    monkeypatch.setattr("keel.commands.cli.heavy", lambda _: pytest.fail("too early"))
    code, _, err = run(capsys, "train", "quickstart", folder)
    assert code == 2 and knob in err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rate=1", "did you mean trainer.lr"),
        ("algorithm.group_size=1", "algorithm.group_size = 1"),
        ("algorithm.keep_sampling_mask=false", "algorithm.keep_sampling_mask"),
        ("algorithm.keep_routing=false", "mixture of experts"),
        ("rollout.sampling.repetition_penalty=1.1", "without being recorded"),
        ("rollout.sampling.top_k=0", "rollout.sampling.top_k"),
        ("data.max_prompt_tokens=8", "prompt spelling/"),
        ("data.sources[spelling].task=spell_backwards", "spell_backward"),
        ("data.sources[spelling].rewards={correctness: 1}", "correct"),
        ("model.path=/nowhere", "/nowhere"),
        ("model.tokenizer=/nowhere", "model.tokenizer"),
        ("rollout.sampling.max_tokens=4096", "max_context"),
        ("rollout.tensor_parallel=2", "on a CPU an engine is one process"),
    ],
)
def test_bad_recipes_are_refused(
    capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    code, _, err = run(capsys, "train", "quickstart", override)
    assert code == 2, err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("def half(prompt, trajectory):\n    return 0.5\n", 0, ""),
        ("def half(prompt, trajectory):\n    1\n", 1, "checked_rewards.py:1"),
        ("async def half(prompt, trajectory):\n    yield 1\n", 2, "checked_rewards.py:1"),
    ],
)
def test_check_tries_reward_functions(
    code: str,
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "checked_rewards.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "checked_rewards", raising=False)
    knob = "data.sources[spelling].rewards={correct: 1, checked_rewards.half: 0.5}"
    actual, out, err = run(capsys, "check", "quickstart", knob, *FEW)
    assert actual == status and message in out + err


def test_check_shows_gpu_seats_and_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = ("check", "quickstart", f"run.dir={tmp_path}", "run.device=gpu", "trainer.ranks=4")
    code, out, err = run(capsys, *recipe, *FEW, "rollout.tensor_parallel=2", "run.gpu_gib=80")
    assert code == 0, err
    assert "1 node(s) of 8 GPU(s), 80.0 GiB each: by rule, as no GPU is here" in out
    assert "node 0: engines 0–1 on GPUs 0–3 (2 each); trainer ranks 0–3 on GPUs 4–7" in out
    assert "ESTIMATE, not measured" in out and "KV cache holds all 64 sequences" in out
    monkeypatch.setattr("keel.trainer.placement.suggestions.TRIED", 1)  # saves a second
    code, _, err = run(capsys, *recipe, *FEW, "run.gpu_gib=1")
    assert (code, "an engine's GPU needs" in err, "run.gpu_gib" in err) == (2, True, True)


def test_too_few_gpus_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("keel.trainer.placement.nodes.visible_gpus", lambda: 2)
    monkeypatch.setattr("keel.trainer.placement.nodes.gpu_gib", lambda: 80.0)
    code, _, err = run(capsys, "train", "quickstart", *FEW, "run.device=gpu", "trainer.ranks=4")
    assert (code, "needs 6 GPU(s)" in err, "trainer.ranks" in err) == (2, True, True), err


def test_own_model_is_planned_from_its_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=288,
        hidden_size=64,
        num_hidden_layers=4,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        max_position_embeddings=300,
        head_dim=32,
    ).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    stand_in(tmp_path)
    lines = tmp_path / "sums.jsonl"
    lines.write_text("".join(f'{{"prompt": "{i} + 1 =", "answer": "{i + 1}"}}\n' for i in range(9)))
    recipe = tmp_path / "mine.yaml"
    source = {"name": "sums", "source": "jsonl", "path": str(lines), "holdout": 2}
    recipe.write_text(
        json.dumps(
            {
                "model": {"path": str(tmp_path)},
                "data": {"sources": [source], "max_prompt_tokens": 64},
                "run": {"dir": str(tmp_path / "run")},
            }
        )
    )
    code, out, err = run(capsys, "check", str(recipe), "rollout.sampling.max_tokens=200")
    assert code == 0, err
    assert "4 MoE layers of 16 experts (4 per token)" in out
    assert "7 to train on, 2 held out" in out

    weights.unlink()
    for command in ("check", "train"):
        code, _, err = run(capsys, command, str(recipe), "rollout.sampling.max_tokens=200")
        assert (code, "model.safetensors" in err) == (2, True), err
    # The recipe targets other machines, which may have the weights.
    elsewhere = ("run.gpu_gib=80", "rollout.sampling.max_tokens=200", "trainer.lr=0.1")
    code, out, err = run(capsys, "check", str(recipe), *elsewhere)
    assert code == 0, err
    assert "model.safetensors" in out and "trainer.lr = 0.1" in out
    stand_in(tmp_path)

    other = tmp_path / "other"
    words = Tokenizer(WordLevel({"[UNK]": 0, **{f"w{i}": i for i in range(1, 200)}}, "[UNK]"))
    template = "{{ messages[0]['content'] }}"
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", eos_token="w1", chat_template=template
    ).save_pretrained(other)
    code, _, err = run(capsys, "check", str(recipe), f"model.tokenizer={other}")
    assert (code, "model.tokenizer" in err or str(other) in err) == (2, True), err

    code, _, err = run(capsys, "check", str(recipe), "rollout.sampling.max_tokens=400")
    assert (code, "has 300 tokens" in err) == (2, True), err
    code, _, err = run(
        capsys, "check", str(recipe), "rollout.sampling.max_tokens=9", "algorithm.keep_routing=no"
    )
    assert (code, "mixture of experts" in err) == (2, True), err


@pytest.mark.e2e
def test_chats_rendered_by_code_need_no_template(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Renders single-turn prompts and environments of DeepSeek-V3.2."""
    tokenizer = tokenizer_of("deepseek-v3.2")
    tokenizer.save_pretrained(tmp_path)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 2}
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **shape).save_pretrained(tmp_path)
    stand_in(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    shop: dict[str, Any] = {"target": "shop:Shop", "folder": str(ROOT / "tests" / "agents")}
    shop |= {"isolation": "none-i-trust-the-environments"}
    sources = [
        {"name": "sums", "source": "jsonl", "path": str(tmp_path / "sums.jsonl")},
        {"name": "shop", "source": "environment", "size": 4, "environment": shop},
    ]
    recipe: dict[str, Any] = {
        "model": {"path": str(tmp_path)},
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "agents": {"window": 2000},
    }
    path = tmp_path / "mine.yaml"
    for chosen, calls in (
        (sources[:1], ""),
        (sources, "; calls are read as in the format deepseek-v3.2"),
    ):
        path.write_text(json.dumps({**recipe, "data": {"sources": chosen}}))
        code, out, err = run(capsys, "check", str(path))
        assert code == 0, err
        lacking = "since the tokenizer has no chat template"
        assert f"chats: written by DeepSeek-V3.2's encoding, {lacking}{calls}\n" in out


@pytest.fixture(scope="module")
def task() -> Task:
    return prepare("quickstart", ["run.device=cpu", *FEW])


@pytest.mark.parametrize(
    ("expected", "here", "device"),
    [(True, True, "cuda"), (True, False, "cpu"), (False, True, "cpu")],
)
def test_tiny_model_trains_on_the_runs_device(
    task: Task, expected: bool, here: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []

    def instead(*_: Any, device: str, **__: Any) -> Path:
        devices.append(device)
        return Path("somewhere")

    monkeypatch.setattr("keel.trainer.launch.ensure_tiny_model", instead)
    monkeypatch.setattr("torch.cuda.is_available", lambda: here)
    assert model_folder(replace(task, hardware=Hardware(gpu=expected))) == "somewhere"
    assert devices == [device]


def test_full_disk_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/runs/x/metrics.jsonl")

    monkeypatch.setitem(COMMANDS, "check", full)
    assert main(["check", "quickstart"]) == 1
    assert "No space left on device: '/runs/x/metrics.jsonl'" in capsys.readouterr().err


def test_failed_export_is_repeated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = tmp_path / "run"
    overrides = (f"run.dir={done}", "run.steps=1", *FEW)
    task = prepare("quickstart", overrides)
    with RunFolder(task.config) as folder:
        state = State(
            step=1, version=1, cursor=task.dataset.train.state(), config=config_digest(task.config)
        )
        folder.save(state, lambda path: {})
    (done / "metrics.jsonl").touch()
    learner = SimpleNamespace(load=lambda path: None, export=lambda path: path.mkdir() or {})

    @contextmanager
    def running(*_: object, **__: object) -> Iterator[Any]:
        yield SimpleNamespace(learner=learner)

    monkeypatch.setattr("keel.commands.train.launch", running)
    code, out, _ = run(capsys, "train", "quickstart", *overrides)
    assert code == 0 and "trained model" in out and (done / "model").is_dir()
    code, out, _ = run(capsys, "train", "quickstart", *overrides)
    assert code == 0 and "run.steps" in out

    (done / "model" / MANIFEST).write_text("{}")
    code, _, err = run(capsys, "train", "quickstart", *overrides)
    assert code == 2 and "exported model has changed" in err
    (done / "checkpoints" / "step_000001" / "more").touch()
    for command in ("train", "check", "eval"):
        code, _, err = run(capsys, command, "quickstart", *overrides)
        assert code == 2 and "every checkpoint is damaged:\n  step_000001: more: extra" in err


def test_damaged_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_model(tmp_path)
    write_manifest(tmp_path, {})
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, err = run(capsys, "check", "quickstart", f"model.path={tmp_path}", *FEW)
    assert code == 2 and f"{tmp_path}: this exported model has changed" in err
    assert "model.safetensors: changed" in err and f"remove {MANIFEST} there" in err


def test_failed_batch_dump_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "nonfinite").touch()
    said: list[str] = []
    dump_bad_batch(tmp_path, said.append, 3, [], ["p, token 3: nan"])
    assert said[0] == "step 3: no finite gradient: p, token 3: nan"
    assert said[1].startswith("warning: step 3: its batch could not be saved") and len(said) == 2
