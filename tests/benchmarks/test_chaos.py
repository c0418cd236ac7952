"""Differences that `benchmarks.chaos` excuses."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.outcome import compared


def test_lost_score_may_change_later_steps(tmp_path: Path) -> None:
    killed = [Fault("kill", "reward worker", step=4)]

    def different(lost: int, faults: Sequence[Fault]) -> list[int]:
        """A run of 8 steps in which step `lost` counts an error and all later steps differ."""
        for folder in ("one", "other"):
            (tmp_path / folder).mkdir(exist_ok=True)
            lines = [{"step": step, "reward/mean": 0.5} for step in range(9)]
            for line in lines[lost:] if folder == "one" else ():
                line |= {"reward/mean": 0.25, "reward/error": float(line["step"] == lost)}
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (tmp_path / folder / "metrics.jsonl").write_text(text)
        result = compared(tmp_path / "one", tmp_path / "other", faults)
        assert result["equal steps"] == lost - 1
        return result["different, and not due"]

    assert different(9, ()) == []
    assert different(6, killed) == []
    assert different(6, ()) == [6, 7, 8]
    assert different(4, killed) == [4, 5, 6, 7, 8]
