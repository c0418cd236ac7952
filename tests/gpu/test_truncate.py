"""Truncation straight from the model's logits, against float64 on the CPU.

The kernels run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS

# The functions load vLLM, which stays out of a run that skips them.
# ruff: noqa: PLC0415
pytestmark = KERNELS
VOCABULARY = 10_001
"""Not a multiple of anything."""
ROUNDING = 1e-6
"""Largest error of a sum of probabilities against top_p."""


def normal(rows: int, vocabulary: int = VOCABULARY, *, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    return spread * torch.randn((rows, vocabulary), generator=generator)


def check_kept(kept: NDArray[np.int32], logits: Tensor, top_k: int, top_p: float) -> None:
    """`kept`, ascending, is the nucleus of one row's scaled logits [V], within ROUNDING."""
    values = logits.numpy()
    order = np.argsort(-values, kind="stable")[:top_k]  # of equals the lowest ids
    order = order[values[order] > -np.inf]
    weights = np.exp(values[order].astype(np.float64) - values[order[0]])
    before = (np.cumsum(weights) - weights) / weights.sum()
    surely, perhaps = len(order), len(order)
    if top_p < 1:
        surely = max(1, int((before < top_p - ROUNDING).sum()))
        perhaps = max(1, int((before < top_p + ROUNDING).sum()))
    assert surely <= len(kept) <= perhaps
    assert kept.tolist() == sorted(order[: len(kept)].tolist())


def check(
    logits: Tensor,
    top_k: list[int],
    top_p: list[float],
    *,
    temperatures: list[float] | None = None,
    unread: tuple[int, ...] = (),
    record: bool = True,
) -> None:
    """Requests are in another order than rows, and two more exist than have a row."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

    from keel.rollout.vllm_fast.sample_kernels import Truncation, draw

    rows = len(logits)
    generator = torch.Generator().manual_seed(rows)
    states = torch.randperm(rows + 2, generator=generator)[:rows]
    temperature, p = torch.rand((2, rows + 2), generator=generator) + 0.5
    k = torch.randint(1, max(top_k) + 1, (rows + 2,), generator=generator).int()
    temperature[states] = torch.tensor(temperatures or [1.0] * rows)
    k[states], p[states] = torch.tensor(top_k).int(), torch.tensor(top_p)
    seeds = torch.randint(-(2**62), 2**62, (rows + 2,), generator=generator)
    positions = torch.randint(0, 40_000, (rows,), generator=generator)
    sampled = torch.ones(rows, dtype=torch.int32)
    sampled[list(unread)] = 0
    on_device = logits.to(DEVICE)
    drawn = draw(
        on_device,
        states.int().to(DEVICE),
        positions.to(DEVICE),
        sampled=sampled.to(DEVICE),
        temperature=temperature.to(DEVICE),
        seeds=seeds.to(DEVICE),
        width=max(top_k),
        record=record,
        truncation=Truncation(k.to(DEVICE), p.to(DEVICE)),
    )
    tokens, logp = drawn.tokens.cpu()[:, 0], drawn.logp.cpu()[:, 0]
    assert (drawn.masks is not None) == record
    if drawn.masks is None:
        assert ((tokens >= 0) & (tokens < logits.shape[1])).all() and logp.isfinite().all()
        return
    sets = drawn.masks.to_cpu_nonblocking()
    if not INTERPRETED:
        torch.cuda.synchronize()
    lists = sets.tolists()
    on_device = on_device.float()
    apply_temperature(on_device, states.int().to(DEVICE), temperature.to(DEVICE))
    scaled = on_device.cpu()
    truncated = torch.full_like(scaled, -torch.inf)
    for row in range(rows):
        kept = lists.token_ids[lists.offsets[row] : lists.offsets[row + 1]]
        if row in unread:
            assert len(kept) == 0
            continue
        check_kept(kept, scaled[row], top_k[row], float(p[states[row]]))
        truncated[row, kept] = scaled[row, kept]
    expected = gumbel_sample(
        truncated.to(DEVICE),
        states.int().to(DEVICE),
        temperature.to(DEVICE),
        seeds.to(DEVICE),
        positions.to(DEVICE),
        apply_temperature=False,
        is_drafting=False,
    ).cpu()
    read = sampled > 0
    assert tokens[read].tolist() == expected[read].tolist()
    exact = truncated.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0].float()
    torch.testing.assert_close(logp[read], exact[read], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("spread", [0.01, 1, 5, 30])
@pytest.mark.parametrize("top_k", [8, 512, 1024])
def test_random_rows(spread: float, top_k: int) -> None:
    temperatures = [1.0, 0.6, 1.7, 1.0]
    check(normal(4, spread=spread), [top_k] * 4, [0.98, 0.5, 0.999, 1], temperatures=temperatures)


@pytest.mark.parametrize("vocabulary", [7, 300, 4096, 5000, 32_770])
def test_vocabularies(vocabulary: int) -> None:
    top_k = [min(vocabulary, top_k) for top_k in (1, 5, 512)]
    check(normal(3, vocabulary).bfloat16(), top_k, [1, 0.9, 0.98])


def test_equals_at_the_cut() -> None:
    few = normal(4).round()
    few[1, 50:70] = few[1].max() + 1
    for top_k in (5, 100, 512):
        check(few, [top_k] * 4, [1, 0.9, 0.98, 0.3])
    signs = torch.where(normal(2) > 0, 0.0, -0.0)
    check(signs, [512, 8], [1.0, 0.5])


@pytest.mark.parametrize("many", [False, True])
def test_nan_rows_are_flagged(many: bool) -> None:
    from keel.rollout.vllm_fast.sample_kernels import Truncation, draw

    logits = normal(5)
    for row, bad in enumerate((torch.nan, torch.inf, -torch.nan, -torch.inf)):
        logits[row, slice(None) if many or row == 3 else 23] = bad
    one = torch.ones(5, dtype=torch.int32, device=DEVICE)
    drawn = draw(
        logits.to(DEVICE),
        torch.arange(5, device=DEVICE),
        one.long(),
        sampled=one,
        temperature=one.float(),
        seeds=one.long(),
        width=512,
        record=True,
        truncation=Truncation(512 * one, 0.9 * one.float()),
    )
    assert drawn.logp.isnan()[:, 0].tolist() == [True] * 4 + [False]
    assert ((drawn.tokens >= 0) & (drawn.tokens < VOCABULARY)).all()
    assert drawn.masks is not None and (drawn.masks.counts <= 512).all()


def test_tokens_come_as_often_as_they_should() -> None:
    """Chi-square test with 512 draws from 6 remaining ids."""
    from keel.rollout.vllm_fast.sample_kernels import Truncation, draw

    draws, vocabulary = 512, 64
    chance = torch.tensor([0.3, 0.25, 0.15, 0.1, 0.08, 0.07, 0.03, 0.02])
    row = torch.full((vocabulary,), -20.0)
    ids = torch.tensor([40, 3, 63, 0, 17, 22, 9, 10])
    temperature = 0.8
    row[ids] = chance.log() * temperature
    drawn = draw(
        row.expand(draws, -1).contiguous().to(DEVICE),
        torch.zeros(draws, dtype=torch.int32, device=DEVICE),
        torch.arange(draws, device=DEVICE),
        sampled=torch.ones(draws, dtype=torch.int32, device=DEVICE),
        temperature=torch.tensor([temperature], device=DEVICE),
        seeds=torch.tensor([11], device=DEVICE),
        width=7,
        record=False,
        truncation=Truncation(
            torch.tensor([7], dtype=torch.int32, device=DEVICE), torch.tensor([0.95], device=DEVICE)
        ),
    )
    kept = ids[:6]
    counts = torch.bincount(drawn.tokens.cpu()[:, 0], minlength=vocabulary)[kept].double()
    assert counts.sum() == draws
    expected = draws * chance[:6].double() / chance[:6].sum()
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom: p = 0.001
