"""Conversations packed for the trainer, and trajectories as lines that become conversations."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from keel.rl.packing import TrainBatch
from keel.rl.sft.lessons import Average, Lesson, pack_lessons, shown
from keel.rl.sft.loss import nll_loss
from keel.rl.sft.records import record_of, records_of, segments_of
from keel.rl.types import PROGRAM, Prompt, Segment, Trajectory
from tests.rl.rollouts import scored

TABLE = torch.linspace(-1, 1, 1000, dtype=torch.float64).sin()


def lessons() -> list[Lesson]:
    """Eleven, of one to three contexts."""
    random = np.random.default_rng(0)
    made: list[Lesson] = []
    for number in range(11):
        contexts: list[Segment] = []
        for _ in range(random.integers(1, 4)):
            length = int(random.integers(3, 20))
            said = random.random(length) < 0.5
            said[0], said[-1] = False, True
            contexts.append(shown(f"c{number}", random.integers(0, 1000, length), said))
        made.append(Lesson(prompt_id=f"c{number}", segments=tuple(contexts)))
    return made


def learned(batches: list[TrainBatch]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a policy that is a table of logits."""
    table = TABLE.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for row in batch.micro_batches:
            assert row.loss == "nll"
            at = torch.from_numpy(np.flatnonzero(row.trainable_N))
            share = nll_loss(
                -table[torch.from_numpy(row.token_ids_N).long()[at]].exp(),
                torch.from_numpy(row.sequence_N)[at],
                sequence_tokens=torch.from_numpy(row.sequence_tokens_S),
                total_sequences=batch.total_sequences,
                sequence_weight=torch.from_numpy(row.sequence_weight_S),
            )
            total = total + share.loss
    return float(total.detach()), torch.autograd.grad(total, table)[0]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("capacity", [1, 25, 10_000])
@pytest.mark.parametrize("mean", ["tokens", "conversations"])
def test_packing_changes_neither_loss_nor_gradient(
    ranks: int, capacity: int, mean: Average
) -> None:
    """capacity 1: every context alone, the ones that nothing is packed with."""
    given = lessons()
    batches = pack_lessons(given, ranks=ranks, micro_batch_tokens=capacity, mean=mean)
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    each = [
        torch.cat([TABLE[one.token_ids_T[one.trainable_T]].exp() for one in lesson.segments])
        for lesson in given
    ]
    wanted = torch.cat(each).mean() if mean == "tokens" else sum(t.mean() for t in each) / 11
    loss, gradient = learned(batches)
    assert loss == pytest.approx(float(wanted), rel=1e-6)  # weights are float32
    torch.testing.assert_close(
        gradient,
        learned(pack_lessons(given, ranks=1, micro_batch_tokens=10_000, mean=mean))[1],
        rtol=1e-6,
        atol=1e-12,
    )


def test_a_step_without_conversations_is_refused() -> None:
    with pytest.raises(ValueError, match="none to learn from"):
        pack_lessons([], ranks=1, micro_batch_tokens=8)
    with pytest.raises(ValueError, match="conversation c: no token"):
        Lesson(prompt_id="c", segments=(shown("c", [1, 2], [False, False]),))


def test_a_trajectory_becomes_a_line_and_its_tokens_again() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "malformed_call", "arguments": {}}}
    messages = (
        {"role": "user", "content": "Shown before?"},
        {"role": "assistant", "content": "As an example."},
        {"role": "user", "content": "Then?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no call", "tool_call_id": "c", "name": "malformed_call"},
        {"role": "assistant", "content": "So.", "raw": "So.<|im_end|>"},
        {"role": "assistant", "content": "So, it says.", "name": PROGRAM},
    )
    sampled = shown("p", [5, 6, 7, 8, 9], [False, True, True, False, True])
    trajectory = Trajectory(
        prompt_id="p",
        sibling=2,
        segments=(sampled, sampled),
        finish_reason="stop",
        messages=messages,
        opening=3,
    )
    prompt = Prompt(prompt_id="p", domain="d", messages=messages[:1], environment="e")
    line = json.loads(json.dumps(record_of(prompt, trajectory, tokenizer="t")))
    assert [m.get("weight") for m in line["messages"]] == [None, 0, None, 0, None, None, 0]
    assert "raw" not in line["messages"][5]
    for again in segments_of(line, "p"):
        np.testing.assert_array_equal(again.token_ids_T, sampled.token_ids_T)
        np.testing.assert_array_equal(again.trainable_T, sampled.trainable_T)
    assert record_of(prompt, trajectory, tokenizer="")["segments"] == [], "nobody knows whose"
    group = scored([trajectory], [0.5])
    assert records_of(group, 0, tokenizer="t")["reward"] == 0.5


@pytest.mark.parametrize(
    "segments",
    [
        [{"ids": [1, 2], "said": [[0, 1]]}],
        [{"ids": [1, 2], "said": [[1, 3]]}],
        [{"ids": [1, 2]}],
        [{"ids": [1, 2], "said": 3}],
        [{"ids": ["x"], "said": []}],
    ],
)
def test_tokens_that_nobody_has_written_are_refused(segments: object) -> None:
    with pytest.raises(ValueError, match=r"said|invalid literal"):
        segments_of({"segments": segments}, "p")
