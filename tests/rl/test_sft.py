"""Supervised fine-tuning: the loss by its laws, packing, and trajectories as JSON lines."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional

from keel.rl.losses import nll_loss
from keel.rl.metrics import merge, values
from keel.rl.packing import TrainBatch
from keel.rl.records import recorded_segments, scored_record, trajectory_record
from keel.rl.sft import Average, SftExample, plan_sft, supervised_segment
from keel.rl.types import PROGRAM, Prompt, Segment, Trajectory
from tests.rl.rollouts import scored

TOKENS = torch.tensor([3, 1, 4])
"""Lengths of three conversations."""
SEQUENCE = torch.repeat_interleave(torch.arange(3), TOKENS)
KNOBS = {"sequence_tokens": TOKENS, "total_sequences": 3}
BY_TOKENS = TOKENS.double() * 3 / TOKENS.sum()
TABLE = torch.linspace(-1, 1, 1000, dtype=torch.float64).sin()


def logp() -> torch.Tensor:
    torch.manual_seed(0)
    return (-torch.rand(8, dtype=torch.float64)).requires_grad_()


def test_token_weights_give_cross_entropy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (8,))
    chosen = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ours = nll_loss(chosen, SEQUENCE, **KNOBS, sequence_weight=BY_TOKENS)
    theirs = functional.cross_entropy(logits, targets)
    torch.testing.assert_close(ours.loss, theirs)
    assert values(ours.metrics) == pytest.approx(dict.fromkeys(("loss", "nll"), theirs.item()))
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (ours.loss, theirs)]
    torch.testing.assert_close(*gradients)


def test_no_weights_give_the_mean_over_conversations() -> None:
    numbers = logp()
    loss = nll_loss(numbers, SEQUENCE, **KNOBS).loss
    means = [-numbers[one == SEQUENCE].mean() for one in range(3)]
    torch.testing.assert_close(loss, torch.stack(means).mean())


@pytest.mark.parametrize("weight", [None, BY_TOKENS], ids=["conversations", "tokens"])
def test_shares_of_any_split_add_up(weight: torch.Tensor | None) -> None:
    numbers = logp()
    whole = nll_loss(numbers, SEQUENCE, **KNOBS, sequence_weight=weight)
    cut = torch.tensor([0, 2, 2, 1, 0, 1, 0, 2])  # through conversations
    parts = [
        nll_loss(numbers[cut == part], SEQUENCE[cut == part], **KNOBS, sequence_weight=weight)
        for part in range(4)  # the last part is empty
    ]
    total = sum(part.loss for part in parts)
    torch.testing.assert_close(total, whole.loss)
    (split,) = torch.autograd.grad(total, numbers)
    torch.testing.assert_close(split, torch.autograd.grad(whole.loss, numbers)[0])
    assert values(merge(part.metrics for part in parts)) == pytest.approx(values(whole.metrics))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"total_sequences": 2}, "total_sequences"),
        ({"sequence_weight": torch.tensor([1.0, -1.0, 1.0])}, r"sequence_weight\[1\]"),
        ({"sequence_tokens": torch.tensor([3, 5])}, r"sequence\[4\]"),
        ({"sequence_tokens": torch.tensor([*TOKENS[:2], 0])}, r"sequence_tokens\[2\] = 0"),
        ({"sequence_tokens": torch.tensor([2, 1, 4])}, r"sequence_tokens\[0\].*less than"),
        ({"sequence_tokens": TOKENS.float()}, "must be int64 or int32"),
    ],
)
def test_invalid_arguments_are_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        nll_loss(logp(), SEQUENCE, **{**KNOBS, **changes})


def examples() -> list[SftExample]:
    """Eleven examples of one to three contexts."""
    random = np.random.default_rng(0)
    result: list[SftExample] = []
    for number in range(11):
        contexts: list[Segment] = []
        for _ in range(random.integers(1, 4)):
            length = int(random.integers(3, 20))
            learned = random.random(length) < 0.5
            learned[0], learned[-1] = False, True
            ids = random.integers(0, 1000, length)
            contexts.append(supervised_segment(f"c{number}", ids, learned))
        result.append(SftExample(prompt_id=f"c{number}", segments=tuple(contexts)))
    return result


def loss_and_gradient(batches: list[TrainBatch]) -> tuple[float, torch.Tensor]:
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


@pytest.mark.parametrize(("replicas", "capacity"), [(1, 1), (3, 25), (3, 10_000)])
@pytest.mark.parametrize("mean", ["tokens", "conversations"])
def test_packing_changes_neither_loss_nor_gradient(
    replicas: int, capacity: int, mean: Average
) -> None:
    plans = plan_sft(examples(), replicas=replicas, micro_batch_tokens=capacity, mean=mean)
    batches = [plan.pack() for plan in plans]
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    each = [
        torch.cat([TABLE[one.token_ids_T[one.trainable_T]].exp() for one in example.segments])
        for example in examples()
    ]
    expected = torch.cat(each).mean() if mean == "tokens" else sum(t.mean() for t in each) / 11
    loss, gradient = loss_and_gradient(batches)
    assert loss == pytest.approx(float(expected), rel=1e-6)  # weights are float32
    (whole,) = plan_sft(examples(), replicas=1, micro_batch_tokens=10_000, mean=mean)
    torch.testing.assert_close(
        gradient, loss_and_gradient([whole.pack()])[1], rtol=1e-6, atol=1e-12
    )


def test_a_trajectory_survives_its_json_line() -> None:
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
    sampled = supervised_segment("p", [5, 6, 7, 8, 9], [False, True, True, False, True])
    whole = {"segments": (sampled, sampled), "messages": messages, "opening": 3}
    trajectory = Trajectory(prompt_id="p", sibling=2, finish_reason="stop", **whole)
    prompt = Prompt(prompt_id="p", domain="d", messages=messages[:1], environment="e")
    line = json.loads(json.dumps(trajectory_record(prompt, trajectory, tokenizer="t")))
    assert [m.get("weight") for m in line["messages"]] == [None, 0, None, 0, None, None, 0]
    assert "raw" not in line["messages"][5]
    read = recorded_segments(line, "p")
    assert len(read) == 2
    for segment in read:
        assert segment.token_ids_T.tolist() == sampled.token_ids_T.tolist()
        assert segment.trainable_T.tolist() == sampled.trainable_T.tolist()
    assert trajectory_record(prompt, trajectory, tokenizer="")["segments"] == []
    assert scored_record(scored([trajectory], [0.5]), 0, tokenizer="t")["reward"] == 0.5
