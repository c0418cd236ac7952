"""Warnings about unusual values. The recipes in this repository cause none."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.load import load_config
from keel.model.load import facts_of
from keel.model.tiny.build import model_config
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.placement.lint import ignored_knobs, lint_recipe
from tests.trainer.placement.test_memory import DENSE

RECIPES = sorted(
    path.stem for path in (Path(__file__).parents[3] / "configs/recipes").glob("*.yaml")
)


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return build_tokenizer()


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_have_no_warnings(name: str, tokenizer: object) -> None:
    config = load_config(name)
    # Models of earlier stages have the shape of the tiny model.
    stages = ("sft-specialists", "pretrain-dense", "pretrain-warm-up")
    tiny = config.model.path in ("tiny", *(f"{load_config(s).run.dir}/model" for s in stages))
    facts = facts_of(model_config(config.model.tiny, tokenizer)) if tiny else DENSE
    assert lint_recipe(config, facts) == []
    assert [*ignored_knobs(config, frozenset())] == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.lr=1e-3", "trainer.lr"),
        ("trainer.lr=1e-12", "trainer.lr"),
        ("algorithm.clip_high=2.0", "algorithm.clip_high"),
        ("rollout.sampling.temperature=5.0", "rollout.sampling.temperature"),
        ("run.hang_timeout_s=5", "run.hang_timeout_s"),
        ("data.sources.0.kl_coef=3", "kl_coef"),
        ("data.sources[spelling].rewards={correct: -1}", "spelling"),
    ],
)
def test_unusual_value_warns(override: str, named: str) -> None:
    (line,) = lint_recipe(load_config("quickstart", ["trainer.lr=1e-6", override]), DENSE)
    assert named in line
