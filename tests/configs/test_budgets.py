"""What a domain may take of tokens, turns and time, and which sources train."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.configs.schema import (
    AgentsConfig,
    BudgetConfig,
    Config,
    ConfigError,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
)
from keel.trainer.build_agents import budget
from keel.trainer.prepare import length_rules

SHOP = EnvironmentConfig(target="shop:Shop")
OWN = {"max_tokens": 40, "window": 200, "max_turns": 30, "max_sampled_tokens": 90, "call_s": 650.0}


def shop(name: str = "shop", **fields: Any) -> SourceConfig:
    given = {"source": "environment", "environment": SHOP, "size": 8, "holdout": 2, **fields}
    return SourceConfig(name=name, **given)


def sums(**fields: Any) -> SourceConfig:
    given = {"source": "reasoning_gym", "task": "chain_sum", "size": 10, **fields}
    return SourceConfig(name="sums", **given)


def config(*sources: SourceConfig, **data: Any) -> Config:
    return Config(
        model=ModelConfig(path="some/model"),
        data=DataConfig(sources=sources, max_prompt_tokens=64, **data),
        rollout=RolloutConfig(sampling=SamplingConfig(max_tokens=100)),
        agents=AgentsConfig(window=400, max_turns=5, call_s=60.0),
    )


def test_a_domain_has_its_own_budget_and_the_runs_elsewhere() -> None:
    own = shop(budget=BudgetConfig(**OWN))
    made = config(own, shop("other"), sums(budget=BudgetConfig(max_tokens=20)))
    first, second = (budget(made, source) for source in made.data.sources[:2])
    assert (first.turn_tokens, first.window, first.turns) == (40, 200, 30)
    assert (first.tokens, first.call_s) == (90, 650.0)
    assert (second.turn_tokens, second.window, second.turns) == (100, 400, 5)
    assert (second.tokens, second.call_s) == (sys.maxsize, 60.0)
    limits = {name: rule.limit for name, rule in length_rules(made).items()}
    assert limits == {"shop": 90, "other": 400, "sums": 20}
    for purpose in ("train", "eval"):
        most = {name: made.sampling(purpose, name).max_tokens for name in limits}
        assert most == {"shop": 40, "other": 100, "sums": 20}
    # An environment whose episodes have more turns may take longer.
    assert made.group_timeout_s > config(shop()).group_timeout_s


def test_a_variant_of_an_evaluation_shortens_every_domain() -> None:
    made = config(shop(budget=BudgetConfig(**OWN)), sums()).with_max_tokens(30)
    assert [made.budget(name).max_tokens for name in ("shop", "sums")] == [30, 30]
    short = config(sums(budget=BudgetConfig(max_tokens=20))).with_max_tokens(30)
    assert short.sampling("eval", "sums").max_tokens == 20


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            lambda: [sums(budget=BudgetConfig(max_turns=3))],
            r"sources\[sums\]\.budget\.max_turns = 3: belongs to a source with an environment",
        ),
        (
            lambda: [sums(budget=BudgetConfig(max_tokens=101))],
            r"sources\[sums\]\.budget\.max_tokens = 101: must be at most "
            r"rollout\.sampling\.max_tokens = 100; raise that",
        ),
        (
            lambda: [shop(budget=BudgetConfig(window=401))],
            r"sources\[shop\]\.budget\.window = 401: must be at most agents\.window = 400",
        ),
        (
            lambda: [shop(budget=BudgetConfig(window=100))],
            r"sources\[shop\]\.budget\.window = 100: must be above the 100 tokens of a turn",
        ),
        (
            lambda: [shop(), shop("two", domain="shop", budget=BudgetConfig(max_turns=2))],
            r"sources\[two\]\.budget .* domain 'shop' has another; .* or the same budget",
        ),
        (lambda: [sums(budget=BudgetConfig(max_tokens=-1))], r"budget\.max_tokens = -1"),
    ],
)
def test_budgets_that_cannot_be_are_refused(sources: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*sources())


def test_a_summary_must_fit_into_a_domains_own_window() -> None:
    made = config(shop(budget=BudgetConfig(window=150, max_tokens=20)))
    with pytest.raises(ConfigError, match=r"budget\.window = 150: .* agents\.summary_tokens = 80"):
        replace(made, agents=replace(made.agents, context="summary", summary_tokens=80))


def test_a_typo_in_a_budget_names_its_line(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "data:\n  sources:\n    - name: sums\n      source: reasoning_gym\n      task: chain_sum\n"
        "      size: 9\n      budget: {max_token: 9}\n"
    )
    with pytest.raises(ConfigError, match=r"own\.yaml:7: .*did you mean .*max_tokens"):
        load_config(recipe)


def test_sources_that_are_measured_and_never_trained_on() -> None:
    made = config(shop(weight=3), sums(), train_on=("sums",))
    assert [made.data.weight_of(source) for source in made.data.sources] == [0, 1]
    assert [source.weight for source in made.data.sources] == [3, 1], "the cold start teaches both"
    with pytest.raises(ConfigError, match=r"data\.train_on = 'sum': .*the nearest: sums"):
        config(shop(), sums(), train_on=("sum",))
    with pytest.raises(ConfigError, match=r"sources\[sums\]\.holdout = 0: must be above 0: data\."):
        config(shop(), sums(), train_on=("shop",))
    with pytest.raises(ConfigError, match=r"a weight above 0 among those of data\.train_on"):
        config(shop(weight=0), sums(holdout=1), train_on=("shop",))
