"""What of the driver's handle needs no Ray; the rest is in `test_learner_on_ray.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from keel.trainer.learner import last_lines


def test_the_driver_loads_no_engine() -> None:
    heavy = ("torch", "deepspeed", "transformers", "vllm")
    code = f"import sys, keel.trainer.learner; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(10_000)))
    assert last_lines(str(log), 2) == "last lines of its log:\nline 9998\nline 9999"
    log.write_text("")
    assert last_lines(str(log)) == last_lines("") == last_lines(str(tmp_path / "absent")) == ""
