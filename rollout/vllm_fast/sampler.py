"""Replaces the last part of vLLM's sampler on Model Runner V2.
`keel.rollout.vllm_fast.sample_kernels` draws the token and computes its log-probability and its
mask. It also applies temperature and truncation if nothing else changes the logits. Batches that
the kernels do not support use vLLM's sampler."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsLists
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from keel.rollout.vllm_fast.sample_kernels import SampledRows, Truncation, draw
from keel.rollout.vllm_fast.step_arrays import UNMASKED
from keel.rollout.vllm_fast.truncate_kernels import WIDEST_TOP_K

_PROCESSORS = [LogitBiasState, PenaltiesState, BadWordsState]
"""vLLM's logits processors. `KeptSampler.only_truncates` can check whether they are active."""


class StepLogprobs(NamedTuple):
    """The log-probabilities of a step. It has the methods of vLLM's `LogprobsTensors`, but no ids
    or ranks."""

    logp: Tensor
    """[rows, 1] float32"""

    def to_cpu_nonblocking(self) -> StepLogprobs:
        return StepLogprobs(self.logp.to("cpu", non_blocking=True))

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> LogprobsLists:
        logp = self.logp.cpu().numpy()
        unknown = np.full(logp.shape, -1, np.int64)
        return LogprobsLists(unknown, logp, unknown[:, 0], None)


class KeptSampler(Sampler):
    """Samples one token per request, and computes a log-probability for that token only."""

    one_and_none: Tensor
    """[2, requests] int32 numbers of sampled tokens (1) and rejected tokens (0), for steps without
    a prompt. Steps can share this tensor because nothing writes to it."""
    unmasked: NDArray[np.bool_]
    """[requests] True for requests whose sampling masks are not recorded."""
    changed: bool = True
    """True if requests have been added since the parameters were last copied to the GPU."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        self.changed = True
        self.unmasked[req_idx] = UNMASKED in (sampling_params.extra_args or {})
        super().add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        if self.changed or not self.only_known:
            self.changed = False
            super().apply_staged_writes()

    def masks(self, requests: NDArray[np.integer]) -> bool:
        """Return True if the sampling mask is recorded for any of these requests."""
        return self.return_sampling_mask and not self.unmasked[requests].all()

    @property
    def only_known(self) -> bool:
        """True if all logits processors are vLLM's own. Their state changes only when the requests
        change."""
        return [type(processor) for processor in self.logits_processors] == _PROCESSORS

    def __call__(self, logits: Tensor, input_batch: InputBatch) -> SamplerOutput:
        requests = input_batch.idx_mapping_np
        if len(logits) != len(requests) or self.get_logprobs_dims(requests) != (0, 0):
            return super().__call__(logits, input_batch)
        rows, states = input_batch.logits_indices, input_batch.expanded_idx_mapping
        positions = input_batch.positions[rows]
        if input_batch.has_prefill:
            sampled, rejected = get_num_sampled_and_rejected(
                input_batch.seq_lens.new_ones(len(requests)),
                input_batch.seq_lens,
                input_batch.cu_num_logits,
                input_batch.idx_mapping,
                self.req_states.prefill_len.gpu,
            )
        else:
            sampled, rejected = self.one_and_none[:, : len(requests)]
        truncation = None
        if self.only_truncates(requests):
            top_k, top_p = self.sampling_states.top_k, self.sampling_states.top_p
            truncation = Truncation(top_k.gpu, top_p.gpu)
        else:
            logits = self.apply_sampling_params(
                logits,
                states,
                input_batch.idx_mapping,
                requests,
                positions,
                input_batch.input_ids[rows],
                input_batch.expanded_local_pos,
                input_batch.seq_lens_cpu_upper_bound.numpy(),
            )
        sampled_rows = draw(
            logits,
            states,
            positions,
            sampled=sampled,
            temperature=self.sampling_states.temperature.gpu,
            seeds=self.sampling_states.seeds.gpu,
            width=int(self.sampling_states.top_k.np[requests].max()),
            record=self.masks(requests),
            truncation=truncation,
        )
        return as_vllm(sampled_rows, sampled, rejected)

    def only_truncates(self, requests: NDArray[np.integer]) -> bool:
        """Return True if these requests use only temperature > 0, top-p and a sufficiently small
        top-k."""
        states, thinking = self.sampling_states, self.thinking_budget_state
        if not self.only_known:
            return False
        bias, penalties, words = cast(
            "tuple[LogitBiasState, PenaltiesState, BadWordsState]", self.logits_processors
        )
        return bool(
            (states.top_k.np[requests] <= WIDEST_TOP_K).all()
            and (states.temperature.np[requests] > 0).all()
            and not states.min_p.np[requests].any()
            and not bias.use_logit_bias[requests].any()
            and not penalties.use_penalty[requests].any()
            and not words.num_bad_words.np[requests].any()
            and not (thinking.enabled and thinking.use_thinking_budget[requests].any())
        )


def as_vllm(rows: SampledRows, sampled: Tensor, rejected: Tensor) -> SamplerOutput:
    """Convert sampled rows to vLLM's type. `sampled` and `rejected` are the numbers of tokens in
    each row."""
    logprobs: Any = StepLogprobs(rows.logp)
    masks: Any = rows.masks
    return SamplerOutput(
        sampled_token_ids=rows.tokens,
        logprobs_tensors=logprobs,
        num_nans=None,
        num_sampled=sampled,
        num_rejected=rejected,
        sampling_mask_tensors=masks,
    )


def install(runner: Any) -> bool:
    """Replace the model runner's sampler with a `KeptSampler`. Returns False if this process has no
    sampler."""
    sampler: Any = runner.sampler
    if type(sampler) is not Sampler:
        return False
    counts = torch.tensor([[1], [0]], dtype=torch.int32, device=runner.device)
    sampler.__class__ = KeptSampler
    most = sampler.sampling_states.max_num_reqs
    runner.sampler.one_and_none = counts.repeat(1, most)
    runner.sampler.unmasked = np.zeros(most, bool)
    return True
