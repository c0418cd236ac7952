"""Every argument of `grpo_loss` that does not fit is refused by name, with its row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from keel.rl.losses import grpo_loss

INF, NAN = float("inf"), float("nan")
POSITIONAL = ("logp", "logp_old", "advantage", "sequence")
THREE = torch.zeros(3)


def call(**change: Any) -> None:
    """Two sequences of one and two tokens."""
    good: dict[str, Any] = {
        "logp": THREE,
        "logp_old": THREE,
        "advantage": THREE,
        "sequence": torch.tensor([0, 1, 1]),
        "sequence_tokens": torch.tensor([1, 2]),
        "total_sequences": 2,
        "logp_ref": THREE,
        "kl_coef": 0.1,
    }
    arguments: dict[str, Any] = {**good, **change}
    positional: list[Tensor] = [arguments.pop(name) for name in POSITIONAL]
    grpo_loss(*positional, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": torch.zeros(3, 1)}, r"logp has shape \[3, 1\]: must be 1-D"),
        ({"logp": torch.zeros(3).bfloat16()}, r"logp is torch.bfloat16: must be float32 or"),
        ({"logp_old": torch.zeros(2)}, r"logp_old has 2 rows for 3 of logp"),
        ({"logp_old": torch.zeros(3).half()}, r"logp_old is torch.float16"),
        ({"advantage": torch.zeros(1)}, r"advantage has 1 rows for 3 of logp"),
        ({"advantage": torch.tensor([0.0, NAN, NAN])}, r"advantage\[1\] = nan: must be finite"),
        ({"sequence": torch.tensor([0.0, 1.0, 1.0])}, r"sequence is torch.float32: must be int64"),
        ({"sequence": torch.tensor([0, 1])}, r"sequence has shape \[2\] for 3 rows"),
        ({"sequence": torch.tensor([0, 1, 2])}, r"sequence\[2\] = 2: out of range for 2 seq"),
        ({"sequence": torch.tensor([0, -1, 1])}, r"sequence\[1\] = -1: out of range"),
        ({"sequence_tokens": torch.tensor([[1, 2]])}, r"sequence_tokens has shape \[1, 2\]"),
        ({"sequence_tokens": torch.tensor([1.0, 2.0])}, r"sequence_tokens is torch.float32"),
        ({"sequence_tokens": torch.tensor([0, 2])}, r"sequence_tokens\[0\] = 0: must be above 0"),
        ({"sequence_tokens": torch.tensor([1, -2])}, r"sequence_tokens\[1\] = -2: must be above"),
        ({"sequence_tokens": torch.tensor([1, 1])}, r"sequence_tokens\[1\] = 1: fewer than"),
        ({"total_sequences": 1}, r"total_sequences = 1: must .* count the 2 sequences"),
        ({"total_sequences": 0}, r"total_sequences = 0"),
        ({"sequence_weight": torch.ones(3)}, r"sequence_weight is torch.float32 \[3\]: must"),
        ({"sequence_weight": torch.ones(2).long()}, r"sequence_weight is torch.int64"),
        ({"sequence_weight": torch.tensor([1.0, -1.0])}, r"sequence_weight.*not negative"),
        ({"sequence_weight": torch.tensor([1.0, torch.nan])}, r"sequence_weight.*finite"),
        ({"logp_ref": torch.zeros(4)}, r"logp_ref has 4 rows for 3 of logp"),
        ({"logp_ref": None}, r"logp_ref is None, but kl_coef is above 0"),
        ({"logp_ref": None, "kl_coef": torch.tensor([0.0, 0.0, 0.1])}, r"logp_ref is None"),
        ({"kl_coef": -0.1}, r"kl_coef = -0.1: must be a finite number, not negative"),
        ({"kl_coef": INF}, r"kl_coef = inf"),
        ({"kl_coef": NAN}, r"kl_coef = nan"),
        ({"kl_coef": torch.zeros(2)}, r"kl_coef has 2 rows for 3 of logp"),
        ({"kl_coef": torch.tensor(-0.1)}, r"kl_coef\[0\] = -0.1.*: must be finite and"),
        ({"kl_coef": torch.full((3, 1), 0.1)}, r"kl_coef has shape \[3, 1\]: must be 1-D"),
        ({"kl_coef": torch.tensor([0.0, 0.1, -0.1])}, r"kl_coef\[2\] = -0.1.*: must be finite and"),
        ({"kl_coef": torch.tensor([0.0, NAN, 0.0])}, r"kl_coef\[1\] = nan"),
        ({"clip_low": -0.1}, r"clip_low = -0.1: must be in \[0, 1\]"),
        ({"clip_low": 1.5}, r"clip_low = 1.5"),
        ({"clip_low": NAN}, r"clip_low = nan"),
        ({"clip_high": -0.1}, r"clip_high = -0.1: must not be negative"),
        ({"clip_high": NAN}, r"clip_high = nan"),
        ({"mask_delta": NAN}, r"delta is NaN"),
        (
            {"kl": "unbiased"},
            r"kl = 'unbiased': did you mean 'unbiased_k3'\? Known: unbiased_k3, k3",
        ),
        ({"kl": "k2"}, r"kl = 'k2': did you mean 'k3'"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**change)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"logp_ref": None, "kl_coef": 0.0},
        {"logp_ref": None, "kl_coef": torch.zeros(3)},
        {"logp_old": torch.zeros(3, dtype=torch.float64)},
        {"sequence_tokens": torch.tensor([5, 9], dtype=torch.int32)},
        {"total_sequences": 100},
        {"clip_low": 1.0, "clip_high": INF},
        {"mask_delta": 0.0},
        {"advantage": torch.tensor([0.5, 1.0, -0.75])},
    ],
)
def test_accepted(change: dict[str, Any]) -> None:
    call(**change)
