"""Warnings about unusual values; shipped recipes have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.configs.schema import Config, ConversationsConfig, SftConfig
from keel.model.load import facts_of
from keel.model.tiny.build import model_config
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.placement.lint import ignored_knobs, lint_recipe
from keel.trainer.placement.memory import GIB
from keel.trainer.placement.plan import make_plan
from keel.trainer.placement.suggestions import with_knob
from keel.trainer.prepare import crowding_warnings
from tests.trainer.placement.test_memory import DENSE, recipe

RECIPES = sorted(path.stem for path in (Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_have_no_warnings(name: str) -> None:
    config = load_config(name)
    # Models of earlier stages have the shape of the tiny model.
    stages = ("sft-specialists", "pretrain-dense", "pretrain-warm-up")
    made = [f"{load_config(stage).run.dir}/model" for stage in stages]
    tiny = config.model.path in ("tiny", *made)
    shape = model_config(config.model.tiny, build_tokenizer()) if tiny else None
    assert lint_recipe(config, facts_of(shape) if shape else DENSE) == []


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("trainer.lr", 0.1),
        ("trainer.lr", 1e-3),
        ("trainer.lr", 1e-12),
        ("trainer.weight_decay", 1.0),
        ("trainer.grad_clip", 1e3),
        ("algorithm.clip_high", 2.0),
        ("algorithm.kept_mass_coef", 100.0),
        ("rollout.sampling.temperature", 5.0),
        ("run.hang_timeout_s", 5.0),
    ],
)
def test_unusual_value_warns(knob: str, value: Any) -> None:
    usual = with_knob(recipe(), ["rollout", "sampling", "top_p"], 0.9)
    assert lint_recipe(usual, DENSE) == []
    assert lint_recipe(with_knob(usual, ["run", "hang_timeout_s"], 0.0), DENSE) == [], "never"
    (line,) = lint_recipe(with_knob(usual, knob.split("."), value), DENSE)
    assert line.startswith(f"{knob} = {value:g} is unusual")


def test_small_model_allows_higher_learning_rate() -> None:
    config = with_knob(recipe(), ["trainer", "lr"], 1e-3)
    assert lint_recipe(config, replace(DENSE, parameters=400_000)) == []
    assert "data.sources[sums].kl_coef = 3 is" in lint_recipe(recipe(beta=3.0), DENSE)[0]


def test_supervised_learning_rates_have_separate_limits() -> None:
    supervised = load_config("sft-quickstart", ["trainer.warmup_steps=5"]).supervised(100)

    def warnings_for(lr: float, **trainer: Any) -> list[str]:
        changed = replace(supervised.trainer, lr=lr, **trainer)
        return lint_recipe(replace(supervised, trainer=changed), DENSE)

    assert warnings_for(3e-4) == warnings_for(1e-3) == warnings_for(1e-3, attention="warm-up") == []
    (line,) = warnings_for(5e-3)
    assert "1e-6 to 3e-4 for supervised training" in line
    assert warnings_for(5e-3, attention="warm-up") == []
    (line,) = warnings_for(1e-5, warmup_steps=100)
    assert line.startswith("trainer.warmup_steps = 100: the run ends after 100 step(s), before")


def test_knobs_unused_by_sft_are_named() -> None:
    source: dict[str, Any] = {"name": "a", "source": "jsonl", "path": "a"}
    sources = (ConversationsConfig(**source),)
    config = Config(sft=SftConfig(sources=sources, max_context_tokens=256))
    assert [*ignored_knobs(config, frozenset())] == []
    algorithm = replace(config.algorithm, prompts_per_step=4)
    engines = replace(config.rollout, engines=3)
    changed = replace(config, algorithm=algorithm, rollout=engines)
    (line,) = ignored_knobs(changed, {"rollout.engines"})
    assert line.startswith("algorithm.prompts_per_step: ")
    (line,) = ignored_knobs(changed, frozenset())
    assert line.startswith("rollout.engines, algorithm.prompts_per_step: ")
    assert [*ignored_knobs(load_config("sft-quickstart"), frozenset())] == [], (
        "knobs of later stages"
    )


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (["run.steps=60"], 1),
        (["run={steps: 60}"], 1),
        (["run.steps=60", "sft.epochs=0"], 0),
        (["run.seed=60"], 0),
    ],
)
def test_steps_are_ignored_with_epochs(overrides: list[str], count: int) -> None:
    config = load_config("sft-quickstart", overrides)
    lines = [*ignored_knobs(config, frozenset(), overrides)]
    assert len(lines) == count
    assert all(line.startswith("run.steps = 60") for line in lines)


def test_stale_masked_completions_without_mass_penalty_warn() -> None:
    usual = with_knob(recipe(), ["rollout", "sampling", "top_p"], 0.9)
    old = replace(usual.algorithm, publish_every=4, max_lag=1, updates_per_batch=4)
    (line,) = lint_recipe(replace(usual, algorithm=old), DENSE)
    assert line.startswith("algorithm.kept_mass_coef = 0: completions are up to 16 optimizer steps")
    assert lint_recipe(replace(usual, algorithm=replace(old, kept_mass_coef=1.0)), DENSE) == []
    assert lint_recipe(replace(usual, algorithm=replace(old, updates_per_batch=2)), DENSE) == []
    assert lint_recipe(replace(recipe(), algorithm=old), DENSE) == [], "sampled from the whole"


@pytest.mark.parametrize(
    ("prompts", "updates", "group", "ranks", "named"),
    [
        (8, 2, 4, 2, ()),
        (4, 3, 8, 1, ("updates_per_batch", "multiple of 3")),
        (1, 1, 3, 2, ("2 trainer ranks", "multiple of 2")),
        (5, 1, 8, 2, ()),  # ranks share completions, not prompts
    ],
)
def test_uneven_batches_warn(
    prompts: int, updates: int, group: int, ranks: int, named: tuple[str, ...]
) -> None:
    base = recipe()
    algorithm = replace(
        base.algorithm, prompts_per_step=prompts, updates_per_batch=updates, group_size=group
    )
    trainer = replace(base.trainer, ranks=ranks)
    lines = lint_recipe(replace(base, algorithm=algorithm, trainer=trainer), DENSE)
    assert len(lines) == bool(named)
    assert all(part in lines[0] for part in named)


def test_negative_correctness_reward_warns() -> None:
    config = load_config("quickstart", ["data.sources[spelling].rewards={correct: -1}"])
    shape = facts_of(model_config(config.model.tiny, build_tokenizer()))
    (line,) = lint_recipe(config, shape)
    assert "spelling" in line and "correct: -1" in line


def test_insufficient_cpu_memory_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_config("quickstart", ["rollout.engines=12"])
    facts = facts_of(model_config(config.model.tiny, build_tokenizer()))
    plan = make_plan(config, facts, gpu=False)
    needed_gib = (12 * plan.engine.total + config.trainer.ranks * plan.trainer.total) / GIB
    (line,) = crowding_warnings(config, plan, needed_gib - 1)
    assert line.startswith("rollout.engines = 12, trainer.ranks = 1: together they want ")
    assert (
        [*crowding_warnings(config, plan, needed_gib + 1)]
        == [*crowding_warnings(config, plan, 0)]
        == []
    )
