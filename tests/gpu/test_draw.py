"""A step's tokens, log-probabilities and sampling masks, row by row against vLLM, torch and numpy.

The kernels run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS

# The functions load vLLM, which stays out of a run that skips them.
# ruff: noqa: PLC0415
pytestmark = KERNELS
VOCABULARY = 10_001
"""Not a multiple of anything."""


def truncated(sizes: list[int], *, values: int = 0) -> Tensor:
    """Rows with so many finite logits; with `values`, of so many different ones."""
    chance = np.random.default_rng(sum(sizes))
    logits = torch.full((len(sizes), VOCABULARY), -torch.inf)
    for row, size in enumerate(sizes):
        ids = chance.choice(VOCABULARY, size, replace=False)
        drawn = chance.integers(0, values, size) if values else 3 * chance.standard_normal(size)
        logits[row, ids] = torch.from_numpy(drawn).float()
    return logits


def check(
    logits: Tensor,
    *,
    top_k: int,
    temperatures: list[float] | None = None,
    unread: tuple[int, ...] = (),
    record: bool = True,
) -> None:
    """Requests are in another order than rows, and two more exist than have a row."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from keel.rollout.vllm_fast.sample_kernels import draw

    rows = len(logits)
    generator = torch.Generator().manual_seed(rows)
    states = torch.randperm(rows + 2, generator=generator)[:rows].int()
    temperature = torch.rand(rows + 2, generator=generator) + 0.5
    for row, given in enumerate(temperatures or []):
        temperature[states[row]] = given
    seeds = torch.randint(-(2**62), 2**62, (rows + 2,), generator=generator)
    positions = torch.randint(0, 40_000, (rows,), generator=generator)
    sampled = torch.ones(rows, dtype=torch.int32)
    sampled[list(unread)] = 0
    on_device = logits.to(DEVICE)
    drawn = draw(
        on_device,
        states.to(DEVICE),
        positions.to(DEVICE),
        sampled=sampled.to(DEVICE),
        temperature=temperature.to(DEVICE),
        seeds=seeds.to(DEVICE),
        width=top_k,
        record=record,
    )
    expected = gumbel_sample(
        on_device,
        states.to(DEVICE),
        temperature.to(DEVICE),
        seeds.to(DEVICE),
        positions.to(DEVICE),
        apply_temperature=False,
        is_drafting=False,
    ).cpu()
    read = sampled > 0
    tokens, logp = drawn.tokens.cpu()[:, 0], drawn.logp.cpu()[:, 0]
    assert tokens[read].tolist() == expected[read].tolist()
    greedy = temperature[states.long()] == 0
    assert (tokens == logits.float().argmax(-1))[greedy & read].all()
    exact = logits.double().log_softmax(-1).gather(1, expected[:, None])[:, 0].float()
    torch.testing.assert_close(logp[read], exact[read], atol=1e-6, rtol=1e-6)
    assert (drawn.masks is not None) == record
    if drawn.masks is not None:
        sets = drawn.masks.to_cpu_nonblocking()
        if not INTERPRETED:
            torch.cuda.synchronize()
        lists = sets.tolists()
        assert lists.offsets is not None and len(lists.offsets) == rows + 1
        assert lists.token_ids.dtype == np.int32
        for row in range(rows):
            found = lists.token_ids[lists.offsets[row] : lists.offsets[row + 1]]
            finite = logits[row].isfinite().nonzero()[:, 0] if read[row] else torch.empty(0)
            assert found.tolist() == finite.tolist()


@pytest.mark.parametrize(
    ("sizes", "values", "top_k", "options"),
    [
        ([1, 8, 3, 40, 17, 64, 65], 0, 128, {"record": True}),
        ([1, 8, 3, 40, 17, 64, 65], 0, 128, {"record": False}),
        ([8, 30, 8, 200], 0, 100, {"temperatures": [0, 1, 1, 0]}),
        ([4, 6, 2], 0, 8, {"unread": (1,)}),  # in prefill
        ([4, 6, 2], 0, 8, {"unread": (0, 1, 2)}),
        # Greedy ties take the lowest id.
        *(([12, 190, 300], 3, top_k, {"temperatures": [0, 0, 0]}) for top_k in (8, 200, 512)),
        *(([12, 190, 300], 1, top_k, {}) for top_k in (8, 200, 512)),
    ],
)
def test_rows_equal_vllms(sizes: list[int], values: int, top_k: int, options: Any) -> None:
    check(truncated(sizes, values=values), top_k=top_k, **options)


def test_nan_rows_are_flagged() -> None:
    from keel.rollout.vllm_fast.sample_kernels import draw

    logits = truncated([5, 5, 5])
    logits[0, 23] = torch.nan
    logits[1, 17] = torch.inf
    few = torch.ones(3, dtype=torch.int32, device=DEVICE)
    drawn = draw(
        logits.to(DEVICE),
        torch.arange(3, device=DEVICE),
        few.long(),
        sampled=few,
        temperature=few.float(),
        seeds=few.long(),
        width=8,
        record=True,
    )
    assert drawn.logp.isnan().tolist() == [[True], [True], [False]]
    assert ((drawn.tokens >= 0) & (drawn.tokens < VOCABULARY)).all()


@pytest.mark.parametrize(
    ("requests", "ours"),
    [
        ([4, 0, 3, 1, 2], True),
        ([2, 0, 3, 1], True),  # nothing but temperature and truncation
        ([5, 1, 6, 9, 7], True),
        ([5], True),
        ([7], False),  # no log-probabilities
        ([0, 8, 4], False),  # log-probabilities of other ids
    ],
)
@pytest.mark.parametrize("record", [True, False])
def test_the_sampler_does_what_vllms_does(requests: list[int], ours: bool, record: bool) -> None:
    from keel.rollout.vllm_fast import sampler as kept_sampler
    from tests.gpu.sampling_parts import PROMPT, make_batch, make_runner, sampling_requests

    theirs, mine = (
        make_runner(sampling_requests(), VOCABULARY, DEVICE, record=record) for _ in range(2)
    )
    assert kept_sampler.install(mine)
    generator = torch.Generator().manual_seed(len(requests))
    logits = 4 * torch.randn((len(requests), VOCABULARY), generator=generator)
    if not INTERPRETED:  # which takes them for integers in vLLM's kernel of sampling masks
        logits = logits.bfloat16()
    lengths = [PROMPT - 2 if request == 3 else PROMPT + request for request in requests]
    batch = make_batch(np.array(requests), lengths, DEVICE)
    with torch.inference_mode():
        expected, found = (
            runner.sampler(logits.to(DEVICE, copy=True), batch) for runner in (theirs, mine)
        )
    happened = expected.num_sampled.cpu().numpy() > 0
    assert happened.tolist() == [request != 3 for request in requests]
    assert found.num_sampled.tolist() == expected.num_sampled.tolist()
    assert found.num_rejected.tolist() == expected.num_rejected.tolist()
    for name in ("num_sampled", "num_rejected", "sampled_token_ids"):
        assert getattr(found, name).dtype == getattr(expected, name).dtype
        assert getattr(found, name).shape == getattr(expected, name).shape
    same = found.sampled_token_ids == expected.sampled_token_ids
    assert same.cpu().numpy()[happened].all()
    assert isinstance(found.logprobs_tensors, kept_sampler.StepLogprobs) == ours
    if expected.logprobs_tensors is not None:
        wanted, got = (output.logprobs_tensors.tolists() for output in (expected, found))
        np.testing.assert_allclose(
            got.logprobs[happened], wanted.logprobs[happened], atol=2e-6, rtol=1e-6
        )
        assert got.slice_request(0, 1).logprobs.shape == wanted.slice_request(0, 1).logprobs.shape
    assert (found.sampling_mask_tensors is not None) == record
    if record:
        wanted, got = (output.sampling_mask_tensors.tolists() for output in (expected, found))
        assert got.offsets.tolist() == wanted.offsets.tolist()
        assert got.token_ids.tolist() == wanted.token_ids.tolist()


def test_reused_slots_take_the_new_sampling() -> None:
    """Parameters go to the device when requests come, and not in each step."""
    from vllm import SamplingParams

    from keel.rollout.vllm_fast import sampler as kept_sampler
    from tests.gpu.sampling_parts import PROMPT, make_batch, make_runner, sampling_requests

    theirs, mine = (make_runner(sampling_requests(), 500, DEVICE, record=True) for _ in range(2))
    assert kept_sampler.install(mine)
    logits = 4 * torch.randn((2, 500), generator=torch.Generator().manual_seed(7))
    written: list[bool] = []
    states = mine.sampler.sampling_states
    write = states.apply_staged_writes
    states.apply_staged_writes = lambda: (written.append(True), write())
    for number in range(4):
        if number == 2:
            for runner in (theirs, mine):
                another = SamplingParams(seed=40, logprobs=0, top_k=3, temperature=1.8)
                runner.sampler.add_request(1, another)
        batch = make_batch(np.array([1, 0]), [PROMPT + 3 + number] * 2, DEVICE)
        with torch.inference_mode():
            for runner in (theirs, mine):
                runner.sampler.apply_staged_writes()
            expected, found = (
                runner.sampler(logits.to(DEVICE, copy=True), batch) for runner in (theirs, mine)
            )
        assert found.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
        wanted, got = (output.sampling_mask_tensors.tolists() for output in (expected, found))
        assert got.token_ids.tolist() == wanted.token_ids.tolist()
    assert len(written) == 2  # the first step after it was installed, and when one came
