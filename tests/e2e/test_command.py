"""`keel train` as a user runs it: whole runs through Ray, vLLM and DeepSpeed."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from keel.commands.cli import main
from keel.commands.reference import find_metric
from keel.commands.report.folders import read_folder
from keel.trainer.run.signals import PREEMPTED
from tests.trainer.run.trackers import stored
from tests.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).parent.parent.parent
KEEL = [sys.executable, "-m", "keel.commands.cli"]
DEADLINE_S = 2 * PATIENCE_S
PLANTED = "0123456789abcdefplanted"
KEYS = {
    name: f"{PLANTED}{number:08d}"
    for number, name in enumerate(
        (
            *("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "JUDGE_API_KEY", "AUTHOR_API_KEY"),
            *("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY"),
        )
    )
}
"""Variables that hold keys; whatever a run writes or shows has none of them."""
pytestmark = pytest.mark.e2e


def read_back(folder: Path, *, resumed: int, steps: int) -> None:
    """What the report is made of: the events, and each token's numbers in engine and trainer."""
    run, chunks = read_folder(folder)
    assert not run.notes
    said = ("alarm", "ledger", "tracker")
    events = [(event["kind"], event["step"]) for event in run.events if event["kind"] not in said]
    # The one who looks, and the one who needs the engine, find out at the same time.
    assert {kind for kind, _ in events[:-1]} == {"frozen", "engine"}
    assert events[-1] == ("resume", resumed)
    accounts = [event["text"] for event in run.events if event["kind"] == "ledger"]
    assert len(accounts) == 2 and all(text.endswith(" 0 lost, 0 twice") for text in accounts)
    assert {group.step for group in run.groups} == set(range(1, steps + 1))
    first, fresh = (f"step_{step:06d}.tokens.jsonl.gz" for step in (1, resumed + 1))
    for chunk in (first, fresh):  # steps whose engines had exactly the trainer's weights
        groups = map(json.loads, gzip.decompress(chunks[chunk].data()).splitlines())
        sampled = [
            part
            for group in groups
            for trajectory in group["trajectories"]
            for part in trajectory["contexts"][0]
            if not isinstance(part, str)
        ]
        assert all({"logp", "kept", "version", "text"} <= part.keys() for part in sampled)
        for part in (part for part in sampled if "ratio" in part):  # the trainer has looked at it
            assert part["ratio"] == pytest.approx([1.0] * len(part["text"]), abs=2e-3)
            assert None not in part["overlap"] and min(part["overlap"]) >= 0
        assert any("ratio" in part for part in sampled)


def tracked(folder: Path, place: Path, seen: list[dict[str, Any]]) -> None:
    """Each tracker has what the run has written: every step once, in order, of each metric. seen:
    the steps as they were when they were written first."""
    for name, found in {
        "wandb": stored.by_wandb(folder),
        "mlflow": stored.by_mlflow(),
        "trackio": stored.by_trackio(place),
    }.items():
        points: dict[str, list[tuple[int, float]]] = {}
        for line in seen:
            for metric in line.keys() - {"step", "time"}:
                shown = metric if "/" in metric else f"train/{metric}"
                shown = shown.replace("@", "_at_") if name == "mlflow" else shown
                points.setdefault(shown, []).append((line["step"], line[metric]))
        assert found.points.keys() == points.keys(), name
        for metric, expected in points.items():
            assert [step for step, _ in found.points[metric]] == [step for step, _ in expected]
            values = [value for _, value in expected]
            assert [value for _, value in found.points[metric]] == pytest.approx(values), metric
        assert len(found.runs) == 1
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        texts = [event["text"] for event in events if event["kind"] != "tracker"]
        assert len(found.events) == len(texts)
        assert all(text in told for text, told in zip(texts, found.events, strict=True)), name
        # A knob that the resumed run has otherwise: MLflow never takes one back.
        changed = "resumed.trainer.ranks" if name == "mlflow" else "trainer.ranks"
        assert str(found.config[changed]) == "2", name
        assert found.end == {"wandb": 0, "mlflow": "FINISHED", "trackio": None}[name]


def small(folder: Path, cache: Path, steps: int) -> list[str]:
    """A quickstart with a hasty cold start: it learns little, and runs through the same parts."""
    return [
        "quickstart",
        f"run.dir={folder}",
        f"run.steps={steps}",
        f"model.tiny.cache_dir={cache}",
        "model.tiny.cold_start.steps=20",
        "data.sources[spelling].size=400",  # thousands of puzzles take seconds
        "data.sources[spiral].size=400",
        "data.sources[spelling].holdout=8",
        "data.sources[spiral].holdout=8",
        "rollout.engines=1",
        "rewards.workers=1",
        f"rewards.timeout_s={PATIENCE_S}",
        "algorithm.prompts_per_step=4",
        "algorithm.group_size=4",
    ]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All of them described (docs/metrics.md)."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    names = {name for line in found for name in line} - {"step", "time"}
    assert [name for name in names if find_metric(name) is None] == []
    return found


def keel(*arguments: str) -> str:
    done = subprocess.run(
        [*KEEL, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def words_of(process: psutil.Process) -> str:
    """Its command line; "" of one that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until(ready: Callable[[], Any], what: str) -> Any:
    return wait_for(ready, what, within_s=DEADLINE_S, every_s=0.2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Running:
    """A training process of this test, ended with it."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        self.process = subprocess.Popen(
            [*KEEL, "train", *arguments],
            cwd=ROOT,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **KEYS, "PYTHONUNBUFFERED": "1"},
        )

    def said(self) -> str:
        return self._log.read_text(errors="replace")  # while it is written

    def finish(self, status: int = 0) -> str:
        code = self.process.wait(timeout=DEADLINE_S)
        assert code == status, self.said()
        return self.said()

    def below(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:  # it has ended meanwhile
            return []

    def signal_all(self, number: signal.Signals) -> None:
        """As a scheduler does: to every process of the job, and to all of them at once."""
        self.process.send_signal(signal.SIGSTOP)
        for process in [*self.below(), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        self.process.send_signal(signal.SIGCONT)

    def engine_pids(self) -> list[int]:
        """Parents before their children."""
        return [p.pid for p in self.below() if "RolloutWorker" in words_of(p)]


def addresses(process: psutil.Process) -> set[str]:
    """At which it listens."""
    try:
        found = process.net_connections()
    except psutil.Error:
        return set()
    return {c.laddr.ip.removeprefix("::ffff:") for c in found if c.status == psutil.CONN_LISTEN}


def with_keys(folder: Path) -> list[str]:
    """Files in which one of `KEYS` stands."""
    found: list[str] = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        if PLANTED.encode() in content:
            found.append(path.name)
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Running]]:
    started: list[Running] = []

    def begin(arguments: list[str]) -> Running:
        started.append(Running(arguments, tmp_path / f"log{len(started)}.txt"))
        return started[-1]

    yield begin
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait(timeout=DEADLINE_S)


def test_a_run_that_is_preempted_while_it_starts_ends_at_once_and_leaves_no_process(
    tmp_path: Path, cache: Path, start: Callable[[list[str]], Running]
) -> None:
    run = start(small(tmp_path / "run", cache, steps=200))
    wait_until(lambda: "starting 1 engine" in run.said() or run.process.poll() is not None, "Ray")
    below = run.below()
    assert any("raylet" in words_of(process) for process in below)
    run.signal_all(signal.SIGTERM)
    said = run.finish(PREEMPTED)
    assert (
        "keel train: stopped by SIGTERM; what was saved is there, and the same command goes on"
        in said
    )
    assert "Traceback" not in said and "*** SIG" not in said
    _, alive = psutil.wait_procs(below, timeout=DEADLINE_S)
    assert not alive


def test_a_run_ahead_loses_its_engine_is_interrupted_resumed_and_leaves_a_model(
    tmp_path: Path,
    cache: Path,
    start: Callable[[list[str]], Running],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that samples ahead; tests/e2e/test_agents.py has one whose engines sleep."""
    folder = tmp_path / "run"
    for name, value in stored.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    trackers = "run.trackers=[wandb, mlflow, trackio]"
    ahead = ["algorithm.max_lag=1", "algorithm.filter_groups=correct"]
    begun = ["rollout.weight_transfer=direct", "run.checkpoint_every=2", "run.hang_timeout_s=5"]
    run = start([*small(folder, cache, steps=200), *ahead, *begun, trackers])
    wait_until(lambda: len(metrics(folder)) >= 3 or run.process.poll() is not None, "two steps")
    ours = [psutil.Process(run.process.pid), *run.below()]
    assert set().union(*map(addresses, ours)) == {"127.0.0.1"}
    assert not any(PLANTED in words_of(process) for process in ours)
    engine = run.engine_pids()[0]
    os.kill(engine, signal.SIGSTOP)  # one that is killed is noticed at once, as this one is then
    after = len(metrics(folder)) + 3
    told = lambda: len(metrics(folder)) >= after and "has been stopped" in run.said()  # noqa: E731
    wait_until(lambda: told() or run.process.poll() is not None, "more")
    run.process.send_signal(signal.SIGINT)
    said = run.finish()
    assert re.search(rf"rollout engine 0 \(process {engine} on \S+\) has been stopped", said)
    assert "rollout engine 0 is started again" in said
    assert with_keys(tmp_path) == []  # what was said is there, too
    first = metrics(folder)
    reached = first[-1]["step"]
    assert f"stopped after step {reached} of 200; to resume: keel train quickstart" in said
    *before, last = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert last == f"step_{reached:06d}"
    assert set(before) <= {f"step_{step:06d}" for step in range(2, reached, 2)}
    # What was being sampled ahead has not been trained on; a resumed run begins with it.
    state = json.loads((folder / "checkpoints" / last / "state.json").read_text())
    assert 0 < len(state["cursor"]["unfinished"]) <= 8

    # One flipped bit in the newest: the run is resumed from the one before.
    damaged = folder / "checkpoints" / last / "optimizer" / "rank_0.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)

    steps = reached + 2
    ours = [*small(folder, cache, steps), *ahead]
    said = keel("train", *ours, "trainer.ranks=2", "trainer.zero_stage=1", trackers)
    was = "trainer.ranks = 1, trainer.zero_stage = 0"
    assert f"{before[-1]} was saved with {was}; this run has trainer.ranks = 2, train" in said
    assert f"{last} is damaged (optimizer/rank_0.safetensors: changed, betw" in said
    assert f"resumes from {before[-1]}, the newest intact" in said
    assert (folder / "checkpoints" / f"damaged_{last}").is_dir()
    seen = metrics(folder)
    assert [line["step"] for line in seen] == list(range(steps + 1))
    assert "held-out spelling/pass@1" in said

    for line in seen[1:]:
        assert line["staleness/max"] <= 1
        assert 0 <= line["time/idle_fraction"] < 1
        assert line["routing/fallback_fraction"] == 0
        assert line["sampling/kept_mean"] >= 1
    assert max(line["staleness/mean"] for line in seen[1:]) > 0, "nothing was sampled ahead"
    # At first nothing is ahead, before and after the resume: the engines sampled with exactly the
    # trainer's weights.
    for step in (1, int(before[-1].removeprefix("step_")) + 1):
        assert seen[step]["staleness/mean"] == 0
        assert seen[step]["mismatch/logp_abs"] <= 1e-4
    assert (folder / "trajectories" / f"step_{steps:06d}.txt").stat().st_size > 0
    read_back(folder, resumed=int(before[-1].removeprefix("step_")), steps=steps)
    assert list((folder / "tensorboard").iterdir())
    tracked(folder, tmp_path, [*first, *seen[reached + 1 :]])

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.num_experts == 8
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template

    # From here on in this process, which has loaded its libraries.
    def said_by(command: str, *words: str, status: int = 0) -> str:
        assert main([command, *ours, *words]) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    assert f"step_{steps:06d}" in said_by("eval")
    assert "raise run.steps" in said_by("train").lower()
    assert "trainer.grad_clip" in said_by("train", "trainer.grad_clip=0.5", status=2)

    # Anything solves the first line, and nothing the second.
    lines = [
        {"id": "easy", "prompt": "Say it.", "answer": r"[\s\S]*", "match": "regex"},
        {"id": "hard", "prompt": "Say that.", "answer": "(?!)", "match": "regex"},
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    others = f"{{name: said, source: jsonl, thinking: false, path: {path}}}"
    spelling = "{name: spelling, source: reasoning_gym, task: spell_backward, size: 12, holdout: 8}"
    words = [f"data.sources=[{others}, {spelling}]", "filter.samples=5", "algorithm.group_size=2"]
    said = said_by("filter", *words)
    assert "6 of 6 prompts" in said and f"step_{steps:06d}" in said
    table = (folder / "filter/pass_rates.jsonl").read_text().splitlines()
    rates = {line["id"]: line for line in map(json.loads, table)}
    assert [rates[f"said/{n}"]["passes"] for n in ("easy", "hard")] == [5, 0]
    assert all(line["samples"] == 5 and line["unscored"] == 0 for line in rates.values())
    (kept,) = (folder / "filter/kept/said.jsonl").read_text().splitlines()
    assert (json.loads(kept)["id"], json.loads(kept)["pass_rate"]) == ("easy", 1)
