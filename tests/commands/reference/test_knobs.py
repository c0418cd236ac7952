"""Every knob is described, by what its section says and does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from keel.commands.reference.knobs import flat, normal, sections
from keel.commands.reference.markdown import pages
from keel.commands.reference.pages import PAGES
from keel.commands.synthesize import depends_on
from keel.configs.diff import RESUMABLE_KNOBS, check_resumable, flatten_config
from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.configs.synthesis import AuthorConfig, SynthesisConfig, decides_tasks

DOCS = Path(__file__).parents[3] / "docs"
KNOBS = {knob.name: knob for knob in flat()}
MAPPINGS = tuple(f"{knob.name}." for knob in flat() if knob.kind.startswith("mapping"))


def test_every_knob_and_section_says_what_it_is() -> None:
    assert [knob.name for knob in flat() if not knob.text] == []
    assert [section.name for section in sections() if not section.text] == []


def test_no_knob_of_a_recipe_is_left_out() -> None:
    recipes = [load_config(name) for name in ("quickstart", "sft-distilled", "mixed-agents")]
    run = {normal(knob) for recipe in recipes for knob in flatten_config(recipe)}
    lists = {section.path.removesuffix("[]") for section in sections()}  # those that are empty
    left = [knob for knob in run - lists - KNOBS.keys() if not knob.startswith(MAPPINGS)]
    assert left == []
    assert {"distill.select.least", "synthesize.general.attempts"} <= KNOBS.keys()


@pytest.mark.parametrize(
    ("name", "kind", "allowed", "default"),
    [
        ("trainer.lr", "number", "> 0", "1e-6"),
        ("trainer.zero_stage", "one of a few", "0 · 1 · 2 · 3 · auto", "auto"),
        ("trainer.micro_batch_tokens", "whole number, or auto", "≥ 1", "auto"),
        ("trainer.expert_parallel", "whole number", "≥ 1, a divisor of trainer.ranks", "1"),
        ("algorithm.mask_delta", "number, or null", "> 0", "0.2"),
        ("rollout.sampling.top_p", "number", "in (0, 1]", "1"),
        ("rollout.sampling.stop", "list of texts", "", "[]"),
        ("run.eval_every", "whole number", "≥ -1", "0"),
        ("data.sources[].name", "text", "", ""),
        ("data.sources[].rewards", "mapping of names to numbers", "", "{correct: 1}"),
        ("rewards.code.memory_mib", "whole number", "≥ 32, ≤ 16777216", "512"),
        ("synthesize.reference", "section like `author`, or null", "", "null"),
    ],
)
def test_types_bounds_and_defaults_are_those_of_the_section(
    name: str, kind: str, allowed: str, default: str
) -> None:
    knob = KNOBS[name]
    assert (knob.kind, knob.allowed, knob.default) == (kind, allowed, default)


def test_bounds_are_found_wherever_a_section_checks_any() -> None:
    """A section that cannot be built with what it is asked by here would have none at all."""
    numbers = ("number", "number, or null", "whole number")
    without = {knob.name for knob in flat() if knob.kind in numbers and not knob.allowed}
    assert without == {
        "sft.sources[].least_reward",
        "sft.sources[].length",
        "synthesize.seed",
    }


def test_resume_is_what_a_resumed_run_may_do() -> None:
    saved = load_config("quickstart")
    for changed in (
        replace(saved, run=replace(saved.run, steps=7)),
        replace(saved, trainer=replace(saved.trainer, lr=7.0)),
        replace(saved, alarms=replace(saved.alarms, kl=7.0)),
        replace(saved, rollout=replace(saved.rollout, threads=7)),
        replace(saved, algorithm=replace(saved.algorithm, clip_low=0.7)),
    ):
        before, after = flatten_config(saved), flatten_config(changed)
        (name,) = [knob for knob, value in before.items() if after[knob] != value]
        try:
            check_resumable(saved, changed, "runs/x")
            said = "yes"
        except ConfigError:
            said = "no"
        assert KNOBS[normal(name)].resume == said, name
    lists = [section.knobs for section in sections() if section.path == "eval.variants[]"]
    listed = {knob.name for knobs in lists for knob in knobs}
    allowed = {*RESUMABLE_KNOBS - {"eval.variants"}, *listed}
    assert listed and {KNOBS[name].resume for name in allowed} == {"yes"}


def test_resume_of_a_synthesis_is_what_its_folder_is_claimed_by() -> None:
    author = AuthorConfig(base_url="http://localhost", model="a")
    config = SynthesisConfig(family="general", dir="a", author=author)
    claimed = depends_on(config)
    for other in (
        replace(config, seed=7),
        replace(config, general=replace(config.general, steps=7)),
        replace(config, at_once=7),
        replace(config, author=replace(author, model="b")),
        replace(config, budget=replace(config.budget, tokens=7)),
    ):
        (name,) = [
            name
            for name in ("seed", "general.steps", "at_once", "author.model", "budget.tokens")
            if _of(config, name) != _of(other, name)
        ]
        assert (depends_on(other) != claimed) == decides_tasks(name), name
        assert KNOBS[f"synthesize.{name}"].resume == ("no" if decides_tasks(name) else "yes")


def _of(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("begin", PAGES)
def test_the_page_of_a_knob_speaks_of_it(begin: str) -> None:
    assert any(knob.name.startswith(begin) for knob in flat())
    if PAGES[begin]:
        word = begin.rpartition(".")[2].removesuffix("[]")
        assert re.search(rf"\b{word}", (DOCS / f"{PAGES[begin]}.md").read_text())


def test_every_page_that_is_named_is_there() -> None:
    named = {knob.page for knob in flat()} - {""}
    assert {page for page in named if not (DOCS / f"{page}.md").is_file()} == set()


@pytest.mark.parametrize("name", pages())
def test_the_pages_are_as_they_are_written(name: str) -> None:
    again = "python -m keel.commands.reference docs"
    assert (DOCS / name).read_text(encoding="utf-8") == pages()[name], f"write it again: {again}"


def test_links_of_the_pages_lead_somewhere() -> None:
    for name, text in pages().items():
        for page in re.findall(r"\]\(([\w-]+\.md)", text):
            assert (DOCS / page).is_file(), f"{name}: {page}"


def test_a_knob_has_one_name() -> None:
    assert len(KNOBS) == len(flat())
    assert all(normal(knob.name) == knob.name for knob in flat())
    assert normal("data.sources[sums].size") == normal("data.sources.0.size")
