"""A policy with tools from end to end, driven by Keel and by an agent program: trained and written
down while an engine dies, stopped in the middle of its episodes in both ways, and resumed. It calls
its tools inside the thinking; test_mixed.py has policies that call them after it."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from keel.rewards.sandbox.environments import environment_wrap
from keel.rewards.sandbox.sandbox import IsolationError
from keel.trainer.run.checkpoint import latest, step_of
from keel.trainer.run.signals import PREEMPTED
from tests.agents.sandboxes import commands
from tests.e2e.test_command import DEADLINE_S, Running, metrics, wait_until
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e
STEPS = 200
"""More than are done."""
AGENT = """
from openai import OpenAI

def solve(task):
    client = OpenAI()  # all that it knows of Keel are OpenAI's environment variables
    asked = task["messages"][-1]
    messages = [asked]
    for _ in range(2):
        reply = client.chat.completions.create(model="any", messages=messages, temperature=0.1)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), asked]
    return reply.choices[0].message.content
"""
# Of the four groups of a step one is the program's, each of whose episodes loads OpenAI's library.
SOURCES = """
- name: trip
  source: environment
  environment:
    target: keel.agents.environments.trip.environment:Trip
    arguments: {{level: 0}}
    demonstrations: keel.agents.environments.demonstrations:trip_demonstrations
    isolation: {isolation}
    open_s: {patience_s}
    reply_s: {patience_s}
    verdict_s: {patience_s}
  size: 64
  holdout: 4
  weight: 3
  rewards: {{correct: 1.0, progress: 0.1}}
- name: spelling
  source: reasoning_gym
  task: spell_backward
  params: {{min_word_len: 4, max_word_len: 7}}
  size: 200
  holdout: 1
  environment:
    program: "my_agent:solve"
    folder: {folder}
    isolation: {isolation}
    open_s: {patience_s}
"""


def recipe(folder: Path) -> list[str]:
    """agent-trip with another source."""
    isolation = "bubblewrap"
    try:
        environment_wrap(isolation)
    except IsolationError:  # tests/rewards/sandbox has what is said then
        isolation = "none-i-trust-the-environments"
    program = folder / "program"
    for made in (folder, program):
        made.mkdir(exist_ok=True)
        made.chmod(0o755)
    (program / "my_agent.py").write_text(AGENT)
    text = SOURCES.format(isolation=isolation, folder=program, patience_s=PATIENCE_S)
    sources = yaml.safe_load(text)
    return [
        "agent-trip",
        f"run.dir={folder / 'run'}",
        f"run.steps={STEPS}",
        f"model.tiny.cache_dir={folder / 'cache'}",
        "model.tiny.cold_start.steps=80",  # enough for calls that can be read
        "model.tiny.cold_start.batch_size=40",
        "model.tiny.cold_start.questions=512",
        f"model.tiny.cold_start.max_seconds={DEADLINE_S}",
        "agents.tools_in_thinking=true",
        "run.checkpoint_every=1",
        "run.save_trajectories=8",  # of each group
        f"data.sources={json.dumps(sources)}",
        "algorithm.prompts_per_step=4",
        "algorithm.group_size=4",
        # Of the machine's time, which may be busy.
        f"agents.call_s={PATIENCE_S}",
        f"rewards.timeout_s={PATIENCE_S}",
        "rewards.workers=1",
    ]


class Watched:
    """All processes that a run ever had below it."""

    def __init__(self, run: Running) -> None:
        self.run = run
        self.seen: dict[psutil.Process, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def environments(self) -> list[psutil.Process]:
        """Those of episodes that are open."""
        hosts = [
            p for p, words in list(self.seen.items()) if "agents/env_runtime/start.py" in words
        ]
        return [process for process in hosts if process.is_running()]

    def left(self) -> list[str]:
        """What still runs, once the run has ended."""
        self._ended.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        _, alive = psutil.wait_procs(list(self.seen), timeout=DEADLINE_S)
        return [self.seen[process] for process in alive]

    def _watch(self) -> None:
        top = psutil.Process(self.run.process.pid)
        while not self._ended.wait(0.2):
            with suppress(psutil.NoSuchProcess):
                for process in top.children(recursive=True):
                    if process not in self.seen:
                        self.seen[process] = " ".join(process.cmdline())


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, with a short name: sockets are put there."""
    with tempfile.TemporaryDirectory(prefix="ka", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        for name in ("TMPDIR", "RAY_TMPDIR"):
            monkeypatch.setenv(name, folder)
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, scratch: Path) -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def begin(*knobs: str) -> Watched:
        run = Running([*recipe(tmp_path), *knobs], tmp_path / f"log{len(started)}.txt")
        started.append(Watched(run))
        return started[-1]

    yield begin
    for watched in started:
        if watched.run.process.poll() is None:
            watched.run.process.kill()
            watched.run.process.wait(timeout=DEADLINE_S)


def test_a_policy_with_tools_survives_its_engine_is_stopped_and_resumed(
    tmp_path: Path, scratch: Path, start: Callable[..., Watched]
) -> None:
    """Its two engines alternate with the trainer; that of the resumed run does not."""
    folder = tmp_path / "run"

    def steps() -> list[dict[str, Any]]:
        return metrics(folder)

    def reach(count: int, run: Running) -> None:
        wait_until(lambda: len(steps()) >= count or run.process.poll() is not None, f"{count}")
        assert run.process.poll() is None, run.said()

    def nothing_left(watched: Watched) -> None:
        assert watched.left() == []
        words = str(tmp_path / "program").encode()
        wait_until(lambda: not commands(words), "the end of those that nobody has seen")
        # Ray keeps the logs of its sessions, and vLLM the file that its group met at.
        assert not [p for p in scratch.iterdir() if not p.name.startswith(("ray", "vllm_dist_"))]

    # An engine is killed in the middle of episodes: that costs turns, and the run goes on.
    patient = ("run.checkpoint_every=0", f"run.grace_s={DEADLINE_S}")
    watched = start("rollout.engines=2", "rollout.time_share=true", *patient)
    reach(2, watched.run)
    wait_until(watched.environments, "open episodes")
    os.kill(watched.run.engine_pids()[0], signal.SIGKILL)
    again = r"rollout engine [01] is started again"
    wait_until(lambda: re.search(again, watched.run.said()), again)
    reach(len(steps()) + 1, watched.run)
    # A scheduler's signal to all of the job in the middle of others: they are given up, and what
    # was trained is saved, by engines and ranks that outlive it.
    wait_until(watched.environments, "open episodes")
    watched.run.signal_all(signal.SIGUSR1)
    watched.run.signal_all(signal.SIGTERM)
    said = watched.run.finish(PREEMPTED)
    nothing_left(watched)
    done = steps()
    reached = done[-1]["step"]
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{reached:06d}" and "Traceback" not in said
    assert "SIGUSR1: dropping the current rollouts" in said and "SIGTERM" not in said
    assert "trip, its environment: opens in" in said and "get_all_hotels_by_city" in said
    assert f"stopped after step {reached} of {STEPS}; to resume: keel train agent-trip" in said
    assert "its program: asked a model by script for 2 turns" in said
    assert {"eval/trip/pass@1", "eval/spelling/pass@1"} <= done[0].keys()
    text = (folder / "trajectories" / f"step_{reached:06d}.txt").read_text()
    assert "[call " in text and " calls (" in text and "the environment says: " in text
    driven = [told for told in text.split("=== ")[1:] if told.startswith("spelling/")]
    assert driven
    for told in driven:
        assert "    2 turns, 0 calls (" in told
        assert told.count("[user] Spell this") == 2

    # Resumed; then asked twice to stop, which it does at once. Meanwhile it is suspended, for else
    # the step could end before Ctrl-C, which is heard after SIGHUP, the smaller number.
    watched = start("rollout.engines=1")
    process = watched.run.process

    def saved() -> int:  # a step is in the metrics before it has a checkpoint
        found = latest(folder / "checkpoints")
        return step_of(found) if found else 0

    wait_until(lambda: saved() > reached or process.poll() is not None, "a checkpoint of its own")
    wait_until(watched.environments, "open episodes")
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGHUP, signal.SIGCONT):
        process.send_signal(number)
    said = watched.run.finish(PREEMPTED)
    assert "SIGHUP: dropping the current rollouts" in said
    nothing_left(watched)
    done = steps()
    assert [step["step"] for step in done] == list(range(len(done)))
    assert done[-1]["step"] - saved() in (0, 1)

    for step in done[1:]:
        assert step["agents/turns_mean"] >= 1 and step["agents/calls_mean"] > 0
        assert step["rollout/dropped_completions"] == step["agents/crashes"] == 0
        assert step["reward/error"] == 0 and {"reward/correct", "reward/progress"} <= step.keys()
        assert step["staleness/mean"] == 0 and step["agents/tools_seconds_mean"] > 0
    # A call outside the thinking would be malformed.
    assert min(step["agents/malformed_fraction"] for step in done[1:]) < 0.5
    learned = [step for step in done if "loss" in step]  # not all groups were of one reward
    assert learned
    for step in learned:
        assert step["routing/fallback_fraction"] == 0 and step["mismatch/logp_abs"] < 1e-4
