"""A policy with tools, driven by Keel and by an agent program; a lost engine and a preemption.

It calls tools inside its thinking; the policies of test_in_process.py call them after it."""

import gzip
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from keel.rewards.sandbox.environments import environment_sandbox
from keel.rewards.sandbox.sandbox import IsolationError
from keel.trainer.run.signals import PREEMPTED
from keel.trainer.run.trajectory_files import TOKENS
from tests.agents.sandboxes import commands
from tests.e2e.test_command import DEADLINE_S, Running, metrics, wait_until, words_of
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_ray_workers")]
STEPS = 200
AGENT = """
from openai import OpenAI

def solve(task):
    client = OpenAI()  # configured by environment variables
    question = task["messages"][-1]
    messages = [question]
    for _ in range(2):
        reply = client.chat.completions.create(model="any", messages=messages, temperature=0.1)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), question]
    return reply.choices[0].message.content
"""


def source(name: str, kind: str, environment: Any, size: int, holdout: int) -> dict[str, Any]:
    about = {"name": name, "source": kind, "environment": environment}
    return {**about, "size": size, "holdout": holdout}


def recipe(folder: Path) -> list[str]:
    isolation = "bubblewrap"
    try:
        environment_sandbox(isolation)
    except IsolationError:
        isolation = "none-i-trust-the-environments"
    program = folder / "program"
    for made in (folder, program):
        made.mkdir(exist_ok=True)
        made.chmod(0o755)
    (program / "my_agent.py").write_text(AGENT)
    common = {"isolation": isolation, "open_s": PATIENCE_S}
    environments = "keel.agents.environments"
    trip = {
        "target": f"{environments}.trip.environment:Trip",
        "arguments": {"level": 0},
        "demonstrations": f"{environments}.demonstrations:trip_demonstrations",
        **{"reply_s": PATIENCE_S, "verdict_s": PATIENCE_S, **common},
    }
    # One of four groups per step is the program's, whose episodes load OpenAI's library.
    asked = {"program": "my_agent:solve", "folder": str(program), **common}
    rewards = {"correct": 1.0, "progress": 0.1}
    task = {"task": "spell_backward", "params": {"min_word_len": 4, "max_word_len": 7}}
    sources = [
        {**source("trip", "environment", trip, 64, 4), "weight": 3, "rewards": rewards},
        {**source("spelling", "reasoning_gym", asked, 200, 1), **task},
    ]
    return [
        "agent-trip",
        f"run.dir={folder / 'run'}",
        f"run.steps={STEPS}",
        f"model.tiny.cache_dir={folder / 'cache'}",
        *(f"model.tiny.cold_start.{k}" for k in ("steps=40", "batch_size=40", "questions=512")),
        f"model.tiny.cold_start.max_seconds={DEADLINE_S}",
        "agents.tools_in_thinking=true",
        "run.checkpoint_every=0",
        f"run.grace_s={DEADLINE_S}",
        *("rollout.engines=2", "rollout.time_share=true"),
        "run.save_trajectories=8",  # of each group
        f"data.sources={json.dumps(sources)}",
        *("algorithm.prompts_per_step=4", "algorithm.group_size=4", "rewards.workers=1"),
        *(f"agents.call_s={PATIENCE_S}", f"rewards.timeout_s={PATIENCE_S}"),
    ]


class Watched:
    """A run, and every process that it ever started."""

    def __init__(self, run: Running) -> None:
        self.run = run
        self.seen: dict[psutil.Process, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def environments(self) -> list[psutil.Process]:
        seen = list(self.seen.items())
        return [p for p, words in seen if "env_runtime/start.py" in words and p.is_running()]

    def survivors(self) -> list[str]:
        self._ended.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        _, alive = psutil.wait_procs(list(self.seen), timeout=DEADLINE_S)
        return [self.seen[process] for process in alive]

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            for process in self.run.below():
                if process not in self.seen:
                    self.seen[process] = words_of(process)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Its name is short, as sockets need.
    with tempfile.TemporaryDirectory(prefix="ka", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        for name in ("TMPDIR", "RAY_TMPDIR"):
            monkeypatch.setenv(name, folder)
        yield Path(folder)


@pytest.fixture
def watched(tmp_path: Path, scratch: Path) -> Iterator[Watched]:
    watched = Watched(Running(recipe(tmp_path), tmp_path / "log.txt", module="tests.forked"))
    yield watched
    watched.run.kill()


def test_policy_with_tools_survives_faults(tmp_path: Path, scratch: Path, watched: Watched) -> None:
    folder = tmp_path / "run"

    def reach(count: int) -> None:
        watched.run.wait(lambda: len(metrics(folder)) >= count, f"{count} steps")
        assert watched.run.process.poll() is None, watched.run.output()

    # An engine that is killed during episodes is restarted.
    reach(2)
    wait_until(watched.environments, "open episodes")
    os.kill(watched.run.engine_pids()[0], signal.SIGKILL)
    events = folder / "events.jsonl"
    restarted = '"kind": "engine"'
    wait_until(lambda: events.exists() and restarted in events.read_text(), "a new engine")
    reach(len(metrics(folder)) + 1)
    # A scheduler's signal to the whole job drops open episodes and saves a checkpoint.
    wait_until(watched.environments, "open episodes")
    watched.run.signal_all(signal.SIGUSR1)
    watched.run.signal_all(signal.SIGTERM)
    output = watched.run.finish(PREEMPTED)
    assert watched.survivors() == []
    words = str(tmp_path / "program").encode()
    wait_until(lambda: not commands(words), "the end of all programs")
    # Ray keeps its logs, and vLLM its rendezvous file.
    assert not [p for p in scratch.iterdir() if not p.name.startswith(("ray", "vllm_dist_"))]
    done = metrics(folder)
    reached = done[-1]["step"]
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{reached:06d}" and "Traceback" not in output
    assert "SIGUSR1" in output and "SIGTERM" not in output
    assert {"eval/trip/pass@1", "eval/spelling/pass@1"} <= done[0].keys()
    with gzip.open(folder / "trajectories" / f"step_{reached:06d}{TOKENS}") as file:
        groups = [json.loads(line) for line in file]
    samples = [(group, each) for group in groups for each in group["trajectories"]]
    assert any(sample.get("usage", {}).get("calls") for _, sample in samples)
    assert any("facts" in sample for _, sample in samples)
    program = [sample for group, sample in samples if group["prompt"].startswith("spelling/")]
    assert program
    for sample in program:
        assert (sample["usage"]["turns"], sample["usage"]["calls"]) == (2, 0)

    for step in done[1:]:
        assert step["agents/turns_mean"] >= 1 and step["agents/calls_mean"] > 0
        assert step["rollout/dropped_completions"] == step["agents/crashes"] == 0
        assert step["reward/error"] == 0 and {"reward/correct", "reward/progress"} <= step.keys()
        assert step["staleness/mean"] == 0 and step["agents/tools_seconds_mean"] > 0
    learned = [step for step in done if "loss" in step]
    assert learned
    for step in learned:
        assert step["routing/fallback_fraction"] == 0 and step["mismatch/logp_abs"] < 1e-4
