"""Each recipe of the shelf fits the machine in its name, and says what `keel check` does."""

from __future__ import annotations

import re
from functools import cache

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from keel.configs.load import load_config
from keel.configs.shipped import HERE
from keel.model.load import ModelFacts, facts_of
from keel.trainer.planning.memory import GIB
from keel.trainer.planning.placement import Hardware, idle_nodes, place
from keel.trainer.planning.plan import plan_on

SHELF = {file.stem: file for file in HERE.glob("shelf/*x*.yaml")}


def qwen(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = True) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
    )


SHAPES: dict[str, tuple[PreTrainedConfig, float]] = {
    "Qwen/Qwen3-0.6B": (qwen(1024, 3072, 28, 16), 0.596e9),
    "Qwen/Qwen3-1.7B": (qwen(2048, 6144, 28, 16), 1.72e9),
    "Qwen/Qwen3-4B": (qwen(2560, 9728, 36, 32), 4.02e9),
    "Qwen/Qwen3-8B": (qwen(4096, 12_288, 36, 32, tied=False), 8.19e9),
    "meta-llama/Llama-3.1-8B-Instruct": (
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=False,
            max_position_embeddings=131_072,
        ),
        8.03e9,
    ),
    "Qwen/Qwen3-30B-A3B": (
        Qwen3MoeConfig(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,  # pyright: ignore[reportCallIssue]
            num_experts=128,
            num_experts_per_tok=8,
            tie_word_embeddings=False,
            max_position_embeddings=40_960,
        ),
        30.5e9,
    ),
}
"""As their config.json say, and the parameters that their makers publish."""


@cache
def facts(model: str) -> ModelFacts:
    config, parameters = SHAPES[model]
    found = facts_of(config)
    assert found.parameters == pytest.approx(parameters, rel=2e-3)
    return found


@pytest.mark.parametrize("name", SHELF)
def test_it_fits_and_its_figures_are_the_plans(name: str) -> None:
    config = load_config(name)
    gpus, gib = map(int, name.rpartition("-")[2].split("x"))
    assert (config.run.dir, config.run.gpus_per_node, config.run.gpu_gib) == (
        f"runs/{name}",
        gpus,
        gib,
    )
    hardware = Hardware(gpu=True, nodes=tuple(idle_nodes(1, gpus)), gpu_gib=gib, found=False)
    plan = plan_on(config, facts(config.model.path), hardware)
    assert place(config, hardware.idle).shared and plan.time
    # Not to the last byte: cards have a little less than their name says.
    engine = config.rollout.gpu_memory_utilization * gib
    rank = plan.trainer.total / GIB
    assert (max(engine, rank) if config.rollout.sleep else engine + rank) < 0.96 * gib

    text = SHELF[name].read_text()
    said = re.search(
        r"estimated ([\d.]+) s per step of[\s#]+(\d+) completions.*rollout ([\d.]+) s, "
        r"training ([\d.]+) s;\n# ([\d.]+) GiB per trainer rank, ([\d.]+) GiB per engine",
        text,
        flags=re.DOTALL,
    )
    assert said, "the comment that the others have"
    figures = [plan.time.total, plan.sequences, plan.time.rollout, plan.time.training, rank, engine]
    wanted = ", ".join(f"{figure:.1f}" for figure in figures)
    assert [*map(float, said.groups())] == pytest.approx(figures, rel=0.05), f"now: {wanted}"


def test_the_shelf_has_the_common_sizes() -> None:
    assert len(SHELF) >= 7
    assert {load_config(name).model.path for name in SHELF} == set(SHAPES)
