"""Whose attention a rank takes, and what it says where FlashAttention-4's is not to be had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel.configs.schema import (
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.model.layers.flash4 import INSTALL
from keel.trainer.engine import policy
from keel.trainer.engine.policy import flash4_here

GPU, CPU = torch.device("cuda"), torch.device("cpu")
SUMS = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)


def config(*, tokens: int = 8000, kernels: Any = "auto", invariant: bool = False) -> Config:
    return Config(
        model=ModelConfig(path="some/model", batch_invariant=invariant),
        data=DataConfig(sources=(SUMS,)),
        rollout=RolloutConfig(sampling=SamplingConfig(top_k=64, max_tokens=tokens)),
        trainer=TrainerConfig(attention_kernels=kernels, zero_stage=1),
    )


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is wrong with the machine, and with the kernels: nothing, unless a test says so."""
    wrong = {"machine": "", "kernels": ""}
    monkeypatch.setattr(policy, "missing", lambda *_: wrong["machine"])
    monkeypatch.setattr(policy, "disagreement", lambda *_: wrong["kernels"])
    monkeypatch.setattr(policy, "head_shapes", lambda *_: ())
    return wrong


def here(recipe: Config, device: torch.device = GPU, dtype: Any = torch.bfloat16) -> Any:
    model: Any = SimpleNamespace(dtype=dtype)
    return flash4_here(recipe, model, device)


@pytest.mark.usefixtures("found")
def test_long_contexts_on_a_gpu_take_flash_attention_4() -> None:
    assert here(config()) == (True, "")
    assert here(config(tokens=500)) == (False, "")
    assert here(config(tokens=500, kernels="flash4")) == (True, "")
    assert here(config(kernels="torch")) == (False, "")
    assert here(config(), CPU) == (False, "")
    assert here(config(), dtype=torch.float32) == (False, "")
    with pytest.raises(RuntimeError, match=r"half precision, and model\.dtype is float32"):
        here(config(kernels="flash4"), dtype=torch.float32)
    assert here(config(invariant=True)) == (False, "")


@pytest.mark.parametrize(
    ("what", "why", "said"),
    [
        ("machine", "they are for compute capability 9 and 10, and this GPU has 8.0", ""),
        ("machine", f"{INSTALL} is not installed", "PyTorch's kernels"),
        ("kernels", f"{INSTALL} gives gradients of K that are off by 20%", "off by 20%"),
    ],
)
def test_what_is_lacking_costs_time_and_is_said_where_it_can_be_mended(
    found: dict[str, str], what: str, why: str, said: str
) -> None:
    found[what] = why
    wanted, line = here(config())
    assert not wanted and said in line and bool(line) == bool(said)
    with pytest.raises(RuntimeError, match=r"trainer\.attention_kernels = 'flash4': "):
        here(config(kernels="flash4"))
