"""The records of a run: metrics, alarms, costs, trajectories with their tokens, and batches."""

import dataclasses
import gzip
import io
import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from keel.configs.load import load_config
from keel.configs.schema import AlarmsConfig, RunConfig
from keel.model import ray_timeouts
from keel.rl.metrics import Mean, Sum
from keel.rl.types import Dialogue, ScoredGroup, Segment, TokenNumbers, Usage, Verdict
from keel.rollout.engine.worker import attach, detach
from keel.rollout.spec import GroupRequest
from keel.trainer.run.bad_batches import list_batches, read_batch, save_batch
from keel.trainer.run.journal import (
    _ALARMS,
    _BELOW,
    EVENTS,
    CostRates,
    Journal,
    _Alarms,
    cost_rows,
    costs_of,
)
from keel.trainer.run.trajectory_files import TokenFile, TokenTexts
from keel.trainer.run.view import View, _LiveView
from tests.rl.rollouts import (
    as_stored,
    finished,
    kept_of,
    logp_old_of,
    scored,
    segment,
    trajectory,
    with_segments,
)


def said() -> ScoredGroup:
    """Two completions with a message each."""
    one = finished("p")
    answers = [
        replace(each, messages=({"role": "assistant", "content": "1"},))
        for each in one.group.trajectories
    ]
    return replace(one, group=replace(one.group, trajectories=tuple(answers)))


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def record(folder: Path, steps: range, resumed_at: int = 0) -> None:
    journal = Journal(folder, View(4), trajectories=2, resumed_at=resumed_at)
    for step in steps:
        metrics = {"loss": Mean(step, 1), "empty": Mean(0, 0)}
        journal.record(step, metrics, [said()] if step else [])
    journal.close()


def test_resumed_run_replaces_steps_after_its_checkpoint(tmp_path: Path) -> None:
    record(tmp_path, range(5))
    assert [line["step"] for line in metrics_of(tmp_path)] == [0, 1, 2, 3, 4]
    assert metrics_of(tmp_path)[2]["loss"] == 2 and "empty" not in metrics_of(tmp_path)[2]
    assert list((tmp_path / "tensorboard").glob("events*"))
    for step in (2, 3):
        save_batch(tmp_path, step, [], [])
    trajectories = tmp_path / "trajectories"
    local = [trajectories / "step_000004 (copy).txt", trajectories / "step_late.txt"]
    tokens = [trajectories / f"step_00000{step}.tokens.jsonl.gz" for step in (2, 3, 4)]
    for path in (*local, *tokens):
        path.touch()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # the run was killed
    record(tmp_path, range(3, 4), resumed_at=2)
    assert all(path.exists() for path in local)
    assert [path.exists() for path in tokens] == [True, False, False]
    assert [path.stem for path in list_batches(tmp_path)] == ["step_000002"]
    assert [line["step"] for line in metrics_of(tmp_path)] == [0, 1, 2, 3]
    names = sorted(path.stem for path in trajectories.glob("*.jsonl"))
    assert names == ["step_000001", "step_000002", "step_000003"]


@pytest.mark.parametrize(("save_all", "count"), [(True, 6), (False, 2)])
def test_trajectories_are_saved_as_jsonl(tmp_path: Path, save_all: bool, count: int) -> None:
    tokens = SimpleNamespace(write=lambda path, groups: path.touch())
    options = {"trajectories": 2, "save_all": save_all, "tokenizer": "t", "tokens": tokens}
    journal = Journal(tmp_path, View(1), **options)  # pyright: ignore
    journal.record(1, {}, [said()] * 3)
    journal.say("engine", "rollout engine 0 restarts: it died")
    journal.close()
    Journal(tmp_path, View(1), trajectories=0, resumed_at=1).close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["kind"]) for event in events] == [(1, "engine"), (1, "resume")]
    path = tmp_path / "trajectories" / "step_000001.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    names = {path.name.removesuffix(".gz") for path in path.parent.iterdir()}
    assert names == {"step_000001.jsonl", "step_000001.tokens.jsonl"}
    assert len(records) == count
    for line in records:
        assert (line["step"], line["tokenizer"]) == (1, "t")
        assert line["messages"][0]["role"] == "user" and line["segments"][0]["said"]


FINE = {metric: 1.0 if knob in _BELOW else 0.0 for knob, (metric, _) in _ALARMS.items()}


@pytest.mark.parametrize("knob", _ALARMS)
def test_alarm_is_active_beyond_its_threshold_only(knob: str) -> None:
    config, (metric, _) = AlarmsConfig(uniform=0.95, entropy=0.005, kept_mass=0.45), _ALARMS[knob]
    limit = getattr(config, knob)
    beyond, within = (0.5 * limit, 2 * limit) if knob in _BELOW else (limit + 1, 0.5 * limit)
    assert _Alarms(config).check(1, FINE | {metric: within}, []) == (0, [])
    number, (line,) = _Alarms(config).check(1, FINE | {metric: beyond}, [])
    assert number == 1 and f"alarms.{knob} = {limit:g}" in line and metric in line
    off = replace(config, **{knob: 0})
    assert _Alarms(off).check(1, FINE | {metric: beyond}, []) == (0, [])


def test_low_held_out_score_ends_the_run() -> None:
    alarms = _Alarms(AlarmsConfig(stop_below={"harmful": 0.9}))
    assert alarms.check(1, {"eval/harmful/pass@1": 0.9, "eval/other/pass@1": 0.1}, []) == (0, [])
    assert alarms.check(2, {}, []) == (0, []) and not alarms.ends  # not evaluated
    low = {"eval/harmful/pass@1": 0.85, "eval/harmful/unscored": 160.0}
    number, (line,) = alarms.check(3, low, [])
    assert number == 1 and line == alarms.ends and "0.850" in line and "160" in line
    knobs = ("run.eval_every=1", "alarms.stop_below={spelling: 0.5}")
    assert not load_config("sft-quickstart", knobs).supervised().alarms.stop_below


def test_journal_prints_and_counts_alarms(tmp_path: Path) -> None:
    lines: list[str] = []
    view = SimpleNamespace(say=lines.append, record=lambda step, numbers: None)
    journal = Journal(tmp_path, view, trajectories=0, alarms=AlarmsConfig(missing=0.2))
    recorded: dict[int, Any] = {}
    journal.on_record = recorded.__setitem__
    metrics = {"kl/ref": Mean(5.0, 1), "rollout/dropped_completions": Sum(1.0)}
    whole, short = finished("p", (1.0,) * 4), scored([], [], dropped=("late",))
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
    assert [numbers.get("alarms") for numbers in recorded.values()] == [None, 1, 2]


def test_steps_add_up_to_the_run(tmp_path: Path) -> None:
    clock = iter((0.0, 1800.0, 1800.0, 5400.0, 5400.0)).__next__
    rates = CostRates(8, 6e9, 2e9)
    journal = Journal(tmp_path, View(1), trajectories=0, costs=rates, clock=clock)
    journal.record(0, {}, [])  # an evaluation
    journal.record(1, {"train/tokens": Sum(1000.0), "rollout/tokens": Sum(500.0)}, [])
    journal.close()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["cost/gpu_hours"] for step in steps] == [4.0, 8.0]
    costs = costs_of(tmp_path)
    assert costs == {"cost/gpu_hours": 12.0, "cost/train_flops": 6e12, "cost/rollout_flops": 1e12}
    pretraining = {"cost/gpu_hours": 100.0, "cost/train_flops": 63e12}
    *_, rl, total = cost_rows({"pre-training": pretraining, "RL": costs})
    assert rl == ("RL", "12", "6.00e+12", "1.00e+12", "10.0%")
    assert total[1] == "112" and total[-1] == "100.0%"


class Bytes:
    """A tokenizer whose token ids are bytes."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


def group(first: int, rewards: list[float], tokens: int = 6) -> ScoredGroup:
    answers = [
        trajectory(segment(first + 10 * i, tokens, context=2, kept=True, version=3), sibling=i)
        for i in range(len(rewards))
    ]
    return scored(answers, rewards, parts=[{"correct": reward} for reward in rewards])


@pytest.mark.parametrize("text", ["plain words, ½ and “quotes”", "日本語 🙂🙂", "a\n\tb", "é"])
def test_token_texts_join_to_the_text(text: str) -> None:
    ids = list(text.encode())
    texts = TokenTexts(Bytes()).texts(ids)
    assert "".join(texts) == text and len(texts) == len(ids)
    cut = TokenTexts(Bytes()).texts(list("🙂".encode())[:3])  # in the middle of a character
    assert cut == ["", "", "\N{REPLACEMENT CHARACTER}"]


def test_tokens_have_their_own_numbers(tmp_path: Path) -> None:
    one = group(40, [1, 0, 0.5])
    one = replace(one, notes_G=({"c1": "1: good"}, {}, {}))
    now = np.full(6, np.nan, np.float32)
    now[2:] = [logp_old_of(token) + 0.1 for token in range(42, 46)]
    overlap = np.array([np.nan, 1, 0.5, 1, np.nan, 0.25], np.float32)
    config = RunConfig(dir="d", save_trajectories=2, save_tokens=12)
    numbers = {0: TokenNumbers(logp_T=now, overlap_T=overlap)}
    path = tmp_path / "step_000001.tokens.jsonl.gz"
    TokenFile(config, TokenTexts(Bytes()), lambda: numbers).write(path, [one])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    line = json.loads(gzip.decompress(path.read_bytes()))
    best, worst, summed_up = line["trajectories"]
    context, sampled = best["contexts"][0]
    assert (context, sampled["text"]) == ("()", list("*+,-"))
    ids = range(42, 46)
    assert sampled["logp"] == pytest.approx([logp_old_of(token) for token in ids], abs=1e-4)
    assert sampled["ratio"] == pytest.approx([np.exp(0.1)] * 4, abs=1e-4)
    assert sampled["overlap"] == [0.5, 1, None, 0.25]
    assert sampled["kept"] == [len(kept_of(token)) for token in ids]
    assert sampled["version"] == [3] * 4
    assert best["notes"] == {"c1": "1: good"} and best["parts"] == {"correct": 1}
    # The trainer has no numbers for the second; the third exceeds the budget.
    assert set(worst["contexts"][0][1]) == {"text", "logp", "kept", "version"}
    assert "contexts" not in summed_up and "messages" not in summed_up
    assert summed_up["reward"] == 0.5 and summed_up["tokens"] == 4


def batch() -> list[Any]:
    messages = ({"role": "assistant", "content": "é", "tool_calls": [{"id": 1, "args": ["a"]}]},)
    first = replace(
        trajectory(segment(3, 4, kept=True), segment(2, 5, kept=True)),
        messages=messages,
        dialogues=(Dialogue(messages=messages * 2, sampled=frozenset({0, 1}), tools=({},)),),
        verdict=Verdict(parts={"correct": 0.5}, facts={"seen": [1, 2]}),
        usage=Usage(turns=2, tools_s=0.25),
    )
    return [scored([first, trajectory(segment(3, 4, routes=True), sibling=1)], [0.0, 1.0])]


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_batch_is_read_back_exactly(tmp_path: Path) -> None:
    groups = batch()
    path = save_batch(tmp_path, 7, groups, ["p, token 3: nan"])
    assert path == tmp_path / "nonfinite" / "step_000007.npz"
    again, findings = read_batch(path)
    assert findings == ["p, token 3: nan"] and same(again, groups)


def test_recordings_are_saved_one_segment_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [trajectory(segment(3, 9, routes=True, kept=True), sibling=i) for i in range(3)]
    whole, load, arrays = scored(answers, [0.0, 1.0, 0.0]), Segment.loaded, list[Any]()
    monkeypatch.setattr("keel.rollout.engine.worker.STORED_BYTES", 1)
    sampled = with_segments(whole.group, as_stored)
    light, *stored = detach(GroupRequest(whole.group.prompt, 3), sampled)
    light = attach(light, range(3))

    def loaded(one: Segment, recordings: Any) -> Segment:
        assert all(array() is None for array in arrays)
        one = load(one, recordings)
        arrays.append(weakref.ref(one.routes_TLK))
        return one

    monkeypatch.setattr(ray_timeouts, "fetch", lambda keys, **_: {key: stored[key] for key in keys})
    monkeypatch.setattr(Segment, "loaded", loaded)
    path = save_batch(tmp_path, 7, [replace(whole, group=light)], [])
    assert len(arrays) == 3 and same(read_batch(path)[0], [whole])


NUMBERS = {
    "reward/mean": 0.25,
    "reward/error": 0.25,
    "mismatch/logp_abs": 3e-6,
    "time/rollout": 3.0,
    "time/train": 1.0,
}


def test_panel_shows_progress_health_and_times() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=130)
    with _LiveView("quickstart", 10, console) as view:
        view.begin("evaluating")
        view.show_progress(12, 256, "prompts")
        view.begin("training")
        view.record(3, NUMBERS)
        view.say("saved")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "step 3/10",
        "training",
        "mismatch",
        "saved",
        "sampling 75%",
        "reward errors 25.0%",
    ):
        assert part in text
