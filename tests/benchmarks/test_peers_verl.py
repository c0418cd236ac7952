"""verl's arm of the comparison, as far as it runs without verl."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peers import compare, verl_attention, verl_grpo
from benchmarks.peers.compare import Bench, environment, parse
from benchmarks.peers.reward import variety_of_all, variety_of_solution
from benchmarks.peers.workload import QWEN3_06B, SMALL, Workload, drawn


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    messages = [{"role": "user", "content": "w1 w2"}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": messages}) + "\n" for _ in range(3)))
    return replace(SMALL, model='/a "model"', prompts=str(prompts))


def test_inputs_have_verls_format(workload: Workload, tmp_path: Path) -> None:
    verl_grpo.write_inputs(tmp_path / "run", workload)
    lines = (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
    assert rows[0]["prompt"] == [{"role": "user", "content": "w1 w2"}]
    (turn,) = json.loads((tmp_path / "run" / "turn.yaml").read_text())
    assert turn["name"] == verl_grpo.TURN


def test_all_that_has_to_be_equal_is(workload: Workload, tmp_path: Path) -> None:
    made = verl_grpo.overrides(workload, verl_grpo.ARMS["verl"], folder=tmp_path, steps=4)
    rollout, actor = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
    assert [made[rollout + key] for key in ("n", "top_p", "top_k", "temperature")] == [
        workload.group_size,
        workload.top_p,
        workload.top_k,
        workload.temperature,
    ]
    assert made[actor + "optim.betas"] == [workload.beta1, workload.beta2]
    assert made[actor + "optim.lr"] == workload.lr
    assert made[actor + "kl_loss_coef"] == workload.kl_coef
    assert made[actor + "ppo_mini_batch_size"] == made["data.train_batch_size"]
    assert made["trainer.total_training_steps"] == 4
    phrase = verl_grpo.words(made)
    assert r'actor_rollout_ref.model.path="/a \"model\""' in phrase
    assert "trainer.val_before_train=false" in phrase
    assert "+ray_kwargs.ray_init.include_dashboard=false" in phrase
    attention = f'"{verl_attention.NAME}"'
    assert f"+actor_rollout_ref.model.override_config.attn_implementation={attention}" in phrase


@pytest.mark.parametrize("arm", sorted(verl_grpo.ARMS))
def test_micro_batch_holds_a_sequence(arm: str) -> None:
    settings = verl_grpo.ARMS[arm]
    for each in (QWEN3_06B, SMALL, *map(drawn, range(8))):
        tokens = verl_grpo.micro_batch(each, settings)
        assert each.context <= tokens <= max(each.context, verl_grpo.CHECKPOINTED)


def line(step: int, **metrics: float) -> str:
    timers = {"gen": 5.0, "old_log_prob": 1.0, "ref": 0.5, "update_actor": 2.0}
    times = {f"timing_s/{name}": seconds for name, seconds in timers.items()}
    data = {**times, "response_length/mean": 31.5, "actor/grad_norm": float("nan"), **metrics}
    return json.dumps({"step": step, "data": data}) + "\n"


def test_partial_log_is_read(tmp_path: Path) -> None:
    watched = verl_grpo.Watched(tmp_path / "metrics.jsonl", sequences=16)
    assert watched.fresh(0, 90.0) == []
    watched.path.touch()
    assert watched.fresh(0, 100.0) == []
    assert watched.began == 100.0
    peak = {"actor/perf/max_memory_allocated_gb": 12.5}
    watched.path.write_text(line(1, **peak) + line(2)[:20])
    (first,) = watched.fresh(0, 110.0)
    watched.path.write_text(line(1, **peak) + line(2, **peak))
    (second,) = watched.fresh(1, 119.0)
    assert (first.step, first.seconds, second.step, second.seconds) == (1, 10.0, 2, 9.0)
    assert second.tokens == 504
    assert second.phases == {"rollout": 5.0, "old and reference passes": 1.5, "training": 2.0}
    assert "actor/grad_norm" not in second.notes


def test_arms_have_separate_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/others")
    assert environment("m")["PYTHONPATH"].endswith(os.pathsep + "/of/the/others")
    alone = environment("m", tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert alone[1:] == [str(tmp_path)]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    made = verl_grpo.environment(tmp_path / "log", tmp_path)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in made


def test_arms_receive_their_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "gpu_reader", lambda: None)
    monkeypatch.setattr(Bench, "write", lambda self: None)
    words = ["--out", str(tmp_path), "--arms", "keel,verl-fast,trl", "--set", "a=b"]
    bench = Bench(parse(words), tmp_path, SMALL)
    ours, verl, trl = (
        bench._command(arm, tmp_path / "out") for arm in ("keel", "verl-fast", "trl")
    )
    assert "benchmarks.peers.verl_grpo" in verl and "--arm=verl-fast" in verl
    scratch = f"--scratch={tmp_path}"
    assert [scratch in each for each in (ours, verl, trl)] == [True, True, False]
    assert ["a=b" in each for each in (ours, verl, trl)] == [True, False, False]
    bench.all(["verl"])
    (run,) = bench.runs
    assert run.status == "skipped" and "--verl-path" in run.why
    with pytest.raises(SystemExit):
        parse(["--out", str(tmp_path), "--arms", "other"])


def test_reward_forms_are_equal() -> None:
    text = "w1 w2 w2 w3"
    (theirs,) = variety_of_all([[{"content": text}]])
    assert variety_of_solution("peers", text, "", {}) == theirs == 0.75


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Softmax attention over a packed row, with a mask: [heads, N, D] in, [N, heads, D] out."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    causal = torch.ones(len(sequence), len(sequence)).tril().bool()
    seen = causal & (sequence[:, None] == sequence[None, :])
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def test_packed_sequences_attend_separately() -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 7]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row = verl_attention.packed(positions)
    assert row.offsets.tolist() == [0, 5, 6, 13] and row.longest == 7
    shapes = [(4, 13, 8), (2, 13, 8), (2, 13, 8)]
    mine = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [x.detach().clone().requires_grad_() for x in mine]
    made, _ = verl_attention.attention(
        nn.Identity(), *(x[None] for x in mine), None, scaling=8**-0.5, position_ids=positions
    )
    expected = dense(*theirs, lengths)
    torch.testing.assert_close(made[0], expected)
    upstream = torch.randn_like(expected)
    made[0].backward(upstream)
    expected.backward(upstream)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


def test_attention_refuses_rows_that_are_not_packed() -> None:
    x: Any = torch.zeros(2, 1, 3, 4)
    with pytest.raises(ValueError, match="use_remove_padding"):
        verl_attention.attention(nn.Identity(), x, x, x, None, position_ids=torch.zeros(2, 3))


def test_offsets_are_read_once_for_all_layers() -> None:
    latest, ids = verl_attention.Latest(), torch.arange(4)[None]
    first = latest.packed(ids)
    assert latest.packed(ids) is first
    assert latest.packed(torch.tensor([[0, 1, 0, 1]])) is not first
