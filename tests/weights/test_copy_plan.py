"""Copies of checkpoint tensors into kernel tensors, merged into few."""

import random
from math import prod

import pytest
import torch
from torch import Tensor

from keel.weights.channel import FlatBucket, TensorEntry
from keel.weights.copy_plan import CopyPlan, _CopyPiece, _merge_pieces, _simplify_dims
from tests.buckets import pack_flat

BF16 = torch.bfloat16
_Placed = tuple[TensorEntry, tuple[_CopyPiece, ...]]


def bucket_of(tensors: dict[str, Tensor]) -> FlatBucket:
    (bucket,) = pack_flat(tensors.items(), 2**30)
    return bucket


def placed(tensor: Tensor, *parts: tuple[int, Tensor, Tensor]) -> _Placed:
    """parts: (kernel index, view of its tensor, view of `tensor`)."""
    pieces = tuple(
        _CopyPiece(
            index,
            int(to.storage_offset()),
            int(part.storage_offset()) - int(tensor.storage_offset()),
            _simplify_dims(part.shape, to.stride(), part.stride()),
            tensor.dtype,
        )
        for index, to, part in parts
    )
    return bucket_of({"": tensor})[0][0], pieces


def experts(count: int, inner: int, hidden: int, *, rank: int = 0, ranks: int = 1) -> tuple:
    """Per-expert tensors of a layer, and their places in the fused tensors of a rank."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    here = inner // ranks
    w13 = torch.zeros(count, 2 * here, hidden, dtype=BF16)
    w2 = torch.zeros(count, hidden, here, dtype=BF16)
    plan: dict[str, _Placed] = {}
    for e in range(count):
        gate, up = torch.randn(2, inner, hidden).to(BF16).unbind()
        down = torch.randn(hidden, inner).to(BF16)
        gate, up = gate.clone(), up.clone()
        shard = slice(rank * here, (rank + 1) * here)
        tensors |= {f"{e}.gate": gate, f"{e}.up": up, f"{e}.down": down}
        plan[f"{e}.gate"] = placed(gate, (0, w13[e, :here], gate[shard]))
        plan[f"{e}.up"] = placed(up, (0, w13[e, here:], up[shard]))
        plan[f"{e}.down"] = placed(down, (1, w2[e], down[:, shard]))
    right13 = torch.stack(
        [torch.cat([tensors[f"{e}.{k}"][shard] for k in ("gate", "up")]) for e in range(count)]
    )
    right2 = torch.stack([tensors[f"{e}.down"][:, shard] for e in range(count)])
    return tensors, CopyPlan([w13, w2], plan), right13, right2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("order", ["expert", "kind"])
def test_experts_of_a_layer_are_two_copies(ranks: int, order: str) -> None:
    tensors, plan, right13, right2 = experts(6, 8, 16, rank=ranks - 1, ranks=ranks)
    if order == "kind":  # all gates, all ups, all downs
        tensors = dict(sorted(tensors.items(), key=lambda item: item[0].partition(".")[2]))
    entries, data = bucket_of(tensors)
    for _ in range(2):  # checked, then from memory
        for kernel in plan.kernels:
            kernel.fill_(float("nan"))
        plan.load(entries, data)
        assert torch.equal(plan.kernels[0], right13) and torch.equal(plan.kernels[1], right2)
    (entries, program) = plan._programs[entries[0].name]
    assert sum(len(targets) for _, (targets, _) in program) == 2


def test_joined_copies_equal_single_ones() -> None:
    draw = random.Random(0)
    joined_any = 0
    for trial in range(150):
        torch.manual_seed(trial)
        rows, columns = draw.choice([4, 6, 12]), draw.choice([4, 8, 10])
        kernel = torch.zeros(rows, columns, dtype=BF16)
        if draw.random() < 0.3:
            kernel = kernel.t()
        cuts = sorted(draw.sample(range(1, kernel.shape[0]), draw.choice([0, 1, 3])))
        bounds = list(zip([0, *cuts], [*cuts, kernel.shape[0]], strict=True))
        right = torch.randn(kernel.shape).to(BF16)
        pieces: dict[str, _Placed] = {}
        sources: dict[str, Tensor] = {}
        for low, high in bounds:
            for column in draw.choice([[slice(None)], [slice(0, 2), slice(2, None)]]):
                name = f"t{len(sources)}"
                part = right[low:high, column]
                wide = torch.randn(part.shape[0] + 2, part.shape[1] + 3).to(BF16)
                view = wide[1:-1, 2:-1] if draw.random() < 0.5 else wide[: len(part), :-3]
                view.copy_(part)
                sources[name] = wide
                pieces[name] = placed(wide, (0, kernel[low:high, column], view))
        plan = CopyPlan([kernel], pieces)
        names = draw.sample(list(sources), len(sources))
        entries, data = bucket_of({name: sources[name] for name in names})
        plain = [p for entry in entries for p in plan._pieces(entry)]
        joined = _merge_pieces(plain)
        joined_any += len(joined) < len(plain)
        assert sum(prod(n for n, _, _ in p.dims) for p in joined) == kernel.numel()
        for _ in range(2):
            kernel.fill_(float("nan"))
            plan.load(entries, data)
            assert torch.equal(kernel, right)
    assert joined_any > 3


def test_conversion_equals_copy() -> None:
    bias = torch.randn(5, 7).to(BF16)
    kernel = torch.zeros(5, 7)
    plan = CopyPlan([kernel], {"bias": placed(bias, (0, kernel, bias))})
    entries, data = bucket_of({"bias": bias})
    for _ in range(2):
        kernel.zero_()
        plan.load(entries, data)
        assert torch.equal(kernel, bias.float())


def test_unaligned_buckets_are_copied() -> None:
    tensors, plan, right13, right2 = experts(3, 4, 8)
    entries, data = bucket_of(tensors)
    for shift in (1, 8, 64):
        for kernel in plan.kernels:
            kernel.fill_(0)
        moved = torch.cat([data.new_zeros(shift), data])[shift:]
        plan.load(entries, moved)
        assert torch.equal(plan.kernels[0], right13) and torch.equal(plan.kernels[1], right2)


def test_changed_tensors_are_refused() -> None:
    tensors, plan, *_ = experts(2, 4, 8)
    with pytest.raises(ValueError, match=r"'new'.*absent"):
        plan.load(*bucket_of({"new": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"'0\.up'.*float32.*bfloat16"):
        plan.load(*bucket_of({"0.up": tensors["0.up"].float()}))
    entries, data = bucket_of(tensors)
    plan.load(entries, data)
    plan.load(entries[:3], data[: entries[3].offset])  # another bucket that begins alike
