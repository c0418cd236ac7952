"""vLLM's scheduler with a fast path for steps in which no request begins.

Most steps sample one token for each running request. vLLM loops over all requests three times in
such a step. With 256 requests, this takes longer than the GPU needs. Here, these steps are
scheduled as a `DecodeBatch`.

When requests begin, vLLM's scheduler sees only the new ones, with the capacity that the batch
leaves free. The step that it schedules is merged with the batch's step. The requests join the batch
once they only decode. For anything else (an abort, a preemption, a pause) the batch is flushed: its
state is written back to the requests, and vLLM schedules the whole step. Flushed tokens are
delivered together with the request's next token, as in speculative decoding.

The batch continues when a request finishes, which is reported at once, and also while other
requests wait to begin. In both cases, some slots in the batch stay unused. Waiting requests begin
once the loss from unused slots equals the cost of a step in which requests begin. The total loss is
therefore at most twice the minimum.

`_FastPath` is mixed into vLLM's scheduler, which still makes all decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from keel.rollout.vllm_fast.decode_batch import DecodeBatch, ScheduledStep, only_decodes
from keel.rollout.vllm_fast.step_arrays import PackedRecording

_JOIN_COST = 1.0
"""Extra cost of a step in which requests begin, in units of ordinary steps of the batch."""
_MAX_WAIT = 64
"""Number of steps after which requests may begin even if only one is waiting."""
_LIMITS = ("max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens")
"""Limits of vLLM's scheduler that are reduced by what the batch already uses."""
_MAX_FINISHED = 0.25
"""Maximum fraction of the batch that may consist of finished requests. Their rows are still
computed."""
_BLOCKS_AHEAD = 4
"""Number of KV blocks to allocate at once, provided that twice as many are free for every
request."""


class _FastPath(Scheduler):
    """Adds the fast path to a scheduler (see the module docstring). The recorder uses `recordings`
    and `finished_blocks`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recordings: dict[str, PackedRecording] = {}
        """Log-probabilities and sampling masks of the requests that are recorded."""
        self.finished_blocks: dict[str, list[int]] = {}
        """KV blocks of recorded requests that have finished. Valid until the next step."""
        self.fast_steps = 0
        self._ahead = isinstance(self, AsyncScheduler)
        self._batch: DecodeBatch | None = None
        self._outside: list[Request] = []
        """Running requests that are not in the batch, mostly prefills."""
        self._idle = 0.0
        """Number of unused batch slots, summed over the steps since requests last began."""
        self._undelivered: dict[str, list[int]] = {}
        """Flushed tokens that have not reached the output processor yet."""
        self._stuck = False
        """True if requests are waiting but vLLM began none of them in its last step, although it
        still had tokens to spare."""
        groups = self.kv_cache_config.kv_cache_groups
        self._possible = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec

    def leave_routes(self) -> None:
        self.aux_output_connector = None

    # Overrides of vLLM's methods.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        batch = self._batch = self._batch or self._new_batch()
        if batch is not None:
            self._join_decoding(batch)
            if (output := self._next_step(batch, throttle_prefills)) is not None:
                return output
            self.keel_flush()
        self.finished_blocks.clear()
        self._idle = 0
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
                other, outputs = step.other, self._finish(batch, finished)
        if other is not None:
            for client, theirs in super().update_from_output(other, model_runner_output).items():
                for output in theirs.outputs:
                    self._complete(output)
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
        """Return True also if a paused engine has undelivered tokens, so that it runs one more
        (empty) step."""
        pending = self._undelivered or (self._batch is not None and self._batch.received)
        paused = self._pause_state != PauseState.UNPAUSED
        return bool(paused and pending) or super().has_finished_requests()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.request_id in self.recordings:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)
            self.finished_blocks[request.request_id] = blocks[0]
        return super()._free_request(request, *args, **kwargs)

    # The batch.

    def _new_batch(self) -> DecodeBatch | None:
        """Return a batch of all running requests, or None if some of them do more than decode."""
        if (
            not self._possible
            or not self.running
            or self.aux_output_connector is not None
            or self._pause_state != PauseState.UNPAUSED
            or not all(self._only_decodes(request) for request in self.running)
        ):
            return None
        batch = DecodeBatch(self.max_num_running_reqs)
        self._join(batch, self.running)
        return batch

    def _only_decodes(self, request: Request) -> bool:
        recorded = request.request_id in self.recordings
        return only_decodes(request, self.max_model_len, logprobs=recorded)

    @property
    def _block_size(self) -> int:
        return self.kv_cache_manager.coordinator.single_type_managers[0].block_size

    def _join(self, batch: DecodeBatch, requests: Iterable[Request]) -> None:
        for request in requests:
            batch.join(request, window=self.max_model_len, block=self._block_size)
        batch.settle()
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(batch.ids)

    def _join_decoding(self, batch: DecodeBatch) -> None:
        if not self._outside:
            return
        unfinished = [request for request in self._outside if not request.is_finished()]
        decoding = [request for request in unfinished if self._only_decodes(request)]
        self._outside = [request for request in unfinished if request not in decoding]
        if decoding:
            self._join(batch, decoding)

    def _next_step(self, batch: DecodeBatch, throttle_prefills: bool) -> SchedulerOutput | None:
        """Schedule the next step of the batch, together with requests that begin. Returns None if
        vLLM has to schedule the whole step."""
        if batch.full or self._pause_state != PauseState.UNPAUSED:
            return None
        joined = self._should_begin(batch) or bool(self._outside)
        if joined:
            self._remove(batch, batch.finished())
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        due = np.flatnonzero(batch.due <= batch.scheduled)
        if not batch.ids or len(due) > free:
            return None
        self.kv_cache_manager.new_step_starts()
        ahead = _BLOCKS_AHEAD if free >= 2 * _BLOCKS_AHEAD * len(batch.ids) else 1
        cached = batch.as_cached(self._allocate(batch, due.tolist(), ahead))
        self.finished_blocks.clear()
        if joined:
            other, output = self._with_others(batch, cached, throttle_prefills)
        else:
            other, output = None, self._alone(batch, cached)
            self.fast_steps += 1
        batch.in_flight.append(ScheduledStep(output, other, batch.ids, batch.places))
        return output

    def _should_begin(self, batch: DecodeBatch) -> bool:
        finished = len(batch.ids) - int(np.count_nonzero(batch.live))
        waiting = len(self.waiting) + len(self.kv_holding_waiting)
        full = self._stuck or len(batch.ids) >= self.max_num_running_reqs
        if lost := min(waiting, finished) if full else waiting:
            self._idle += max(lost, _JOIN_COST * len(batch.ids) / _MAX_WAIT)
        cost = _JOIN_COST * len(batch.ids)
        return self._idle >= cost or finished > _MAX_FINISHED * len(batch.ids)

    def _alone(self, batch: DecodeBatch, cached: CachedRequestData) -> SchedulerOutput:
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

    def _with_others(
        self, batch: DecodeBatch, cached: CachedRequestData, throttle_prefills: bool
    ) -> tuple[SchedulerOutput | None, SchedulerOutput]:
        """Let vLLM schedule all other requests with the remaining capacity. The two steps are then
        merged."""
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
            mine = (batch.requests[place] for place in sorted(batch.places))  # by arrival, mostly
            self.running = [*(it for it in mine if it is not None), *self._outside]
        self._idle = 0
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
        self, batch: DecodeBatch, due: list[int], ahead: int
    ) -> list[tuple[list[int], ...] | None]:
        """Allocate KV blocks for the batch slots in `due`. Returns the new blocks for every
        request, in batch order."""
        if not due:
            return [None] * len(batch.ids)
        size, now = self._block_size, batch.scheduled
        new: dict[int, tuple[list[int], ...] | None] = {}
        for place in due:
            request = batch.requests[place]
            assert request is not None
            before = request.num_computed_tokens
            request.num_computed_tokens = int(batch.computed[place]) + now
            tokens = int(batch.due[place]) - now + size * ahead
            blocks = self.kv_cache_manager.allocate_slots(request, tokens)
            request.num_computed_tokens = before
            if blocks is None:
                raise RuntimeError(f"request {request.request_id}: no KV block where one was free")
            new[place] = blocks.get_block_ids(allow_none=True)
        batch.due[due] += size * ahead
        return [new.get(place) for place in batch.places.tolist()]

    def _finish(self, batch: DecodeBatch, places: list[int]) -> dict[int, EngineCoreOutputs]:
        """Report the requests that ended with the last tokens as finished. They keep their KV
        blocks until other requests join, because steps in flight still use these blocks."""
        outputs: dict[int, EngineCoreOutputs] = {}
        for place in places:
            request = batch.requests[place]
            assert request is not None
            *before, last = batch.tokens_of(place)
            self._write_back(batch, place, before)
            if self._ahead:
                request.num_output_placeholders += 1
            _, stopped = self._update_request_with_output(request, [last])
            assert stopped, f"request {request.request_id} continues after its last token"
            name = request.request_id
            if (recording := self.recordings.get(name)) is not None:
                batch.record(place, recording)
                self.finished_blocks[name] = self.kv_cache_manager.get_block_ids(name)[0]
            batch.live[place] = False
            output = EngineCoreOutput(
                request_id=name,
                new_token_ids=[*before, last],
                finish_reason=request.get_finished_reason(),
                stop_reason=request.stop_reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            self._complete(output)
            mine = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            mine.outputs.append(output)
        if places and not batch.live.any():
            self.keel_flush()
        return outputs

    def _remove(self, batch: DecodeBatch, places: Collection[int]) -> None:
        if not places:
            return
        requests = {it for place in places if (it := batch.requests[place]) is not None}
        for place in places:
            batch.leave(place)
        batch.settle()
        self.running = [request for request in self.running if request not in requests]
        for request in requests:
            super()._free_request(request)

    def keel_flush(self) -> None:
        """Write the batch's state back to its requests. Afterwards they look as if vLLM itself had
        run the steps."""
        batch, self._batch = self._batch, None
        self._outside = []
        if batch is None or not batch.scheduled:
            return
        for place in batch.places[batch.live[batch.places]].tolist():
            request = batch.requests[place]
            assert request is not None
            tokens = batch.tokens_of(place)
            self._write_back(batch, place, tokens)
            if tokens:
                self._undelivered.setdefault(request.request_id, []).extend(tokens)
            if (recording := self.recordings.get(request.request_id)) is not None:
                batch.record(place, recording)
        if finished := batch.finished():
            self._remove(batch, finished)
            self._stuck = False

    def _write_back(self, batch: DecodeBatch, place: int, tokens: list[int]) -> None:
        batch.write_back(place, tokens, self.current_step if self._ahead else None)

    def _complete(self, output: EngineCoreOutput) -> None:
        """Prepend flushed tokens to the new ones, and store the recording."""
        if (recording := self.recordings.get(output.request_id)) is not None:
            recording.take(output)
        if before := self._undelivered.pop(output.request_id, None):
            output.new_token_ids = before + output.new_token_ids


class FastScheduler(_FastPath):
    """Fast scheduler that waits for each step to finish before it schedules the next one."""


class AsyncFastScheduler(_FastPath, AsyncScheduler):
    """Fast scheduler that schedules the next step while the previous one is running."""
