"""Several steps of a run at once.

Between two steps of the same rows the GPU needs nothing of the host: the tokens that one has drawn
are the next one's input, and lie on the GPU. So where the scheduler offers it (`Burst`), the model
runner starts several steps in a row, and the host takes all their tokens together. For a batch of
few sequences that is what its steps wait for otherwise.

Requests that end within a burst are computed along to its end, and others can begin only after it;
so a burst lasts no longer than `LONGEST_S`, or one step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    LogprobsLists,
    ModelRunnerOutput,
    SamplingMaskLists,
)
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from keel.rollout.vllm_fast.sampling_mask import fetched

MOST = 8
"""Steps of a burst."""
LONGEST_S = 6e-3
"""Of a burst."""


@dataclass
class Burst(SchedulerOutput):
    """A step that may be several."""

    offered: int = 1
    """Steps for which there is room: a model runner may take fewer."""
    taken: int = 1
    """Those that it has begun; known once it has been given the step."""


def steps_in(output: SchedulerOutput) -> int:
    """Tokens that it samples for each row of a run."""
    return output.taken if isinstance(output, Burst) else 1


def steps_offered(output: SchedulerOutput) -> int:
    return output.offered if isinstance(output, Burst) else 1


def begin(output: SchedulerOutput, steps: int) -> None:
    """Tell the scheduler how many steps are taken."""
    assert isinstance(output, Burst) and steps <= output.offered
    output.taken = steps


def as_scheduled(output: SchedulerOutput) -> SchedulerOutput:
    """A burst as vLLM has it of several tokens a request."""
    steps = steps_in(output)
    if steps == 1:
        return output
    counts = dict.fromkeys(output.num_scheduled_tokens, steps)
    return replace(
        output, num_scheduled_tokens=counts, total_num_scheduled_tokens=steps * len(counts)
    )


class Pace:
    """How many steps a burst may have, by the time that the last ones of as many rows took."""

    def __init__(self) -> None:
        self._took: dict[int, tuple[float, float]] = {}
        """Seconds of a step in the last two bursts, by the rows' power of two."""
        self._now = self._before = 0.0

    def most(self, rows: int) -> int:
        """One, where nobody knows. The longer of two times counts: what comes late makes the next
        ones seem early."""
        took = self._took.get(rows.bit_length())
        return 1 if took is None else int(min(max(LONGEST_S / max(took), 1), MOST))

    def look(self) -> None:
        """Something has come."""
        self._now = time.perf_counter()

    def came(self, steps: int, rows: int) -> None:
        """That was a burst, or a single step, right after the one before."""
        before, self._before = self._before, self._now
        if before:
            each, size = max(self._now - before, 1e-9) / steps, rows.bit_length()
            self._took[size] = self._took.get(size, (each, each))[1], each

    def broken(self) -> None:
        """Something else comes before the next ones."""
        self._before = 0.0


class Drawn:
    """What the first steps of a burst have drawn, on the GPU: [steps, rows, …] each. Steps share
    the places that their kernels write to, so it is copied out of these. No mask is wider than
    there is room in `StepSets.ids`."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._made: list[Tensor] = []
        self._filed = 0

    def add(self, output: SamplerOutput) -> None:
        """A step's, in their order."""
        sets: Any = output.sampling_mask_tensors
        logprobs: Any = output.logprobs_tensors
        given = [output.sampled_token_ids, logprobs.logp]
        if sets is not None:
            assert sets.bits is None
            given += [sets.counts, sets.flat, sets.ids]
        if not self._made:
            self._made = [one.new_empty((self._steps, *one.shape)) for one in given]
        for place, one in zip(self._made, given, strict=True):
            place[self._filed].copy_(one)
        self._filed += 1

    def to_host(
        self, copying: torch.cuda.Stream | None, computing: torch.cuda.Stream | None
    ) -> OnHost:
        """Begins to copy; what has been drawn by now is there once `copying` has come so far. None:
        there are no streams on a CPU."""
        with torch.cuda.stream(copying):
            if copying and computing:
                copying.wait_stream(computing)
            sent = [one.to("cpu", non_blocking=True) for one in self._made[:4]]
        return OnHost(sent, self._made)


@dataclass(frozen=True)
class OnHost:
    """What the first steps of a burst have drawn, to be read once the copies are made."""

    sent: list[Tensor]
    kept: list[Tensor]
    """The same on the GPU, whose memory is in use until then."""

    def tokens(self) -> NDArray[np.int64]:
        """[steps, rows]"""
        return self.sent[0][:, :, 0].numpy()

    def logp(self) -> NDArray[np.float32]:
        """[steps, rows]"""
        return self.sent[1][:, :, 0].numpy()

    def masks(self) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]] | None:
        """Ids of each step, row by row, and their numbers [steps, rows]; None without masks."""
        if len(self.sent) == 2:
            return None
        counts, flat = self.sent[2].numpy().astype(np.int64), self.sent[3].numpy()
        whole = [
            ids[:total] if total <= len(ids) else self._from_gpu(step, counts[step])
            for step, (ids, total) in enumerate(zip(flat, counts.sum(1).tolist(), strict=True))
        ]
        return whole, counts

    def _from_gpu(self, step: int, counts: NDArray[np.int64]) -> NDArray[np.int32]:
        ids = fetched(self.kept[4][step])
        return np.concatenate([np.sort(row[:n]) for row, n in zip(ids, counts, strict=True)])


class BurstOutput(AsyncModelRunnerOutput):
    """Of all steps together: as vLLM has it of several tokens a request."""

    def __init__(self, before: OnHost, last: AsyncModelRunnerOutput) -> None:
        self._before, self._last = before, last

    def get_output(self) -> ModelRunnerOutput:
        return merged(self._before, self._last.get_output())


def merged(before: OnHost, last: ModelRunnerOutput) -> ModelRunnerOutput:
    """`last` with the tokens of the steps before it, too."""
    tokens = np.vstack([before.tokens(), np.array(last.sampled_token_ids).T])
    steps, rows = tokens.shape
    firsts = list(range(0, steps * rows + 1, steps))
    last.sampled_token_ids = tokens.T.tolist()
    if last.logprobs is not None:
        logp = np.vstack([before.logp(), last.logprobs.logprobs.T])
        nobody = np.full((steps * rows, 1), -1)
        last.logprobs = LogprobsLists(
            nobody, np.ascontiguousarray(logp.T).reshape(-1, 1), nobody[:, 0], firsts
        )
    if (masks := before.masks()) is not None and last.sampling_masks is not None:
        ids, counts = masks
        own = last.sampling_masks
        assert own.offsets is not None
        ids, counts = [*ids, own.token_ids], np.vstack([counts, np.diff(own.offsets)])
        flat, offsets = by_row(np.concatenate(ids), counts)
        last.sampling_masks = SamplingMaskLists(flat, offsets, firsts)
    return last


def by_row(
    ids: NDArray[np.int32], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Spans of ids in the order of `counts` [steps, rows], reordered row by row; and their offsets
    [rows · steps + 1]."""
    begins = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape).T.ravel()
    sizes = counts.T.ravel()
    offsets = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    take = np.repeat(begins - offsets[:-1], sizes) + np.arange(offsets[-1])
    return ids[take], offsets
