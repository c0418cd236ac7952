"""The examples of docs/environments.md run unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

GUIDE = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)


@pytest.mark.e2e
def test_guide_script(tmp_path: Path) -> None:
    for name, text in BLOCK.findall(GUIDE.read_text()):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "try_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "['ask', 'buy']" in done.stdout
    assert "{'correct': 1.0, 'bought': 1.0}" in done.stdout
