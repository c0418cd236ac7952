"""`keel train` as a user runs it: whole runs through Ray, vLLM and DeepSpeed."""

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
from keel.commands.reference import _find_metric
from keel.commands.report.folders import read_folder
from keel.trainer.run.journal import EVENTS
from keel.trainer.run.signals import PREEMPTED
from tests.forked import descendants
from tests.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 2 * PATIENCE_S
PLANTED = "0123456789abcdefplanted"
KEY_NAMES = (
    *("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "JUDGE_API_KEY", "AUTHOR_API_KEY"),
    *("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY"),
)
KEYS = {name: f"{PLANTED}{number:08d}" for number, name in enumerate(KEY_NAMES)}
"""Secrets in the environment, which no run may write or show."""
pytestmark = pytest.mark.e2e


def small(folder: Path, cache: Path, steps: int) -> list[str]:
    return [
        "quickstart",
        f"run.dir={folder}",
        f"run.steps={steps}",
        f"model.tiny.cache_dir={cache}",
        "model.tiny.cold_start.steps=20",
        *(
            f"data.sources[{n}].{k}"
            for n in ("spelling", "spiral")
            for k in ("size=400", "holdout=8")
        ),
        "rollout.engines=1",
        "rewards.workers=1",
        f"rewards.timeout_s={PATIENCE_S}",
        "algorithm.prompts_per_step=4",
        "algorithm.group_size=4",
    ]


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    names = {name for line in steps for name in line} - {"step", "time"}
    assert [name for name in names if _find_metric(name) is None] == []
    return steps


def words_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def wait_until(ready: Callable[[], Any], what: str) -> Any:
    return wait_for(ready, what, within_s=DEADLINE_S, every_s=0.5)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Running:
    def __init__(self, arguments: list[str], log: Path, module: str = "keel.commands.cli") -> None:
        self._log = log
        env = {**os.environ, **KEYS, "PYTHONUNBUFFERED": "1"}
        streams: dict[str, Any] = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
        command = [sys.executable, "-m", module, "train", *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, **streams)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def finish(self, status: int = 0) -> str:
        code = self.process.wait(timeout=DEADLINE_S)
        assert code == status, self.output()
        return self.output()

    def wait(self, ready: Callable[[], Any], what: str) -> None:
        wait_until(lambda: ready() or self.process.poll() is not None, what)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=DEADLINE_S)

    def below(self) -> list[psutil.Process]:
        return descendants(self.process.pid)

    def signal_all(self, number: signal.Signals) -> None:
        """Signal every process of the job at once, as a scheduler does."""
        self.process.send_signal(signal.SIGSTOP)
        for process in [*self.below(), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        self.process.send_signal(signal.SIGCONT)

    def engine_pids(self) -> list[int]:
        return [p.pid for p in self.below() if "RolloutWorker" in words_of(p)]


def listening(process: psutil.Process) -> set[str]:
    with suppress(psutil.Error):
        open_ = [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        return {c.laddr.ip.removeprefix("::ffff:") for c in open_}
    return set()


def files_with_keys(folder: Path) -> list[str]:
    names: list[str] = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        names += [path.name] * (PLANTED.encode() in content)
    return names


def check_report(folder: Path, *, resumed: int, steps: int) -> None:
    """Check the data of a report: events, and each token's numbers in engine and trainer."""
    run, chunks = read_folder(folder)
    assert not run.notes
    events = [(e["kind"], e["step"]) for e in run.events if e["kind"] != "alarm"]
    assert {kind for kind, _ in events[:-1]} >= {"frozen", "engine", "resume"}
    assert events[-1] == ("resume", resumed)
    assert {group.step for group in run.groups} == set(range(1, steps + 1))
    for step in (1, resumed + 1):  # whose engines had exactly the trainer's weights
        chunk = chunks[f"step_{step:06d}.tokens.jsonl.gz"].read()
        sampled = [
            part
            for group in map(json.loads, gzip.decompress(chunk).splitlines())
            for trajectory in group["trajectories"]
            for part in trajectory["contexts"][0]
            if not isinstance(part, str)
        ]
        assert all({"logp", "kept", "version", "text"} <= part.keys() for part in sampled)
        trained = [part for part in sampled if "ratio" in part]
        assert trained
        for part in trained:
            assert part["ratio"] == pytest.approx([1.0] * len(part["text"]), abs=2e-3)
            assert None not in part["overlap"] and min(part["overlap"]) >= 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Running]]:
    runs: list[Running] = []

    def begin(arguments: list[str]) -> Running:
        runs.append(Running(arguments, tmp_path / f"log{len(runs)}.txt"))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


@pytest.mark.parametrize("fault", ["SIGTERM", "frozen raylet"])
def test_failed_start_leaves_no_process(
    fault: str, tmp_path: Path, cache: Path, start: Callable[[list[str]], Running]
) -> None:
    run = start([*small(tmp_path / "run", cache, steps=200), "run.hang_timeout_s=5"])
    run.wait(lambda: "starting 1 engine" in run.output(), "Ray")
    below = run.below()
    raylet = next(p for p in below if "/raylet" in words_of(p).split(" ")[0])
    if fault == "SIGTERM":
        run.signal_all(signal.SIGTERM)
        assert "SIGTERM" in run.finish(PREEMPTED)
    else:
        raylet.send_signal(signal.SIGSTOP)
        assert f"(raylet) (process {raylet.pid} " in run.finish(1)
    assert not any(t in run.output() for t in ("Traceback", "*** SIG", "state-dump"))
    _, alive = psutil.wait_procs(below, timeout=DEADLINE_S)
    assert not alive


@pytest.mark.usefixtures("forked_ray_workers")
def test_run_survives_frozen_processes_interrupt_and_damage(
    tmp_path: Path,
    cache: Path,
    start: Callable[[list[str]], Running],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    ahead = ["algorithm.max_lag=1", "algorithm.filter_groups=correct"]
    knobs = ["rollout.weight_transfer=direct", "run.checkpoint_every=2", "run.hang_timeout_s=5"]
    run = start([*small(folder, cache, steps=200), *ahead, *knobs])
    run.wait(lambda: len(metrics(folder)) >= 3, "two steps")
    processes = [psutil.Process(run.process.pid), *run.below()]
    assert set().union(*map(listening, processes)) == {"127.0.0.1"}
    assert not any(PLANTED in words_of(process) for process in processes)
    engine = run.engine_pids()[0]
    os.kill(engine, signal.SIGSTOP)
    after = len(metrics(folder)) + 3
    run.wait(lambda: len(metrics(folder)) >= after and f"process {engine}" in run.output(), "more")
    # A frozen rank is replaced, and the run resumes from its checkpoint.
    rank = next(p for p in run.below() if words_of(p).startswith("ray::TrainerWorker"))
    rank.send_signal(signal.SIGSTOP)
    events = folder / EVENTS
    run.wait(lambda: '"kind": "resume"' in events.read_text(), "a restart")
    since = metrics(folder)[-1]["step"]
    run.wait(lambda: metrics(folder)[-1]["step"] > since, "a step after it")
    run.process.send_signal(signal.SIGINT)
    output = run.finish()
    assert re.search(rf"rollout engine 0 \(process {engine} on \S+\)", output)
    assert f"trainer rank 0 (process {rank.pid} on " in output and "Traceback" not in output
    assert files_with_keys(tmp_path) == []
    first = metrics(folder)
    reached = first[-1]["step"]
    assert f"step {reached} of 200" in output
    *before, last = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert last == f"step_{reached:06d}"
    assert set(before) <= {f"step_{step:06d}" for step in range(2, reached, 2)}
    # A resumed run begins with the prompts that were being sampled ahead.
    state = json.loads((folder / "checkpoints" / last / "state.json").read_text())
    assert 0 < len(state["cursor"]["unfinished"]) <= 8

    # A flipped bit in the newest checkpoint makes the run resume from the one before.
    damaged = folder / "checkpoints" / last / "optimizer" / "rank_0.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    resumed, steps = int(before[-1].removeprefix("step_")), reached + 2
    knobs = [*small(folder, cache, steps), *ahead]
    # In this process, which has loaded its libraries, as is the evaluation.
    assert main(["train", *knobs, "trainer.ranks=2", "trainer.zero_stage=1"]) == 0
    output = capsys.readouterr().out
    assert before[-1] in output
    assert f"{last} is damaged (optimizer/rank_0.safetensors: changed" in output
    assert (folder / "checkpoints" / f"damaged_{last}").is_dir()
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(steps + 1))
    for line in lines[1:]:
        assert line["staleness/max"] <= 1 and 0 <= line["time/idle_fraction"] < 1
        assert line["routing/fallback_fraction"] == 0 and line["sampling/kept_mean"] >= 1
    assert max(line["staleness/mean"] for line in lines[1:]) > 0, "nothing was sampled ahead"
    for step in (1, resumed + 1):  # nothing is ahead, so engines and trainer had equal weights
        assert lines[step]["staleness/mean"] == 0
        assert lines[step]["mismatch/logp_abs"] <= 1e-4
    assert (folder / "trajectories" / f"step_{steps:06d}.jsonl").stat().st_size > 0
    check_report(folder, resumed=resumed, steps=steps)
    assert list((folder / "tensorboard").iterdir())
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.num_experts == 8
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template

    assert main(["eval", *knobs]) == 0 and f"step_{steps:06d}" in capsys.readouterr().out
