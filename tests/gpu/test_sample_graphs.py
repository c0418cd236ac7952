"""Sampling by a CUDA graph against sampling without one.

The inputs of graphs are also checked under Triton's interpreter (TRITON_INTERPRET=1).
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS

# The functions load vLLM, which stays out of a run that skips them.
# ruff: noqa: PLC0415
pytestmark = KERNELS
VOCABULARY, HIDDEN = 10_001, 64
GRAPH = pytest.mark.skipif(INTERPRETED, reason="no NVIDIA GPU is visible (CUDA graphs)")


def test_rows_are_gathered_and_the_rest_padded() -> None:
    from keel.rollout.vllm_fast.sampler import _fill_rows, _SamplingRows

    into = _SamplingRows.allocate(7, DEVICE)
    for each in into:
        each.fill_(9)
    of = {
        "temperature": torch.tensor([0.5, 0.6, 0.7], device=DEVICE),
        "top_k": torch.tensor([5, 6, 7], dtype=torch.int32, device=DEVICE),
        "top_p": torch.tensor([0.1, 0.2, 0.3], device=DEVICE),
        "seeds": torch.tensor([11, 12, -13], device=DEVICE),
    }
    _fill_rows(into, torch.tensor([2, 0, 1], device=DEVICE), 5, **of)
    assert into.temperature.tolist() == pytest.approx([0.7, 0.5, 0.6, 1, 1, 9, 9])
    assert into.top_k.tolist() == [7, 5, 6, 1, 1, 9, 9]
    assert into.top_p.tolist() == pytest.approx([0.3, 0.1, 0.2, 1, 1, 9, 9])
    assert into.seeds.tolist() == [-13, 11, 12, 0, 0, 9, 9]
    assert into.sampled.tolist() == [1, 1, 1, 0, 0, 9, 9]


class Bench:
    """Model runner with the fields that sampling reads."""

    def __init__(self, *, record: bool = True) -> None:
        from vllm import SamplingParams

        from keel.rollout.vllm_fast import sampler
        from tests.gpu.sampling_parts import make_runner, sampling_requests

        torch.manual_seed(0)
        requests = sampling_requests()[:6]
        requests[3] = SamplingParams(seed=4, logprobs=0, top_k=300, top_p=0.5)
        requests[4] = SamplingParams(seed=5, logprobs=0, top_k=200, top_p=0.8)
        self.runner = make_runner(requests, VOCABULARY, DEVICE, record=record)
        assert sampler.install(self.runner)
        head = torch.randn(HIDDEN, VOCABULARY, device=DEVICE)
        self.fixed = torch.zeros(16, HIDDEN, device=DEVICE)
        self.positions = torch.zeros(16, dtype=torch.int64, device=DEVICE)
        self.runner.max_num_reqs = 8
        self.runner.model = SimpleNamespace(compute_logits=lambda hidden: 0.3 * hidden @ head)
        self.runner.cudagraph_manager = SimpleNamespace(hidden_states=self.fixed)
        self.runner.input_buffers = SimpleNamespace(positions=self.positions)
        self.runner.sample = self.eagerly
        self.eager = 0

    def eagerly(self, hidden: Any, batch: Any, grammar: Any) -> Any:
        self.eager += 1
        logits = self.runner.model.compute_logits(hidden[batch.logits_indices])
        made = self.runner.sampler(logits, batch)
        return made, made.num_sampled, made.num_rejected

    def step(self, requests: list[int], size: int, place: int) -> Any:
        from tests.gpu.sampling_parts import make_batch

        batch = make_batch(np.array(requests), [place + r for r in requests], DEVICE)
        batch.num_tokens, batch.num_tokens_after_padding = len(requests), size
        batch.num_draft_tokens = 0
        self.fixed.copy_(torch.randn(self.fixed.shape))
        self.positions[: len(requests)] = batch.positions
        return batch


def lists(output: Any) -> tuple[list[int], list[int], Any]:
    """Return tokens, numbers of sampled tokens and sampling masks."""
    sampled = output.sampled_token_ids[:, 0].tolist(), output.num_sampled.tolist()
    if output.sampling_mask_tensors is None:
        return *sampled, None
    found = output.sampling_mask_tensors.tolists()
    return *sampled, (found.offsets.tolist(), found.token_ids.tolist())


def logp(output: Any) -> Any:
    return output.logprobs_tensors.tolists().logprobs[:, 0]


def check(bench: Bench, graphs: Any, requests: list[int], size: int, *, at: int) -> None:
    """Check that a step by its graph equals the eager step."""
    batch = bench.step(requests, size, at)
    expected = bench.eagerly(bench.fixed[:size], batch, None)
    bench.eager = 0
    found = graphs.sample(bench.fixed[:size], batch, None)
    assert bench.eager == 0
    assert lists(found[0]) == lists(expected[0])
    # The head sums in another order.
    np.testing.assert_allclose(logp(found[0]), logp(expected[0]), atol=1e-4)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.tolist() == theirs.tolist()


def without_graphs(bench: Bench, patch: pytest.MonkeyPatch) -> tuple[Any, list[tuple[int, int]]]:
    """Return `_SampleGraphs` with plain calls as graphs, and the list of captures."""
    from keel.rollout.vllm_fast import sampler

    patch.setattr(torch.cuda, "Stream", lambda: None)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    graphs: Any = sampler._SampleGraphs(bench.runner)
    made: list[tuple[int, int]] = []

    def capture(size: int, width: int) -> list[Any]:
        assert int(graphs._rows.top_k.max()) <= width, "rows of an earlier step"
        made.append((size, width))
        room = [sampler._empty_like(graphs._draw(size, width)) for _ in range(sampler._COPIES)]

        def replayed(drawn: Any) -> Any:
            again = lambda: sampler._copy(graphs._draw(size, width), drawn)  # noqa: E731
            return SimpleNamespace(replay=again), drawn

        return [replayed(drawn) for drawn in room]

    graphs._capture = capture
    return graphs, made


@pytest.mark.parametrize("record", [True, False])
def test_graphs_draw_like_eager_sampling(record: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(record=record)
    graphs, made = without_graphs(bench, monkeypatch)
    steps = [([1, 3, 4], 4), ([0], 1), ([2, 0, 1], 4)]
    with torch.inference_mode():
        for place, (requests, size) in enumerate(steps):
            check(bench, graphs, requests, size, at=8 + place)
    assert made == [(8, 300), (4, 300), (1, 8)]  # the largest first


@GRAPH
@pytest.mark.parametrize("record", [True, False])
def test_a_graph_draws_what_is_drawn_without(record: bool) -> None:
    from keel.rollout.vllm_fast.sampler import _SampleGraphs

    bench = Bench(record=record)
    graphs = _SampleGraphs(bench.runner)
    with torch.inference_mode():
        for place, (requests, size) in enumerate(
            [([1, 0, 4], 4), ([1, 0, 4], 4), ([3, 2, 1], 4), ([2], 2), ([4, 3, 2, 1, 0], 8)] * 2
        ):
            check(bench, graphs, requests, size, at=8 + place)


@GRAPH
def test_two_steps_may_be_in_flight() -> None:
    from keel.rollout.vllm_fast.sampler import _SampleGraphs

    bench = Bench()
    graphs = _SampleGraphs(bench.runner)
    with torch.inference_mode():
        outputs: list[Any] = []
        for place in range(2):
            batch = bench.step([0, 1, 2], 4, 8 + place)
            outputs.append(bench.eagerly(bench.fixed[:4], batch, None)[0])
            outputs.append(graphs.sample(bench.fixed[:4], batch, None)[0])
    one, mine, two, last = (lists(output) for output in outputs)
    assert (mine, last) == (one, two)
    assert one != two
