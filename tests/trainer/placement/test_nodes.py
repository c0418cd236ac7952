"""Unreachable clusters and detected hardware; `test_reservation.py` tests a live cluster."""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.model import ray_timeouts
from keel.trainer.placement import nodes, reservation
from keel.trainer.placement.hardware import Hardware, idle_nodes
from keel.trainer.placement.memory import GIB
from keel.trainer.placement.nodes import (
    detect_hardware,
    planned_hardware,
    seat_lines,
    start_ray,
    with_missing_nodes,
)
from keel.trainer.placement.ray_internals import (
    _AGENT,
    _NODE,
    _SERVICES,
    _SETUP_WORKER,
    _START_PROCESS,
    _TIED,
    _UNUSED,
    lighter,
    without_unused_processes,
)
from keel.trainer.prepare import missing_node_warnings
from keel.trainer.run.signals import Preempted, watching
from tests.waiting import PATIENCE_S

SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)


@pytest.fixture(autouse=True)
def well() -> Iterator[None]:
    yield
    ray_timeouts.joined()


def test_signal_does_not_interrupt_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray kills a process whose cluster is gone before the process has disconnected."""
    ended: list[str] = []

    def leave(*_: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        ended.append("Ray")

    monkeypatch.setattr(nodes, "shut_down", leave)
    with watching(), pytest.raises(Preempted):
        nodes.stop_ray()
    assert ended == ["Ray"]


def test_unreachable_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=rf"^RAY_ADDRESS = {address}: no Ray cluster answers"):
            planned_hardware(recipe())
    assert not ray.is_initialized()


def test_joining_a_hung_cluster_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Imitates a hung GCS: only the kernel accepts connections."""
    never = threading.Event()
    monkeypatch.setattr("ray.init", lambda **_: never.wait())
    monkeypatch.setattr("keel.trainer.placement.nodes.JOIN_S", 0.01)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"RAY_ADDRESS = .*: waited 0\.01 s for Ray to take "):
            start_ray()
    never.set()
    assert "take this process into the cluster" in ray_timeouts.lost_reason()


def test_failed_release_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    seats = SimpleNamespace(group="a group")
    monkeypatch.setattr(reservation, "_reserve", lambda *_: seats)
    monkeypatch.setattr(reservation, "remove_placement_group", lambda _: never.wait())
    monkeypatch.setattr(reservation, "CALL_S", 0.01)
    ray_timeouts.joined()
    with pytest.raises(KeyError, match="first"), reservation.reserve_gpus(recipe(), timeout_s=1):
        raise KeyError("first")
    never.set()
    assert "give up a reservation" in ray_timeouts.lost_reason()


def test_failed_local_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", fails)
    with pytest.raises(RuntimeError, match="Ray did not start on this machine: The current node"):
        start_ray()


@pytest.mark.e2e
def test_slow_local_start_is_retried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the failed start are killed first."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started: list[subprocess.Popen[bytes]] = []

    def late_once(**_: object) -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        if len(started) == 1:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", late_once)
    before = subprocess.Popen(["sleep", "600"])
    try:
        start_ray()
        assert started[0].wait(PATIENCE_S) == -signal.SIGKILL
        assert before.poll() is None and started[1].poll() is None
    finally:
        for process in (before, *started):
            process.kill()
            process.wait()


@pytest.mark.parametrize("variable", [None, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_local_cluster_gets_a_token_unless_set(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "given") if name == variable else monkeypatch.delenv(name, False)
    seen: list[dict[str, str]] = []
    monkeypatch.setattr("ray.init", lambda **_: seen.append(dict(os.environ)))
    start_ray()
    token = seen[0].get("RAY_AUTH_TOKEN")
    if variable:
        assert seen[0][variable] == "given" and token == (
            "given" if variable == "RAY_AUTH_TOKEN" else None
        )
    else:
        assert token and len(token) == 64
    monkeypatch.delenv("RAY_AUTH_TOKEN", False)


GPUS = RunConfig(device="gpu")


def recipe(run: RunConfig = GPUS, **shape: Any) -> Config:
    return Config(run=run, data=DataConfig(sources=(SOURCE,)), rollout=RolloutConfig(**shape))


def here(monkeypatch: pytest.MonkeyPatch, *, gpus: int, gib: float) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("keel.trainer.placement.nodes.visible_gpus", lambda: gpus)
    monkeypatch.setattr("keel.trainer.placement.nodes.gpu_gib", lambda: gib)


def sizes(hardware: Hardware) -> tuple[list[int], float]:
    return [node.gpus for node in hardware.nodes], hardware.gpu_gib


def test_nodes_default_to_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, gpus=0, gib=0.0)
    with pytest.raises(ConfigError, match=r"run\.device = gpu: this machine has no GPU"):
        planned_hardware(recipe())
    wide = recipe(replace(GPUS, gpu_gib=80.0), engines=2, tensor_parallel=8)
    rule = planned_hardware(wide)
    assert "by rule, as no GPU is here and no RAY_ADDRESS" in str(rule)
    assert not rule.found
    assert seat_lines(wide, rule) == [
        "node 0: engine 0 on GPUs 0–7",
        "node 1: engine 1 on GPUs 0–7",
        "node 2: trainer rank 0 on GPU 0",
    ]
    here(monkeypatch, gpus=4, gib=80.0)
    with pytest.raises(ConfigError, match=r"needs 17 GPU\(s\) .* has 4"):
        seat_lines(wide, planned_hardware(wide))


def test_fractional_free_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"NodeID": "a", "Alive": True, "NodeManagerHostname": "x", "Resources": {"CPU": 1.0}}
    monkeypatch.setattr("keel.trainer.placement.nodes.ray.nodes", lambda: [node])
    monkeypatch.setattr("keel.trainer.placement.nodes.free_by_node", lambda: {"a": {"CPU": 0.5}})
    assert [node.free_cpus for node in nodes.cluster_nodes(gpus=False)] == [0.5]


def test_plan_includes_missing_nodes_of_elastic_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here(monkeypatch, gpus=4, gib=80.0)
    monkeypatch.setattr("keel.trainer.placement.nodes.available_cores", lambda: 8)
    whole = replace(recipe(engines=4), trainer=TrainerConfig(ranks=4, min_ranks=2))
    here_now = detect_hardware(whole)
    detected = with_missing_nodes(here_now, whole)
    assert detected.missing.startswith("the recipe needs 8 GPU(s)")
    assert str(detected).endswith("this machine; 1 of these nodes absent now")
    assert seat_lines(whole, detected)[1] == "missing node 0: engines 0–3 on GPUs 0–3"
    (line,) = missing_node_warnings(whole, detected)
    assert "starts with fewer ranks, 2 of 4 at least (trainer.min_ranks)" in line
    one_node = replace(whole, run=replace(GPUS, gpus_per_node=4))
    others = [replace(whole, trainer=TrainerConfig(ranks=4, min_ranks=m)) for m in (0, 4)]
    enough = replace(whole, rollout=RolloutConfig(engines=4, colocated=True))
    for config in (one_node, *others, enough):
        assert with_missing_nodes(here_now, config) == here_now


@pytest.mark.parametrize(
    ("recipe_values", "detected", "check", "train"),
    [
        # said: device, gpu_gib, gpus_per_node, nodes; found: GPUs and their memory
        (("auto", 0, 0, 1), (0, 0.0), None, None),
        (("auto", 0, 0, 1), (2, 80.0), ([2], 80.0), ([2], 80.0)),
        (("cpu", 0, 0, 1), (2, 80.0), None, None),
        # GPUs in the recipe are planned for; a run without GPUs does not fall back to CPU.
        (("auto", 139, 0, 1), (0, 0.0), ([8], 139.0), ([], 139.0)),
        (("auto", 139, 4, 2), (0, 0.0), ([4, 4], 139.0), ([], 139.0)),
        (("auto", 0, 4, 1), (0, 0.0), ([4], 0.0), ([], 0.0)),
        # A run uses at most the present GPUs and the recipe's limit.
        (("auto", 139, 8, 1), (2, 80.0), ([8], 139.0), ([2], 80.0)),
        (("auto", 40, 1, 1), (2, 80.0), ([1], 40.0), ([1], 40.0)),
        (("auto", 139, 0, 1), (2, 80.0), ([2], 139.0), ([2], 80.0)),
    ],
)
def test_planned_and_detected_hardware(
    monkeypatch: pytest.MonkeyPatch,
    recipe_values: tuple[Any, float, int, int],
    detected: tuple[int, float],
    check: tuple[list[int], float] | None,
    train: tuple[list[int], float] | None,
) -> None:
    here(monkeypatch, gpus=detected[0], gib=detected[1])
    device, gib, gpus, nodes = recipe_values
    needed = recipe(RunConfig(device=device, gpu_gib=gib, gpus_per_node=gpus, nodes=nodes))
    for hardware, expected in ((planned_hardware(needed), check), (detect_hardware(needed), train)):
        assert hardware.gpu == (expected is not None)
        if expected:
            assert sizes(hardware) == expected
    if check == train:
        assert planned_hardware(needed) == detect_hardware(needed)


@pytest.mark.parametrize(
    ("nodes", "recipe_values", "taken", "size", "remaining"),
    [
        # nodes: of a cluster, 0 without one; said: run.gpu_gib; taken: of each of two GPUs of 80
        (0, 0, (35, 0), 80, 45),
        (0, 40, (35, 0), 40, 40),  # other processes may use the remaining half
        (0, 40, (60, 0), 40, 20),
        (1, 0, (70, 0), 80, 80),  # Ray tracks which GPUs are taken
        (1, 0, (70, 50), 80, 30),
        (1, 139, (0, 0), 80, 80),
        (2, 139, (0, 0), 139, 139),  # other nodes may have larger GPUs
    ],
)
def test_memory_of_other_processes_reduces_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    recipe_values: float,
    taken: tuple[float, float],
    size: float,
    remaining: float,
) -> None:
    here(monkeypatch, gpus=2, gib=80.0)
    if nodes:
        monkeypatch.setenv("RAY_ADDRESS", "a cluster")
    module = "keel.trainer.placement.nodes"
    monkeypatch.setattr(f"{module}._detect_nodes", lambda: idle_nodes(max(1, nodes), 2))
    monkeypatch.setattr(f"{module}.taken_gib", lambda *, least: min(taken) if least else max(taken))
    detected = detect_hardware(recipe(RunConfig(gpu_gib=recipe_values)))
    assert (detected.gpu_gib, detected.gpu_gib - detected.taken_gib) == (size, remaining)


def test_cpu_recipe_refuses_gpu_knobs() -> None:
    speeches: list[dict[str, Any]] = [{"gpu_gib": 80.0}, {"gpus_per_node": 2}]
    for speech in speeches:
        with pytest.raises(ConfigError, match=r"run\.gpu.* run\.device"):
            RunConfig(device="cpu", **speech)
    with pytest.raises(ConfigError, match=r"run\.nodes = 2: needs run\.gpus_per_node"):
        RunConfig(nodes=2)


def test_unknown_ray_release_is_not_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = vars(importlib.import_module(_NODE))["Node"]
    monkeypatch.delattr(node, _UNUSED[0])
    before = [vars(node)[name] for name in _UNUSED[1:]]
    with without_unused_processes():
        assert not hasattr(node, _UNUSED[0])
        assert all(vars(node)[name](None, port=1) is None for name in _UNUSED[1:])
    assert [vars(node)[name] for name in _UNUSED[1:]] == before
    monkeypatch.setattr(importlib.import_module(_NODE), "Node", None)
    with without_unused_processes():
        pass


def test_container_limits_host_memory(tmp_path: Path) -> None:
    most, none, limit = tmp_path / "max", tmp_path / "absent", tmp_path / "memory.max"
    most.write_text("max\n")
    limit.write_text(f"{GIB // 2}\n")
    whole = nodes.memory_gib((most, none))
    assert whole == psutil.virtual_memory().total / GIB
    assert nodes.memory_gib((most, none, limit)) == 0.5


def test_raylet_starts_without_the_dashboard_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    services, commands = importlib.import_module(_SERVICES), list[list[str]]()
    monkeypatch.setattr(
        services, _START_PROCESS, lambda command, kind, **_: commands.append(command)
    )
    original = getattr(services, _START_PROCESS)
    agent = "--dashboard_agent_command='/a b/python' agent.py --session-dir=/s --node-id=7"
    with without_unused_processes():
        getattr(services, _START_PROCESS)(
            ["raylet", "--session_dir=/s", agent, "--node_id=7"], "raylet"
        )
    assert getattr(services, _START_PROCESS) is original
    ((program, session, line, node),) = commands
    assert (program, session, node) == ("raylet", "--session_dir=/s", "--node_id=7")
    words = shlex.split(line.removeprefix("--dashboard_agent_command="))
    assert words == [sys.executable, "-I", "-S", str(_AGENT), "/s", "7"] and _AGENT.is_file()
    other = "--runtime_env_agent_command='/a b/python' other.py"
    bound = lighter(["--session_dir=/s", agent, other, "--node_id=7"])[2]
    words = shlex.split(bound.removeprefix("--runtime_env_agent_command="))
    assert words[:4] == [sys.executable, "-I", "-S", str(_TIED)] and _TIED.is_file()
    assert words[-2:] == ["/a b/python", "other.py"]
    workers = "--python_worker_command='/a b/python' /ray/workers/setup_worker.py '/a b/default_worker.py' --x=1"  # noqa: E501
    setting = lighter(["--session_dir=/s", agent, workers, "--node_id=7"])[2]
    assert shlex.split(setting.partition("=")[2]) == [
        *("/a b/python", str(_SETUP_WORKER), "/a b/default_worker.py", "--x=1")
    ]
    elsewhere = workers.replace("setup_worker", "begin_worker")
    assert lighter(["--session_dir=/s", agent, elsewhere, "--node_id=7"])[2] == elsewhere
    for other in (["gcs_server", "--session_dir=/s"], ["raylet", agent, "--node_id=7"]):
        assert lighter(other) == other, "another process, or another release of Ray"
