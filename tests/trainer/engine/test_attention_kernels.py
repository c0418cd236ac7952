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
from keel.model.layers.flash4 import INSTALL
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


@pytest.mark.parametrize(
    ("what", "why", "message"),
    [
        ("machine", "they are for compute capability 9 and 10, and this GPU has 8.0", ""),
        ("machine", f"{INSTALL} is not installed", "PyTorch's kernels"),
        ("kernels", f"{INSTALL} gives gradients of K that are off by 20%", "off by 20%"),
    ],
)
def test_missing_flash4_is_reported_if_fixable(
    found: dict[str, str], what: str, why: str, message: str
) -> None:
    found[what] = why
    expected, line = here(config())
    assert not expected and message in line and bool(line) == bool(message)
    with pytest.raises(RuntimeError, match=r"trainer\.attention_kernels"):
        here(config(kernels="flash4"))
