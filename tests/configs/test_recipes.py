"""Recipes that come with Keel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from keel.configs.load import dump_config, load_config
from keel.configs.schema import ConfigError

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("*.yaml"))
shipped = cache(load_config)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_loads_by_its_bare_name(name: str) -> None:
    assert shipped(name).run.dir == f"runs/{name}"


@pytest.mark.parametrize("name", RECIPES)
def test_cold_start_has_something_to_teach(name: str) -> None:
    config = shipped(name)
    taught = any(
        source.source == "reasoning_gym" or source.environment.demonstrations
        for source in config.data.sources
    )
    other = config.model.path != "tiny"
    assert taught or other or config.model.tiny.cold_start.steps == 0


@pytest.mark.parametrize("name", ["spelling", "spiral", "code", "chat"])
def test_specialist_is_one_domain_of_the_mix(name: str) -> None:
    (source,) = shipped(f"specialist-{name}").data.sources
    assert source in shipped("mixed").data.sources
    assert source.name == name


def test_speciale_allows_longer_completions() -> None:
    mixed, speciale = shipped("mixed"), shipped("speciale")
    assert speciale.rollout.sampling.max_tokens == 2 * mixed.rollout.sampling.max_tokens
    price = {config.data.sources[0].length.linear for config in (speciale, mixed)}
    assert price == {0.02, 0.1}


def test_only_removes_the_other_sources(tmp_path: Path) -> None:
    config = load_config("mixed", ["data.only=[chat, code]"])
    assert [source.name for source in config.data.sources] == ["code", "chat"]
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    with pytest.raises(ConfigError, match=r"data\.only = 'cod'.*code"):
        load_config("mixed", ["data.only=[cod]"])


def test_mixed_stage_has_every_family_and_mode() -> None:
    config = shipped("mixed-agents")
    sources = {source.name: source for source in config.data.sources}
    families = {"general": "General", "search": "Search", "code": "Repository"}
    families |= {"interpreter": "Interpreter"}
    for name, kind in families.items():
        environment = sources[name].environment
        assert (
            environment.target.endswith(f":{kind}")
            and environment.demonstrations
            and sources[name].holdout
        )
    assert {s.name for s in sources.values() if s.thinking} >= {"spelling", "search", "interpreter"}
    assert not any(sources[name].thinking for name in ("general", "code", "chat"))
    assert len({(s.kl_coef, s.weight, s.length, s.budget) for s in sources.values()}) > 5
    # Each step contains every domain.
    assert sum(s.weight for s in sources.values()) == config.algorithm.prompts_per_step


def test_transfer_evaluates_families_never_trained() -> None:
    config = shipped("transfer")
    trained = {s.name for s in config.data.sources if config.data.weight_of(s) > 0}
    held = {source.name for source in config.data.sources if source.holdout}
    assert trained == {"general"} and held == {"general", "search", "code", "interpreter"}
    assert all(s in shipped("mixed-agents").data.sources for s in config.data.sources)
