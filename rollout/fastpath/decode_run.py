"""A run of steps in which every request samples one token and nothing else happens: counters for
all requests together, and the arrays that the steps returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from keel.rollout.fastpath.step_arrays import Packed, StepMasks, transpose_masks


@dataclass(slots=True)
class DecodeRun:
    """R requests that all sample one token a step, from some step on."""

    requests: list[Request]
    ids: list[str]
    computed: NDArray[np.int64]
    """[R] tokens that were scheduled before the run."""
    outputs: NDArray[np.int64]
    """[R] tokens sampled before the run, those in flight included."""
    room: int
    """Steps until the first request reaches its limit."""
    stops: frozenset[int]
    """Tokens that end any of them."""
    due: dict[int, list[int]]
    """Requests that may need a KV block at a step."""
    one_each: dict[str, int]
    blocked: bool
    """Requests are waiting, and nothing but the end of another lets them begin."""
    scheduled: int = 0
    in_flight: list[SchedulerOutput] = field(default_factory=list)
    """Steps whose tokens have not come yet, oldest first."""
    tokens: list[NDArray[np.int64]] = field(default_factory=list)
    """[R] of each step that was received, in the order of `requests`."""
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    """[R] row of each request in the step's output."""
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    masks: list[StepMasks] = field(default_factory=list)
    order: tuple[list[str], NDArray[np.int64]] | None = None

    @property
    def received(self) -> int:
        return len(self.tokens)

    def receive(self, output: ModelRunnerOutput) -> bool:
        """Take a step's tokens. False, and nothing is taken, if one of them may end its request."""
        sampled = output.sampled_token_ids
        if (
            self.received + 1 >= self.room
            or len(sampled) != len(self.ids)
            or output.num_nans_in_logits
            or any(len(row) != 1 for row in sampled)
        ):
            return False
        flat = [row[0] for row in sampled]
        if not self.stops.isdisjoint(flat):
            return False
        rows = self._rows_of(output)
        self.rows.append(rows)
        self.tokens.append(np.array(flat, np.int64)[rows])
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs.logprobs[:, 0][rows])
        if output.sampling_masks is not None:
            masks = output.sampling_masks
            assert masks.offsets is not None
            self.masks.append(StepMasks(masks.token_ids, masks.offsets))
        self.in_flight.pop(0)
        return True

    def _rows_of(self, output: ModelRunnerOutput) -> NDArray[np.int64]:
        if self.order is None or self.order[0] != output.req_ids:
            index = output.req_id_to_index
            self.order = output.req_ids, np.array([index[name] for name in self.ids], np.int64)
        return self.order[1]

    def file(self, recordings: Mapping[str, Packed]) -> None:
        """Give each request that is recorded its share of what the run received."""
        if not self.tokens:
            return
        wanted = [(row, recordings.get(name)) for row, name in enumerate(self.ids)]
        if self.logprobs:
            logp = np.stack(self.logprobs, 1)
            for row, packed in wanted:
                if packed is not None:
                    packed.logp.append(logp[row].copy())
        if self.masks and any(packed is not None and packed.kept_wanted for _, packed in wanted):
            ids, sizes = transpose_masks(self.masks, self.rows)
            ends = np.cumsum(sizes.sum(1)).tolist()
            for row, packed in wanted:
                if packed is not None and packed.kept_wanted:
                    packed.ids.append(ids[ends[row - 1] if row else 0 : ends[row]].copy())
                    packed.sizes.append(sizes[row].copy())
