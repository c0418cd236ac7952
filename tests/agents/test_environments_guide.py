"""The examples of docs/environments.md run unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import Hosted, Program
from keel.rl.types import Verdict
from tests.agents.episodes import PATIENT, TASK, run, transcript, use
from tests.waiting import PATIENCE_S

GUIDE = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    blocks = BLOCK.findall(GUIDE.read_text())
    assert {"shop.py", "sums.py", "coin.py", "try_it.py"} <= {name for name, _ in blocks}
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.e2e
def test_guide_script(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "try_it.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "['ask', 'buy']" in done.stdout
    assert "{'correct': 1.0, 'bought': 1.0}" in done.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("target", "name", "arguments", "text", "parts"),
    [
        ("sums", "add", {"a": 2, "b": 3}, "5", {}),
        ("shop:Shop", "buy", {"stall": "stall 9"}, "KeyError: 'stall 9'", {"bought": 0.0}),
        ("coin:Coin", "play", {"action": "edge"}, "No.", {"correct": 0.0, "score": 0.0}),
    ],
)
def test_guide_examples(
    folder: Path, target: str, name: str, arguments: Any, text: str, parts: dict[str, float]
) -> None:
    async def play() -> None:
        environment = Hosted(Program(target=target, folder=folder, deadlines=PATIENT))
        opening = await environment.open(TASK, seed=3)
        assert all(tool.description for tool in opening.tools)
        assert (await use(environment, name, **arguments)).text == text
        verdict = await environment.verdict(transcript())
        assert isinstance(verdict, Verdict) and parts.items() <= verdict.parts.items()
        await environment.close()

    run(play())
