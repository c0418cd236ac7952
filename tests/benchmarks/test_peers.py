"""Workloads, recipe and verdicts of the comparison with TRL."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers import compare, keel_grpo, memory
from benchmarks.peers.report import (
    KNOBS,
    ArmRun,
    allowed_gib,
    check_same,
    earlier,
    judge_draws,
    report,
    summarize,
    verdict,
)
from benchmarks.peers.shape import MARKS, write
from benchmarks.peers.workload import QWEN3_06B, SMALL, Workload, drawn
from keel.configs.load import load_config
from keel.model.load import load_tokenizer
from keel.rl.types import Prompt
from keel.rollout.engine.conversion import render_prompt


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return write(tmp_path_factory.mktemp("peers"), SMALL)


def messages(workload: Workload) -> list[list[dict[str, Any]]]:
    return [
        json.loads(line)["messages"] for line in Path(workload.prompts).read_text().splitlines()
    ]


def test_busy_gpu_is_refused() -> None:
    memory.check_alone(lambda: 1e9, timeout_s=1.0)
    with pytest.raises(SystemExit):
        memory.check_alone(lambda: 70.0 * 2**30, timeout_s=0.2)


def test_prompt_lengths_match_in_both_systems(workload: Workload) -> None:
    tokenizer = load_tokenizer(workload.model)
    assert len(tokenizer) == workload.shape.tokens
    for prompt in messages(workload):
        ours = render_prompt(
            tokenizer, Prompt(prompt_id="p", domain="d", messages=tuple(prompt), reward={})
        )
        theirs = AutoTokenizer.from_pretrained(workload.model).apply_chat_template(
            [prompt], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        assert theirs["input_ids"][0] == ours.token_ids
        assert len(ours.token_ids) == workload.prompt_tokens


def test_each_word_is_one_token(workload: Workload) -> None:
    tokenizer = load_tokenizer(workload.model)
    ids = list(range(len(MARKS), len(MARKS) + 40))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_no_answer_can_end(workload: Workload) -> None:
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.randint(len(MARKS), workload.shape.tokens, (8, 48))
    with torch.no_grad():
        logits = model(ids).logits.flatten(0, 1)
    assert workload.sharpness / 2 < float(logits.std()) < 2 * workload.sharpness
    least_kept = logits.topk(workload.top_k).values[:, -1]
    never = torch.cat([logits[:, : len(MARKS)], logits[:, workload.shape.tokens :]], dim=1)
    assert bool((never.max(dim=1).values < least_kept).all())


def test_engine_share_fits_its_completions() -> None:
    # 0.6 B parameters, and 128 × 1,152 tokens of 112 KiB: 15.75 GiB.
    assert 0.15 < QWEN3_06B.engine_share(140 * 2**30) < 0.19
    longer = replace(QWEN3_06B, completion_tokens=2 * QWEN3_06B.completion_tokens)
    assert longer.engine_share(2**40) > 1.4 * QWEN3_06B.engine_share(2**40)


def test_workload_round_trips_through_its_file(workload: Workload) -> None:
    assert Workload.load(Path(workload.model).parent / "workload.json") == workload


@pytest.mark.parametrize("arm", sorted(keel_grpo.ARMS))
def test_every_arm_is_a_valid_recipe(workload: Workload, arm: str, tmp_path: Path) -> None:
    made = keel_grpo.recipe(workload, folder=tmp_path / "run", steps=3, gpu=True, arm=arm)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(made))  # JSON is YAML
    config = load_config(path)
    assert config.rollout.sampling.max_tokens == workload.completion_tokens
    assert config.algorithm.prompts_per_step * config.algorithm.group_size == workload.sequences


def test_partial_metrics_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert keel_grpo.read_steps(path) == []
    lines: list[dict[str, Any]] = [{"step": 0, "time": 100.0}]
    for step, at in ((1, 104.0), (2, 107.0)):
        lines.append(
            {
                "step": step,
                "time": at,
                "time/step": 2.5,
                "time/rollout": 1.5,
                "time/train": 0.75,
                "time/sync": 0.25,
                "throughput/tokens_per_second": 200.0,
                "sampling/kept_mean": 9.0,
            }
        )
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "ti')
    first, second = keel_grpo.read_steps(path)
    assert (first.seconds, second.seconds) == (4.0, 3.0)
    assert second.tokens == 500
    assert second.phases == {"rollout": 1.5, "reward": 0.0, "training": 0.75, "weights": 0.25}
    assert second.notes == {"sampling/kept_mean": 9.0}
    assert keel_grpo.started_at(path) == 100.0


def arm(name: str, seconds: list[float], peak: float, **fields: Any) -> ArmRun:
    steps = [
        {"step": i, "seconds": s, "tokens": 1000, "phases": {"rollout": s / 2}, "notes": {"kl": s}}
        for i, s in enumerate(seconds, start=2)
    ]
    return ArmRun(arm=name, run=1, status="done", peak_gib=peak, steps=steps, **fields)


@pytest.mark.parametrize(("seconds", "peak"), [(6.0, 39.0), (5.0, 41.0)])
def test_slower_or_larger_misses_the_goal(seconds: float, peak: float) -> None:
    runs = [arm("trl", [11.0], 100.0), arm("keel", [seconds], peak)]
    assert "NOT met" in verdict(summarize(runs))
    assert "no verdict" in verdict(summarize(runs[:1]))


def test_verdict_uses_the_fastest_fitting_arm() -> None:
    runs = [arm("trl", [11.0], 100.0), arm("keel", [6.0], 30.0), arm("keel-turns", [5.0], 39.0)]
    assert verdict(summarize(runs)).startswith("keel-turns has 2.20 times")
    runs.append(arm("keel-fast", [4.0], 60.0))
    assert verdict(summarize(runs)).startswith("keel-turns")
    assert "keel-fast" in verdict(summarize([runs[0], runs[3]]))


def test_workload_depends_on_its_seed() -> None:
    assert drawn(3) == drawn(3) != drawn(4)
    assert {drawn(seed).ends_after > 0 for seed in range(8)} == {True, False}


def test_completions_have_the_workloads_length(tmp_path: Path) -> None:
    shape = replace(SMALL.shape, hidden_size=256, head_dim=64, spread=0.06)
    workload = replace(SMALL, shape=shape, completion_tokens=32, ends_after=12, sharpness=8.0)
    made = write(tmp_path, workload)
    model = AutoModelForCausalLM.from_pretrained(made.model, dtype=torch.float32)
    torch.manual_seed(0)
    ids = torch.randint(len(MARKS), shape.tokens, (48, 16))
    with torch.no_grad():
        sampled = model.generate(
            ids, do_sample=True, max_new_tokens=32, top_p=workload.top_p, top_k=workload.top_k
        )
    lengths = (sampled[:, 16:] != model.config.pad_token_id).sum(1).float()
    assert 6 < float(lengths.mean()) < 24
    assert 0 < float((lengths == 32).float().mean()) < 0.4


def test_memory_uses_the_peers_fastest_arm() -> None:
    runs = [arm("trl", [12.0], 80.0), arm("trl-liger", [10.0], 70.0), arm("keel", [5.0], 10.0)]
    assert allowed_gib(runs) == 28.0
    assert allowed_gib([arm("keel", [5.0], 10.0), arm("trl", [], 80.0)]) == 0.0
    assert allowed_gib([replace(runs[1], status="cut short"), runs[0]]) == 32.0


def test_runs_of_another_commit_stay_separate(tmp_path: Path) -> None:
    facts = {"machine": "m", "commit": "a", "model": "x", "a step": "y", KNOBS: "none"}
    (tmp_path / "results.json").write_text(json.dumps({"facts": facts}))
    check_same(tmp_path, facts | {"command": "again"})
    with pytest.raises(SystemExit, match="commit"):
        check_same(tmp_path, facts | {"commit": "b"})
    with pytest.raises(SystemExit, match="knobs"):
        check_same(tmp_path, facts | {KNOBS: "x=1"})


@pytest.mark.e2e
def test_interrupt_ends_the_running_arm(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = compare.Bench(compare.parse(["--out", str(tmp_path), "--small"]), tmp_path, workload)
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(bench, "_command", lambda *_: sleeps)
    before, started = psutil.Process().children(), list[psutil.Process]()

    def interrupt(process: object, timeout: float | None = None) -> int:
        monkeypatch.undo()
        started.extend(one for one in psutil.Process().children() if one not in before)
        sys.exit(143)

    monkeypatch.setattr(compare.subprocess.Popen, "wait", interrupt)
    with pytest.raises(SystemExit):
        bench.all(["keel"])
    assert started and not any(one.is_running() and one.status() != "zombie" for one in started)


def test_summary_covers_all_runs_of_an_arm(tmp_path: Path) -> None:
    runs = [
        arm("trl", [11.0, 12.0], 100.0),
        arm("keel", [4.0, 5.0], 39.0),
        arm("keel", [5.0, 8.0], 40.0),
        ArmRun(arm="trl-fit", run=4, status="failed", steps=[], why="out of memory"),
    ]
    (tmp_path / "results.json").write_text(json.dumps({"runs": [run.as_json() for run in runs]}))
    assert earlier(tmp_path) == runs
    summaries = summarize(earlier(tmp_path))
    assert list(summaries) == ["trl", "keel"]
    ours = summaries["keel"]
    assert (ours.runs, ours.steps, ours.step_s, ours.tokens_s) == (2, 4, 5.0, 200.0)
    assert (ours.slowest, ours.fastest, ours.peak_gib) == (125.0, 250.0, 40.0)
    assert ours.phases == {"rollout": 2.5, "rest": 2.5}
    assert "out of memory" in report(runs, {"machine": "made up"})


def test_verdict_over_draws_uses_the_peers_best_arm(tmp_path: Path) -> None:
    def write_runs(seed: int, *runs: ArmRun) -> Path:
        folder = tmp_path / str(seed)
        folder.mkdir(exist_ok=True)
        (folder / "results.json").write_text(json.dumps({"runs": [run.as_json() for run in runs]}))
        return folder

    peers = [arm("trl", [12.0], 90.0), arm("trl-liger", [10.0], 100.0)]
    folders = [
        write_runs(seed, arm("keel-auto", [seconds], 39.0), *peers)
        for seed, seconds in enumerate((4.0, 5.0, 4.0, 4.0))
    ]
    assert "met in 3 of 4" in judge_draws(folders, "keel-auto")
    assert "no verdict" in judge_draws(folders[:3], "keel-auto")
    cut = replace(arm("trl-liger", [1.0], 100.0), status="cut short")
    write_runs(1, arm("keel-auto", [4.0], 35.0), peers[0], cut)
    assert "met in 4 of 4" in judge_draws(folders, "keel-auto")
    write_runs(3, arm("keel-auto", [], 0.0), peers[0])
    assert "no verdict" in judge_draws(folders, "keel-auto")
