"""What is said of a cluster that is not there; one that is: `tests/e2e/test_placement.py`."""

from __future__ import annotations

import socket

import pytest
import ray

from configs.schema import Config, ConfigError, DataConfig, RolloutConfig, SourceConfig
from trainer.cluster import seating, start_ray

SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=rf"^RAY_ADDRESS = {address}: no Ray cluster answers"):
            seating(Config(data=DataConfig(sources=(SOURCE,))))
    assert not ray.is_initialized()


def test_a_ray_that_does_not_start_here_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", fails)
    with pytest.raises(RuntimeError, match="Ray did not start on this machine: The current node"):
        start_ray()


def test_without_a_cluster_the_rule_is_for_nodes_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("trainer.cluster.visible_gpus", lambda: 0)
    recipe = Config(
        data=DataConfig(sources=(SOURCE,)), rollout=RolloutConfig(engines=2, tensor_parallel=8)
    )
    assert seating(recipe) == [
        "no GPU here and no RAY_ADDRESS: by rule, on nodes of 8 GPUs",
        "node 0: engine 0 on GPUs 0–7",
        "node 1: engine 1 on GPUs 0–7",
        "node 2: trainer rank 0 on GPU 0",
    ]
    monkeypatch.setattr("trainer.cluster.visible_gpus", lambda: 4)
    with pytest.raises(ConfigError, match=r"needs 17 GPUs .* has 4"):
        seating(recipe)
