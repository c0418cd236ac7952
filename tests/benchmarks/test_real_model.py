"""Tasks and arms of `benchmarks.real_model`, without a model."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import real_model
from benchmarks.peers import keel_grpo
from benchmarks.peers.reward import number, number_of_all
from benchmarks.real_model import ARMS, Run
from benchmarks.real_tasks import Calculator, arithmetic, calculate, hard, write_prompts
from keel.configs.load import load_config


def options(out: Path) -> argparse.Namespace:
    return argparse.Namespace(
        out=out, model="a-model", prompts=4, group=2, tokens=96, prompt_tokens=192, steps=2, lr=0.0,
        set=[], gib=0.0,
    )  # fmt: skip


def test_every_arm_of_keel_is_a_valid_recipe(tmp_path: Path) -> None:
    write_prompts(tmp_path / "arithmetic.prompts", "arithmetic", small=True)
    for name, arm in ARMS.items():
        if arm.trl:
            continue
        words = real_model.command(
            Run(arm=name, seed=1, tasks="arithmetic"), options(tmp_path), tmp_path
        )
        knobs = [word for word in words[3:] if not word.startswith("-")]
        workload = keel_grpo.Workload.load(tmp_path / "workload.json")
        made = keel_grpo.recipe(workload, folder=tmp_path, steps=3, gpu=True, arm=keel_grpo.AUTO)
        (tmp_path / "recipe.yaml").write_text(json.dumps(made))  # JSON is YAML
        config = load_config(tmp_path / "recipe.yaml", knobs)
        assert config.run.seed == 1 and config.model.lora.enabled == arm.lora
        assert config.rollout.sampling.top_p == arm.sampling.get("top_p", 1.0)


@pytest.mark.parametrize("tasks", [arithmetic, hard])
def test_both_systems_give_the_same_reward(tasks: type) -> None:
    rows = list(tasks(40))
    assert len(rows) == 40 and len(set(rows)) > 20
    as_any: Any = SimpleNamespace
    for _, right in rows:
        for text, expected in ((f"12, so {right}.", 1.0), (f"{right} or 123456", 0.0), ("", 0.0)):
            prompt = as_any(reward={"answer": right})
            assert number(prompt, as_any(answer=text)) == expected
            assert number_of_all([[{"content": text}]], answer=[right]) == [expected]


def test_the_calculator_takes_numbers_only() -> None:
    agent = Calculator()
    assert agent.reply("I do. calc(12 * (3))") is None
    assert agent.reply("calc(61 - 30)") == "61 - 30 = 31"
    assert agent.reply("The answer is 31.") is None
    for bad in ("open('x')", "2 ** 9", "1 // 0", "1 +", "9 +" * 5000):
        assert calculate(bad) == "The calculator does not understand that."
