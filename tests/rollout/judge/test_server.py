"""Tests the judge server of a run with vLLM and the tiny model."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from keel.configs.schema import ColdStartConfig, JudgeConfig, JudgeServerConfig, TinyModelConfig
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rewards.judge.service import JudgeService
from keel.rewards.sandbox.processes import adopt_orphans
from keel.rl.types import Prompt
from keel.rollout.judge import process, reaper
from keel.rollout.judge.server import JudgeServer
from tests.agents.episodes import alive
from tests.rewards.groups import group, new_scorer, score
from tests.rewards.judge.judge_server import process_of
from tests.waiting import PATIENCE_S, start_local_ray, wait_for

CRITERIA = [
    {"name": "blue", "text": "says blue", "weight": 0.5},
    {"name": "brief", "text": "is brief", "weight": 0.5},
]
PROMPT = Prompt(
    prompt_id="chat/1",
    domain="chat",
    messages=({"role": "user", "content": "What colour is the sky?"},),
    reward={"kind": "rubric", "criteria": CRITERIA},
)
BLUE, RED, GREEN = (f"<think></think>{answer}" for answer in ("Blue.", "Red, I think.", "Green."))


@pytest.fixture
def cluster() -> Iterator[None]:
    start_local_ray(num_cpus=2)
    yield
    ray.shutdown()


def processes_of(model: str) -> list[int]:
    pids: list[int] = []
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(stat[1])
        if stat[0] != "Z" and model in words.split("\0"):
            pids.append(int(entry.name))
    for pid in pids:  # grows during the loop
        pids.extend(
            child for child, parent in parents.items() if parent == pid and child not in pids
        )
    return pids


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.e2e
@pytest.mark.usefixtures("cluster")
def test_server_judges_and_restarts(tmp_path: Path) -> None:
    cold = ColdStartConfig(steps=0)
    tiny = TinyModelConfig(max_context=6144, cache_dir=str(tmp_path), cold_start=cold)
    quote = build_tokenizer().convert_tokens_to_ids('"')
    config = JudgeConfig(
        model=str(ensure_tiny_model(tiny, Curriculum(seed=0))),
        serve=True,
        server=JudgeServerConfig(dtype="float32", startup_timeout_s=2 * PATIENCE_S),
        timeout_s=PATIENCE_S,
        # Lets its reasons end.
        temperature=1.0,
        extra={"logit_bias": {str(quote): 5}},
        max_reply_tokens=1500,
    )
    server = JudgeServer(config, gpu=False)
    with (
        JudgeService(config, servers=[server]) as judge,
        new_scorer({"chat": {"rubric": 1.0}}, judge=judge) as scorer,
    ):
        judge.check_reachable()
        (scored,) = score(scorer, [group(BLUE, RED, prompt=PROMPT)])
        assert scored.group.dropped == ()
        assert all(reward in (0, 0.25, 0.5, 0.75, 1) for reward in scored.rewards_G)
        before = processes_of(config.model)
        assert len(before) >= 3  # reaper, server, engine

        ray.kill(server._actor)
        assert gone(before)

        (scored,) = score(scorer, [group(GREEN, prompt=PROMPT)])
        counts = judge.counts()
        assert scored.group.dropped == () and server.restarts == counts.restarts == 1
        assert (counts.completions, counts.skipped, counts.failed) == (3, 0, {})
        after = processes_of(config.model)
        assert len(after) >= 3
        server.stop()
        assert gone(after)
        server.stop()


pytestmark = pytest.mark.e2e


def test_end_is_reported_without_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_MODULE", "this")
    server = process.VllmServer(
        {"model": "m"}, gpu=True, threads=1, kv_cache_gib=1, host="127.0.0.1", log=tmp_path / "log"
    )
    (tmp_path / "log").unlink()
    with pytest.raises(RuntimeError, match=r"it ended \(exit status 0\)"):
        server.wait(PATIENCE_S)


def test_hang_counts_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_MODULE", process_of.__module__)
    server = process.VllmServer(
        {"model": "m"}, gpu=True, threads=1, kv_cache_gib=1, host="127.0.0.1", log=tmp_path / "log"
    )
    with process_of("") as (url, pid):
        server._address = url
        server.wait(PATIENCE_S)
        assert server.lost() == ""
        checks = iter((False, True))
        with monkeypatch.context() as patch:
            patch.setattr(server, "_is_healthy", lambda _: next(checks))
            assert server.lost() == "", "one failed check proves nothing"
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(process, "HANG_TIMEOUT_S", 0.5)
        assert "health check" in server.lost() and server.ended() == ""
    server.stop()


STARTS_THREE = """
import os, subprocess, sys, time
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print(*(child.pid for child in children), file=open(sys.argv[1] + ".new", "w"), flush=True)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(1000)
"""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("event", "statuses"),
    [
        # On a busy machine SIGTERM may time out.
        ("the owner ends", (b"-15", b"-9")),
        ("the command is killed", (b"-9",)),
        ("the command is stopped", (b"-9",)),
        ("a child is stopped", (b"-9",)),
    ],
)
@adopt_orphans()  # as in a container whose first process reaps nothing
def test_all_descendants_end(tmp_path: Path, event: str, statuses: tuple[bytes, ...]) -> None:
    pids, log, python = tmp_path / "pids", tmp_path / "log", [sys.executable, "-I", "-S"]
    with log.open("wb") as output:
        owner = subprocess.Popen(
            [*python, str(reaper.__file__), *python, "-c", STARTS_THREE, str(pids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        )
    assert owner.stdin and owner.stdout
    wait_for(pids.exists, "start of the command")
    # The reaper is a grandchild: killing the owner's children does not reach it.
    owner.wait(PATIENCE_S)
    children = [int(pid) for pid in pids.read_text().split()]
    command = parent(children[0])
    reaper_pid = parent(command)
    assert all(alive(pid) for pid in [*children, command])
    if event == "the owner ends":
        owner.stdin.close()
    elif event == "the command is killed":
        os.kill(command, signal.SIGKILL)
    else:
        os.kill(command if event == "the command is stopped" else children[1], signal.SIGSTOP)
    assert owner.stdout.read().strip() in statuses  # ends with the reaper
    os.waitpid(reaper_pid, 0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in [*children, command])
