"""Recipes that come with Keel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from keel.configs.load import dump_config, load_config
from keel.configs.schema import ConfigError

RECIPES = sorted(
    path.stem for path in (Path(__file__).parents[2] / "configs/recipes").glob("*.yaml")
)
shipped = cache(load_config)
MATHEMATICS = {"gsm8k", "proofs", "sums", "sums-direct", "gcd"}
"""The report weakens the KL penalty for mathematics, or omits it."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_loads_by_its_bare_name(name: str) -> None:
    assert shipped(name).run.dir == f"runs/{name}"


def test_only_removes_the_other_sources(tmp_path: Path) -> None:
    config = load_config("mixed", ["data.only=[chat, code]"])
    assert [source.name for source in config.data.sources] == ["code", "chat"]
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    with pytest.raises(ConfigError, match=r"data\.only = 'cod'.*code"):
        load_config("mixed", ["data.only=[cod]"])


def test_transfer_evaluates_families_never_trained() -> None:
    config = shipped("transfer")
    trained = {s.name for s in config.data.sources if config.data.weight_of(s) > 0}
    held = {source.name for source in config.data.sources if source.holdout}
    assert trained == {"general"} and held == {"general", "search", "code", "interpreter"}
    assert all(s in shipped("mixed-agents").data.sources for s in config.data.sources)


@pytest.mark.parametrize(
    "name", [each for each in RECIPES if not each.startswith(("sft", "pretrain", "quickstart"))]
)
def test_domains_have_the_rewards_of_the_report(name: str) -> None:
    """DeepSeek-V3.2, section 3.1."""
    for source in shipped(name).data.sources:
        assert "language" in source.rewards, source.name
        if "rubric" not in source.rewards:
            assert source.rewards["correct"] > 0 and source.length.linear > 0, source.name
        assert source.kl_coef > 0 or source.name in MATHEMATICS, source.name


def test_a_recipe_splits_a_large_batch_into_mini_batches() -> None:
    algorithm = shipped("gpu-dense").algorithm
    assert algorithm.updates_per_batch > 1
    assert algorithm.prompts_per_step % algorithm.updates_per_batch == 0
