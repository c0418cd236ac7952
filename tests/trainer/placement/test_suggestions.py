"""Every suggested change makes the recipe fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from keel.configs.schema import AlgorithmConfig, Config, ConfigError, SamplingConfig
from keel.trainer.placement.hardware import Hardware, idle_nodes
from keel.trainer.placement.plan import plan_on
from keel.trainer.placement.suggestions import with_knob
from tests.trainer.placement.test_memory import DENSE, recipe


def machine(gpus: int, gib: float, nodes: int = 1) -> Hardware:
    return Hardware(gpu=True, nodes=tuple(idle_nodes(nodes, gpus)), gpu_gib=gib, note="made up")


def refusal(config: Config, hardware: Hardware) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_on(config, DENSE, hardware)
    return str(raised.value)


def ways(message: str) -> list[dict[str, Any]]:
    """Changes suggested by a refusal."""
    (text,) = re.findall(r"To make it fit: (.*)\. \(", message)
    values = {"true": True, "false": False, "bfloat16": "bfloat16"}
    return [
        {
            knob: values.get(value) or (float(value) if "." in value else int(value))
            for knob, value in (change.split("=") for change in way.split(" "))
        }
        for way in text.split("; or ")
    ]


LONG = SamplingConfig(top_k=64, max_tokens=30_000)


@pytest.mark.parametrize(
    ("config", "hardware", "first"),
    [
        # The engine takes 0.85 of a shared GPU but needs little, so lowering it comes first.
        (
            recipe(micro_batch_tokens=8000),
            machine(1, 139),
            {"rollout.gpu_memory_utilization": 0.73},
        ),
        (
            recipe(micro_batch_tokens=32_000),
            machine(2, 80),
            {"trainer.activation_checkpointing": True},
        ),
        (recipe(micro_batch_tokens=8000, zero_stage=3, ranks=2), machine(8, 24), None),
        (recipe(micro_batch_tokens=8000, activation_checkpointing=True), machine(2, 16), None),
        (recipe(micro_batch_tokens=8000), machine(2, 16), None),
        (
            recipe(rollout={"gpu_memory_utilization": 0.05}),
            machine(2, 48),
            {"rollout.gpu_memory_utilization": 0.09},
        ),
        (recipe(rollout={"sampling": LONG}, micro_batch_tokens=32_000), machine(2, 48), None),
        (
            recipe(rollout={"gpu_memory_utilization": 0.999, "time_share": True}),
            machine(1, 48),
            None,
        ),
        (
            recipe(
                rollout={"gpu_memory_utilization": 0.9, "time_share": True},
                offload_while_sampling=False,
            ),
            machine(1, 48),
            {"rollout.gpu_memory_utilization": 0.66},
        ),
    ],
)
def test_every_suggestion_makes_the_recipe_fit(
    config: Config, hardware: Hardware, first: dict[str, Any] | None
) -> None:
    named = ways(refusal(config, hardware))
    assert 1 <= len(named) <= 3
    for way in named:
        changed = config
        for knob, value in way.items():
            assert value != getattr_path(config, knob), "nonsense: it is that already"
            changed = with_knob(changed, knob.split("."), value)
        plan_on(changed, DENSE, hardware)
    if first is not None:
        assert named[0] == first


def getattr_path(config: Any, knob: str) -> Any:
    for name in knob.split("."):
        config = getattr(config, name)
    return config


def test_invalid_changes_are_not_suggested() -> None:
    """Asynchronous sampling excludes time sharing, and torch.compile excludes ZeRO-3."""
    config = recipe(micro_batch_tokens=8000, compile=True)
    asleep = replace(config, algorithm=AlgorithmConfig(max_lag=1))
    message = refusal(asleep, machine(1, 24))
    assert "sleep" not in message and "zero_stage=3" not in message


def test_impossible_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "keel.trainer.placement.suggestions._MAX_KNOBS", 2
    )  # trying all 4 takes a second
    message = refusal(recipe(), machine(1, 3))
    assert "It needs more or larger GPUs: no change of up to 2 knobs makes it fit" in message
    assert "To make it fit" not in message
    assert "1 node(s) of 1 GPU(s), 3.0 GiB each: made up" in message


def test_tiny_memory_is_shown_in_mib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keel.trainer.placement.suggestions.TRIED", 1)  # saves a second
    message = refusal(recipe(), machine(1, 0.02))
    assert "of a GPU with 20 MiB (run.gpu_gib) is 17 MiB" in message
    assert "1 node(s) of 1 GPU(s), 20 MiB each: made up" in message
    assert "0.0 GiB" not in message
