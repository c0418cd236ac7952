"""A run of steps in which every request samples one token and none begins: counters for all
requests together, and the arrays that the steps returned. A request that has ended keeps its row
until the run is over, and what it samples from there on is nobody's."""

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
    limits: NDArray[np.int64]
    """[R] tokens that each may sample."""
    room: int
    """Steps until the first request reaches the end of the model's window."""
    stops: list[frozenset[int]]
    """R sets of tokens: those that end each request."""
    due: dict[int, list[int]]
    """Requests that may need a KV block at a step."""
    one_each: dict[str, int]
    blocked: bool
    """Requests that wait can begin only when another has ended."""
    live: NDArray[np.bool_] = field(init=False)
    """[R] those that have not ended."""
    any_stop: frozenset[int] = field(init=False)
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

    def __post_init__(self) -> None:
        self.live = np.ones(len(self.ids), np.bool_)
        self.any_stop = frozenset().union(*self.stops)

    @property
    def received(self) -> int:
        return len(self.tokens)

    @property
    def ended(self) -> int:
        return len(self.ids) - int(np.count_nonzero(self.live))

    def receive(self, output: ModelRunnerOutput) -> list[int] | None:
        """Take a step's tokens. Returns the rows whose requests end with theirs; None, and nothing
        is taken, if vLLM has to look at the step."""
        sampled = output.sampled_token_ids
        if (
            self.received + 1 >= self.room
            or len(sampled) != len(self.ids)
            or output.num_nans_in_logits
            or any(len(row) != 1 for row in sampled)
        ):
            return None
        flat = [row[0] for row in sampled]
        rows = self._rows_of(output)
        tokens = np.array(flat, np.int64)[rows]
        self.rows.append(rows)
        self.tokens.append(tokens)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs.logprobs[:, 0][rows])
        if output.sampling_masks is not None:
            masks = output.sampling_masks
            assert masks.offsets is not None
            self.masks.append(StepMasks(masks.token_ids, masks.offsets))
        self.in_flight.pop(0)
        ends = self.outputs + self.received >= self.limits
        if not self.any_stop.isdisjoint(flat):
            stopped = zip(tokens.tolist(), self.stops, strict=True)
            ends |= np.array([token in stops for token, stops in stopped])
        return np.flatnonzero(ends & self.live).tolist()

    def tokens_of(self, row: int) -> list[int]:
        """What was received of a request."""
        return [step.item(row) for step in self.tokens]

    def _rows_of(self, output: ModelRunnerOutput) -> NDArray[np.int64]:
        if self.order is None or self.order[0] != output.req_ids:
            index = output.req_id_to_index
            self.order = output.req_ids, np.array([index[name] for name in self.ids], np.int64)
        return self.order[1]

    def file(self, recordings: Mapping[str, Packed]) -> None:
        """Give each request that is recorded, and has not ended, its share of what the run
        received."""
        if not self.tokens:
            return
        wanted = [(row, recordings.get(self.ids[row])) for row in np.flatnonzero(self.live)]
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

    def file_one(self, row: int, packed: Packed) -> None:
        """As `file`, for a request that ends."""
        if self.logprobs:
            packed.logp.append(np.array([step.item(row) for step in self.logprobs], np.float32))
        if self.masks and packed.kept_wanted:
            places = [rows.item(row) for rows in self.rows]
            spans = [step.of(place) for step, place in zip(self.masks, places, strict=True)]
            packed.ids.append(np.concatenate(spans))
            packed.sizes.append(np.array([len(span) for span in spans], np.int64))
