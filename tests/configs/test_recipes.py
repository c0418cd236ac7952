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
