"""vLLM's sampler and batches without an engine."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

PROMPT = 5
"""Tokens of each request's prompt."""


def sampling_requests() -> list[SamplingParams]:
    """Requests whose truncation, temperature and log-probabilities differ."""
    return [
        SamplingParams(seed=1, logprobs=0, top_k=8),
        SamplingParams(seed=2, logprobs=0, top_k=300, temperature=0.7),
        SamplingParams(seed=3, logprobs=0, top_k=40, top_p=0.9, temperature=1.3),
        SamplingParams(seed=4, logprobs=0, top_k=512, top_p=0.5),
        SamplingParams(seed=5, logprobs=0, top_k=200),
        SamplingParams(seed=6, logprobs=0, temperature=0),
        SamplingParams(seed=7, logprobs=0, temperature=0.9),
        SamplingParams(seed=8, top_k=20),
        SamplingParams(seed=9, logprobs=2, top_k=20),
    ]


def make_runner(
    parameters: Sequence[SamplingParams], vocabulary: int, device: torch.device, *, record: bool
) -> Any:
    """Model runner with one request for each of `parameters`.

    Has the fields that `keel.rollout.vllm_fast.sampler.install` reads.
    """
    config: Any = SimpleNamespace(reasoning_config=None)
    states = RequestState(len(parameters), 64, 64, 0, vocabulary, device)
    states.prefill_len.np[:] = PROMPT
    states.prefill_len.copy_to_uva()
    sampler = Sampler(
        config,
        len(parameters),
        vocabulary,
        device,
        states,
        logprobs_mode="processed_logprobs",
        return_sampling_mask=record,
    )
    sampler.use_flashinfer = False
    for request, one in enumerate(parameters):
        sampler.add_request(request, one)
    sampler.apply_staged_writes()
    return SimpleNamespace(
        sampler=sampler, rejection_sampler=None, batch_sharder=None, device=device
    )


def make_batch(requests: NDArray[np.int64], lengths: Sequence[int], device: torch.device) -> Any:
    """Batch with the `InputBatch` fields that the sampler reads.

    Row r belongs to request `requests[r]` with `lengths[r]` tokens.
    """
    rows = len(requests)
    mapping = torch.from_numpy(requests).to(device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=rows,
        idx_mapping=mapping,
        expanded_idx_mapping=mapping,
        idx_mapping_np=requests,
        expanded_local_pos=torch.zeros(rows, dtype=torch.int32, device=device),
        cu_num_logits=torch.arange(rows + 1, dtype=torch.int32, device=device),
        cu_num_logits_np=np.arange(rows + 1, dtype=np.int32),
        has_prefill=min(lengths) <= PROMPT,
        logits_indices=torch.arange(rows, device=device),
        positions=torch.tensor(lengths, device=device) - 1,
        input_ids=torch.zeros(rows, dtype=torch.int32, device=device),
        seq_lens=seq_lens.to(device),
        seq_lens_cpu_upper_bound=seq_lens,
    )
