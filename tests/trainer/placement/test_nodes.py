"""Unreachable clusters, hardware detection, and recipes for GPUs planned on other machines."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray

from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from keel.model import ray_timeouts
from keel.trainer.placement import nodes
from keel.trainer.placement.nodes import (
    detect_hardware,
    planned_hardware,
    seat_lines,
    start_ray,
    used_gib,
    with_missing_nodes,
)
from keel.trainer.run.signals import Preempted, watching
from tests.trainer.placement.shapes import SOURCE


@pytest.fixture(autouse=True)
def well() -> Iterator[None]:
    yield
    ray_timeouts.joined()


def test_signal_does_not_interrupt_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray kills a process that has not disconnected by the time its cluster is gone."""
    ended: list[str] = []

    def leave(*_: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        ended.append("Ray")

    monkeypatch.setattr(nodes, "shut_down", leave)
    with watching(), pytest.raises(Preempted):
        nodes.stop_ray()
    assert ended == ["Ray"]


def test_unreachable_or_hung_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the GCS hangs, only the kernel accepts connections."""
    never = threading.Event()
    monkeypatch.setattr("ray.init", lambda **_: never.wait())
    monkeypatch.setattr(nodes, "JOIN_S", 0.01)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port.getsockname()[1]}")
        with pytest.raises(ConfigError, match="RAY_ADDRESS"):
            planned_hardware(recipe())
        assert not ray.is_initialized()
        port.listen()
        with pytest.raises(ConfigError, match="RAY_ADDRESS"):
            start_ray()
    never.set()
    assert ray_timeouts.lost_reason()


def recipe(run: RunConfig | None = None, **shape: Any) -> Config:
    run = run or RunConfig(device="gpu")
    return Config(run=run, data=DataConfig(sources=(SOURCE,)), rollout=RolloutConfig(**shape))


def here(monkeypatch: pytest.MonkeyPatch, *, gpus: int, gib: float) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(nodes, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(nodes, "gpu_gib", lambda: gib)


def test_plan_includes_missing_nodes_of_elastic_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, gpus=4, gib=80.0)
    monkeypatch.setattr(nodes, "available_cores", lambda: 8)
    whole = replace(recipe(engines=4), trainer=TrainerConfig(ranks=4, min_ranks=2))
    here_now = detect_hardware(whole)
    detected = with_missing_nodes(here_now, whole)
    assert detected.missing and "1 of these nodes absent" in str(detected)
    assert seat_lines(whole, detected)[1] == "missing node 0: engines 0–3 on GPUs 0–3"
    one_node = replace(whole, run=RunConfig(device="gpu", gpus_per_node=4))
    others = [replace(whole, trainer=TrainerConfig(ranks=4, min_ranks=m)) for m in (0, 4)]
    enough = replace(whole, rollout=RolloutConfig(engines=4, colocated=True))
    for config in (one_node, *others, enough):
        assert with_missing_nodes(here_now, config) == here_now


@pytest.mark.parametrize(
    ("said", "detected", "check", "train"),
    [
        # said: device, gpu_gib, gpus_per_node, nodes; found: GPUs and their memory
        (("auto", 0, 0, 1), (0, 0.0), None, None),
        (("auto", 0, 0, 1), (2, 80.0), ([2], 80.0), ([2], 80.0)),
        (("cpu", 0, 0, 1), (2, 80.0), None, None),
        # GPUs in the recipe are planned for; a run without GPUs does not fall back to CPU.
        (("auto", 139, 0, 1), (0, 0.0), ([8], 139.0), ([], 139.0)),
        (("auto", 139, 4, 2), (0, 0.0), ([4, 4], 139.0), ([], 139.0)),
        # A run uses at most the present GPUs and the recipe's limit.
        (("auto", 139, 8, 1), (2, 80.0), ([8], 139.0), ([2], 80.0)),
        (("auto", 40, 1, 1), (2, 80.0), ([1], 40.0), ([1], 40.0)),
        (("auto", 139, 0, 1), (2, 80.0), ([2], 139.0), ([2], 80.0)),
    ],
)
def test_planned_and_detected_hardware(
    monkeypatch: pytest.MonkeyPatch,
    said: tuple[Any, float, int, int],
    detected: tuple[int, float],
    check: tuple[list[int], float] | None,
    train: tuple[list[int], float] | None,
) -> None:
    here(monkeypatch, gpus=detected[0], gib=detected[1])
    device, gib, gpus, count = said
    needed = recipe(RunConfig(device=device, gpu_gib=gib, gpus_per_node=gpus, nodes=count))
    for hardware, expected in ((planned_hardware(needed), check), (detect_hardware(needed), train)):
        assert hardware.gpu == (expected is not None)
        if expected:
            assert ([node.gpus for node in hardware.nodes], hardware.gpu_gib) == expected


def test_only_memory_of_visible_gpus_counts() -> None:
    listed = "GPU-aa-1, 40960\nGPU-bb-2, 81920\nGPU-cc-3, 300\nGPU-dd-4, [N/A]\n"
    assert used_gib(listed, {"aa-1", "cc-3", "dd-4"}) == 40.0
    assert used_gib(listed, {"cc-3"}) == 0.0  # used by an idle driver
    assert used_gib(listed, {"aa-1", "bb-2"}, least=True) == 40.0
