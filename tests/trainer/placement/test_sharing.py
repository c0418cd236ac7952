"""Where a group's prompt is computed once without being asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common import QWEN3_06B
from keel.configs.auto import KNOBS
from keel.configs.schema import Config
from keel.model.load import facts_of
from keel.trainer.placement.choose import choose
from keel.trainer.placement.hardware import Hardware, idle_nodes
from tests.trainer.placement.test_choose import machine, recipe

KNOB = "trainer.share_prompts"


@pytest.mark.parametrize(
    ("config", "facts", "shared", "why"),
    [
        (recipe(), {}, True, "computed once"),
        (
            replace(recipe(), model=replace(recipe().model, batch_invariant=True)),
            {},
            False,
            "batch",
        ),
        (recipe(), {"head_size": 0}, False, "latent"),
    ],
    ids=["shared", "batch-invariant", "latent attention"],
)
def test_prompts_are_shared_where_they_can_be(
    config: Config, facts: dict[str, Any], shared: bool, why: str
) -> None:
    made = choose(config, KNOBS, replace(facts_of(QWEN3_06B), **facts), machine(1, 139.0))
    assert made.values[KNOB] == made.config.trainer.share_prompts == shared
    assert why in made.reasons[KNOB]


def test_a_recipe_and_a_cpu_share_what_the_recipe_says() -> None:
    facts = facts_of(QWEN3_06B)
    made = choose(recipe(), KNOBS - {KNOB}, facts, machine(1, 139.0))
    assert KNOB not in made.values and not made.config.trainer.share_prompts
    on_cpu = Hardware(gpu=False, nodes=tuple(idle_nodes(1, 0)), gpu_gib=0.0, note="x")
    small = replace(recipe(), model=replace(recipe().model, dtype="float32"))
    assert not choose(small, KNOBS, facts, on_cpu).config.trainer.share_prompts
