"""`keel knobs` and the generated pages match the schema and the code."""

from dataclasses import replace
from pathlib import Path

import pytest

from keel.commands.reference import PAGES, all_knobs, describe, normal, pages, sections
from keel.commands.synthesize import depends_on
from keel.configs.diff import RESUMABLE_KNOBS, flatten_config
from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.configs.synthesis import AuthorConfig, SynthesisConfig, decides_tasks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
KNOBS = {knob.name: knob for knob in all_knobs()}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("trainer.lr", ["trainer.lr\n", "1e-6", "may change"]),
        ("lr", ["trainer.lr\n", "model.tiny.cold_start.lr\n", "lr (metric)\n"]),
        ("data.sources[sums].size", ["data.sources[].size\n", "in [0, 10,000,000]"]),
        ("algorithm.mask_delta", ["number, or null", "docs/stability.md"]),
        ("trainer", ["  lr: 1e-6 ", "  zero_stage: auto "]),
        ("select.least", ["distill.select.least", "stages that have not run"]),
        ("mismatch/logp_abs", ["nats per token", "alarms.mismatch", "docs/stability.md"]),
        ("eval/sums/pass@1", ["eval/<set>/pass@1 (metric)"]),
        ("", ["  rollout.sampling ", "  distill.select ", "reward/mean"]),
    ],
)
def test_names_are_described(name: str, parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = describe(name)
    assert [part for part in parts if part not in text] == []
    assert max(map(len, text.splitlines())) <= 100


def test_unknown_names_are_answered() -> None:
    for name, hint in (
        ("trainer.lrr", "trainer.lr?"),
        ("reward_std", "TRL"),
        ("synthesize.author.modle", "author.model?"),
        ("mismach/logp_abs", "mismatch/logp_abs"),
        ("actor/ppo_kl", "mismatch/kl"),
    ):
        with pytest.raises(ConfigError) as caught:
            describe(name)
        assert hint in str(caught.value)


def test_every_knob_of_a_recipe_is_described() -> None:
    assert [knob.name for knob in all_knobs() if not knob.text] == []
    assert [section.name for section in sections() if not section.text] == []
    assert len(KNOBS) == len(all_knobs()) and all(normal(name) == name for name in KNOBS)
    recipes = [load_config(name) for name in ("quickstart", "sft-distilled", "mixed-agents")]
    paths = {normal(knob) for recipe in recipes for knob in flatten_config(recipe)}
    lists = {section.path.removesuffix("[]") for section in sections()}
    mappings = tuple(f"{name}." for name, knob in KNOBS.items() if knob.kind.startswith("mapping"))
    missing = paths - lists - KNOBS.keys()
    assert [path for path in missing if not path.startswith(mappings)] == []
    assert {"distill.select.least", "synthesize.general.attempts"} <= KNOBS.keys()


def test_types_bounds_and_defaults_follow_the_schema() -> None:
    for name, *expected in (
        ("trainer.zero_stage", "one of", "0 · 1 · 2 · 3 · auto", "auto"),
        ("trainer.micro_batch_tokens", "integer, or auto", "≥ 1", "auto"),
        ("algorithm.mask_delta", "number, or null", "> 0", "0.2"),
        ("rollout.sampling.top_p", "number", "in (0, 1]", "1"),
        ("rollout.sampling.stop", "list of texts", "", "[]"),
        ("data.sources[].rewards", "mapping of names to numbers", "", "{correct: 1}"),
        ("synthesize.reference", "section like `author`, or null", "", "null"),
    ):
        knob = KNOBS[name]
        assert [knob.kind, knob.allowed, knob.default] == expected


def test_resume_column_matches_the_checks() -> None:
    variants = {n for n in KNOBS if n.startswith("eval.variants[].")}
    assert {KNOBS[name].resume for name in {*RESUMABLE_KNOBS - {"eval.variants"}, *variants}} == {
        "yes"
    }
    assert KNOBS["algorithm.clip_low"].resume == "no" and KNOBS["alarms.kl"].resume == "yes"
    config = SynthesisConfig(
        family="general", dir="a", author=AuthorConfig(base_url="http://localhost", model="a")
    )
    claimed = depends_on(config)
    for name, other in {
        "seed": replace(config, seed=7),
        "general.steps": replace(config, general=replace(config.general, steps=7)),
        "at_once": replace(config, at_once=7),
        "author.model": replace(config, author=replace(config.author, model="b")),
        "budget.tokens": replace(config, budget=replace(config.budget, tokens=7)),
    }.items():
        assert (depends_on(other) != claimed) == decides_tasks(name), name
        assert KNOBS[f"synthesize.{name}"].resume == ("no" if decides_tasks(name) else "yes")


def test_pages_follow_the_schema() -> None:
    for prefix in PAGES:
        assert any(name.startswith(prefix) for name in KNOBS)
    assert (DOCS / "coming-from.md").read_text(encoding="utf-8") == pages()["coming-from.md"]
