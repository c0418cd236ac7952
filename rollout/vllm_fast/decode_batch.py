"""A run of steps in which the same requests sample one token each: counters for all of them
together, and the arrays that the steps returned.

Each request has a place in the run. One that has ended keeps its place, and what it samples from
there on is nobody's, until others come in; they go on from the step at which they did.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from keel.rollout.vllm_fast.bursts import steps_in
from keel.rollout.vllm_fast.step_arrays import Packed

SHORTEST_RUN = 2
"""Steps that a request must have before the end of the window, or it does not come in."""
LONGEST_RUN = 1024
MOST_IDS = 1 << 24
"""Steps, and ids of their sampling masks, that a run holds."""
NEVER = 1 << 62
LOOKED_AT = tuple((1 << power) - 1 for power in range(14))
"""Blocks of prompts that are compared."""


@dataclass(frozen=True, slots=True)
class Step:
    """One that was scheduled, or several at once."""

    output: SchedulerOutput
    theirs: SchedulerOutput | None
    """What vLLM's scheduler has put beside the run in it."""
    ids: list[str]
    places: NDArray[np.int64]


def only_decodes(request: Request, window: int, *, logprobs: bool) -> bool:
    """Whether each step to come samples one token for it, and nothing else happens to it.
    `window`: of the model; `logprobs`: the recorder takes them, so that they may be asked for."""
    params = request.sampling_params
    known = request.num_tokens + request.num_output_placeholders
    return not (
        params is None
        or known - request.num_computed_tokens != 1
        or request.is_prefill_chunk
        or request.num_stale_output_tokens
        or params.detokenize
        or params.repetition_detection is not None
        or request.structured_output_request is not None
        or request.resumable
        or request.mm_features
        or request.spec_token_ids
        or (params.logprobs is not None and not logprobs)
        or window - known <= SHORTEST_RUN
    )


def beginning(request: Request, block: int) -> tuple[bytes, ...]:
    """Of requests in the order of these, those whose prompts have most in common are neighbours:
    hashes of ever longer parts of the prompt, the last of all its full blocks. `block`: tokens of
    one."""
    known = request.block_hashes[: request.num_prompt_tokens // block]
    return (*(known[at] for at in LOOKED_AT if at < len(known)), *known[-1:])


def together(run: DecodeRun, cached: CachedRequestData, theirs: SchedulerOutput) -> SchedulerOutput:
    """One step of the run and of what vLLM has scheduled beside it."""
    more = theirs.scheduled_cached_reqs
    return replace(
        theirs,
        scheduled_cached_reqs=CachedRequestData(
            req_ids=cached.req_ids + more.req_ids,
            resumed_req_ids=more.resumed_req_ids,
            new_token_ids=more.new_token_ids,
            all_token_ids=more.all_token_ids,
            new_block_ids=cached.new_block_ids + more.new_block_ids,
            num_computed_tokens=cached.num_computed_tokens + more.num_computed_tokens,
            num_output_tokens=cached.num_output_tokens + more.num_output_tokens,
        ),
        num_scheduled_tokens=run.one_each | theirs.num_scheduled_tokens,
        total_num_scheduled_tokens=len(run.ids) + theirs.total_num_scheduled_tokens,
    )


class DecodeRun:
    """Column c of an array is about the run's step c; [P] is by place."""

    def __init__(self, places: int) -> None:
        self.requests: list[Request | None] = [None] * places
        self.place_of: dict[str, int] = {}
        self.begins: list[tuple[bytes, ...]] = [()] * places
        """[P] `beginning` of each request."""
        self.stops: list[frozenset[int]] = [frozenset()] * places
        """[P] sets of tokens: those that end each request."""
        self.live = np.zeros(places, np.bool_)
        """[P] those that have not ended."""
        self.first = np.zeros(places, np.int64)
        """[P] step at which each came in."""
        self.computed = np.zeros(places, np.int64)
        self.outputs = np.zeros(places, np.int64)
        """[P] tokens scheduled, and sampled, before a step, those in flight included: less the
        step's number."""
        self.limits = np.zeros(places, np.int64)
        """[P] tokens that each may sample."""
        self.due = np.full(places, NEVER)
        """[P] step at which each may need a KV block."""
        self.room = np.full(places, NEVER)
        """[P] step at which each reaches the end of the model's window."""
        self.last = np.full(places, NEVER)
        """[P] step of each one's last token, once it has come."""
        self.received = 0
        self.in_flight: list[Step] = []
        """Steps whose tokens have not come yet, oldest first."""
        self._tokens = np.empty((LONGEST_RUN, places), np.int64)
        self._logp = np.empty((LONGEST_RUN, places), np.float32)
        self._starts = np.zeros((LONGEST_RUN, places), np.int64)
        self._sizes = np.zeros((LONGEST_RUN, places), np.int64)
        """Of sampling masks, in `_ids`."""
        self._ids = np.empty(0, np.int32)
        self._held = 0
        self._with_logp = self._with_masks = False
        self._order: tuple[list[str], list[str], NDArray[np.int64]] | None = None
        self.settle()

    @property
    def scheduled(self) -> int:
        """Steps, those in flight included."""
        return self.received + sum(steps_in(step.output) for step in self.in_flight)

    def settle(self) -> None:
        """The steps to come have the requests that there are now, those that begin alike side by
        side: attention reads what they share once (`keel.rollout.vllm_fast.cascade.kernels`)."""
        there = {place: it for place, it in enumerate(self.requests) if it is not None}
        order = sorted(there, key=self.begins.__getitem__)
        self.places = np.array(order, int)
        self.ids = [there[place].request_id for place in order]
        self.one_each = dict.fromkeys(self.ids, 1)
        self.any_stop = frozenset().union(*(self.stops[place] for place in self.places))
        self.end = int(self.room.min())

    def admit(self, request: Request, *, window: int, block: int) -> None:
        """From the next step on; `settle` comes after. `window`: of the model; `block`: tokens of a
        KV block."""
        place, now, params = self.requests.index(None), self.scheduled, request.sampling_params
        assert params is not None
        eos = () if params.eos_token_id is None else (params.eos_token_id,)
        flying = request.num_output_placeholders
        self.requests[place], self.place_of[request.request_id] = request, place
        self.begins[place] = beginning(request, block)
        self.stops[place] = frozenset((*eos, *(params.stop_token_ids or ())))
        self.live[place], self.first[place] = True, now
        self.computed[place] = request.num_computed_tokens - now
        self.outputs[place] = request.num_output_tokens + flying - now
        self.limits[place] = request.max_tokens
        self.due[place] = now + -request.num_computed_tokens % block
        self.room[place] = now + window - request.num_tokens - flying
        self.last[place] = NEVER

    def as_cached(self, blocks: list[tuple[list[int], ...] | None]) -> CachedRequestData:
        """The next step; `blocks`: new ones, in the order of `ids`."""
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

    def leave(self, place: int) -> None:
        """`settle` comes after."""
        request = self.requests[place]
        assert request is not None
        del self.place_of[request.request_id]
        self.requests[place], self.stops[place], self.live[place] = None, frozenset(), False
        self.due[place] = self.room[place] = NEVER

    @property
    def full(self) -> bool:
        """Whether it has no room for a further step."""
        return self.scheduled + 1 >= min(self.end, LONGEST_RUN) or self._held > MOST_IDS

    def at_once(self, most: int) -> int:
        """Steps that may follow on each other, `most` at most: those that somebody needs."""
        now = self.scheduled
        needed = (self.limits - self.outputs)[self.live].max(initial=0) - now
        return max(1, min(most, int(needed), min(self.end, LONGEST_RUN) - now - 1))

    def let_go(self, known: Container[str]) -> None:
        """Of requests that vLLM has ended: all but these."""
        gone = [place for name, place in self.place_of.items() if name not in known]
        for place in gone:
            self.leave(place)
        if gone:
            self.settle()

    def ended(self) -> list[int]:
        """Places of those that have ended and not left."""
        return [place for place in self.places.tolist() if not self.live[place]]

    def write_back(self, place: int, tokens: list[int], step: int | None) -> None:
        """Bring a request to where the run is; these are its `tokens` in it. `step`: number of the
        scheduler's last, where it schedules ahead of the tokens."""
        request = self.requests[place]
        assert request is not None
        flying = self.scheduled - max(self._known(place), int(self.first[place]))
        request.num_computed_tokens = int(self.computed[place]) + self.scheduled
        request.num_in_flight_tokens += flying
        if step is not None:
            request.num_output_placeholders += flying
            request.next_decode_eligible_step = step + 1
        if tokens:
            request.append_output_token_ids(tokens)

    def receive(self, output: ModelRunnerOutput) -> list[int] | None:
        """Take a step's tokens. Returns the places whose requests end with theirs; None, and
        nothing is taken, if vLLM has to look at the step."""
        step, column, sampled = self.in_flight[0], self.received, output.sampled_token_ids
        count = steps_in(step.output)
        if output.num_nans_in_logits or column + count >= self.end:
            return None
        rows = self._rows_of(step, output)
        mine = sampled if len(sampled) == len(rows) else [sampled[row] for row in rows]
        if any(len(row) != count for row in mine):
            return None
        tokens = np.array(mine, np.int64)
        if mine is sampled:
            tokens = tokens[rows]
        places, columns = step.places, slice(column, column + count)
        self._tokens[columns, places] = tokens.T
        if output.logprobs is not None:
            self._with_logp = True
            at = _places_of(rows, output.logprobs.cu_num_generated_tokens, count)
            self._logp[columns, places] = output.logprobs.logprobs[at, 0].T
        if output.sampling_masks is not None:
            masks = output.sampling_masks
            assert masks.offsets is not None
            at = _places_of(rows, masks.cu_num_generated_tokens, count)
            self._keep(columns, places, at, masks.token_ids, masks.offsets)
        self.in_flight.pop(0)
        self.received += count
        last = np.maximum(self.limits[places] - self.outputs[places] - 1, column)
        if not self.any_stop.isdisjoint(tokens.ravel().tolist()):
            for row, after in np.argwhere(np.isin(tokens, list(self.any_stop))).tolist():
                if int(tokens[row, after]) in self.stops[places[row]]:
                    last[row] = min(last[row], column + after)
        ends = last < self.received
        ends &= self.live[places] & (self.first[places] <= column)
        self.last[places[ends]] = last[ends]
        return places[ends].tolist()

    def _rows_of(self, step: Step, output: ModelRunnerOutput) -> NDArray[np.int64]:
        known = self._order
        if known is None or known[0] is not step.ids or known[1] != output.req_ids:
            index = output.req_id_to_index
            rows = np.array([index[name] for name in step.ids], np.int64)
            known = self._order = step.ids, output.req_ids, rows
        return known[2]

    def _keep(
        self,
        columns: slice,
        places: NDArray[np.int64],
        at: NDArray[np.int64],
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
    ) -> None:
        """The sampling masks of steps: `ids[offsets[n]:offsets[n + 1]]` was kept for the nth token,
        and `at` [rows, steps] says which that is."""
        self._with_masks = True
        held = self._held + len(ids)
        if held > len(self._ids):
            self._ids = np.resize(self._ids, max(2 * len(self._ids), held, 1 << 14))
        self._ids[self._held : held] = ids
        begins = offsets[at]
        self._starts[columns, places] = begins.T + self._held
        self._sizes[columns, places] = (offsets[at + 1] - begins).T
        self._held = held

    def _known(self, place: int) -> int:
        """Steps that a request has had of those received: what came after its end is nobody's."""
        return min(self.received, int(self.last[place]) + 1)

    def tokens_of(self, place: int) -> list[int]:
        """What was received of a request."""
        return self._tokens[self.first[place] : self._known(place), place].tolist()

    def file(self, place: int, packed: Packed) -> None:
        """Add what was received of a request to its recording."""
        steps = slice(int(self.first[place]), self._known(place))
        if steps.start >= steps.stop:
            return
        if self._with_logp:
            packed.logp.append(self._logp[steps, place].copy())
        if self._with_masks and packed.kept_wanted:
            sizes = self._sizes[steps, place].copy()
            before = np.cumsum(sizes) - sizes
            take = np.repeat(self._starts[steps, place] - before, sizes) + np.arange(sizes.sum())
            packed.ids.append(self._ids[take])
            packed.sizes.append(sizes)


def _places_of(rows: NDArray[np.int64], firsts: list[int] | None, count: int) -> NDArray[np.int64]:
    """[rows, count]: where what was sampled for these rows stands. firsts: where it begins for each
    row; None: there is one token for every row, and not none for those whose prompt is not
    finished."""
    first = rows if firsts is None else np.asarray(firsts, np.int64)[rows]
    return first[:, None] + np.arange(count)
