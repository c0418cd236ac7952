from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from keel.model.load import checkpoint_tensors, load_policy
from keel.weights import pack
from keel.weights.buckets import FlatBucket, unpack_flat
from keel.weights.pack import BucketPacker
from tests.model.test_load import CONFIGS

SIZE = 6_000
MOE, DEEPSEEK = "qwen3_moe, one dense layer", "deepseek_v3, dense first"


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family])


def change(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def unpacked(packed: list[FlatBucket]) -> dict[str, Tensor]:
    assert all(flat.numel() <= SIZE or len(entries) == 1 for entries, flat in packed)
    named = [pair for entries, flat in packed for pair in unpack_flat(entries, flat)]
    assert len(dict(named)) == len(named)
    return dict(named)


def assert_current(packed: list[FlatBucket], model: PreTrainedModel, dtype: torch.dtype) -> None:
    actual, right = unpacked(packed), dict(checkpoint_tensors(model))
    assert actual.keys() == right.keys()
    for name, tensor in right.items():
        exact = name.endswith(".e_score_correction_bias")
        assert torch.equal(actual[name], tensor if exact else tensor.to(dtype)), name


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_pass_has_current_weights(family: str, dtype: torch.dtype) -> None:
    model = make(family)
    packer = BucketPacker(model, dtype, SIZE)
    first = list(packer.buckets())
    assert_current(first, model, dtype)
    for _ in range(2):
        change(model)
        again = list(packer.buckets())
        assert_current(again, model, dtype)
        assert [entries for entries, _ in again] == [entries for entries, _ in first]


def test_routing_bias_keeps_its_precision(tmp_path: Path) -> None:
    make(DEEPSEEK).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = dict(model.named_buffers())[name]
    bias.copy_(torch.linspace(14, 14.05, len(bias)))  # equal, if rounded to bfloat16
    packer = BucketPacker(model, torch.bfloat16, SIZE)
    for _ in range(2):
        actual = unpacked(list(packer.buckets()))
        assert torch.equal(actual[name], bias)
        assert actual[name.replace("e_score_correction_bias", "weight")].dtype == torch.bfloat16


@pytest.mark.parametrize("family", CONFIGS)
def test_later_passes_skip_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family)
    packer = BucketPacker(model, torch.float32, 10**9)
    (first,) = packer.buckets()
    monkeypatch.setattr(pack, "as_checkpoint", None)
    (again,) = packer.buckets()
    assert torch.equal(first[1], again[1])
    # Experts of a layer are copied together.
    assert sum(map(len, packer._runs)) <= len(model.state_dict())


@pytest.mark.parametrize(
    "change_tensor", [Tensor.t, lambda tensor: 2 * tensor.t()], ids=["view", "product"]
)
def test_computed_modules_are_converted_every_pass(
    change_tensor: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, original = make(MOE), pack.as_checkpoint

    def computed(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        named = original(model, tensors)
        return {
            name: change_tensor(tensor) if "down_proj" in name else tensor  # type: ignore[operator]
            for name, tensor in named.items()
        }

    monkeypatch.setattr(pack, "as_checkpoint", computed)
    packer = BucketPacker(model, torch.bfloat16, SIZE)
    for _ in range(3):
        actual = unpacked(list(packer.buckets()))
        for name, tensor in checkpoint_tensors(model):
            right = change_tensor(tensor) if "down_proj" in name else tensor  # type: ignore[operator]
            assert torch.equal(actual[name], right.bfloat16()), name
        change(model)


def test_modules_gather_once_in_the_same_order() -> None:
    """As under ZeRO-3, where tensors are empty between passes."""
    model = make(MOE)
    gathered: list[str] = []

    @contextmanager
    def whole(part: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        gathered.extend(part)
        copies = {name: tensor.detach().clone() for name, tensor in part.items()}
        yield copies
        for tensor in copies.values():
            tensor.data = torch.empty(0)

    packer = BucketPacker(model, torch.float32, SIZE, whole=whole)
    passes = []
    for _ in range(3):
        assert_current(list(packer.buckets()), model, torch.float32)
        passes.append(gathered.copy())
        gathered.clear()
        change(model)
    assert passes[0] == passes[1] == passes[2]
    assert sorted(passes[0]) == sorted(dict(model.named_parameters()))


def test_packing_holds_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    packer = BucketPacker(make(MOE), torch.float32, SIZE)
    number = sum(1 for _ in packer.buckets())
    made: list[weakref.ref[Tensor]] = []
    held: list[int] = []
    zeros = torch.zeros

    def watched(*size: Any, **options: Any) -> Tensor:
        held.append(sum(flat() is not None for flat in made))
        flat = zeros(*size, **options)
        made.append(weakref.ref(flat))
        return flat

    monkeypatch.setattr(torch, "zeros", watched)
    for _ in map(len, packer.buckets()):
        pass
    assert number > 3 and held == [0] * number
