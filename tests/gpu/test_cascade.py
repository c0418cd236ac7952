"""Attention in which what rows share is read once, against attention in float64.

The kernels run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS

# The functions load vLLM, which stays out of a run that skips them.
# ruff: noqa: PLC0415
pytestmark = KERNELS
PAGE = 16


@dataclass
class Cache:
    """Rows of a batch, and where their tokens are."""

    width: int = 24
    """Blocks of a row, at most."""
    rows: list[list[int]] = field(default_factory=list[list[int]])
    lengths: list[int] = field(default_factory=list[int])
    used: int = 1

    def add(self, length: int, begin: list[int] | None = None) -> list[int]:
        """A row, which has these blocks of another's at its beginning."""
        blocks = list(begin or [])
        new = -(-length // PAGE) - len(blocks)
        blocks += range(self.used, self.used + new)
        self.used += new
        self.rows.append(blocks)
        self.lengths.append(length)
        return blocks

    def table(self) -> Tensor:
        """Blocks that a row does not have are what another row had there."""
        table = torch.full((len(self.rows), self.width), 3, dtype=torch.int32)
        for row, blocks in enumerate(self.rows):
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return table.to(DEVICE)


def groups(*sizes: int, prompt: int = 6 * PAGE, common: int = 0) -> Cache:
    """Groups of rows that share a prompt; all prompts share their first `common` tokens."""
    cache = Cache()
    first = cache.add(common) if common else []
    if common:
        cache.rows.clear()
        cache.lengths.clear()
    for size in sizes:
        shared = cache.add(prompt, first)[: prompt // PAGE]
        cache.rows.pop()
        cache.lengths.pop()
        for number in range(size):
            cache.add(prompt + 1 + 37 * number % 150, shared)
    return cache


def check(cache: Cache, queries: int = 4, keys: int = 2, size: int = 64, most: int = 0) -> None:
    """Check that every row attends to exactly its own tokens."""
    from keel.rollout.vllm_fast.cascade.kernels import Heads, Scratch, attend, plan

    torch.manual_seed(0)
    rows = len(cache.rows)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    made = torch.randn(cache.used, keys, PAGE, 2 * size, device=DEVICE).to(dtype)
    query = torch.randn(rows, queries, size, device=DEVICE).to(dtype)
    out = torch.full_like(query, float("nan"))
    table, lengths = cache.table(), torch.tensor(cache.lengths, dtype=torch.int32, device=DEVICE)
    key, value = made.transpose(1, 2).split(size, dim=-1)
    heads = Heads(queries, keys, size, PAGE)
    scratch = Scratch(heads, most or rows, torch.device(DEVICE))
    plan(scratch, table, lengths)
    attend(scratch, query, key, value, table, lengths, size**-0.5, out)
    for row, (blocks, length) in enumerate(zip(cache.rows, cache.lengths, strict=True)):
        if not length:
            assert not out[row].any()
            continue
        k = key[blocks].flatten(0, 1)[:length].double().repeat_interleave(queries // keys, 1)
        v = value[blocks].flatten(0, 1)[:length].double().repeat_interleave(queries // keys, 1)
        logits = torch.einsum("hd,nhd->hn", query[row].double(), k) * size**-0.5
        wanted = torch.einsum("hn,nhd->hd", logits.softmax(-1), v)
        tolerance = 1e-5 if INTERPRETED else 2e-2
        torch.testing.assert_close(out[row].double(), wanted, rtol=tolerance, atol=tolerance)


def planned(cache: Cache, queries: int = 4, keys: int = 2) -> tuple[list[int], list[int]]:
    """First row of each one's segment, and the tokens it shares."""
    from keel.rollout.vllm_fast.cascade.kernels import Heads, Scratch, plan

    heads = Heads(queries, keys, 64, PAGE)
    scratch = Scratch(heads, len(cache.rows), torch.device(DEVICE))
    lengths = torch.tensor(cache.lengths, dtype=torch.int32, device=DEVICE)
    plan(scratch, cache.table(), lengths)
    return scratch.leader.tolist(), scratch.shared.tolist()


def wide(cache: Cache, width: int) -> Cache:
    cache.width = width
    return cache


def two_rows(stale: bool = False) -> Cache:
    """Two rows with the same blocks. The second begins with the whole first one, or has blocks that
    the first one no longer uses."""
    if stale:
        return Cache(rows=[[3] * 8, [3] * 8], lengths=[2 * PAGE, 8 * PAGE], used=4)
    cache = Cache()
    cache.add(6 * PAGE, cache.add(6 * PAGE))
    return cache


@pytest.mark.parametrize(
    ("cache", "leaders", "shared"),
    [
        (groups(4, 1, 3), [0, 0, 0, 0, 4, 5, 5, 5], [96, 96, 96, 96, 0, 96, 96, 96]),
        (groups(3, 3, common=5 * PAGE, prompt=12 * PAGE), [0, 0, 0, 3, 3, 3], [192] * 6),
        (two_rows(), None, [80, 80]),  # each row keeps its decoded token
        (two_rows(stale=True), None, [0, 0]),
        (groups(40), [8 * (row // 8) for row in range(40)], None),
        (wide(groups(2, prompt=200 * PAGE), 220), None, [3200, 3200]),
    ],
    ids=["group", "less in common", "decoded token", "stale blocks", "many rows", "long prompt"],
)
def test_plans(cache: Cache, leaders: list[int] | None, shared: list[int] | None) -> None:
    ours = planned(cache)
    assert ours[0] == (leaders or ours[0])
    assert ours[1] == (shared or ours[1])


@pytest.mark.parametrize(
    ("cache", "queries", "keys"),
    [
        (groups(3, 10, 1, 6), 4, 2),
        (groups(1, 1, 1, 1, 1), 4, 2),
        (groups(21), 4, 2),  # larger than a tile
        (wide(groups(2, prompt=70 * PAGE), 100), 4, 2),  # cut into many shares
        *((groups(5, 2), *heads) for heads in ((2, 2), (7, 1), (16, 2), (6, 2))),
    ],
)
def test_attention(cache: Cache, queries: int, keys: int) -> None:
    check(cache, queries, keys)


def test_rows_without_a_request_are_zero() -> None:
    cache = groups(3)
    for _ in range(2):
        cache.rows.append([])
        cache.lengths.append(0)
    check(cache)


def test_rows_are_cut_by_their_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from keel.rollout.vllm_fast.cascade import kernels

    monkeypatch.setattr(kernels, "PARTS", 8)
    monkeypatch.setattr(kernels, "LONGER", 8)
    monkeypatch.setattr(kernels, "SLICE", 64)
    assert kernels.Heads(4, 2, 64, PAGE).splits(8) == (1, 4)
    cache = groups(4, 1, 3, prompt=14 * PAGE)
    cache.add(7 * PAGE)
    check(wide(cache, 40))
