"""The mean negative log-likelihood by its laws, and by PyTorch's cross-entropy."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from keel.rl.metrics import merge, values
from keel.rl.sft.loss import nll_loss

TOKENS = torch.tensor([3, 1, 4])
"""Of three conversations."""
SEQUENCE = torch.repeat_interleave(torch.arange(3), TOKENS)
BY_TOKENS = TOKENS.double() * 3 / TOKENS.sum()


def logp() -> torch.Tensor:
    torch.manual_seed(0)
    return (-torch.rand(8, dtype=torch.float64)).requires_grad_()


def test_with_the_weight_of_tokens_it_is_the_cross_entropy_of_all_of_them() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (8,))
    chosen = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ours = nll_loss(
        chosen, SEQUENCE, sequence_tokens=TOKENS, total_sequences=3, sequence_weight=BY_TOKENS
    )
    theirs = functional.cross_entropy(logits, targets)
    torch.testing.assert_close(ours.loss, theirs)
    assert values(ours.metrics) == pytest.approx(dict.fromkeys(("loss", "nll"), theirs.item()))
    (our_gradient,) = torch.autograd.grad(ours.loss, logits)
    (their_gradient,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(our_gradient, their_gradient)


def test_without_weights_it_is_the_mean_of_the_conversations_means() -> None:
    given = logp()
    loss = nll_loss(given, SEQUENCE, sequence_tokens=TOKENS, total_sequences=3).loss
    means = [-given[one == SEQUENCE].mean() for one in range(3)]
    torch.testing.assert_close(loss, torch.stack(means).mean())


@pytest.mark.parametrize("weight", [None, BY_TOKENS], ids=["conversations", "tokens"])
def test_shares_of_any_split_add_up(weight: torch.Tensor | None) -> None:
    given = logp()
    whole = nll_loss(
        given, SEQUENCE, sequence_tokens=TOKENS, total_sequences=3, sequence_weight=weight
    )
    cut = torch.tensor([0, 2, 2, 1, 0, 1, 0, 2])  # through conversations
    parts = [
        nll_loss(
            given[cut == part],
            SEQUENCE[cut == part],
            sequence_tokens=TOKENS,
            total_sequences=3,
            sequence_weight=weight,
        )
        for part in range(4)  # the last one has nothing
    ]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    (split,) = torch.autograd.grad(sum(part.loss for part in parts), given)
    torch.testing.assert_close(split, torch.autograd.grad(whole.loss, given)[0])
    assert values(merge(part.metrics for part in parts)) == pytest.approx(values(whole.metrics))


def test_a_token_that_is_no_number_makes_the_loss_none() -> None:
    given = logp().detach()
    given[2] = math.nan
    assert nll_loss(given, SEQUENCE, sequence_tokens=TOKENS, total_sequences=3).loss.isnan()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"total_sequences": 2}, "total_sequences = 2"),
        ({"sequence_weight": torch.tensor([1.0, -1.0, 1.0])}, r"sequence_weight\[1\]"),
        ({"sequence_tokens": torch.tensor([3, 5])}, r"sequence\[4\] = 2"),
    ],
)
def test_what_it_refuses(changes: dict[str, object], named: str) -> None:
    arguments = {"sequence_tokens": TOKENS, "total_sequences": 3, **changes}
    with pytest.raises(ValueError, match=named):
        nll_loss(logp(), SEQUENCE, **arguments)  # pyright: ignore[reportArgumentType]
