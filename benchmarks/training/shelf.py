"""What `keel check` estimates for the recipes of the shelf (configs/shelf/), memory and the time of
a step, written into their comments and into docs/recipes.md.

    python -m benchmarks.training.shelf

Needs no GPU and no network: the models' shapes stand here. A test holds both places to the plans,
and fails where the planner has changed: then this is run again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from benchmarks.common.models import QWEN3_06B, QWEN3_17B, QWEN3_30B_A3B
from keel.configs.load import load_config, load_recipe
from keel.configs.schema import Config
from keel.configs.shipped import HERE, SHELF
from keel.model.load import ModelFacts, facts_of
from keel.trainer.planning.choose import choose
from keel.trainer.planning.memory import GIB
from keel.trainer.planning.placement import Hardware, idle_nodes
from keel.trainer.planning.plan import Plan

PAGE = Path(__file__).parents[2] / "docs/recipes.md"
HEAD = "| recipe | model | GPUs | step | rollout, training | a trainer rank, an engine |"


def _qwen3(**sizes: Any) -> Qwen3Config:
    return Qwen3Config(vocab_size=151_936, num_key_value_heads=8, head_dim=128, **sizes)


SHAPES: dict[str, tuple[PreTrainedConfig, float]] = {
    "Qwen/Qwen3-0.6B": (QWEN3_06B, 0.596e9),
    "Qwen/Qwen3-1.7B": (QWEN3_17B, 1.72e9),
    "Qwen/Qwen3-4B": (
        _qwen3(
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            tie_word_embeddings=True,
        ),
        4.02e9,
    ),
    "Qwen/Qwen3-8B": (
        _qwen3(
            hidden_size=4096,
            intermediate_size=12_288,
            num_hidden_layers=36,
            num_attention_heads=32,
        ),
        8.19e9,
    ),
    "Qwen/Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.5e9),
    "meta-llama/Llama-3.1-8B-Instruct": (
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131_072,
        ),
        8.03e9,
    ),
}
"""Name at the hub → the sizes in its config.json, and the parameters that its makers publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A recipe of the shelf on the machine in its name."""

    name: str
    gpus: int
    gib: int
    config: Config
    plan: Plan
    hardware: Hardware

    @property
    def engine_gib(self) -> float:
        return self.config.rollout.gpu_memory_utilization * self.gib

    @property
    def rank_gib(self) -> float:
        return self.plan.peak / GIB

    def comment(self, title: str) -> str:
        """The comment that its file begins with. title: what and where, in a few words."""
        time, sequences = self.plan.time, self.plan.sequences
        assert time is not None
        return (
            f"# {title}: estimated {time.total:.1f} s per step of {sequences} completions.\n"
            "# By `keel check`, for H200s and completions of full length: rollout "
            f"{time.rollout:.1f} s, training {time.training:.1f} s;\n"
            f"# {self.rank_gib:.1f} GiB per trainer rank, {self.engine_gib:.1f} GiB per engine.\n"
        )

    def row(self) -> str:
        """Of the table."""
        time = self.plan.time
        assert time is not None
        return (
            f"| `{self.name}` | {self.config.model.path} | {self.gpus} × {self.gib} GiB | "
            f"{time.total:.1f} s | {time.rollout:.1f} s, {time.training:.1f} s | "
            f"{self.rank_gib:.1f} GiB, {self.engine_gib:.1f} GiB |"
        )


@cache
def facts(model: str) -> ModelFacts:
    return facts_of(SHAPES[model][0])


def files() -> dict[str, Path]:
    """By name, those that say their machine in it, in the order of `SHAPES` and of GPUs."""
    order = list(SHAPES)
    found = {file.stem: file for file in HERE.glob(f"{SHELF}*x*.yaml")}
    key = {name: (order.index(load_config(name).model.path), *_machine(name)) for name in found}
    return {name: found[name] for name in sorted(found, key=key.__getitem__)}


def _machine(name: str) -> tuple[int, int]:
    gpus, _, gib = name.rpartition("-")[2].partition("x")
    return int(gpus), int(gib)


def entry(name: str) -> Entry:
    """Planned as `keel check` does. Raises ConfigError where it does not fit."""
    (config, left), (gpus, gib) = load_recipe(name), _machine(name)
    hardware = Hardware(gpu=True, nodes=tuple(idle_nodes(1, gpus)), gpu_gib=float(gib), found=False)
    choice = choose(config, left, facts(config.model.path), hardware)
    return Entry(
        name=name,
        gpus=gpus,
        gib=gib,
        config=choice.config,
        plan=choice.plan,
        hardware=hardware,
    )


def commented(text: str, found: Entry) -> str:
    """The recipe's text with its figures as they are now."""
    lines = text.splitlines(keepends=True)
    knobs = "".join(line for line in lines if not line.startswith("#"))
    title = re.sub(r"^# |\s#", " ", text.partition(": estimated")[0], flags=re.MULTILINE)
    return found.comment(" ".join(title.split())) + knobs


def tabled(page: str, rows: list[str]) -> str:
    """The page with these rows in its table."""
    before, head, after = page.partition(HEAD)
    rule, *rest = after.lstrip("\n").splitlines(keepends=True)
    while rest and rest[0].startswith("|"):
        rest.pop(0)
    return before + head + "\n" + rule + "".join(f"{row}\n" for row in rows) + "".join(rest)


def main() -> None:
    entries = {name: entry(name) for name in files()}
    for name, file in files().items():
        file.write_text(commented(file.read_text(), entries[name]))
    PAGE.write_text(tabled(PAGE.read_text(), [each.row() for each in entries.values()]))


if __name__ == "__main__":
    main()
