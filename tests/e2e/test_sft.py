"""`keel sft` as a user runs it: stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.commands.cli import main
from keel.trainer.run.manifest import find_damage
from tests.e2e.in_process import in_this_process

pytestmark = pytest.mark.e2e
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"x": {}, "y": {}}}}


def conversation(number: int) -> dict[str, Any]:
    """Two questions; the first is answered with a tool and with thinking."""
    call = {"function": {"name": "add", "arguments": {"x": number, "y": 1}}}
    thinking = {"role": "assistant", "content": "", "reasoning_content": "one more"}
    return {
        "messages": [
            {"role": "user", "content": f"What comes after {number}?"},
            {**thinking, "tool_calls": [call]},
            {"role": "tool", "content": str(number + 1)},
            {"role": "assistant", "content": str(number + 1)},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "it was added"},
        ],
        "tools": [TOOL],
    }


def recipe(folder: Path) -> Path:
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(40)))
    chat = {"name": "chats", "source": "jsonl", "path": str(chats), "holdout": 4}
    tiny = {"cache_dir": str(folder / "cache")}
    sections = {
        "run": {"dir": str(folder / "run"), "device": "cpu", "steps": 5, "checkpoint_every": 2},
        "model": {"path": "tiny", "dtype": "float32", "tiny": tiny},
        "sft": {"sources": [chat], "max_context_tokens": 128, "tokens_per_step": 900},
        "trainer": {"lr": 5e-3, "threads": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(sections))
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Metrics that do not depend on the machine's speed."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in line.items() if not k.startswith(("time", "throughput/"))}
        for line in lines
    ]


def test_resumed_run_repeats_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = recipe(tmp_path), tmp_path / "run"
    with in_this_process():
        assert main(["sft", str(path)]) == 0, capsys.readouterr()
        first = metrics(folder)
        *_, before, last = sorted((folder / "checkpoints").iterdir())
        assert (before.name, last.name) == ("step_000004", "step_000005")
        original = last.rename(tmp_path / "original")
        assert main(["sft", str(path)]) == 0, capsys.readouterr()
    assert metrics(folder) == first
    assert [line["step"] for line in first] == list(range(6))
    assert first[0]["eval/chats/loss"] == first[0]["eval/loss"] > first[-1]["eval/loss"]
    one, other = (load_file(at / "optimizer" / "rank_0.safetensors") for at in (original, last))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert (folder / "model" / "tokenizer.json").exists()
    assert find_damage(folder / "model", extra=True) == []
