"""A run's local Ray cluster: its token, its ports, and an environment path with a space."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import psutil
import pytest

from keel.trainer.placement.ray_internals import STUBS
from tests.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.e2e

STRANGER = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print('is in')"
PROGRAM = f"""
import os, subprocess, sys
import psutil, ray
from keel.trainer.placement.nodes import start_ray
from keel.trainer.placement.ray_internals import own_processes
start_ray()
print(*sorted(own_processes()))
token, address = os.environ["RAY_AUTH_TOKEN"], ray.get_runtime_context().gcs_address
without = {{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}}
without["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or Ray would look at another address for it
few = {{"RAY_NUM_REDIS_GET_RETRIES": "5"}}  # a second each, of 20
modes = few, {{**few, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}}, os.environ
tries = [
    subprocess.Popen([sys.executable, "-c", {STRANGER!r}, address], env={{**without, **mode}},
                     stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for mode in modes
]
print(*("is in" in tried.communicate(timeout=300)[0] for tried in tries))
seen = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
print(any(token in word for words in seen for word in words or ()))
class Worker:
    def where(self): return sys.executable, os.nice(0)
actor = ray.remote(Worker).options(runtime_env={{"env_vars": {{"A": "1"}}}}).remote()
where, niceness = ray.get(actor.where.remote(), timeout=300)
print(where)
print(niceness - os.nice(0))
def about(process):
    try:
        ports = [c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"]
        return " ".join(process.cmdline()), ports
    except psutil.Error:  # the process has just ended
        return "", []
ours = [about(p) for p in [psutil.Process(), *psutil.Process().children(recursive=True)]]
reached = {{ip.removeprefix("::ffff:") for _, ports in ours for ip in ports}}
print(bool(reached), *(ip for ip in reached if "127." not in ip))
print([n for n, _ in ours[1:] if "ray::IDLE" in n or "ashboard" in n.split("=")[0]])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment whose path contains a space."""
    home = tmp_path_factory.mktemp("environments") / "my environment"
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "python"


def test_local_cluster_is_private_and_light(python: Path, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [str(python), "-c", PROGRAM],
        env={**env, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    processes, joined, shown, where, behind, ports, unused = done.stdout.splitlines()
    assert processes == "gcs_server raylet"
    assert joined == "False False True", "joining needs the secret token"
    assert shown == "False" and not (tmp_path / ".ray").exists()
    assert (where, behind) == (str(python), "0")
    assert ports == "True", "no process listens to other machines"
    assert unused == "[]", "neither an idle worker nor a dashboard"


RAYLET = """
import subprocess, sys
agent = subprocess.Popen(sys.argv[1:])
print(agent.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("program", ["agent", "bound"])
def test_programs_end_with_their_raylet(program: str, tmp_path: Path) -> None:
    waits = [sys.executable, "-c", "import time; time.sleep(1000)"]
    arguments = [str(tmp_path), "7"] if program == "agent" else waits
    raylet = subprocess.Popen(
        [sys.executable, "-c", RAYLET, *STUBS, program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert raylet.stdin and raylet.stdout
    agent = psutil.Process(int(raylet.stdout.readline()))
    if program == "agent":
        wait_for(lambda: len([*tmp_path.glob("*_port_7")]) == 3, "its ports")
        assert {path.read_text() for path in tmp_path.iterdir()} == {"-1"}
    else:
        wait_for(lambda: agent.cmdline() == waits, "the command itself")
    assert agent.is_running()
    raylet.kill()
    raylet.communicate(timeout=PATIENCE_S)
    wait_for(lambda: not agent.is_running(), "its end")
