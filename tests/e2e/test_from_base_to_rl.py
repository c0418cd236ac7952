"""Runs the commands of docs/from-base-to-rl.md in order, with fewer tasks and steps.

One specialist covers three domains, and everything runs in this process with one engine."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keel.commands.cli import main as keel
from keel.commands.distill import distill
from keel.configs.load import load_config, load_distillation
from keel.examples.small.__main__ import main as make_tasks
from keel.rewards.sandbox.sandbox import IsolationError, open_sandbox
from tests.e2e.in_process import in_this_process
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e
PAGE = Path(__file__).parents[2] / "docs/from-base-to-rl.md"
TAUGHT = ["spiral-direct", "programs", "towers"]
"""A reasoning_gym task, a JSONL source, and an agent task."""
DOMAINS = ("logic", "code", "search-agents")
SMALL = (
    f"data.only={json.dumps(TAUGHT)}",
    "data.sources[spiral-direct].size=40",
    *(f"data.sources[{name}].holdout=2" for name in TAUGHT),
    # Any answer is right, as so young a model knows nothing.
    "data.sources[programs].path=easy.jsonl",
    "data.sources[programs].length={linear: 0.5}",  # makes rewards differ
    "algorithm.group_size=2",
    "rewards.code.completion_s=60",
    "rewards.workers=1",
    f"rewards.timeout_s={PATIENCE_S}",
)
LESSONS = (
    *(f"sft.sources[{n}].size=16" for n in ("sums", "sums-direct", "spiral", "spiral-direct")),
    *(f"sft.sources[{one.name}].holdout=1" for one in load_config("sft-specialists").sft.sources),
    "sft.epochs=0",
    "run.steps=8",
    "trainer.warmup_steps=1",
)
CHAIN = (
    f"specialists=[{{name: all, sources: {json.dumps(TAUGHT)}}}]",
    f"overrides={json.dumps([*SMALL, 'run.steps=1', 'algorithm.prompts_per_step=3'])}",
    "prompts=3",
    "eval_samples=1",
)
FEW = ("run.steps=3", "sft.sources[retrieval].size=200")
MORE: dict[str, Sequence[str]] = {
    "keel pretrain": FEW,
    "keel sft": (*SMALL, *LESSONS),
    "keel distill": CHAIN,
    "keel eval": (*SMALL, "data.only=[programs]"),
    "keel compare": (),
}


def commands() -> list[list[str]]:
    """Commands of the page, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_commands_of_the_page_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    try:
        open_sandbox("bubblewrap")
    except IsolationError as error:
        pytest.skip(str(error))
    tmp_path.chmod(0o755)  # environments run in it as another user
    monkeypatch.chdir(tmp_path)
    # Different questions, so that none is both held out and trained on.
    easy = [
        {"id": f"{n}", "prompt": f"Say {n}.", "answer": r"[\s\S]*", "match": "regex"}
        for n in range(8)
    ]
    Path("easy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in easy))
    output: dict[str, str] = {}
    pretrained: list[str] = []
    with in_this_process():
        for words in commands():
            run, name = shrink(words)
            pretrained += words[2:] * (name == "keel pretrain")
            assert run() == 0, capfd.readouterr()
            output[name] = capfd.readouterr().out
    assert sorted(output) == sorted(["python -m keel.examples.small", *MORE])
    assert pretrained == ["pretrain-dense", "pretrain-warm-up", "pretrain-sparse"]
    for before, after in pairwise(pretrained):
        assert load_config(f"runs/{after}/config.yaml").model.path == f"runs/{before}/model"
    warm = lines_of(Path("runs/pretrain-warm-up/metrics.jsonl"))
    assert warm[-1]["indexer/kl"] < warm[1]["indexer/kl"]
    start, root = Path("runs/sft-specialists"), Path("runs/distill-specialists")
    for run, model in (
        ("specialists/all", start),
        ("distilled", start),
        ("mixed", root / "distilled"),
    ):
        assert load_config(root / run / "config.yaml").model.path == str(model / "model")

    learned = lines_of(root / "distilled.jsonl")
    held = {
        line["id"]
        for stage in ("specialist-all", "distilled", "mixed")
        for line in lines_of(root / "eval" / stage / "samples.jsonl")
    }
    assert {line["source"] for line in learned} >= {"programs"} and len(held) == 6
    for line in learned:
        assert line["specialist"] == "all" and line["parts"]["correct"] == 1
        assert line["finish_reason"] == "stop" and line["id"] not in held

    for run in ("specialists/all", "mixed"):
        _, step = lines_of(root / run / "metrics.jsonl")
        assert all(f"domain/{domain}/reward_mean" in step for domain in DOMAINS)
        assert step["staleness/mean"] == 0 and step["mismatch/logp_abs"] <= 1e-4
        assert step["routing/fallback_fraction"] == 0 and step["rollout/dropped_completions"] == 0
    assert (root / "mixed/model/model.safetensors").exists()

    scores, costs = (root / "report.md").read_text().split("\n\n")
    head, *rows = scores.splitlines()
    assert head.split() == ["specialist", "distilled", "mixed"]
    assert [row.split()[0] for row in rows] == TAUGHT
    names = [row.split()[0] for row in costs.splitlines()[1:]]
    assert names == ["specialists/all", "distilled", "mixed", "together"]
    assert "programs" in output["keel compare"] and "pass@8" in output["keel eval"]


def shrink(words: list[str]) -> tuple[Callable[[], int], str]:
    """Make a small version of a command of the page; returns it with its name."""
    if words[:3] == ["python", "-m", "keel.examples.small"]:
        few = "--general 2 --search 9 --code 1 --programs 2 --lessons 6"
        return lambda: make_tasks([*words[3:], *few.split()]), " ".join(words[:3])
    name = " ".join(words[:2])
    more = MORE[name]
    if name != "keel distill":
        return lambda: keel([*words[1:], *more]), name
    return lambda: distill(load_distillation(words[2], more), lambda link: keel(list(link))), name
