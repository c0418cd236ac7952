"""Refusals before anything starts, and the output of `keel check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from transformers import Qwen3MoeConfig

from keel.commands.cli import main
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.prepare import prepare
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.manifest import MANIFEST
from tests.model.stand_in import stand_in

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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rate=1", "did you mean trainer.lr"),
        ("algorithm.group_size=1", "algorithm.group_size = 1"),
        ("algorithm.keep_sampling_mask=false", "algorithm.keep_sampling_mask"),
        ("algorithm.keep_routing=false", "mixture of experts"),
        ("rollout.sampling.top_k=0", "rollout.sampling.top_k"),
        ("data.max_prompt_tokens=8", "prompt spelling/"),
        ("data.sources[spelling].task=spell_backwards", "spell_backward"),
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
    stand_in(tmp_path)
    code, _, err = run(capsys, "check", str(recipe), "rollout.sampling.max_tokens=400")
    assert (code, "has 300 tokens" in err) == (2, True), err


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
