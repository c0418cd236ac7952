"""vLLM's scheduler with a fast path for steps in which no request begins.

Most steps sample one token for each running request. vLLM loops over all requests three times in
such a step. With 256 requests, this takes longer than the GPU needs. Here, these steps are
scheduled as a `_DecodeBatch`.

When requests begin, vLLM's scheduler sees only the new ones, with the capacity that the batch
leaves free. The step that it schedules is merged with the batch's step. The requests join the batch
once they only decode. For anything else (an abort, a preemption, a pause) the batch is flushed: its
state is written back to the requests, and vLLM schedules the whole step. Flushed tokens are
delivered together with the request's next token, as in speculative decoding.

The batch continues when a request finishes, and while other requests wait to begin. In both cases,
some slots in the batch stay unused. A finished request is reported at once. Waiting requests begin
once the loss from unused slots equals the cost of a step in which requests begin. The total loss is
therefore at most twice the minimum.

`_FastPath` is mixed into vLLM's scheduler, which still makes all decisions.
"""

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from keel.rollout.vllm_fast.step_arrays import PackedRecording

_MIN_STEPS = 2  # minimum number of steps to the end of the context window for a request to join
_MAX_STEPS = 1024
_MAX_IDS = 1 << 24  # limits what a batch stores before it is written back, like `_MAX_STEPS`
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class _ScheduledStep:
    output: SchedulerOutput
    other: SchedulerOutput | None  # what vLLM scheduled for requests outside the batch
    ids: list[str]
    slots: NDArray[np.int64]


class _DecodeBatch:
    """A batch of requests that sample one token per step, along with their counters and recorded
    data. Arrays of shape [P] are indexed by batch slot, and columns correspond to steps."""

    def __init__(self, slots: int) -> None:
        self.requests: list[Any] = [None] * slots  # [P] vLLM's `Request`s, or None
        self.slot_of: dict[str, int] = {}
        self.stop_ids: list[frozenset[int]] = [frozenset()] * slots  # [P] ids that end the request
        self.live = np.zeros(slots, np.bool_)  # [P] False once the request here has finished
        self.first_step = np.zeros(slots, np.int64)  # [P] step at which each request joined
        self.computed = np.zeros(slots, np.int64)
        self.outputs = np.zeros(slots, np.int64)
        """[P] number of tokens sampled before a step, including those in flight, minus the number
        of the step. `computed` is the same for scheduled tokens."""
        self.limits = np.zeros(slots, np.int64)  # [P] `max_tokens` of each request
        self.next_block_step = np.full(slots, _NEVER)  # [P] step that needs the next KV block
        self.window_end = np.full(slots, _NEVER)  # [P] step at the end of the context window
        self.last_step = np.full(slots, _NEVER)  # [P] step of each last token, once received
        self.received = 0
        self.in_flight: list[_ScheduledStep] = []  # steps without received tokens, oldest first
        self._tokens = np.empty((_MAX_STEPS, slots), np.int64)
        self._logp = np.empty((_MAX_STEPS, slots), np.float32)
        self._starts = np.zeros((_MAX_STEPS, slots), np.int64)
        self._sizes = np.zeros((_MAX_STEPS, slots), np.int64)
        """Number of ids in each sampling mask. A mask starts at `_starts` in `_ids`."""
        self._ids = np.empty(0, np.int32)
        self._num_ids = 0
        self._with_logp = self._with_masks = False
        self._order: tuple[list[str], list[str], NDArray[np.int64]] | None = None
        self.refresh()

    @property
    def scheduled(self) -> int:
        return self.received + len(self.in_flight)

    def refresh(self) -> None:
        """Update everything that depends on which requests are in the batch. Call this after
        requests have joined or left."""
        present = {slot: r for slot, r in enumerate(self.requests) if r is not None}
        self.slots = np.array(list(present), int)
        self.ids = [request.request_id for request in present.values()]
        self.one_each = dict.fromkeys(self.ids, 1)
        self.all_stop_ids = frozenset().union(*(self.stop_ids[slot] for slot in self.slots))
        self.end = int(self.window_end.min())

    def join(self, request: Request, *, window: int, block: int) -> None:
        """Add a request to the batch, starting with the next step. Call `refresh` afterwards.
        `window` is the size of the context window, and `block` is the number of tokens per KV
        block."""
        slot, now = self.requests.index(None), self.scheduled
        params: Any = request.sampling_params
        eos = () if params.eos_token_id is None else (params.eos_token_id,)
        in_flight = request.num_output_placeholders
        self.requests[slot], self.slot_of[request.request_id] = request, slot
        self.stop_ids[slot] = frozenset((*eos, *(params.stop_token_ids or ())))
        self.live[slot], self.first_step[slot] = True, now
        self.computed[slot] = request.num_computed_tokens - now
        self.outputs[slot] = request.num_output_tokens + in_flight - now
        self.limits[slot] = request.max_tokens
        self.next_block_step[slot] = now + -request.num_computed_tokens % block
        self.window_end[slot] = now + window - request.num_tokens - in_flight
        self.last_step[slot] = _NEVER

    def leave(self, slot: int) -> None:
        request = self.requests[slot]
        del self.slot_of[request.request_id]
        self.requests[slot], self.stop_ids[slot], self.live[slot] = None, frozenset(), False
        self.next_block_step[slot] = self.window_end[slot] = _NEVER

    def to_cached_requests(self, blocks: list[tuple[list[int], ...] | None]) -> CachedRequestData:
        """Return the next step's requests in vLLM's format. `blocks` contains the new KV blocks of
        each request in `ids`."""
        now = self.scheduled
        return CachedRequestData(
            req_ids=self.ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=blocks,
            num_computed_tokens=(self.computed[self.slots] + now).tolist(),
            num_output_tokens=(self.outputs[self.slots] + now).tolist(),
        )

    def merge(self, cached: CachedRequestData, other: SchedulerOutput) -> SchedulerOutput:
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
        return self.scheduled + 1 >= min(self.end, _MAX_STEPS) or self._num_ids > _MAX_IDS

    def retain(self, known: Container[str]) -> None:
        gone = [slot for name, slot in self.slot_of.items() if name not in known]
        for slot in gone:
            self.leave(slot)
        if gone:
            self.refresh()

    def finished(self) -> list[int]:
        """Return the batch slots of requests that have finished but are still in the batch."""
        return [slot for slot in self.slots.tolist() if not self.live[slot]]

    def write_back(self, slot: int, tokens: list[int], step: int | None) -> None:
        """Write a request's counters and its new `tokens` back to vLLM's `Request`. If steps are
        scheduled ahead, `step` is the number of the request's last step."""
        request = self.requests[slot]
        in_flight = self.scheduled - max(self._steps_received(slot), int(self.first_step[slot]))
        request.num_computed_tokens = int(self.computed[slot]) + self.scheduled
        request.num_in_flight_tokens += in_flight
        if step is not None:
            request.num_output_placeholders += in_flight
            request.next_decode_eligible_step = step + 1
        if tokens:
            request.append_output_token_ids(tokens)

    def receive(self, output: ModelRunnerOutput) -> list[int] | None:
        """Record the tokens of the oldest step in flight. Returns the batch slots of the requests
        that finish with them, or None if vLLM has to handle the step."""
        step, column, sampled = self.in_flight[0], self.received, output.sampled_token_ids
        if output.num_nans_in_logits or column + 1 >= self.end:
            return None
        rows = self._rows_of(step, output)
        mine = sampled if len(sampled) == len(rows) else [sampled[row] for row in rows]
        if any(len(row) != 1 for row in mine):
            return None
        slots, tokens = step.slots, np.array(mine, np.int64)[:, 0]
        if mine is sampled:
            tokens = tokens[rows]
        self._tokens[column, slots] = tokens
        if output.logprobs is not None:
            self._with_logp = True
            at = _token_positions(rows, output.logprobs.cu_num_generated_tokens)
            self._logp[column, slots] = output.logprobs.logprobs[at, 0]
        if output.sampling_masks is not None:
            masks: Any = output.sampling_masks
            at = _token_positions(rows, masks.cu_num_generated_tokens)
            begins, ends = masks.offsets[at], masks.offsets[at + 1]
            self._keep_masks(column, slots, masks.token_ids, begins, ends)
        self.in_flight.pop(0)
        self.received += 1
        last = self.limits[slots] - self.outputs[slots] - 1 <= column
        if not self.all_stop_ids.isdisjoint(tokens.tolist()):
            for row in np.flatnonzero(np.isin(tokens, list(self.all_stop_ids))).tolist():
                last[row] |= int(tokens[row]) in self.stop_ids[slots[row]]
        last &= self.live[slots] & (self.first_step[slots] <= column)
        self.last_step[slots[last]] = column
        return slots[last].tolist()

    def _rows_of(self, step: _ScheduledStep, output: ModelRunnerOutput) -> NDArray[np.int64]:
        known = self._order
        if known is None or known[0] is not step.ids or known[1] != output.req_ids:
            index = output.req_id_to_index
            rows = np.array([index[name] for name in step.ids], np.int64)
            known = self._order = step.ids, output.req_ids, rows
        return known[2]

    def _keep_masks(
        self,
        column: int,
        slots: NDArray[np.int64],
        ids: NDArray[np.int32],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        """Store the sampling masks of one step. The mask of batch slot `slots[n]` is
        `ids[begins[n]:ends[n]]`."""
        self._with_masks = True
        total = self._num_ids + len(ids)
        if total > len(self._ids):
            self._ids = np.resize(self._ids, max(2 * len(self._ids), total, 1 << 14))
        self._ids[self._num_ids : total] = ids
        self._starts[column, slots] = begins + self._num_ids
        self._sizes[column, slots] = ends - begins
        self._num_ids = total

    def _steps_received(self, slot: int) -> int:
        """Return the number of steps received so far for a request, not counting any after it
        finished."""
        return min(self.received, int(self.last_step[slot]) + 1)

    def tokens_of(self, slot: int) -> list[int]:
        return self._tokens[self.first_step[slot] : self._steps_received(slot), slot].tolist()

    def record(self, slot: int, recording: PackedRecording) -> None:
        steps = slice(int(self.first_step[slot]), self._steps_received(slot))
        if steps.start >= steps.stop:
            return
        if self._with_logp:
            recording.logp.append(self._logp[steps, slot].copy())
        if self._with_masks and recording.with_masks:
            sizes = self._sizes[steps, slot].copy()
            before = np.cumsum(sizes) - sizes
            take = np.repeat(self._starts[steps, slot] - before, sizes) + np.arange(sizes.sum())
            recording.ids.append(self._ids[take])
            recording.sizes.append(sizes)


def _token_positions(rows: NDArray[np.int64], firsts: list[int] | None) -> NDArray[np.int64]:
    """Return the index of each row's token in a flat array. This is the row number if `firsts` is
    None."""
    return rows if firsts is None else np.asarray(firsts, np.int64)[rows]


_JOIN_COST = 1.0  # extra cost of a step in which requests begin, in ordinary steps of the batch
_MAX_WAIT = 64  # number of steps after which requests may begin even if only one is waiting
_LIMITS = ("max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens")
"""Limits of vLLM's scheduler that are reduced by what the batch already uses."""
_MAX_FINISHED = 0.25  # maximum fraction of finished requests, whose rows are still computed
_BLOCKS_AHEAD = 4  # KV blocks to allocate at once if twice as many are free for every request


class _FastPath(Scheduler):
    """Mixin that adds the fast path to a vLLM scheduler (see the module docstring)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recordings: dict[str, PackedRecording] = {}  # by request
        self.finished_blocks: dict[str, list[int]] = {}  # KV blocks until the next step
        self.fast_steps = 0
        self._is_async = isinstance(self, AsyncScheduler)
        self._batch: _DecodeBatch | None = None
        self._outside: list[Request] = []  # running, but not in the batch; mostly prefills
        self._unused_slots = 0.0  # summed over the steps since requests last began
        self._undelivered: dict[str, list[int]] = {}  # flushed, but not in an output yet
        self._stuck = False  # vLLM began no waiting request last, although it had tokens to spare
        groups = self.kv_cache_config.kv_cache_groups
        self._is_supported = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec

    # Overrides of vLLM's methods.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        batch = self._batch = self._batch or self._new_batch()
        if batch is not None:
            self._join_decoding(batch)
            if (output := self._next_step(batch, throttle_prefills)) is not None:
                return output
            self.keel_flush()
        self.finished_blocks.clear()
        self._unused_slots = 0
        output = super().schedule(throttle_prefills)
        self._update_stuck(output, self.max_num_scheduled_tokens, len(self.running))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        batch, unpaused = self._batch, self._pause_state == PauseState.UNPAUSED
        outputs: dict[int, EngineCoreOutputs] = {}
        other: SchedulerOutput | None = scheduler_output
        if batch is not None and batch.in_flight and batch.in_flight[0].output is scheduler_output:
            step = batch.in_flight[0]
            finished = batch.receive(model_runner_output) if unpaused else None
            if finished is None:
                self.keel_flush()
            else:
                other, outputs = step.other, self._report_finished(batch, finished)
        if other is not None:
            for client, theirs in super().update_from_output(other, model_runner_output).items():
                for output in theirs.outputs:
                    self._add_undelivered(output)
                mine = outputs.setdefault(client, theirs)
                if mine is not theirs:
                    mine.outputs.extend(theirs.outputs)
        if self._undelivered and not unpaused:
            # No step may come for them before the weights, and so their version, change.
            mine = outputs.setdefault(0, EngineCoreOutputs(outputs=[]))
            mine.outputs.extend(
                EngineCoreOutput(request_id=name, new_token_ids=self._undelivered.pop(name))
                for name in list(self._undelivered)
            )
        if self.finished_req_ids:
            self._stuck = False
            if self._batch is not None:
                self._batch.retain(self.requests)
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        self.keel_flush()
        self._stuck = False
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._undelivered.pop(request.request_id, None)
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.keel_flush()
        self._stuck = False
        return super().reset_prefix_cache(*args, **kwargs)

    def has_finished_requests(self) -> bool:
        """Also return True if a paused engine has undelivered tokens, so that it runs one more
        empty step to deliver them."""
        pending = self._undelivered or (self._batch is not None and self._batch.received)
        paused = self._pause_state != PauseState.UNPAUSED
        return bool(paused and pending) or super().has_finished_requests()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.request_id in self.recordings:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)
            self.finished_blocks[request.request_id] = blocks[0]
        return super()._free_request(request, *args, **kwargs)

    # The batch.

    def _new_batch(self) -> _DecodeBatch | None:
        """Build a batch of all running requests. Returns None if any of them does more than
        decode."""
        if (
            not self._is_supported
            or not self.running
            or self.aux_output_connector is not None
            or self._pause_state != PauseState.UNPAUSED
            or not all(self._only_decodes(request) for request in self.running)
        ):
            return None
        batch = _DecodeBatch(self.max_num_running_reqs)
        self._join(batch, self.running)
        return batch

    def _only_decodes(self, request: Request) -> bool:
        """Return True if a request does nothing but sample one token per step until it ends, and
        returns log-probabilities only to the recorder."""
        params = request.sampling_params
        known = request.num_tokens + request.num_output_placeholders
        return not (
            params is None
            or known - request.num_computed_tokens != 1
            or request.is_prefill_chunk
            or request.num_stale_output_tokens
            or params.detokenize
            or (params.logprobs is not None and request.request_id not in self.recordings)
            or self.max_model_len - known <= _MIN_STEPS
        )

    @property
    def _block_size(self) -> int:
        return self.kv_cache_manager.coordinator.single_type_managers[0].block_size

    def _join(self, batch: _DecodeBatch, requests: Iterable[Request]) -> None:
        for request in requests:
            batch.join(request, window=self.max_model_len, block=self._block_size)
        batch.refresh()
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(batch.ids)

    def _join_decoding(self, batch: _DecodeBatch) -> None:
        if not self._outside:
            return
        unfinished = [request for request in self._outside if not request.is_finished()]
        decoding = [request for request in unfinished if self._only_decodes(request)]
        self._outside = [request for request in unfinished if request not in decoding]
        if decoding:
            self._join(batch, decoding)

    def _next_step(self, batch: _DecodeBatch, throttle_prefills: bool) -> SchedulerOutput | None:
        """Schedule the batch's next step, along with newly started requests. Returns None if vLLM
        has to schedule the step."""
        if batch.full or self._pause_state != PauseState.UNPAUSED:
            return None
        joined = self._should_begin(batch) or bool(self._outside)
        if joined:
            self._remove(batch, batch.finished())
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        due = np.flatnonzero(batch.next_block_step <= batch.scheduled)
        if not batch.ids or len(due) > free:
            return None
        self.kv_cache_manager.new_step_starts()
        ahead = _BLOCKS_AHEAD if free >= 2 * _BLOCKS_AHEAD * len(batch.ids) else 1
        cached = batch.to_cached_requests(self._allocate(batch, due.tolist(), ahead))
        self.finished_blocks.clear()
        if joined:
            other, output = self._merge_with_others(batch, cached, throttle_prefills)
        else:
            other, output = None, self._schedule_batch_only(batch, cached)
            self.fast_steps += 1
        batch.in_flight.append(_ScheduledStep(output, other, batch.ids, batch.slots))
        return output

    def _should_begin(self, batch: _DecodeBatch) -> bool:
        finished = len(batch.ids) - int(np.count_nonzero(batch.live))
        waiting = len(self.waiting) + len(self.kv_holding_waiting)
        full = self._stuck or len(batch.ids) >= self.max_num_running_reqs
        if lost := min(waiting, finished) if full else waiting:
            self._unused_slots += max(lost, _JOIN_COST * len(batch.ids) / _MAX_WAIT)
        cost = _JOIN_COST * len(batch.ids)
        return self._unused_slots >= cost or finished > _MAX_FINISHED * len(batch.ids)

    def _schedule_batch_only(
        self, batch: _DecodeBatch, cached: CachedRequestData
    ) -> SchedulerOutput:
        self.current_step += 1
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=batch.one_each,
            total_num_scheduled_tokens=len(batch.ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return output

    def _merge_with_others(
        self, batch: _DecodeBatch, cached: CachedRequestData, throttle_prefills: bool
    ) -> tuple[SchedulerOutput | None, SchedulerOutput]:
        """Let vLLM schedule all other requests with the remaining capacity, and merge the step it
        schedules with the batch's step."""
        count, outside = len(batch.ids), len(self._outside)
        self.running = self._outside
        for name in _LIMITS:
            setattr(self, name, getattr(self, name) - count)
        try:
            other = super().schedule(throttle_prefills)
            self._update_stuck(other, self.max_num_scheduled_tokens, outside)
        finally:
            for name in _LIMITS:
                setattr(self, name, getattr(self, name) + count)
            self._outside = self.running
            mine = (batch.requests[slot] for slot in sorted(batch.slots))  # by arrival, mostly
            self.running = [*(r for r in mine if r is not None), *self._outside]
        self._unused_slots = 0
        output = batch.merge(cached, other)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(output.num_scheduled_tokens)
        return other if other.num_scheduled_tokens else None, output

    def _update_stuck(self, output: SchedulerOutput, budget: int, running: int) -> None:
        self._stuck = (
            bool(self.waiting or self.kv_holding_waiting)
            and output.total_num_scheduled_tokens < budget
            and not output.scheduled_new_reqs
            and not output.scheduled_cached_reqs.resumed_req_ids
            and not output.preempted_req_ids
            and len(output.num_scheduled_tokens) == running
        )

    def _allocate(
        self, batch: _DecodeBatch, due: list[int], ahead: int
    ) -> list[tuple[list[int], ...] | None]:
        """Allocate KV blocks for the batch slots in `due`. Returns the new blocks in batch
        order."""
        if not due:
            return [None] * len(batch.ids)
        size, now = self._block_size, batch.scheduled
        new: dict[int, tuple[list[int], ...] | None] = {}
        for slot in due:
            request = batch.requests[slot]
            before = request.num_computed_tokens
            request.num_computed_tokens = int(batch.computed[slot]) + now
            tokens = int(batch.next_block_step[slot]) - now + size * ahead
            blocks = self.kv_cache_manager.allocate_slots(request, tokens)
            request.num_computed_tokens = before
            if blocks is None:
                raise RuntimeError(f"request {request.request_id}: no KV block where one was free")
            new[slot] = blocks.get_block_ids(allow_none=True)
        batch.next_block_step[due] += size * ahead
        return [new.get(slot) for slot in batch.slots.tolist()]

    def _report_finished(
        self, batch: _DecodeBatch, slots: list[int]
    ) -> dict[int, EngineCoreOutputs]:
        """Report the requests that finished with the latest tokens. They keep their KV blocks until
        other requests join, because steps in flight still use those blocks."""
        outputs: dict[int, EngineCoreOutputs] = {}
        for slot in slots:
            request = batch.requests[slot]
            *before, last = batch.tokens_of(slot)
            self._write_back(batch, slot, before)
            if self._is_async:
                request.num_output_placeholders += 1
            _, stopped = self._update_request_with_output(request, [last])
            assert stopped, f"request {request.request_id} continues after its last token"
            name = request.request_id
            if (recording := self.recordings.get(name)) is not None:
                batch.record(slot, recording)
                self.finished_blocks[name] = self.kv_cache_manager.get_block_ids(name)[0]
            batch.live[slot] = False
            output = EngineCoreOutput(
                request_id=name,
                new_token_ids=[*before, last],
                finish_reason=request.get_finished_reason(),
                stop_reason=request.stop_reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            self._add_undelivered(output)
            mine = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            mine.outputs.append(output)
        if slots and not batch.live.any():
            self.keel_flush()
        return outputs

    def _remove(self, batch: _DecodeBatch, slots: Collection[int]) -> None:
        if not slots:
            return
        requests = {r for slot in slots if (r := batch.requests[slot]) is not None}
        for slot in slots:
            batch.leave(slot)
        batch.refresh()
        self.running = [request for request in self.running if request not in requests]
        for request in requests:
            super()._free_request(request)

    def keel_flush(self) -> None:
        """Write the state of the fast-path batch back to vLLM's requests, as if vLLM had run the
        steps itself."""
        batch, self._batch = self._batch, None
        self._outside = []
        if batch is None or not batch.scheduled:
            return
        for slot in batch.slots[batch.live[batch.slots]].tolist():
            request = batch.requests[slot]
            tokens = batch.tokens_of(slot)
            self._write_back(batch, slot, tokens)
            if tokens:
                self._undelivered.setdefault(request.request_id, []).extend(tokens)
            if (recording := self.recordings.get(request.request_id)) is not None:
                batch.record(slot, recording)
        if finished := batch.finished():
            self._remove(batch, finished)
            self._stuck = False

    def _write_back(self, batch: _DecodeBatch, slot: int, tokens: list[int]) -> None:
        batch.write_back(slot, tokens, self.current_step if self._is_async else None)

    def _add_undelivered(self, output: EngineCoreOutput) -> None:
        if (recording := self.recordings.get(output.request_id)) is not None:
            recording.take(output)
        if before := self._undelivered.pop(output.request_id, None):
            output.new_token_ids = before + output.new_token_ids


class AsyncFastScheduler(_FastPath, AsyncScheduler):
    """A fast scheduler that schedules the next step while the previous one is still running."""
