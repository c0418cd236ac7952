"""Packed segments and shared prefixes give the results of separate contexts with every kernel.

Flash attention runs here with plain kernels; tests/gpu/test_attention.py tests those on GPUs."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from keel.model import attention
from keel.model.attention import (
    Contexts,
    Segments,
    attention_kept,
    use_packed_attention,
)
from keel.model.layers import flash4
from tests.model.layers.plain_attention import FAMILIES, PlainFlash

LENGTHS, FOLLOWS = (7, 3, 9, 1, 12, 4, 2, 5), (-1, 0, 0, -1, 0, -1, 5, 5)
"""Two prefixes, shared by three and by two contexts, and a context without one."""
PREFIXES = {first for first in FOLLOWS if first >= 0}


def expanded() -> tuple[list[int], list[int]]:
    """Return the rows of separate contexts, and the first place of each packed token in them."""
    starts = [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]
    own = [range(start, start + length) for start, length in zip(starts, LENGTHS, strict=True)]
    rows: list[int] = []
    for segment, first in enumerate(FOLLOWS):
        if segment not in PREFIXES:
            rows += [*(own[first] if first >= 0 else ()), *own[segment]]
    return rows, [rows.index(token) for token in range(sum(LENGTHS))]


def positions() -> Tensor:
    begun = [LENGTHS[first] if first >= 0 else 0 for first in FOLLOWS]
    counted = zip(begun, LENGTHS, strict=True)
    return torch.cat([torch.arange(start, start + length) for start, length in counted])


def states(model: PreTrainedModel, ids: Tensor, where: Tensor, segments: Segments) -> Tensor:
    output = model.base_model(
        ids[None], position_ids=where[None], use_cache=False, segments=segments
    )
    return output.last_hidden_state[0]


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", ["padded", "flash"])
def test_shared_contexts_match_separate_ones(
    family: str, kernels: str, request: pytest.FixtureRequest
) -> None:
    if kernels == "flash":
        request.getfixturevalue("plain_flash")
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(FAMILIES[family])
    shared = deepcopy(whole)
    for model in (whole, shared):
        use_packed_attention(model)
    ids, weights = torch.randint(0, 31, (sum(LENGTHS),)), torch.randn(sum(LENGTHS), 32)
    trained = torch.tensor([s not in PREFIXES for s in range(len(LENGTHS))])
    weights *= trained.repeat_interleave(torch.tensor(LENGTHS))[:, None]
    rows, places = expanded()
    contexts = Contexts.build(LENGTHS, FOLLOWS)
    apart = Segments.of([n for s, n in enumerate(contexts.lengths) if s not in PREFIXES])

    alone = states(whole, ids[rows], positions()[rows], apart)[places]
    (alone * weights).sum().backward()
    together = states(shared, ids, positions(), Segments.of(LENGTHS, follows=FOLLOWS))
    (together * weights).sum().backward()

    torch.testing.assert_close(together, alone, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(gradients(shared), gradients(whole), atol=2e-5, rtol=1e-4)


def test_keys_outside_all_windows_have_zero_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(*tensors: Tensor, dk: Tensor, **options: Any) -> None:
        dk[1] = 1.0  # skips keys 0 and 2

    package = SimpleNamespace(_flash_attn_bwd=backward)
    monkeypatch.setattr(flash4, "_package", lambda: package)
    x = torch.randn(3, 2, 8)
    _, dk, _ = flash4._flash_attn_bwd(*[x] * 6, causal=False)
    assert dk.unique(dim=0).tolist() == [[[0.0] * 8] * 2, [[1.0] * 8] * 2]


def test_copies_and_gradients_are_exact() -> None:
    contexts = Contexts.build(LENGTHS, FOLLOWS)
    x = torch.randn(sum(LENGTHS), 2, 4, dtype=torch.bfloat16, requires_grad=True)
    copies = contexts.expand(x)
    assert torch.equal(copies, x[contexts.rows])
    slope = torch.randn(copies.shape, dtype=torch.bfloat16)
    (gradient,) = torch.autograd.grad(copies, x, slope)
    exact = torch.zeros(x.shape).index_add_(0, contexts.rows, slope.float())
    torch.testing.assert_close(gradient, exact.to(torch.bfloat16), rtol=0.008, atol=1e-6)
    x64 = x.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(contexts.expand, x64)


LAYOUT = (3, 17, 1, 9, 16, 8, 2)


def test_layout_has_every_token_once() -> None:
    segments = Segments.of(LAYOUT)
    total = sum(LAYOUT)
    assert segments.offsets.tolist() == [0, 3, 20, 21, 30, 46, 54, 56]
    assert segments.longest == 17
    assert len(segments.token_of_row) == sum(count * longest for count, longest in segments.blocks)
    assert torch.equal(segments.token_of_row[segments.row_of_token], torch.arange(total))
    assert segments.blocks == ((2, 17), (2, 9), (1, 3), (1, 2), (1, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(family: str) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager")
    packed = deepcopy(plain)
    use_packed_attention(packed)
    parts = [torch.randint(0, 31, (1, length)) for length in LAYOUT]
    weights = torch.randn(sum(LAYOUT), 32)

    alone = torch.cat([plain.base_model(ids).last_hidden_state[0] for ids in parts])
    (alone * weights).sum().backward()
    where = torch.cat([torch.arange(length) for length in LAYOUT])
    together = states(packed, torch.cat(parts, 1)[0], where, Segments.of(LAYOUT))
    (together * weights).sum().backward()

    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    actual = gradients(packed)
    for name, grad in gradients(plain).items():
        bound = 1e-5 * float(grad.abs().max())
        torch.testing.assert_close(actual[name], grad, rtol=0, atol=bound, msg=name)


SEGMENTS = (3, 17, 1, 9)


@pytest.fixture
def plain_flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainFlash]:
    kernels = PlainFlash()
    monkeypatch.setattr(attention, "_has_flash", lambda *_: True)
    yield kernels
    kernels.close()


def trained(model: PreTrainedModel) -> list[Tensor]:
    """Return hidden states and all gradients."""
    torch.manual_seed(1)
    where = torch.cat([torch.arange(length) for length in SEGMENTS])
    hidden = states(model, torch.randint(0, 31, where.shape), where, Segments.of(SEGMENTS))
    (hidden * torch.randn(hidden.shape)).sum().backward()
    return [hidden.detach(), *gradients(model).values()]


def packed(model: PreTrainedModel) -> PreTrainedModel:
    copy = deepcopy(model).train()
    use_packed_attention(copy)
    return copy


def close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * max(1.0, scale))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.e2e)])
def test_attention_outputs_survive_checkpointing(plain_flash: PlainFlash, compiled: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["full"])
    expected = trained(packed(model))
    for kept, forwards in ((True, 2), (False, 4)):
        again = packed(model)
        options = {"context_fn": attention_kept} if kept else {}
        again.gradient_checkpointing_enable({"use_reentrant": False, **options})
        if compiled:
            for layer in again.get_decoder().layers:  # pyright: ignore
                layer.compile(backend="aot_eager", dynamic=True, fullgraph=True)
        plain_flash.calls.clear()
        close(trained(again), expected)
        assert [plain_flash.calls.count(half) for half in ("forward", "backward")] == [forwards, 2]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError(name="flash_attn"), "is not installed (no module flash_attn)"),
        (RuntimeError("no compiler"), "fails: RuntimeError: no compiler"),
    ],
)
def test_torch_kernels_are_restored_if_a_package_fails(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    removed: list[bool] = []
    handle = SimpleNamespace(remove=lambda: removed.append(True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash4, "replace_flash_kernels", lambda _: handle)
    monkeypatch.setattr(flash4, "find_error", Mock(side_effect=error))
    for name in ("CACHE_ENABLED", "CACHE_DIR"):
        monkeypatch.setenv(f"FLASH_ATTENTION_CUTE_DSL_{name}", "")
    model = AutoModelForCausalLM.from_config(FAMILIES["full"]).bfloat16()
    assert flash4.use_flash4(model, torch.device("cpu"), Path()).endswith(f") {reason}")
    assert removed == [True] and flash4._ACTIVE == []


def test_wrong_results_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def error() -> str:
        return flash4.find_error(4, 2, 8, [None, 9], torch.device("cpu"), torch.bfloat16)

    assert error() == ""

    def wrong(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        off = key.dtype == torch.bfloat16 and rest[-1] is not None
        return attention.attend(query, key * 1.2 if off else key, *rest)

    monkeypatch.setattr(flash4, "attend", wrong)
    assert "off by" in error()
