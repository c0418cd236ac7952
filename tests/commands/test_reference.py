"""`keel knobs` and the generated pages match the schema and the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.commands.reference import (
    PAGES,
    all_knobs,
    describe,
    find_metric,
    metrics,
    normal,
    pages,
    sections,
)
from keel.commands.synthesize import depends_on
from keel.configs.diff import RESUMABLE_KNOBS, flatten_config
from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.configs.synthesis import AuthorConfig, SynthesisConfig, decides_tasks
from keel.rewards.judge.results import JUDGE_COUNTS
from keel.rl.evaluation import evaluation
from keel.rl.metrics import Mean
from keel.rl.summary import CUTS
from keel.trainer.loop import IDLE
from keel.trainer.sft import MEASURED, evaluation_metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
KNOBS = {knob.name: knob for knob in all_knobs()}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("trainer.lr", ["trainer.lr\n", "1e-6", "may change"]),
        ("lr", ["trainer.lr\n", "model.tiny.cold_start.lr\n", "lr (metric)\n"]),
        ("data.sources[sums].size", ["data.sources[].size\n", "in [0, 10,000,000]"]),
        ("data.sources.0.length.target", ["data.sources[].length.target\n"]),
        ("algorithm.mask_delta", ["number, or null", "docs/stability.md"]),
        ("trainer", ["  lr: 1e-6 ", "  zero_stage: auto "]),
        ("data", ["data.sources[]\n", "data.sources[].environment\n"]),
        ("distill", ["  recipe: ", "distill.select\n", "  balance: 4 "]),
        ("select.least", ["distill.select.least", "stages that have not run"]),
        ("mismatch/logp_abs", ["nats per token", "alarms.mismatch", "docs/stability.md"]),
        ("eval/sums/pass@1", ["eval/<set>/pass@1 (metric)"]),
        ("warmup", ["trainer.warmup_steps"]),
        ("gpu memory", ["rollout.gpu_memory_utilization"]),
        ("", ["  rollout.sampling ", "  distill.select ", "reward/mean"]),
    ],
)
def test_names_are_described(name: str, parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = describe(name)
    assert [part for part in parts if part not in text] == []
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trainer.lrr", "trainer.lr?"),
        ("reward_std", "TRL"),
        ("trianer.lr", "trainer?"),
        ("synthesize.author.modle", "author.model?"),
        ("mismach/logp_abs", "mismatch/logp_abs"),
        ("learning_rate", "trainer.lr?"),
        ("actor/ppo_kl", "mismatch/kl"),
        ("xyzzy", "run, model, data"),
        ("a/b", "no such metric"),
    ],
)
def test_unknown_names_are_answered(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(name)
    assert str(caught.value).startswith(f"{name}: no such ") and hint in str(caught.value)


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


@pytest.mark.parametrize(
    ("name", "kind", "allowed", "default"),
    [
        ("trainer.lr", "number", "> 0", "1e-6"),
        ("trainer.zero_stage", "one of", "0 · 1 · 2 · 3 · auto", "auto"),
        ("trainer.micro_batch_tokens", "integer, or auto", "≥ 1", "auto"),
        ("algorithm.mask_delta", "number, or null", "> 0", "0.2"),
        ("rollout.sampling.top_p", "number", "in (0, 1]", "1"),
        ("rollout.sampling.stop", "list of texts", "", "[]"),
        ("data.sources[].name", "text", "", ""),
        ("data.sources[].rewards", "mapping of names to numbers", "", "{correct: 1}"),
        ("synthesize.reference", "section like `author`, or null", "", "null"),
    ],
)
def test_types_bounds_and_defaults_follow_the_schema(
    name: str, kind: str, allowed: str, default: str
) -> None:
    knob = KNOBS[name]
    assert (knob.kind, knob.allowed, knob.default) == (kind, allowed, default)


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


def test_pages_and_links_exist() -> None:
    generated = pages()
    for prefix in PAGES:
        assert any(name.startswith(prefix) for name in KNOBS)
    linked = {f"{knob.page}.md" for knob in all_knobs() if knob.page}
    linked |= {f"{metric.page}.md" for metric in metrics() if metric.page}
    for text in generated.values():
        linked |= set(re.findall(r"\]\(([\w-]+\.md)", text))
    assert {page for page in linked if page not in generated and not (DOCS / page).is_file()} == (
        set()
    )
    assert (DOCS / "coming-from.md").read_text(encoding="utf-8") == generated["coming-from.md"]


MAKERS = ("rl", "model", "rewards", "rollout", "agents", "data", "trainer")
KINDS = {"Mean", "Sum", "Max", "mean_of"}
HELD_OUT = [*evaluation_metrics({f"a/{name}": Mean(1, 1) for name in MEASURED})]
HOLES = {
    "judge/<>": [f"judge/{name}" for name in JUDGE_COUNTS],
    "judge/<>_seconds": ["judge/call_seconds", "judge/queue_seconds"],
    "agents/<>_cuts": [f"agents/{name}_cuts" for name in CUTS],
    "eval/<>/<>": [f"eval/a/{name}" for name in evaluation([])],
    "eval/<><>": HELD_OUT,
    "eval/<>": HELD_OUT,
    "time/<>": [f"time/{name}" for name in IDLE],
}
"""Computed names of metrics → their values."""


def text_of(node: ast.AST | None) -> str:
    """Text of a string in code, with `<>` for computed parts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "<>" for part in node.values)
    return ""


def name_of(node: ast.AST) -> str:
    return getattr(node, "id", "") or getattr(node, "attr", "")


def metric_names(tree: ast.AST) -> Iterator[str]:
    """Yield texts that look like metric names, and keys that hold a metric."""
    nodes = [*ast.walk(tree)]
    skipped: set[Any] = {node.value for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    skipped |= {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if node not in skipped and re.fullmatch(r"[a-z]+/[\w@<>/]+", text_of(node)):
            yield text_of(node)
        pairs: list[tuple[ast.AST | None, ast.AST]] = []
        if isinstance(node, ast.Dict):
            pairs = [*zip(node.keys, node.values, strict=True)]
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            pairs = [(node.targets[0].slice, node.value)]
        for key, value in pairs:
            if isinstance(value, ast.Call) and name_of(value.func) in KINDS and text_of(key):
                yield text_of(key)
        if isinstance(node, ast.Call) and name_of(node.func) == "time" and node.args:
            yield f"time/{text_of(node.args[0])}"


def test_documented_metrics_match_the_code() -> None:
    made: set[str] = set()
    for path in (path for package in MAKERS for path in sorted((ROOT / package).rglob("*.py"))):
        text = path.read_text()
        if "keel.rl.metrics" in text or "Clock" in text:
            for name in metric_names(ast.parse(text)):
                made |= set(HOLES.get(name, [name]))
    assert {"loss", "grad_norm", "mismatch/kl", "time/sync", "sft/packed"} <= made
    suffixes = {"pass@1", "score", "unscored"}
    assert {n for n in made - suffixes if find_metric(n.replace("<>", "x")) is None} == set()
    names = {name.replace("<>", "a") for name in made}
    names |= {"alarms", "reward/error", "reward/length_cost"}  # of other files
    known = {find_metric(name) for name in names}
    assert [metric.name for metric in metrics() if metric not in known] == []
