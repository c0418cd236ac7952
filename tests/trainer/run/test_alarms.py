"""What a run says by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keel.configs.load import load_config
from keel.configs.schema import AlarmsConfig, ConfigError
from keel.rl.metrics import Mean, Sum
from keel.rl.types import Group, Prompt, ScoredGroup
from keel.trainer.run.alarms import ALARMS, Alarms
from keel.trainer.run.journal import EVENTS, Journal
from keel.trainer.run.view import PlainView
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
def test_each_rings_beyond_its_threshold_alone(alarm: Any) -> None:
    config = AlarmsConfig(uniform=0.95, entropy=0.005, kept_mass=0.45)
    limit = getattr(config, alarm.knob)
    beyond, within = (0.5 * limit, 2 * limit) if alarm.below else (limit + 1, 0.5 * limit)
    assert Alarms(config).look(1, FINE | {alarm.metric: within}, []) == (0, [])
    number, (line,) = Alarms(config).look(1, FINE | {alarm.metric: beyond}, [])
    assert number == 1 and f"alarms.{alarm.knob} = {limit:g}" in line and alarm.metric in line
    off = replace(config, **{alarm.knob: 0})
    assert Alarms(off).look(1, FINE | {alarm.metric: beyond}, []) == (0, [])


def test_a_held_out_set_that_may_not_fall_ends_the_run() -> None:
    alarms = Alarms(AlarmsConfig(stop_below={"harmful": 0.9}))
    assert alarms.look(1, {"eval/harmful/pass@1": 0.9, "eval/other/pass@1": 0.1}, []) == (0, [])
    assert alarms.look(2, {}, []) == (0, []) and not alarms.ends  # not evaluated
    number, (line,) = alarms.look(3, {"eval/harmful/pass@1": 0.85}, [])
    assert number == 1 and line == alarms.ends
    assert "harmful/pass@1 is 0.850, and may not fall below 0.9" in line
    assert "could not be judged" not in line


def test_an_end_by_completions_that_nobody_judged_says_so() -> None:
    fallen = {"eval/harmful/pass@1": 0.2, "eval/harmful/unscored": 160.0}
    _, (line,) = Alarms(AlarmsConfig(stop_below={"harmful": 0.9})).look(3, fallen, [])
    assert "(alarms.stop_below); 160 completions had no score: counted wrong" in line


def test_what_ends_a_run_does_not_end_its_supervised_start() -> None:
    below = ("run.eval_every=1", "alarms.stop_below={spelling: 0.5}")
    assert not load_config("sft-quickstart", below).supervised(3).alarms.stop_below


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"alarms.stop_below": "{spelling: 0}"}, r"alarms.stop_below.spelling = 0.*in \(0, 1"),
        ({"alarms.stop_below": "{speling: 0.5}"}, "'speling': needs run.eval_every, .* spelling"),
        ({"alarms.stop_below": "{spelling: 0.5}", "run.eval_every": "0"}, "needs run.eval_every"),
    ],
)
def test_what_cannot_end_a_run_is_refused(wrong: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config("quickstart", [f"{knob}={value}" for knob, value in wrong.items()])


def test_one_that_goes_on_or_returns_is_said_now_and_then() -> None:
    alarms, said = Alarms(AlarmsConfig(every=5)), []
    for step in range(1, 16):
        bad = step != 8
        number, lines = alarms.look(step, {"kl/ref": 9.0 * bad}, [])
        assert number == bad
        said += [step] * len(lines)
    assert said == [1, 6, 11]


def test_what_is_missing_is_said_with_its_reasons() -> None:
    numbers = {"rollout/dropped_completions": 4.0}
    groups = [lost("late: a", "late: a"), lost("late: b", "late: a")]
    _, (line,) = Alarms(AlarmsConfig()).look(3, numbers, groups)
    assert line.startswith(
        "step 3: 4 completions are missing from the batch: 3 late: a; 1 late: b (alarms.missing"
    )
    assert Alarms(AlarmsConfig(missing=0)).look(3, numbers, groups) == (0, [])


def test_completions_of_groups_that_were_filtered_out_count_in_what_is_missing(
    tmp_path: Path,
) -> None:
    journal = Journal(
        tmp_path, PlainView(9), trajectories=0, alarms=Alarms(AlarmsConfig(missing=0.2))
    )
    metrics = {"rollout/dropped_completions": Sum(1.0)}
    whole, short = finished("p", (1.0,) * 4), lost("late")
    for step, (trained, discarded) in enumerate([([whole], [short]), ([], [short])], start=1):
        journal.record(step, metrics, trained, discarded)
    journal.close()
    said = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert [(one["step"], one["kind"]) for one in said] == [(2, "alarm")]
    assert "1 completions are missing from the batch: 1 late" in said[0]["text"]


def test_the_journal_says_and_counts_them(tmp_path: Path) -> None:
    said: list[str] = []
    view = SimpleNamespace(say=said.append, record=lambda step, numbers: None)
    journal = Journal(tmp_path, view, trajectories=1, alarms=Alarms(AlarmsConfig()))
    bad = {"kl/ref": Mean(5.0, 1), "rollout/dropped_completions": Sum(2)}
    journal.record(0, bad, [])
    journal.record(1, bad, [lost("late", "late")])
    journal.close()
    assert len(said) == 2 and all(line.startswith("step 1: ") for line in said)
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"alarms"' not in first and '"alarms": 2' in second


def test_thresholds_are_not_negative() -> None:
    with pytest.raises(ConfigError, match=r"alarms.kl = -1: must not be negative"):
        AlarmsConfig(kl=-1)
