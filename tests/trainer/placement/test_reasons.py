"""What is said of a choice is what the models say of the other one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keel.configs.auto import KNOBS
from keel.configs.schema import Config, SamplingConfig, TrainerConfig
from keel.model.load import facts_of
from keel.trainer.placement.choose import choose
from keel.trainer.placement.layouts import with_values
from tests.trainer.placement.test_choose import SHAPES, machine, recipe
from tests.trainer.placement.test_layouts import lessons

SOME = {"trainer.activation_checkpointing": True}
SHARE = {"rollout.gpu_memory_utilization": 0.2}
SPREAD = replace(recipe(), trainer=TrainerConfig(ranks=2, sequence_parallel=2))
WIDE = replace(recipe(), rollout=replace(recipe().rollout, tensor_parallel=2))
LONG = SamplingConfig(max_tokens=16_000, top_k=512)


def reason(
    knob: str, config: Config, shape: str, gpus: int, gib: float, said: Any = None, **more: Any
) -> str:
    facts = replace(facts_of(SHAPES[shape]), max_context=40_960, **more)
    config, left = with_values(config, said or {}), KNOBS - set(said or {})
    return choose(config, left, facts, machine(gpus, gib)).reasons[knob]


@pytest.mark.parametrize(
    ("knob", "config", "shape", "gpus", "gib", "said", "words"),
    [
        ("trainer.ranks", lessons(conversations_per_step=2), "1.7b", 8, 79.0, {}, "no sequences"),
        ("trainer.ranks", lessons(conversations_per_step=64), "1.7b", 8, 79.0, {}, "all 8 GPUs"),
        ("rollout.colocated", WIDE, "1.7b", 4, 79.0, {}, "an engine of several GPUs shares none"),
        ("rollout.colocated", recipe(), "1.7b", 2, 23.0, {}, "trainer: does not fit"),
        ("rollout.colocated", recipe(), "1.7b", 4, 79.0, {}, "% slower"),
        (
            "rollout.time_share",
            recipe(),
            "1.7b",
            1,
            79.0,
            SHARE,
            "side by side: less than 2 % faster",
        ),
        ("trainer.compile", SPREAD, "1.7b", 4, 79.0, {}, "trainer.sequence_parallel"),
        ("trainer.micro_batch_tokens", recipe(), "0.6b", 1, 46.0, {}, "less than 2 % faster"),
        ("trainer.offload_while_sampling", recipe(), "1.7b", 1, 23.0, {}, "% slower"),
    ],
)
def test_what_is_said(
    knob: str, config: Config, shape: str, gpus: int, gib: float, said: Any, words: str
) -> None:
    assert words in reason(knob, config, shape, gpus, gib, said)


def test_activations_that_fit_in_smaller_micro_batches_are_not_said_to_lack_room() -> None:
    config = lessons(conversations_per_step=32, max_context_tokens=1024)
    why = reason("trainer.activation_checkpointing", config, "8b", 1, 46.0)
    assert why.startswith("without it, in smaller micro-batches: ") and why.endswith("% slower")
