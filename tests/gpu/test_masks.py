"""Kept sets from truncated logits, row by row against numpy.

The kernels run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import numpy as np
import torch

from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS

pytestmark = KERNELS
VOCABULARY = 10_001
"""Not a multiple of anything."""


def sets_of(sizes: list[int], *, top_k: int, sampled: list[int] | None = None) -> None:
    """Rows with so many finite logits, in places of their own; the last in reverse order."""
    from rollout.masks import StepSets  # noqa: PLC0415  (loads vLLM)

    chance = np.random.default_rng(len(sizes))
    expected = [np.sort(chance.choice(VOCABULARY, size, replace=False)) for size in sizes]
    logits = torch.full((len(sizes), VOCABULARY), -torch.inf)
    for row, ids in enumerate(expected):
        logits[row, ids] = torch.randn(len(ids))
    source = torch.arange(len(sizes) - 1, -1, -1, dtype=torch.int32)
    happened = torch.tensor(sampled or [1] * len(sizes), dtype=torch.int32)
    step = StepSets.from_logits(
        logits.to(DEVICE), source.to(DEVICE), happened.to(DEVICE), max_num_kept=top_k
    )
    if not INTERPRETED:
        step = step.to_cpu_nonblocking()
        torch.cuda.synchronize()
    lists = step.tolists()
    assert lists.offsets is not None and len(lists.offsets) == len(sizes) + 1
    for row in range(len(sizes)):
        found = lists.token_ids[lists.offsets[row] : lists.offsets[row + 1]]
        wanted = expected[source[row]] if happened[row] else []
        assert found.dtype == np.int32 and found.tolist() == list(wanted)


def test_few_ids_come_with_the_step() -> None:
    sets_of([1, 8, 3, 40, 17], top_k=64)


def test_one_row() -> None:
    sets_of([5], top_k=8)


def test_rows_without_a_token_have_none() -> None:
    sets_of([4, 6, 2], top_k=8, sampled=[1, 0, 1])


def test_more_ids_than_travel_with_the_step_are_fetched() -> None:
    sets_of([300, 200, 250], top_k=512)


def test_more_ids_than_the_widest_top_k_are_read_from_the_bits() -> None:
    sets_of([9, 8, 3, 30], top_k=8)


def test_the_whole_vocabulary() -> None:
    sets_of([VOCABULARY, 2], top_k=VOCABULARY)
