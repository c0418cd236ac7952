import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from keel.model.load import checkpoint_tensors, load_policy
from keel.weights import sender
from keel.weights.channel import ALIGNMENT, FlatBucket, HostData, Receiver, unpack_flat
from keel.weights.sender import BucketPacker
from tests.buckets import data_of, pack_buckets, unpack_bucket
from tests.model.test_load import MOE_LAYERS, built

SIZE = 6_000
MOE, DEEPSEEK = "qwen3_moe", "deepseek_v3"


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


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(MOE, torch.float32), *((family, torch.bfloat16) for family in MOE_LAYERS)],
)
def test_every_pass_has_current_weights(family: str, dtype: torch.dtype) -> None:
    model = built(family)
    packer = BucketPacker(model, dtype, SIZE)
    first = list(packer.buckets())
    assert_current(first, model, dtype)
    for _ in range(2):
        change(model)
        again = list(packer.buckets())
        assert_current(again, model, dtype)
        assert [entries for entries, _ in again] == [entries for entries, _ in first]


def test_routing_bias_keeps_its_precision(tmp_path: Path) -> None:
    built(DEEPSEEK).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = dict(model.named_buffers())[name]
    bias.copy_(torch.linspace(14, 14.05, len(bias)))  # equal, if rounded to bfloat16
    packer = BucketPacker(model, torch.bfloat16, SIZE)
    for _ in range(2):
        actual = unpacked(list(packer.buckets()))
        assert torch.equal(actual[name], bias)
        assert actual[name.replace("e_score_correction_bias", "weight")].dtype == torch.bfloat16


@pytest.mark.parametrize("family", MOE_LAYERS)
def test_later_passes_skip_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(family)
    packer = BucketPacker(model, torch.float32, 10**7)
    (first,) = packer.buckets()
    monkeypatch.setattr(sender, "as_checkpoint", None)
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
    model, original = built(MOE), sender.as_checkpoint

    def computed(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        named = original(model, tensors)
        return {
            name: change_tensor(tensor) if "down_proj" in name else tensor  # type: ignore[operator]
            for name, tensor in named.items()
        }

    monkeypatch.setattr(sender, "as_checkpoint", computed)
    packer = BucketPacker(model, torch.bfloat16, SIZE)
    for _ in range(3):
        actual = unpacked(list(packer.buckets()))
        for name, tensor in checkpoint_tensors(model):
            right = change_tensor(tensor) if "down_proj" in name else tensor  # type: ignore[operator]
            assert torch.equal(actual[name], right.bfloat16()), name
        change(model)


def test_modules_gather_once_in_the_same_order() -> None:
    model = built(MOE)
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
    packer = BucketPacker(built(MOE), torch.float32, SIZE)
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


# Buckets.

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.uint8]


def random_tensors(shapes: list[list[int]], dtypes: list[torch.dtype]) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"tensor.{i}", torch.randint(0, 100, shape, generator=generator).to(dtype))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(DTYPES)), max_size=12
    ),
    st.integers(1, 500),
)
def test_packing_round_trips(specs: list[tuple[list[int], torch.dtype]], bucket_bytes: int) -> None:
    tensors = random_tensors([shape for shape, _ in specs], [dtype for _, dtype in specs])
    buckets = list(pack_buckets(tensors, bucket_bytes))
    unpacked = [pair for bucket in buckets for pair in unpack_bucket(bucket)]
    assert [name for name, _ in unpacked] == [name for name, _ in tensors]
    for (_, packed), (_, original) in zip(unpacked, tensors, strict=True):
        assert packed.dtype == original.dtype
        assert torch.equal(packed, original)
    for bucket in buckets:
        assert all(entry.offset % ALIGNMENT == 0 for entry in bucket.entries)
        assert len(bucket.entries) == 1 or data_of(bucket).size <= bucket_bytes + ALIGNMENT


@pytest.mark.parametrize("writeable", [True, False])
def test_read_only_bytes_are_copied(writeable: bool) -> None:
    data = HostData(np.zeros(16, np.uint8))
    data.array.flags.writeable = writeable
    flat = data.read(Receiver(torch.device("cpu")), to_device=False, keep=True)
    flat.view(torch.float32)[:4] = 1.0
    assert (data.array.view(np.float32) == (1.0 if writeable else 0.0)).all()


# The manifest.

NAMES = ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.1.a", "model.layers.2.a"]


def checklist(names: list[str], **options: Any) -> Any:
    from keel.weights.loader import TensorChecklist  # noqa: PLC0415  (loads vLLM)

    return TensorChecklist(names, **options)


def update(manifest: Any, *names: str) -> None:
    manifest.begin()
    for bucket in pack_buckets([(name, torch.ones(2)) for name in names], 8):
        manifest.arrived(bucket)
    manifest.finish()


@pytest.mark.e2e
def test_missing_and_unknown_tensors_are_named() -> None:
    manifest = checklist(NAMES, layers=3, tied=False, decoder="model")
    for _ in range(2):
        update(manifest, *reversed(NAMES))
    with pytest.raises(ValueError, match=r"layers.1.a"):
        update(manifest, *(name for name in NAMES if name != "model.layers.1.a"))
    with pytest.raises(ValueError, match=r"layers.0.b"):
        update(manifest, *NAMES, "model.layers.0.b")
    # Layers for multi-token prediction come last and are not loaded.
    update(checklist(NAMES, layers=2, tied=False), *NAMES[:3])


@pytest.mark.e2e
def test_unloaded_tensors_are_not_expected() -> None:
    biases = [f"gpt_neox.layers.{n}.attention.dense.bias" for n in range(2)]
    masks = [f"gpt_neox.layers.{n}.attention.{m}bias" for n in range(2) for m in ("", "masked_")]
    computed = ["gpt_neox.layers.0.attention.rotary_emb.inv_freq"]
    unread = [r"attention.bias", r"attention.masked_bias", r"layers\.1.*"]
    manifest = checklist([*biases, *masks, *computed], layers=2, tied=False, unread=unread)
    update(manifest, *biases)
    with pytest.raises(ValueError, match=r"layers.1.attention.dense"):
        update(manifest, biases[0])


@pytest.mark.e2e
def test_decoder_only_checkpoints_match() -> None:
    manifest = checklist(["wte.weight", "h.0.b"], layers=1, tied=True, decoder="transformer")
    update(manifest, "transformer.wte.weight", "transformer.h.0.b", "lm_head.weight")
    with pytest.raises(ValueError, match=r"h.0.c"):
        update(manifest, "transformer.wte.weight", "transformer.h.0.c")


@pytest.mark.e2e
@pytest.mark.parametrize("published", [NAMES, [*NAMES, "lm_head.weight"]])
@pytest.mark.parametrize("stored", [NAMES, [*NAMES, "lm_head.weight"]])
def test_tied_head_is_optional(published: list[str], stored: list[str]) -> None:
    update(checklist(stored, layers=3, tied=True), *published)
