"""A step's tokens, log-probabilities and sampling masks, row by row against vLLM, torch and numpy.

The kernels run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

from typing import Any

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


def truncated(sizes: list[int], *, values: int = 0) -> Tensor:
    """Rows with so many finite logits; with `values`, of so many different ones."""
    chance = np.random.default_rng(sum(sizes))
    logits = torch.full((len(sizes), VOCABULARY), -torch.inf)
    for row, size in enumerate(sizes):
        ids = chance.choice(VOCABULARY, size, replace=False)
        drawn = chance.integers(0, values, size) if values else 3 * chance.standard_normal(size)
        logits[row, ids] = torch.from_numpy(drawn).float()
    return logits


class Step:
    """Rows to sample. Requests are in another order, and two more exist than have a row."""

    def __init__(
        self, logits: Tensor, temperatures: list[float] | None, unread: tuple[int, ...]
    ) -> None:
        rows, generator = len(logits), torch.Generator().manual_seed(len(logits))
        self.logits = logits.to(DEVICE)
        self.order = torch.randperm(rows + 2, generator=generator)[:rows]
        temperature = torch.rand(rows + 2, generator=generator) + 0.5
        if temperatures is not None:
            temperature[self.order] = torch.tensor(temperatures).float()
        self.states, self.temperature = self.order.int().to(DEVICE), temperature.to(DEVICE)
        seeds = torch.randint(-(2**62), 2**62, (rows + 2,), generator=generator)
        self.seeds = seeds.to(DEVICE)
        self.positions = torch.randint(0, 40_000, (rows,), generator=generator).to(DEVICE)
        self.sampled = torch.ones(rows, dtype=torch.int32)
        self.sampled[list(unread)] = 0

    def draw(self, **options: Any) -> Any:
        from keel.rollout.vllm_fast.sample_kernels import draw

        rows = {"sampled": self.sampled.to(DEVICE), "temperature": self.temperature}
        where = self.states, self.positions
        return draw(self.logits, *where, **rows, seeds=self.seeds, **options)

    def vllms_tokens(self, scaled: Tensor) -> Tensor:
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        rows = self.states, self.temperature, self.seeds, self.positions
        options = {"apply_temperature": False, "is_drafting": False}
        return gumbel_sample(scaled.to(DEVICE), *rows, **options).cpu()

    def check(self, drawn: Any, scaled: Tensor, tolerance: float) -> None:
        """Compare tokens and log-probabilities of the read rows with those of `scaled` logits."""
        read, expected = self.sampled > 0, self.vllms_tokens(scaled)
        tokens, logp = drawn.tokens.cpu()[:, 0], drawn.logp.cpu()[:, 0]
        assert tokens[read].tolist() == expected[read].tolist()
        exact = scaled.double().log_softmax(-1).gather(1, expected[:, None])[:, 0].float()
        torch.testing.assert_close(logp[read], exact[read], atol=tolerance, rtol=1e-6)


def kept_of(drawn: Any) -> list[NDArray[np.int32]]:
    """Return the sampling mask of each row."""
    sets = drawn.masks.to_cpu_nonblocking()
    if not INTERPRETED:
        torch.cuda.synchronize()
    lists = sets.tolists()
    assert lists.token_ids.dtype == np.int32
    ends = zip(lists.offsets[:-1], lists.offsets[1:], strict=True)
    return [lists.token_ids[start:stop] for start, stop in ends]


def check(
    logits: Tensor,
    *,
    top_k: int,
    temperatures: list[float] | None = None,
    unread: tuple[int, ...] = (),
    record: bool = True,
) -> None:
    step = Step(logits, temperatures, unread)
    drawn = step.draw(width=top_k, record=record)
    step.check(drawn, logits, 1e-6)
    greedy = (step.temperature.cpu()[step.order] == 0) & (step.sampled > 0)
    assert (drawn.tokens.cpu()[:, 0] == logits.float().argmax(-1))[greedy].all()
    assert (drawn.masks is not None) == record
    if record:
        rows = zip(kept_of(drawn), logits, step.sampled, strict=True)
        for kept, row, sampled in rows:
            assert kept.tolist() == (row.isfinite().nonzero()[:, 0].tolist() if sampled else [])


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


@pytest.mark.parametrize(
    ("requests", "ours"),
    [
        ([4, 0, 3, 1, 2], True),
        ([2, 0, 3, 1], True),  # nothing but temperature and truncation
        ([5, 1, 6, 7], True),
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
    assert isinstance(found.logprobs_tensors, kept_sampler._StepLogprobs) == ours
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


def check_truncated(
    logits: Tensor, top_k: list[int], top_p: list[float], temperatures: list[float] | None = None
) -> None:
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    from keel.rollout.vllm_fast.sample_kernels import Truncation

    step = Step(logits, temperatures or [1.0] * len(logits), ())
    k = torch.ones(len(logits) + 2, dtype=torch.int32)
    p = torch.full((len(logits) + 2,), 0.7)
    k[step.order], p[step.order] = torch.tensor(top_k).int(), torch.tensor(top_p).float()
    truncation = Truncation(k.to(DEVICE), p.to(DEVICE))
    drawn = step.draw(width=max(top_k), record=True, truncation=truncation)
    scaled = step.logits.float().clone()
    apply_temperature(scaled, step.states, step.temperature)
    scaled = scaled.cpu()
    truncated = torch.full_like(scaled, -torch.inf)
    for row, kept in enumerate(kept_of(drawn)):
        check_kept(kept, scaled[row], top_k[row], float(p[step.order[row]]))
        truncated[row, kept] = scaled[row, kept]
    step.check(drawn, truncated, 1e-5)


@pytest.mark.parametrize("spread", [0.01, 1, 5, 30])
@pytest.mark.parametrize("top_k", [8, 512, 1024])
def test_random_rows(spread: float, top_k: int) -> None:
    temperatures = [1.0, 0.6, 1.7, 1.0]
    rows = normal(4, spread=spread)
    check_truncated(rows, [top_k] * 4, [0.98, 0.5, 0.999, 1], temperatures)


@pytest.mark.parametrize("vocabulary", [7, 300, 4096, 5000, 32_770])
def test_vocabularies(vocabulary: int) -> None:
    top_k = [min(vocabulary, top_k) for top_k in (1, 5, 512)]
    check_truncated(normal(3, vocabulary).bfloat16(), top_k, [1, 0.9, 0.98])


def test_equals_at_the_cut() -> None:
    few = normal(4).round()
    few[1, 50:70] = few[1].max() + 1
    for top_k in (5, 100, 512):
        check_truncated(few, [top_k] * 4, [1, 0.9, 0.98, 0.3])
    signs = torch.where(normal(2) > 0, 0.0, -0.0)
    check_truncated(signs, [512, 8], [1.0, 0.5])


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
