"""The commands of docs/sft.md from system prompts to RL, on the tiny model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.commands.cli import main
from tests.e2e.in_process import in_this_process
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e
PAGE = Path(__file__).parents[2] / "docs/sft.md"
SHOP = """
class Shop:
    def price(self, name: str) -> int:
        \"\"\"Return a price.\"\"\"
        return len(name)
"""
# Whether an answer is right depends on its letters, so that some are.
ANSWER = {"answer": r"[^x]*[aeiou][^x]*", "match": "regex"}
SMALL: dict[str, Any] = {
    "run": {"device": "cpu", "steps": 1},
    "model": {
        "path": "tiny",
        "dtype": "float32",
        "tiny": {"cache_dir": "cache", "max_context": 2048, "cold_start": {"steps": 0}},
    },
    "algorithm": {"prompts_per_step": 3, "group_size": 2},
    "rollout": {"sampling": {"max_tokens": 12, "top_k": 64, "top_p": 0.95}},
    "rewards": {"workers": 1, "timeout_s": PATIENCE_S},
    "agents": {"max_turns": 2, "window": 1500},
    "eval": {"size": 6},
    "trainer": {"threads": 1},
}


def page(kind: str) -> str:
    section = PAGE.read_text().partition("## Cold start from system prompts")[2]
    return re.findall(rf"^```{kind}\n(.*?)^```$", section, re.M | re.S)[0]


def test_right_trajectories_of_prompted_model_start_rl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(SHOP)
    lines = [{"prompt": f"Describe {n} things.", **ANSWER} for n in range(40)]
    Path("shop.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = yaml.safe_load(page("yaml"))
    sums, *shops = recipe["data"]["sources"]
    (source,) = recipe["sft"]["sources"]
    for one in (sums, *shops):
        one["holdout"] = 4
    sums |= {"size": 40, "holdout": 4}
    for one in shops:
        one["environment"] |= {"isolation": "none-i-trust-the-environments", "folder": "."}
    data = {"max_prompt_tokens": 1400, "sources": [sums, *shops]}
    sft = {"max_context_tokens": 1500, "conversations_per_step": 4, "sources": [source]}
    Path("cold.yaml").write_text(yaml.safe_dump({**SMALL, "data": data, "sft": sft}))
    with in_this_process():
        for line in page("sh").splitlines():
            assert main(shlex.split(line)[1:]) == 0, capsys.readouterr()
    asked = map(json.loads, Path("runs/cold/prompted/samples.jsonl").read_text().splitlines())
    samples = [sample for line in asked for sample in line["samples"]]
    right = sum(sample["correct"] == 1 for sample in samples)
    assert 0 < right < len(samples)
