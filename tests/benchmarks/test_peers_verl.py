"""verl's arm of the comparison, as far as it runs without verl."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peers import verl_attention, verl_grpo
from benchmarks.peers.workload import SMALL, Workload


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    messages = [{"role": "user", "content": "w1 w2"}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": messages}) + "\n" for _ in range(3)))
    return replace(SMALL, model='/a "model"', prompts=str(prompts))


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
