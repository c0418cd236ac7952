"""The comparison with TRL: what both are given, and the arithmetic of its report."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers import compare, keel_grpo, memory
from benchmarks.peers.compare import arguments
from benchmarks.peers.draws import Draw, read
from benchmarks.peers.draws import report as over_draws
from benchmarks.peers.report import (
    KNOBS,
    ArmRun,
    allowed_gib,
    check_same,
    earlier,
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
def given(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return write(tmp_path_factory.mktemp("peers"), SMALL)


def messages(given: Workload) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["messages"] for line in Path(given.prompts).read_text().splitlines()]


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        arguments(["--help"])
    assert "40%" in capsys.readouterr().out


@pytest.mark.e2e
def test_an_arm_ends_with_the_comparison(
    given: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = arguments(["--out", str(tmp_path), "--small"])
    bench = compare.Bench(options, tmp_path, given)
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(bench, "_command", lambda *_: sleeps)
    seen: list[psutil.Process] = []
    others = psutil.Process().children()

    def interrupted(_: object) -> None:
        seen.extend(one for one in psutil.Process().children() if one not in others)
        sys.exit(143)

    monkeypatch.setattr(compare, "note_processes", interrupted)
    with pytest.raises(SystemExit):
        bench.all(["keel"])
    assert seen and not any(one.is_running() and one.status() != "zombie" for one in seen)


def test_a_gpu_that_others_use_is_refused() -> None:
    memory.check_alone(lambda: 1e9, deadline_s=1.0)
    with pytest.raises(SystemExit, match=r"70\.0 GiB of GPU"):
        memory.check_alone(lambda: 70.0 * 2**30, deadline_s=0.2)


def test_prompts_have_the_promised_length_in_both_systems(given: Workload) -> None:
    tokenizer = load_tokenizer(given.model)
    assert len(tokenizer) == given.shape.tokens
    for prompt in messages(given):
        ours = render_prompt(
            tokenizer, Prompt(prompt_id="p", domain="d", messages=tuple(prompt), reward={})
        )
        theirs = AutoTokenizer.from_pretrained(given.model).apply_chat_template(
            [prompt], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        assert theirs["input_ids"][0] == ours.token_ids
        assert len(ours.token_ids) == given.prompt_tokens


def test_a_word_is_a_token_and_comes_back(given: Workload) -> None:
    tokenizer = load_tokenizer(given.model)
    ids = list(range(len(MARKS), len(MARKS) + 40))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_no_answer_can_end(given: Workload) -> None:
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.randint(len(MARKS), given.shape.tokens, (8, 48))
    with torch.no_grad():
        logits = model(ids).logits.flatten(0, 1)
    assert given.sharpness / 2 < float(logits.std()) < 2 * given.sharpness
    least_kept = logits.topk(given.top_k).values[:, -1]
    never = torch.cat([logits[:, : len(MARKS)], logits[:, given.shape.tokens :]], dim=1)
    assert bool((never.max(dim=1).values < least_kept).all())


def test_the_sizes_are_those_of_the_model_they_stand_for() -> None:
    assert QWEN3_06B.step_tokens == 16 * 8 * 1024
    assert QWEN3_06B.context == 1152
    assert QWEN3_06B.shape.tokens < QWEN3_06B.shape.vocab_size


def test_the_share_of_an_engine_is_what_its_completions_need() -> None:
    # 0.6 B parameters, and 128 × 1,152 tokens of 112 KiB: 15.75 GiB.
    assert 0.15 < QWEN3_06B.engine_share(140 * 2**30) < 0.19
    longer = replace(QWEN3_06B, completion_tokens=2 * QWEN3_06B.completion_tokens)
    assert longer.engine_share(2**40) > 1.4 * QWEN3_06B.engine_share(2**40)


def test_a_workload_comes_back_from_its_file(given: Workload) -> None:
    assert Workload.load(Path(given.model).parent / "workload.json") == given


@pytest.mark.parametrize("arm", sorted(keel_grpo.ARMS))
def test_every_arm_is_a_valid_recipe(given: Workload, arm: str, tmp_path: Path) -> None:
    made = keel_grpo.recipe(given, folder=tmp_path / "run", steps=3, gpu=True, arm=arm)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(made))  # JSON is YAML
    config = load_config(path)
    assert config.rollout.sampling.max_tokens == given.completion_tokens
    assert config.algorithm.prompts_per_step * config.algorithm.group_size == given.sequences


def test_steps_are_read_from_metrics_as_far_as_they_are_written(tmp_path: Path) -> None:
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


def test_the_report_is_of_all_runs_of_an_arm(tmp_path: Path) -> None:
    runs = [
        arm("trl", [11.0, 12.0], 100.0),
        arm("keel", [4.0, 5.0], 39.0),
        arm("keel", [5.0, 8.0], 40.0),
        ArmRun(arm="trl-lean", run=4, status="failed", steps=[], why="out of memory"),
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"runs": [run.as_json() for run in runs]}))
    read = earlier(tmp_path)
    assert read == runs
    summaries = summarize(read)
    assert list(summaries) == ["trl", "keel"]
    ours = summaries["keel"]
    assert (ours.runs, ours.steps, ours.step_s, ours.tokens_s) == (2, 4, 5.0, 200.0)
    assert (ours.slowest, ours.fastest, ours.peak_gib) == (125.0, 250.0, 40.0)
    assert ours.phases == {"rollout": 2.5, "rest": 2.5}
    assert "met" in verdict(summaries) and "NOT" not in verdict(summaries)
    text = report(runs, {"machine": "made up"})
    row = "| keel | 2, 4 | 5.00 | 200 | 125 … 250 | 40.0 | 2.30 | 40% |"
    assert row in text
    assert "trl-lean: failed" in text and "out of memory" in text


@pytest.mark.parametrize(("seconds", "peak"), [(6.0, 39.0), (5.0, 41.0)])
def test_slower_or_larger_misses_the_goal(seconds: float, peak: float) -> None:
    runs = [arm("trl", [11.0], 100.0), arm("keel", [seconds], peak)]
    assert "NOT met" in verdict(summarize(runs))
    assert "no verdict" in verdict(summarize(runs[:1]))


def test_the_verdict_is_of_the_fastest_arm_that_fits() -> None:
    runs = [arm("trl", [11.0], 100.0), arm("keel", [6.0], 30.0), arm("keel-turns", [5.0], 39.0)]
    assert verdict(summarize(runs)).startswith("keel-turns has 2.20 times")
    runs.append(arm("keel-fast", [4.0], 60.0))
    assert verdict(summarize(runs)).startswith("keel-turns")
    assert "keel-fast" in verdict(summarize([runs[0], runs[3]]))


def test_an_arm_cut_short_counts_with_the_steps_it_has() -> None:
    short = replace(arm("trl", [11.0], 100.0), status="cut short")
    assert summarize([short])["trl"].steps == 1


def test_a_workload_drawn_by_seed_is_the_same_again_and_no_other() -> None:
    assert drawn(3) == drawn(3) != drawn(4)
    assert {drawn(seed).ends_after > 0 for seed in range(8)} == {True, False}


def test_completions_end_as_soon_as_the_workload_says(tmp_path: Path) -> None:
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


def test_memory_is_measured_by_the_fastest_arm_of_the_peer() -> None:
    runs = [arm("trl", [12.0], 80.0), arm("trl-liger", [10.0], 70.0), arm("keel", [5.0], 10.0)]
    assert allowed_gib(runs) == 28.0
    assert allowed_gib([arm("keel", [5.0], 10.0), arm("trl", [], 80.0)]) == 0.0
    assert allowed_gib([replace(runs[1], status="cut short"), runs[0]]) == 32.0


def test_the_verdict_over_draws_counts_the_best_arm_of_the_peer(tmp_path: Path) -> None:
    for seed, seconds in enumerate((4.0, 5.0, 4.0, 4.0)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        runs = [
            arm("keel-auto", [seconds], 39.0),
            arm("trl", [12.0], 90.0),
            arm("trl-liger", [10.0], 100.0),
        ]
        made = {"workload": asdict(drawn(seed)), "runs": [run.as_json() for run in runs]}
        (folder / "results.json").write_text(json.dumps(made))
    found = [read(tmp_path / str(seed)) for seed in range(4)]
    assert [each.peer.arm for each in found if isinstance(each, Draw)] == ["trl-liger"] * 4
    assert "met in 3 of 4 draws" in over_draws(found)
    assert "no verdict: 3 draws of 4" in over_draws(found[:3])
    runs = [run.as_json() for run in (arm("keel-auto", [], 0.0), arm("trl", [12.0], 90.0))]
    (tmp_path / "3" / "results.json").write_text(json.dumps({"workload": {}, "runs": runs}))
    assert "no figures of both" in over_draws([*found[:3], read(tmp_path / "3"), found[0]])
    cut = replace(arm("trl-liger", [1.0], 100.0), status="cut short")
    runs = [run.as_json() for run in (arm("keel-auto", [4.0], 39.0), arm("trl", [12.0], 90.0), cut)]
    made = {"workload": asdict(drawn(3)), "runs": runs}
    (tmp_path / "3" / "results.json").write_text(json.dumps(made))
    assert isinstance(again := read(tmp_path / "3"), Draw) and again.peer.arm == "trl"


def test_runs_of_another_commit_are_not_added_to(tmp_path: Path) -> None:
    facts = {"machine": "m", "commit": "a", "model": "x", "a step": "y", KNOBS: "none"}
    (tmp_path / "results.json").write_text(json.dumps({"facts": facts}))
    check_same(tmp_path, facts | {"command": "again"})
    with pytest.raises(SystemExit, match="where commit: 'a', now 'b': give them another --out"):
        check_same(tmp_path, facts | {"commit": "b"})
    with pytest.raises(SystemExit, match="where knobs of all arms of Keel: 'none', now 'x=1'"):
        check_same(tmp_path, facts | {KNOBS: "x=1"})
