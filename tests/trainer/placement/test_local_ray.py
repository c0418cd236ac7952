"""The local Ray cluster of a run: its token, and an environment path with a space."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from keel.trainer.placement.programs.no_agent import PORTS
from keel.trainer.placement.ray_internals import _AGENT, _TIED
from tests.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.e2e

STRANGER = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print('is in')"
KNOCK = f"""
import os, subprocess, sys
import psutil, ray
from keel.trainer.placement.nodes import start_ray
start_ray()
print("token", os.environ["RAY_AUTH_TOKEN"])
address = ray.get_runtime_context().gcs_address
without = {{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}}
without["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or Ray would look at another address for it
few = {{"RAY_NUM_REDIS_GET_RETRIES": "5"}}  # a second each, of 20
modes = few, {{**few, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}}, os.environ
tries = [
    subprocess.Popen(
        [sys.executable, "-c", {STRANGER!r}, address], env={{**without, **mode}},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    for mode in modes
]
for tried in tries:
    out, err = tried.communicate(timeout=300)
    print("is in" in out, "Authentication" in err)
token = os.environ["RAY_AUTH_TOKEN"]
seen = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
print("shown", any(token in word for words in seen for word in words or ()))
"""
ACTOR = """
import os, psutil, ray, sys
from keel.trainer.placement.nodes import start_ray
from keel.trainer.placement.ray_internals import own_processes
start_ray()
print(sorted(own_processes()))
class Worker:
    def where(self): return sys.executable
    def kept(self): return os.environ.get("RAY_task_events_report_interval_ms")
    def niceness(self): return os.nice(0)
actor = ray.remote(Worker).options(runtime_env={"env_vars": {"A": "1"}}).remote()
print(ray.get(actor.where.remote(), timeout=300))
print(ray.get(actor.kept.remote(), timeout=300))
print(ray.get(actor.niceness.remote(), timeout=300) - os.nice(0))
def named(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has just ended
        return ""
ours = psutil.Process().children(recursive=True)
def listens(process):
    try:
        return [c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"]
    except psutil.Error:
        return []
reached = {ip for p in [psutil.Process(), *ours] for ip in listens(p)}
print(sorted(ip.removeprefix("::ffff:") for ip in reached if "127." not in ip), bool(reached))
print([named(p) for p in ours if "ray::IDLE" in named(p) or "ashboard" in named(p).split("=")[0]])
"""
BOTH = """
import os, sys
from keel.trainer.placement.nodes import start_ray  # takes seconds, and is here for both
for code, home in zip(sys.argv[1::2], sys.argv[2::2]):
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.environ["HOME"] = home
    os.chdir(home)
    for number, name in ((1, "said"), (2, "errors")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), number)
    exec(code, {"__name__": "__main__"})
    break
"""
"""Run several programs in turn, each in its own process and home directory."""
TOKEN = Path(".ray", "auth_token")
RAYLET = """
import subprocess, sys
agent = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]])
print(agent.pid, flush=True)
sys.stdin.read()
"""


def test_stub_agent_is_silent_and_ends_with_raylet(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RAYLET, str(_AGENT), str(tmp_path), "7"]
    raylet = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert raylet.stdin and raylet.stdout
    agent = psutil.Process(int(raylet.stdout.readline()))
    expected = {f"{name}_7": "-1" for name in PORTS}
    # Files are written under a temporary name, then renamed.
    wait_for(lambda: {path.name for path in tmp_path.iterdir()} == expected.keys(), "its ports")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == expected
    assert agent.is_running() and not agent.net_connections()
    raylet.kill()
    raylet.communicate(timeout=PATIENCE_S)
    wait_for(lambda: not agent.is_running(), "its end")


def test_tied_process_ends_with_its_parent() -> None:
    waits = [str(_TIED), sys.executable, "-c", "import time; time.sleep(1000)"]
    raylet = subprocess.Popen(
        [sys.executable, "-c", RAYLET, *waits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert raylet.stdin and raylet.stdout
    agent = psutil.Process(int(raylet.stdout.readline()))
    wait_for(lambda: agent.cmdline() == waits[1:], "the command itself")
    assert agent.is_running()
    raylet.kill()
    raylet.communicate(timeout=PATIENCE_S)
    wait_for(lambda: not agent.is_running(), "its end")


@dataclass(frozen=True)
class Program:
    home: Path
    status: int

    def lines(self) -> list[str]:
        """Lines of standard output."""
        assert self.status == 0, (self.home / "errors").read_text()
        return (self.home / "said").read_text().splitlines()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with a space in its path."""
    home = tmp_path_factory.mktemp("environments") / "my environment"
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def ran(python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Program]:
    """Run `KNOCK` in an empty home and `ACTOR` in a home with a token."""
    homes = [tmp_path_factory.mktemp(name) for name in ("knock", "actor")]
    (homes[1] / TOKEN).parent.mkdir()
    (homes[1] / TOKEN).write_text("1" * 64)
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [str(python), "-c", BOTH, KNOCK, str(homes[0]), ACTOR, str(homes[1])],
        env={**env, "PYTHONPATH": str(ROOT)},
        cwd=homes[0],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    knock, actor = map(Program, homes, map(int, done.stdout.split()))
    return knock, actor


def test_joining_needs_the_secret_token(
    ran: tuple[Program, Program],
) -> None:
    output = ran[0].lines()
    assert len(output[0]) == len("token ") + 64
    assert output[1:] == ["False True", "False True", "True False", "shown False"]
    assert not (ran[0].home / ".ray").exists()


def test_actor_runs_from_a_path_with_a_space(python: Path, ran: tuple[Program, Program]) -> None:
    processes, where, kept, behind, reached, idle = ran[1].lines()
    assert processes == "['gcs_server', 'raylet']"
    # Only the actor's process: no idle worker and no dashboard.
    assert (where, idle) == (str(python), "[]")
    assert kept == "0", "or the GCS grows with every call"
    assert behind == "0", "or whatever else the machine does comes first"
    assert reached == "[] True"  # no process listens to other machines
    assert (ran[1].home / TOKEN).read_text() == "1" * 64
