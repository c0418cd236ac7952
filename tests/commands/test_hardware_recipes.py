"""Recipes in `configs/hardware` fit their machines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig

from benchmarks.common import QWEN3_06B, QWEN3_4B, QWEN3_8B, QWEN3_17B, QWEN3_30B_A3B
from keel.configs.load import load_recipe
from keel.configs.shipped import HARDWARE, HERE
from keel.model.load import facts_of
from keel.trainer.placement.choose import choose
from keel.trainer.placement.hardware import Hardware, idle_nodes, place
from keel.trainer.placement.memory import GIB

LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
)
SHAPES: dict[str, tuple[PreTrainedConfig, float]] = {
    "Qwen/Qwen3-0.6B": (QWEN3_06B, 0.596e9),
    "Qwen/Qwen3-1.7B": (QWEN3_17B, 1.72e9),
    "Qwen/Qwen3-4B": (QWEN3_4B, 4.02e9),
    "Qwen/Qwen3-8B": (QWEN3_8B, 8.19e9),
    "Qwen/Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.5e9),
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA_8B, 8.03e9),
}
"""Hub name → sizes in config.json, and the published number of parameters."""
FILES = sorted(HERE.glob(f"{HARDWARE}*x*.yaml"))


def planned(file: Path) -> Any:
    """Plan a recipe for the machine in its name as `keel check` does."""
    gpus, _, gib = file.stem.rpartition("-")[2].partition("x")
    hardware = Hardware(
        gpu=True, nodes=tuple(idle_nodes(1, int(gpus))), gpu_gib=float(gib), found=False
    )
    config, open_knobs = load_recipe(file.stem)
    facts = facts_of(SHAPES[config.model.path][0])
    return choose(config, open_knobs, facts, hardware), hardware


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recipe_fits_its_machine(file: Path) -> None:
    choice, hardware = planned(file)
    config, gib = choice.config, hardware.gpu_gib
    run = config.run
    expected = (f"runs/{file.stem}", len(hardware.nodes) and hardware.nodes[0].gpus, gib)
    assert (run.dir, run.gpus_per_node, run.gpu_gib) == expected
    assert place(config, hardware.idle).shared
    # Cards have a little less memory than their name says.
    both = (config.rollout.gpu_memory_utilization * gib, choice.plan.peak / GIB)
    assert (max(both) if config.rollout.time_share else sum(both)) < 0.96 * gib
    estimate = re.search(r"estimated ([\d.]+) s per step", file.read_text().replace("\n# ", " "))
    assert estimate and float(estimate[1]) == pytest.approx(choice.plan.time.total, rel=0.1)


def test_shelf_has_every_common_size() -> None:
    assert {load_recipe(file.stem)[0].model.path for file in FILES} == set(SHAPES)
    for model, (config, parameters) in SHAPES.items():
        assert facts_of(config).parameters == pytest.approx(parameters, rel=2e-3), model
