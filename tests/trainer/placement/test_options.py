"""Layouts that are tried where a recipe has fixed a part of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from keel.configs.auto import KNOBS
from keel.configs.schema import Config, ConfigError, RewardsConfig
from keel.configs.sections.rewards import JudgeConfig, JudgeServerConfig
from keel.model.load import ModelFacts, facts_of
from keel.rl.packing.prefix_sharing import prefix_group_size
from keel.trainer.placement.choose import choose
from keel.trainer.placement.hardware import Hardware, idle_nodes, place
from keel.trainer.placement.layouts import Search, with_values
from keel.trainer.placement.memory import GIB, trainer_memory
from tests.trainer.placement.test_choose import SHAPES, machine, recipe
from tests.trainer.placement.test_layouts import lessons


def facts(shape: str) -> ModelFacts:
    return replace(facts_of(SHAPES[shape]), max_context=40_960)


def rollout(**knobs: Any) -> Config:
    made = recipe()
    return replace(made, rollout=replace(made.rollout, **knobs))


def test_what_fixed_engines_leave_is_the_trainers() -> None:
    config, left = rollout(engines=3), KNOBS - {"rollout.engines"}
    choice = choose(config, left, facts("1.7b"), machine(8, 79.0)).config
    assert (choice.trainer.ranks, choice.rollout.engines) == (5, 3)
    # Four ranks would have no room for it.
    fixed = replace(config, trainer=replace(config.trainer, offload_optimizer=False))
    left -= {"trainer.offload_optimizer"}
    assert choose(fixed, left, facts("8b"), machine(8, 40.0)).config.trainer.ranks == 5


@pytest.mark.parametrize("gpus", [2, 3])
def test_a_gpu_beside_a_judge_is_shared(gpus: int) -> None:
    """As a machine's only one is, where nobody has to say so."""
    server = JudgeServerConfig(tensor_parallel=gpus - 1)
    rewards = RewardsConfig(judge=JudgeConfig(model="m", serve=True, server=server))
    config = replace(recipe(), rewards=rewards)
    here = machine(gpus, 139.0)
    choice = choose(config, KNOBS, facts("1.7b"), here).config
    assert choice.rollout.colocated and (choice.trainer.ranks, choice.rollout.engines) == (1, 1)
    assert len(place(choice, here.nodes).seats) == 3


def test_a_micro_batch_is_called_the_largest_that_fits_where_it_is() -> None:
    knob = "trainer.micro_batch_tokens"
    for name, gpus, size, said in (
        ("8b", 8, 79.0, "larger ones are less than 2 % faster"),
        ("0.6b", 1, 32.0, "the largest that fits (25.9 GiB)"),
    ):
        reason = choose(recipe(), KNOBS, facts(name), machine(gpus, size)).reasons[knob]
        assert reason.startswith(said), name


def test_a_micro_batch_is_as_large_as_the_groups_that_share_their_prompts_in_it() -> None:
    """Of two groups a rank, where sharing is chosen as well: no token more buys anything."""
    choice = choose(recipe(), KNOBS, facts("0.6b"), machine(8, 79.0)).config
    a, whole = choice.algorithm, choice.max_context
    assert choice.trainer.share_prompts and a.prompts_per_step == 2 * choice.trainer.ranks
    two = 2 * prefix_group_size(a.group_size, choice.data.max_prompt_tokens, whole)
    assert choice.trainer.micro_batch_tokens == two


def test_of_a_few_trajectories_that_have_room_none_is_left_out() -> None:
    """Five took 11 % less time than four, which were the next that were tried."""
    config = lessons(dtype="float16", tokens_per_step=524_288, max_context_tokens=8192)
    choice = choose(config, KNOBS, facts("30b-a3b"), machine(1, 79.2)).config
    assert choice.trainer.micro_batch_tokens == 5 * 8192


def test_a_lone_rank_in_float16_has_the_stage_that_takes_less() -> None:
    """Of ZeRO 2 the buckets alone are 7.5 GiB: on 24 GiB a step of the small model took 2.5 times
    as long. ZeRO 1 has gradients twice in an update, 30 GiB of the large one's."""
    config = lessons(dtype="float16", conversations_per_step=64, max_context_tokens=2048)
    large = choose(config, KNOBS, facts("8b"), machine(1, 178.0))
    assert large.values["trainer.zero_stage"] == 2
    small = Search(config, KNOBS, facts("0.6b"), machine(1, 24.0)).best()
    assert small is not None and small.config.trainer.zero_stage == 1
    second = replace(config, trainer=replace(config.trainer, zero_stage=2))
    other = Search(second, KNOBS - {"trainer.zero_stage"}, facts("0.6b"), machine(1, 24.0)).best()
    assert other is not None and other.cost > 2 * small.cost


def test_engines_of_several_gpus_leave_what_they_do_not_take() -> None:
    choice = choose(rollout(tensor_parallel=4), KNOBS, facts("1.7b"), machine(12, 79.0)).config
    assert choice.trainer.ranks + 4 * choice.rollout.engines == 12


def test_a_refusal_speaks_of_a_layout_that_the_recipe_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keel.trainer.placement.suggestions.TRIED", 1)
    monkeypatch.setattr("keel.trainer.placement.layouts.SUGGESTIONS_TRIED", 1)
    config, left = rollout(engines=3), KNOBS - {"rollout.engines", "trainer.offload_optimizer"}
    config = replace(config, trainer=replace(config.trainer, offload_optimizer=False))
    with pytest.raises(ConfigError) as refused:
        choose(config, left, facts("8b"), machine(8, 22.0))
    assert "a trainer rank needs 39.2 GiB (optimizer 18.3 GiB" in str(refused.value), (
        "of five, under ZeRO 3"
    )


def test_a_model_that_several_ranks_read_has_to_fit_their_machine() -> None:
    """Each of the ranks that have experts of their own reads it whole, 57 GiB."""

    def on(memory_gib: float) -> Hardware:
        (node,) = idle_nodes(1, 8)
        return Hardware(gpu=True, nodes=(replace(node, memory_gib=memory_gib),), gpu_gib=139.0)

    config = recipe()
    config = replace(
        config, trainer=replace(config.trainer, ranks=8, expert_parallel=4, zero_stage=1)
    )
    left = KNOBS - {"trainer.zero_stage", "trainer.ranks"}
    for roomy in (0.0, 1024.0):
        assert choose(config, left, facts("30b-a3b"), on(roomy)).config.trainer.zero_stage == 1
    said = r"4 trainer rank\(s\) read the model, 56\.9 GiB each, into the memory of .* 200\.0 GiB"
    with pytest.raises(ConfigError, match=said):
        choose(config, left, facts("30b-a3b"), on(200.0))


def test_where_nothing_else_helps_the_gpu_that_would_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keel.trainer.placement.layouts.SUGGESTIONS_TRIED", 1)
    with pytest.raises(ConfigError, match=r"with \d+ GiB each it fits as it is") as error:
        choose(recipe(), KNOBS, facts("0.6b"), machine(1, 3.0))
    (size,) = re.findall(r"with (\d+) GiB each", str(error.value))
    choose(recipe(), KNOBS, facts("0.6b"), machine(1, float(size)))
    with pytest.raises(ConfigError, match=f"with {size} GiB"):
        choose(recipe(), KNOBS, facts("0.6b"), machine(1, float(size) - 1))


def test_an_offloaded_optimizer_has_gradients_once() -> None:
    """8.2 B parameters on an H200, beside an engine of 41.5 GiB that was awake: under ZeRO 1 a rank
    had 62.5 GiB after its backward passes and asked for 30.5 more, its gradients in one piece."""
    there = machine(1, 139.8)
    chosen = choose(recipe(), KNOBS, facts("8b"), there)
    assert (chosen.values["trainer.offload_optimizer"], chosen.values["trainer.zero_stage"]) == (
        True,
        2,
    )
    assert "gradients twice" in chosen.reasons["trainer.zero_stage"]
    values = {
        "rollout.gpu_memory_utilization": 0.32,
        "rollout.time_share": False,
        "trainer.activation_checkpointing": True,
        "trainer.micro_batch_tokens": 49_324,
        "trainer.offload_optimizer": True,
    }

    def needs(stage: int) -> float:
        config = with_values(recipe(), {**values, "trainer.zero_stage": stage})
        return trainer_memory(config, facts("8b"), gpu=True).total / GIB

    assert 62.5 + 30.5 < needs(1) < 62.5 + 30.5 + 5
    # Of activations, whose place the second of them has, 23.6 GiB.
    assert needs(2) == pytest.approx(needs(1) - (30.5 - 25.6), abs=1.0)
    # A single rank of ZeRO 3 has none of it on its GPU.
    assert needs(3) < needs(2) - 30
