"""Warnings about metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keel.configs.load import load_config
from keel.configs.schema import AlarmsConfig
from keel.rl.metrics import Mean, Sum
from keel.rl.types import Group, Prompt, ScoredGroup
from keel.trainer.run.alarms import ALARMS, Alarms
from keel.trainer.run.journal import EVENTS, Journal
from tests.rl.rollouts import finished

FINE = {alarm.metric: 1.0 if alarm.below else 0.0 for alarm in ALARMS}


def lost(*reasons: str) -> ScoredGroup:
    prompt = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "?"},))
    return ScoredGroup(
        group=Group(prompt=prompt, trajectories=(), dropped=reasons),
        rewards_G=np.zeros(0, np.float32),
        parts_G=(),
        advantages_G=np.zeros(0, np.float32),
    )


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda alarm: alarm.knob)
def test_alarm_is_active_beyond_its_threshold_only(alarm: Any) -> None:
    config = AlarmsConfig(uniform=0.95, entropy=0.005, kept_mass=0.45)
    limit = getattr(config, alarm.knob)
    beyond, within = (0.5 * limit, 2 * limit) if alarm.below else (limit + 1, 0.5 * limit)
    assert Alarms(config).check(1, FINE | {alarm.metric: within}, []) == (0, [])
    number, (line,) = Alarms(config).check(1, FINE | {alarm.metric: beyond}, [])
    assert number == 1 and f"alarms.{alarm.knob} = {limit:g}" in line and alarm.metric in line
    off = replace(config, **{alarm.knob: 0})
    assert Alarms(off).check(1, FINE | {alarm.metric: beyond}, []) == (0, [])


def test_low_held_out_score_ends_the_run() -> None:
    alarms = Alarms(AlarmsConfig(stop_below={"harmful": 0.9}))
    assert alarms.check(1, {"eval/harmful/pass@1": 0.9, "eval/other/pass@1": 0.1}, []) == (0, [])
    assert alarms.check(2, {}, []) == (0, []) and not alarms.ends  # not evaluated
    low = {"eval/harmful/pass@1": 0.85, "eval/harmful/unscored": 160.0}
    number, (line,) = alarms.check(3, low, [])
    assert number == 1 and line == alarms.ends and "0.850" in line and "160" in line
    knobs = ("run.eval_every=1", "alarms.stop_below={spelling: 0.5}")
    assert not load_config("sft-quickstart", knobs).supervised(3).alarms.stop_below


def test_journal_prints_and_counts_alarms(tmp_path: Path) -> None:
    """Completions of discarded groups do not count as missing."""
    lines: list[str] = []
    view = SimpleNamespace(say=lines.append, record=lambda step, numbers: None)
    alarms = Alarms(AlarmsConfig(missing=0.2))
    journal = Journal(tmp_path, view, trajectories=0, alarms=alarms)
    metrics = {"kl/ref": Mean(5.0, 1), "rollout/dropped_completions": Sum(1.0)}
    whole, short = finished("p", (1.0,) * 4), lost("late")
    journal.record(0, metrics, [])
    for step, trained in enumerate([[whole], []], start=1):
        journal.record(step, metrics, trained, [short])
    journal.close()
    events = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert [event["text"] for event in events] == lines
    assert [(event["step"], event["kind"]) for event in events] == [(1, "alarm"), (2, "alarm")]
    assert "kl/ref" in lines[0] and "1 late" in lines[1]
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [record.get("alarms") for record in records] == [None, 1, 2]
