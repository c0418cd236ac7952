"""A batch of requests that each sample one token per step, stored as arrays over all requests. Each
request occupies one slot of the batch, which is its index in the arrays. A finished request keeps
its slot until other requests join. Tokens that it samples meanwhile are ignored."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from keel.rollout.vllm_fast.step_arrays import PackedRecording

_MIN_STEPS = 2
"""Minimum number of steps that a request must be away from the end of the context window in order
to join."""
_MAX_STEPS = 1024
_MAX_IDS = 1 << 24
"""`_MAX_STEPS` and `_MAX_IDS` limit how many steps and sampling-mask ids a batch stores before they
are written back to its requests."""
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A scheduled step whose sampled tokens have not been received yet."""

    output: SchedulerOutput
    other: SchedulerOutput | None
    """The part of the step that vLLM scheduled for requests outside the batch."""
    ids: list[str]
    places: NDArray[np.int64]


def only_decodes(request: Request, window: int, *, logprobs: bool) -> bool:
    """Return True if a request only needs to sample one token per step until it ends. `window` is
    the size of the model's context window. If `logprobs` is set, a recorder handles
    log-probabilities, so a request that asks for them qualifies too."""
    params = request.sampling_params
    known = request.num_tokens + request.num_output_placeholders
    return not (
        params is None
        or known - request.num_computed_tokens != 1
        or request.is_prefill_chunk
        or request.num_stale_output_tokens
        or params.detokenize
        or (params.logprobs is not None and not logprobs)
        or window - known <= _MIN_STEPS
    )


class DecodeBatch:
    """Counters and recorded arrays of a batch. Arrays of shape [P] are indexed by batch slot.
    Columns correspond to steps."""

    def __init__(self, places: int) -> None:
        self.requests: list[Request | None] = [None] * places
        self.place_of: dict[str, int] = {}
        self.stops: list[frozenset[int]] = [frozenset()] * places
        """[P] ids of the tokens that end the request in each batch slot."""
        self.live = np.zeros(places, np.bool_)
        """[P] False once the request in this batch slot has finished."""
        self.first = np.zeros(places, np.int64)
        """[P] step at which each request joined."""
        self.computed = np.zeros(places, np.int64)
        self.outputs = np.zeros(places, np.int64)
        """[P] number of tokens sampled before a step, including those in flight, minus the number
        of the step. `computed` is defined in the same way for scheduled tokens."""
        self.limits = np.zeros(places, np.int64)
        """[P] `max_tokens` of each request."""
        self.due = np.full(places, _NEVER)
        """[P] step at which each request needs its next KV block."""
        self.room = np.full(places, _NEVER)
        """[P] step at which each request reaches the end of the context window."""
        self.last = np.full(places, _NEVER)
        """[P] step of each request's last token. Set when that token has been received."""
        self.received = 0
        self.in_flight: list[ScheduledStep] = []
        """Steps whose tokens have not been received yet, oldest first."""
        self._tokens = np.empty((_MAX_STEPS, places), np.int64)
        self._logp = np.empty((_MAX_STEPS, places), np.float32)
        self._starts = np.zeros((_MAX_STEPS, places), np.int64)
        self._sizes = np.zeros((_MAX_STEPS, places), np.int64)
        """Number of ids in each sampling mask. `_starts` contains the position in `_ids` at which
        each mask begins."""
        self._ids = np.empty(0, np.int32)
        self._num_ids = 0
        self._with_logp = self._with_masks = False
        self._order: tuple[list[str], list[str], NDArray[np.int64]] | None = None
        self.settle()

    @property
    def scheduled(self) -> int:
        """Number of steps scheduled so far, including those in flight."""
        return self.received + len(self.in_flight)

    def settle(self) -> None:
        """Update everything that depends on which requests are in the batch. Call this after
        requests have joined or left."""
        present = {place: it for place, it in enumerate(self.requests) if it is not None}
        self.places = np.array(list(present), int)
        self.ids = [request.request_id for request in present.values()]
        self.one_each = dict.fromkeys(self.ids, 1)
        self.any_stop = frozenset().union(*(self.stops[place] for place in self.places))
        self.end = int(self.room.min())

    def join(self, request: Request, *, window: int, block: int) -> None:
        """Add a request to the batch, starting with the next step. Call `settle` afterwards.
        `window` is the size of the model's context window. `block` is the number of tokens per KV
        block."""
        place, now, params = self.requests.index(None), self.scheduled, request.sampling_params
        assert params is not None
        eos = () if params.eos_token_id is None else (params.eos_token_id,)
        in_flight = request.num_output_placeholders
        self.requests[place], self.place_of[request.request_id] = request, place
        self.stops[place] = frozenset((*eos, *(params.stop_token_ids or ())))
        self.live[place], self.first[place] = True, now
        self.computed[place] = request.num_computed_tokens - now
        self.outputs[place] = request.num_output_tokens + in_flight - now
        self.limits[place] = request.max_tokens
        self.due[place] = now + -request.num_computed_tokens % block
        self.room[place] = now + window - request.num_tokens - in_flight
        self.last[place] = _NEVER

    def leave(self, place: int) -> None:
        """Remove the request in a batch slot. Call `settle` afterwards."""
        request = self.requests[place]
        assert request is not None
        del self.place_of[request.request_id]
        self.requests[place], self.stops[place], self.live[place] = None, frozenset(), False
        self.due[place] = self.room[place] = _NEVER

    def as_cached(self, blocks: list[tuple[list[int], ...] | None]) -> CachedRequestData:
        """Return the requests of the next step in vLLM's format. `blocks` contains the new KV
        blocks, in the order of `ids`."""
        now = self.scheduled
        return CachedRequestData(
            req_ids=self.ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=blocks,
            num_computed_tokens=(self.computed[self.places] + now).tolist(),
            num_output_tokens=(self.outputs[self.places] + now).tolist(),
        )

    def merge(self, cached: CachedRequestData, other: SchedulerOutput) -> SchedulerOutput:
        """Merge a step of the batch with the step that vLLM scheduled for other requests."""
        more = other.scheduled_cached_reqs
        return replace(
            other,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=cached.req_ids + more.req_ids,
                resumed_req_ids=more.resumed_req_ids,
                new_token_ids=more.new_token_ids,
                all_token_ids=more.all_token_ids,
                new_block_ids=cached.new_block_ids + more.new_block_ids,
                num_computed_tokens=cached.num_computed_tokens + more.num_computed_tokens,
                num_output_tokens=cached.num_output_tokens + more.num_output_tokens,
            ),
            num_scheduled_tokens=self.one_each | other.num_scheduled_tokens,
            total_num_scheduled_tokens=len(self.ids) + other.total_num_scheduled_tokens,
        )

    @property
    def full(self) -> bool:
        """True if the batch has no room to store another step."""
        return self.scheduled + 1 >= min(self.end, _MAX_STEPS) or self._num_ids > _MAX_IDS

    def retain(self, known: Container[str]) -> None:
        """Remove all requests that are not in `known`, because vLLM has finished them."""
        gone = [place for name, place in self.place_of.items() if name not in known]
        for place in gone:
            self.leave(place)
        if gone:
            self.settle()

    def finished(self) -> list[int]:
        """Return the batch slots of requests that have finished but are still in the batch."""
        return [place for place in self.places.tolist() if not self.live[place]]

    def write_back(self, place: int, tokens: list[int], step: int | None) -> None:
        """Update a request with its state in the batch and its new `tokens`. If the scheduler
        schedules ahead, `step` is the number of its last step."""
        request = self.requests[place]
        assert request is not None
        in_flight = self.scheduled - max(self._known(place), int(self.first[place]))
        request.num_computed_tokens = int(self.computed[place]) + self.scheduled
        request.num_in_flight_tokens += in_flight
        if step is not None:
            request.num_output_placeholders += in_flight
            request.next_decode_eligible_step = step + 1
        if tokens:
            request.append_output_token_ids(tokens)

    def receive(self, output: ModelRunnerOutput) -> list[int] | None:
        """Receive the tokens of the oldest step. Returns the batch slots of the requests that end
        with these tokens. Returns None and receives nothing if vLLM has to handle the step."""
        step, column, sampled = self.in_flight[0], self.received, output.sampled_token_ids
        if output.num_nans_in_logits or column + 1 >= self.end:
            return None
        rows = self._rows_of(step, output)
        mine = sampled if len(sampled) == len(rows) else [sampled[row] for row in rows]
        if any(len(row) != 1 for row in mine):
            return None
        places, tokens = step.places, np.array(mine, np.int64)[:, 0]
        if mine is sampled:
            tokens = tokens[rows]
        self._tokens[column, places] = tokens
        if output.logprobs is not None:
            self._with_logp = True
            at = _positions(rows, output.logprobs.cu_num_generated_tokens)
            self._logp[column, places] = output.logprobs.logprobs[at, 0]
        if output.sampling_masks is not None:
            masks = output.sampling_masks
            assert masks.offsets is not None
            at = _positions(rows, masks.cu_num_generated_tokens)
            begins, ends = masks.offsets[at], masks.offsets[at + 1]
            self._keep_masks(column, places, masks.token_ids, begins, ends)
        self.in_flight.pop(0)
        self.received += 1
        last = self.limits[places] - self.outputs[places] - 1 <= column
        if not self.any_stop.isdisjoint(tokens.tolist()):
            for row in np.flatnonzero(np.isin(tokens, list(self.any_stop))).tolist():
                last[row] |= int(tokens[row]) in self.stops[places[row]]
        last &= self.live[places] & (self.first[places] <= column)
        self.last[places[last]] = column
        return places[last].tolist()

    def _rows_of(self, step: ScheduledStep, output: ModelRunnerOutput) -> NDArray[np.int64]:
        known = self._order
        if known is None or known[0] is not step.ids or known[1] != output.req_ids:
            index = output.req_id_to_index
            rows = np.array([index[name] for name in step.ids], np.int64)
            known = self._order = step.ids, output.req_ids, rows
        return known[2]

    def _keep_masks(
        self,
        column: int,
        places: NDArray[np.int64],
        ids: NDArray[np.int32],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        """Store the sampling masks of one step. The mask of `places[n]` is
        `ids[begins[n]:ends[n]]`."""
        self._with_masks = True
        total = self._num_ids + len(ids)
        if total > len(self._ids):
            self._ids = np.resize(self._ids, max(2 * len(self._ids), total, 1 << 14))
        self._ids[self._num_ids : total] = ids
        self._starts[column, places] = begins + self._num_ids
        self._sizes[column, places] = ends - begins
        self._num_ids = total

    def _known(self, place: int) -> int:
        """Return the number of steps received so far, not counting steps after the request's
        end."""
        return min(self.received, int(self.last[place]) + 1)

    def tokens_of(self, place: int) -> list[int]:
        """Return the tokens received so far for the request in a batch slot."""
        return self._tokens[self.first[place] : self._known(place), place].tolist()

    def record(self, place: int, recording: PackedRecording) -> None:
        """Append the log-probabilities and sampling masks of a request to its recording."""
        steps = slice(int(self.first[place]), self._known(place))
        if steps.start >= steps.stop:
            return
        if self._with_logp:
            recording.logp.append(self._logp[steps, place].copy())
        if self._with_masks and recording.with_masks:
            sizes = self._sizes[steps, place].copy()
            before = np.cumsum(sizes) - sizes
            take = np.repeat(self._starts[steps, place] - before, sizes) + np.arange(sizes.sum())
            recording.ids.append(self._ids[take])
            recording.sizes.append(sizes)


def _positions(rows: NDArray[np.int64], firsts: list[int] | None) -> NDArray[np.int64]:
    """Return the index of each row's token in a flat array. If every row has one token, `firsts` is
    None."""
    return rows if firsts is None else np.asarray(firsts, np.int64)[rows]
