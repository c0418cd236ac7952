"""`keel sft` as a user runs it: interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.commands.cli import main
from keel.trainer.run.manifest import find_damage
from tests.e2e.in_process import in_this_process

ROOT = Path(__file__).parent.parent.parent
KEEL = [sys.executable, "-m", "keel.commands.cli", "sft"]
DEADLINE_S = 300
pytestmark = pytest.mark.e2e
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"x": {}, "y": {}}}}


def conversation(number: int) -> dict[str, Any]:
    """Two questions; the first is answered with a tool and with thinking."""
    call = {"function": {"name": "add", "arguments": {"x": number, "y": 1}}}
    return {
        "messages": [
            {"role": "user", "content": f"What comes after {number}?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "one more",
                "tool_calls": [call],
            },
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
    path = folder / "recipe.yaml"
    chat = {"name": "chats", "source": "jsonl", "path": str(chats), "holdout": 4}
    sections = {
        "run": {"dir": str(folder / "run"), "device": "cpu", "checkpoint_every": 2},
        "model": {
            "path": "tiny",
            "dtype": "float32",
            "tiny": {"cache_dir": str(folder / "cache")},
        },
        "sft": {"sources": [chat], "max_context_tokens": 128, "tokens_per_step": 900},
        "trainer": {"lr": 5e-3, "threads": 1},
    }
    path.write_text(json.dumps(sections))
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def learned(line: dict[str, Any]) -> dict[str, Any]:
    """Metrics that do not depend on the machine's speed."""
    return {
        name: value
        for name, value in line.items()
        if name != "time" and not name.startswith(("time/", "throughput/", "eval/"))
    }


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Master weights and moments."""
    return load_file(checkpoint / "optimizer" / "rank_0.safetensors")


def test_interrupted_run_resumes_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder, log = recipe(tmp_path), tmp_path / "run", tmp_path / "log.txt"
    with log.open("w") as out:
        first = subprocess.Popen(
            [*KEEL, str(path), "run.steps=100000"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        end = time.monotonic() + DEADLINE_S
        while len(metrics(folder)) < 6 and first.poll() is None:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        first.send_signal(signal.SIGINT)
        assert first.wait(timeout=DEADLINE_S) == 0, log.read_text()
    finally:
        if first.poll() is None:
            first.kill()
            first.wait(timeout=30)
    first_run = metrics(folder)
    reached = first_run[-1]["step"]
    assert f"step {reached} of 100000" in log.read_text()
    assert first_run[0]["eval/chats/loss"] == first_run[0]["eval/loss"] > 4

    # Resume from the checkpoint before, and reach the same step again.
    before, last = sorted((folder / "checkpoints").iterdir())
    assert last.name == f"step_{reached:06d}"
    original = last.rename(tmp_path / "original")
    with in_this_process():
        status = main(["sft", str(path), f"run.steps={reached}"])
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    again = metrics(folder)
    assert [line["step"] for line in again] == list(range(reached + 1))
    resumed = int(before.name.removeprefix("step_"))
    assert resumed < reached
    assert list(map(learned, again[1:])) == list(map(learned, first_run[1:]))
    assert again[-1]["eval/loss"] < again[0]["eval/loss"]
    first_time, second_time = weights(original), weights(last)
    assert first_time.keys() == second_time.keys()
    for name, tensor in first_time.items():
        assert torch.equal(tensor, second_time[name]), name
    assert (folder / "model" / "tokenizer.json").exists() and find_damage(
        folder / "model", extra=True
    ) == []
