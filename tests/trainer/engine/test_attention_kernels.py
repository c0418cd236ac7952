"""FlashAttention-4 is used where possible, and its absence reported where it can be fixed."""

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
from keel.trainer.engine import policy
from keel.trainer.engine.policy import use_flash4

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
    """Detected problems of the machine and the kernels; empty by default."""
    wrong = {"machine": "", "kernels": ""}
    monkeypatch.setattr(policy, "missing", lambda *_: wrong["machine"])
    monkeypatch.setattr(policy, "disagreement", lambda *_: wrong["kernels"])
    monkeypatch.setattr(policy, "head_shapes", lambda *_: ())
    return wrong


def here(recipe: Config, device: torch.device = GPU, dtype: Any = torch.bfloat16) -> Any:
    model: Any = SimpleNamespace(dtype=dtype)
    return use_flash4(recipe, model, device)


@pytest.mark.usefixtures("found")
def test_long_contexts_on_gpu_use_flash4() -> None:
    assert here(config()) == (True, "")
    assert here(config(tokens=500)) == (False, "")
    assert here(config(tokens=500, kernels="flash4")) == (True, "")
    assert here(config(kernels="torch")) == (False, "")
    assert here(config(), CPU) == (False, "")
    assert here(config(), dtype=torch.float32) == (False, "")
    with pytest.raises(RuntimeError, match=r"model\.dtype"):
        here(config(kernels="flash4"), dtype=torch.float32)
    assert here(config(invariant=True)) == (False, "")
