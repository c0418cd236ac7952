"""Curves of long runs keep few points but every spike."""

from __future__ import annotations

import json
from pathlib import Path

from keel.commands.report.folders import read_folder
from keel.commands.report.page import PARTS, extremes, page
from tests.commands.report.runs import write_step

STEPS = 10 * PARTS


def test_long_run_keeps_spikes_on_a_small_page(
    tmp_path: Path,
) -> None:
    for step in range(1, STEPS + 1):
        spikes = {"grad_norm": {777: 99.0, 778: -99.0}.get(step, 1.0 + step % 7 / 10)}
        late = {"eval/sums/pass@1": step / STEPS} if step % 100 == 0 else {}
        write_step(tmp_path, step, [], **spikes, **late)
    run, chunks = read_folder(tmp_path)
    summary = run.summary
    text = page([(run, chunks)])
    _, _, rest = text.partition('id="data">')
    (shown,) = json.loads(rest.partition("</script>")[0])["runs"]
    norms = shown["metrics"]["grad_norm"]
    assert len(norms["at"]) <= 2 * PARTS + 2 and len(shown["steps"]) == STEPS
    by_step = dict(zip([shown["steps"][at] for at in norms["at"]], norms["values"], strict=True))
    assert by_step[777] == 99 and by_step[778] == -99 and {1, STEPS} <= by_step.keys()
    assert all(value == 1.0 + step % 7 / 10 for step, value in by_step.items() if abs(value) < 99)
    assert shown["metrics"]["eval/sums/pass@1"]["values"] == [at / 50 for at in range(1, 51)]
    assert shown["summary"] == summary and summary["reward"] == "0.055 → 50 (means of 10 steps)"
    assert "5,000 steps" in shown["notes"][-1]


def test_short_curve_keeps_all_points() -> None:
    assert extremes([None, 1.0, None, *[2.0] * (2 * PARTS - 1)]) == {1, *range(3, 2 * PARTS + 2)}
