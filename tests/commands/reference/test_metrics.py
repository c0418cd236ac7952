"""Every metric that the code makes is described, and nothing else is."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from keel.commands.reference.knobs import flat, sections
from keel.commands.reference.metrics import METRICS, NO_METRICS, described, undescribed
from keel.commands.reference.otherwise import OTHERWISE
from keel.rewards.judge.results import JUDGE_COUNTS
from keel.rl.evaluation import evaluation
from keel.rl.metrics import Mean
from keel.rl.summary import CUTS
from keel.trainer.loop import IDLE
from keel.trainer.run.alarms import ALARMS
from keel.trainer.sft import MEASURED, evaluation_metrics

ROOT = Path(__file__).parents[3]
MAKERS = ("rl", "model", "rewards", "rollout", "agents", "data", "trainer")
KINDS = {"Mean", "Sum", "Max", "mean_of"}
HELD_OUT = [*evaluation_metrics({f"a/{name}": Mean(1, 1) for name in MEASURED})]
HOLES = {
    "judge/<>": [f"judge/{name}" for name in JUDGE_COUNTS],
    "agents/<>_cuts": [f"agents/{name}_cuts" for name in CUTS],
    "eval/<>/<>": [f"eval/a/{name}" for name in evaluation([])],
    "eval/<><>": HELD_OUT,
    "eval/<>": HELD_OUT,
    "time/<>": [f"time/{name}" for name in IDLE],  # the others stand in calls of `Clock.time`
}
"""Names with something in them, where they are not a kind of metrics by themselves → all there
are."""


def text_of(node: ast.AST | None) -> str:
    """Of a text in code, `<>` for what is computed; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "<>" for part in node.values)
    return ""


def name_of(node: ast.AST) -> str:
    return getattr(node, "id", "") or getattr(node, "attr", "")


def named(tree: ast.AST) -> Iterator[str]:
    """Texts that look like a metric's name, and names that a metric is made under."""
    nodes = [*ast.walk(tree)]
    skipped = {node.value for node in nodes if isinstance(node, ast.Expr)}  # docstrings
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


def made() -> dict[str, str]:
    """Metric → a file that makes it."""
    found: dict[str, str] = {}
    for path in (path for package in MAKERS for path in sorted((ROOT / package).rglob("*.py"))):
        text = path.read_text()
        if "keel.rl.metrics" in text or "Clock" in text:
            for name in named(ast.parse(text)):
                for each in HOLES.get(name, [name]):
                    found[each] = str(path.relative_to(ROOT))
    return found


PARTS_OF_EVALUATIONS = {"pass@1", "score", "unscored"}


def test_every_metric_that_the_code_makes_is_described() -> None:
    assert {"loss", "grad_norm", "mismatch/kl", "time/sync", "sft/packed"} <= made().keys()
    missing = {
        name: file
        for name, file in made().items()
        if name not in PARTS_OF_EVALUATIONS and described(name.replace("<>", "x")) is None
    }
    assert missing == {}, "describe them in commands/reference/"


def test_nothing_is_described_that_no_code_makes() -> None:
    names = {re.sub("<>", "a", name) for name in made()} | {"alarms", "reward/error"}
    names |= {"reward/length_cost"}  # a part of rewards/length.py
    found = {described(name) for name in names}
    assert [metric.name for metric in METRICS if metric not in found] == []


def test_every_metric_of_finished_runs_is_described() -> None:
    names = {alarm.metric for alarm in ALARMS}
    for path in ROOT.glob("docs/learning/*.jsonl"):
        for line in path.read_text().splitlines():
            names |= json.loads(line).keys()
    assert names > NO_METRICS - {"time"}
    assert undescribed(names) == []


def test_a_part_of_its_own_wins_over_the_kind() -> None:
    for name, found in (
        ("reward/error", "reward/error"),
        ("reward/my_module.my_reward", "reward/<part>"),
        ("eval/sums/loss", "eval/<set>/loss"),
        ("eval/loss", "eval/loss"),
        ("eval/sums/indexer/held", "eval/<set>/indexer/held"),
        ("domain/maths/reward_mean", "domain/<domain>/reward_mean"),
    ):
        metric = described(name)
        assert metric is not None and metric.name == found
    assert undescribed(["step", "time", "reward/mean", "mismatch/new", "throughput"]) == [
        "mismatch/new",
        "throughput",
    ]


def test_what_to_do_is_said_of_metrics_that_are_and_by_knobs_that_are() -> None:
    known, knobs = {metric.name for metric in METRICS}, {knob.name for knob in flat()}
    sections_too = {section.name for section in sections()}
    for name, text in OTHERWISE.items():
        assert name in known, name
        for said in re.findall(r"`([^`]+)`", text):
            ours = said in known | knobs | sections_too or said.startswith("keel ")
            assert ours or said in ("rewards", "rewards/", "events.jsonl", "top_p"), (
                f"{name}: {said}"
            )
    silent = [m.name for m in METRICS if m.healthy and m.name not in OTHERWISE]
    assert len(silent) < 16, f"healthy is said of them, and not what to do: {silent}"
