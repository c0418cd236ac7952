"""vLLM's scheduler with a fast path for steps in which nothing begins.

Most steps sample one token for each running request and begin none. vLLM walks over all requests
three times in such a step (to schedule it, to take its tokens, to pass them on), which at 256
requests takes longer than the GPU needs. Here such steps are a `DecodeRun`. When requests begin,
vLLM's own code is shown these alone, with the room that the run leaves, and its step is put
together with the run's; they come into the run once they only decode. Whatever else is due (an
abort, a preemption, a pause), the run is flushed, that is written back into the requests, and
vLLM's own code does the whole step. Flushed tokens reach the output processor together with the
request's next one, as those of speculative decoding do.

A request that ends goes to the output processor at once, and the run goes on; so it does while
others wait to begin, in turns of conversations at nearly every step. Both leave places of the batch
unused. Those that wait begin once what they have lost comes to about what such a step costs, so
that the two together are at most twice the least possible.

`_FastPath` is mixed into the scheduler that vLLM would use itself, so all decisions stay vLLM's.
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

from keel.rollout.vllm_fast.bursts import MOST, Burst, Pace, as_scheduled, steps_in
from keel.rollout.vllm_fast.decode_batch import DecodeRun, Step, only_decodes, together
from keel.rollout.vllm_fast.step_arrays import Packed
from keel.rollout.vllm_pin import check_parameters

JOIN_COST = 1.0
"""What a step in which others begin costs above one of the run alone, in such steps."""
LIMITS = ("max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens")
"""Of vLLM's scheduler, which a run uses up a part of."""
LONGEST_WAIT = 64
"""Steps after which a single one may begin, too."""
MOST_ENDED = 0.25
"""Share of the run that may have ended: those that have are computed along."""
AHEAD = 4
"""KV blocks that a request is given at once, where twice as many are free for every one of them."""


PARAMETERS = {
    "schedule": "self throttle_prefills",
    "update_from_output": "self scheduler_output model_runner_output",
    "finish_requests": "self request_ids finished_status",
    "_update_request_with_output": "self request new_token_ids is_stale",
}
"""Methods of vLLM's scheduler that are overridden or called, and their parameters."""


class _FastPath(Scheduler):
    """See the module. `recordings` and `finished_blocks` belong to the recorder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for method, parameters in PARAMETERS.items():
            check_parameters(getattr(Scheduler, method), parameters)
        super().__init__(*args, **kwargs)
        self.recordings: dict[str, Packed] = {}
        """Requests whose log-probabilities and sampling masks stay here."""
        self.finished_blocks: dict[str, list[int]] = {}
        """KV blocks of finished requests that are recorded; valid until the next step."""
        self.fast_steps = 0
        self._ahead = isinstance(self, AsyncScheduler)
        self._run: DecodeRun | None = None
        self._pace = Pace()
        self._beside: list[Request] = []
        """What runs and is not in the run: prompts, above all."""
        self._idle = 0.0
        """Places of the batch times steps, since others last began, in which others could have."""
        self._undelivered: dict[str, list[int]] = {}
        """Flushed tokens that the output processor has not seen."""
        self._stuck = False
        """Requests wait, and vLLM's last step could begin none: not for want of a token budget."""
        groups = self.kv_cache_config.kv_cache_groups
        self._possible = (
            len(groups) == 1
            and type(groups[0].kv_cache_spec) is FullAttentionSpec
            and groups[0].kv_cache_spec.block_size >= MOST
            and not self.use_pp
            and not self.num_spec_tokens
            and not self.num_lookahead_tokens
            and self.num_sampled_tokens_per_step == 1
            and self.connector is None
            and self.ec_connector is None
            and not self.log_stats
            and not self.enable_kv_cache_events
        )

    def leave_routes(self) -> None:
        """To the workers: the scheduler has no part in them."""
        self.aux_output_connector = None

    # What vLLM calls.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        run = self._run = self._run or self._begin()
        if run is not None:
            self._take_in(run)
            if (output := self._go_on(run, throttle_prefills)) is not None:
                return output
            self.keel_flush()
        self.finished_blocks.clear()
        self._idle = 0
        output = super().schedule(throttle_prefills)
        self._see_who_waits(output, self.max_num_scheduled_tokens, len(self.running))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._pace.look()
        run, unpaused = self._run, self._pause_state == PauseState.UNPAUSED
        outputs: dict[int, EngineCoreOutputs] = {}
        theirs: SchedulerOutput | None = scheduler_output
        if run is not None and run.in_flight and run.in_flight[0].output is scheduler_output:
            step = run.in_flight[0]
            ended = run.receive(model_runner_output) if unpaused else None
            if ended is None:
                self.keel_flush()
            else:
                theirs, outputs = step.theirs, self._end(run, ended)
                self._pace.came(steps_in(step.output), len(step.ids))
        if theirs is not None:
            self._pace.broken()
            found = super().update_from_output(as_scheduled(theirs), model_runner_output)
            for client, batch in found.items():
                for output in batch.outputs:
                    self._complete(output)
                mine = outputs.setdefault(client, batch)
                if mine is not batch:
                    mine.outputs.extend(batch.outputs)
        if self._undelivered and not unpaused:
            # No step may come for them before the weights, and so their version, change.
            mine = outputs.setdefault(0, EngineCoreOutputs(outputs=[]))
            mine.outputs.extend(
                EngineCoreOutput(request_id=name, new_token_ids=self._undelivered.pop(name))
                for name in list(self._undelivered)
            )
        if self.finished_req_ids:
            self._stuck = False
            if self._run is not None:
                self._run.let_go(self.requests)
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
        """Undelivered tokens of a paused engine ask for one more (empty) step."""
        waiting = self._undelivered or (self._run is not None and self._run.received)
        paused = self._pause_state != PauseState.UNPAUSED
        return bool(paused and waiting) or super().has_finished_requests()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.request_id in self.recordings:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)
            self.finished_blocks[request.request_id] = blocks[0]
        return super()._free_request(request, *args, **kwargs)

    # A run.

    def _begin(self) -> DecodeRun | None:
        """A run of what is running now, if all of it only decodes."""
        if (
            not self._possible
            or not self.running
            or self.aux_output_connector is not None
            or self._pause_state != PauseState.UNPAUSED
            or not all(self._only_decodes(request) for request in self.running)
        ):
            return None
        run = DecodeRun(self.max_num_running_reqs)
        self._admit(run, self.running)
        return run

    def _only_decodes(self, request: Request) -> bool:
        recorded = request.request_id in self.recordings
        return only_decodes(request, self.max_model_len, logprobs=recorded)

    def _admit(self, run: DecodeRun, requests: Iterable[Request]) -> None:
        size = self.kv_cache_manager.coordinator.single_type_managers[0].block_size
        for request in requests:
            run.admit(request, window=self.max_model_len, block=size)
        run.settle()
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(run.ids)

    def _take_in(self, run: DecodeRun) -> None:
        """Those that began beside it, once they only decode."""
        if not self._beside:
            return
        beside = [request for request in self._beside if not request.is_finished()]
        decoding = [request for request in beside if self._only_decodes(request)]
        self._beside = [request for request in beside if request not in decoding]
        if decoding:
            self._admit(run, decoding)

    def _go_on(self, run: DecodeRun, throttle_prefills: bool) -> SchedulerOutput | None:
        """The run's next step, with what begins beside it; None if vLLM has to decide about the
        whole."""
        if run.full or self._pause_state != PauseState.UNPAUSED:
            return None
        joined = self._worth_it(run) or bool(self._beside)
        if joined:
            self._drop(run, run.ended())
        free, now = self.kv_cache_manager.block_pool.get_num_free_blocks(), run.scheduled
        alone = not (joined or self.waiting or self.kv_holding_waiting)
        steps = run.at_once(self._pace.most(len(run.ids))) if alone else 1
        due = np.flatnonzero(run.due < now + steps)
        if len(due) > free:
            steps, due = 1, due[run.due[due] == now]
        if not run.ids or len(due) > free:
            return None
        self.kv_cache_manager.new_step_starts()
        blocks = self._blocks(run, due.tolist(), AHEAD if free >= 2 * AHEAD * len(run.ids) else 1)
        cached = run.as_cached(blocks)
        self.finished_blocks.clear()
        if joined:
            theirs, output = self._beside_it(run, cached, throttle_prefills)
        else:
            theirs, output = None, self._alone(run, cached, steps)
            self.fast_steps += 1
        run.in_flight.append(Step(output, theirs, run.ids, run.places))
        return output

    def _worth_it(self, run: DecodeRun) -> bool:
        """Whether vLLM is to begin others now."""
        ended = len(run.ids) - int(np.count_nonzero(run.live))
        waiting = len(self.waiting) + len(self.kv_holding_waiting)
        full = self._stuck or len(run.ids) >= self.max_num_running_reqs
        if lost := min(waiting, ended) if full else waiting:
            self._idle += max(lost, JOIN_COST * len(run.ids) / LONGEST_WAIT)
        return self._idle >= JOIN_COST * len(run.ids) or ended > MOST_ENDED * len(run.ids)

    def _alone(self, run: DecodeRun, cached: CachedRequestData, steps: int) -> SchedulerOutput:
        self.current_step += 1
        output = Burst(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=run.one_each,
            total_num_scheduled_tokens=len(run.ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            offered=steps,
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return output

    def _beside_it(
        self, run: DecodeRun, cached: CachedRequestData, throttle_prefills: bool
    ) -> tuple[SchedulerOutput | None, SchedulerOutput]:
        """vLLM schedules all but the run, in the room that this leaves; and the two together."""
        count, beside = len(run.ids), len(self._beside)
        self.running = self._beside
        for name in LIMITS:
            setattr(self, name, getattr(self, name) - count)
        try:
            theirs = super().schedule(throttle_prefills)
            self._see_who_waits(theirs, self.max_num_scheduled_tokens, beside)
        finally:
            for name in LIMITS:
                setattr(self, name, getattr(self, name) + count)
            self._beside = self.running
            mine = (run.requests[place] for place in sorted(run.places))  # as they came, about
            self.running = [*(it for it in mine if it is not None), *self._beside]
        self._idle = 0
        output = together(run, cached, theirs)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(output.num_scheduled_tokens)
        return theirs if theirs.num_scheduled_tokens else None, output

    def _see_who_waits(self, output: SchedulerOutput, budget: int, running: int) -> None:
        self._stuck = (
            bool(self.waiting or self.kv_holding_waiting)
            and output.total_num_scheduled_tokens < budget
            and not output.scheduled_new_reqs
            and not output.scheduled_cached_reqs.resumed_req_ids
            and not output.preempted_req_ids
            and len(output.num_scheduled_tokens) == running
        )

    def _blocks(
        self, run: DecodeRun, due: list[int], ahead: int
    ) -> list[tuple[list[int], ...] | None]:
        """New KV blocks for the places that are due, in the order of the run."""
        if not due:
            return [None] * len(run.ids)
        size = self.kv_cache_manager.coordinator.single_type_managers[0].block_size
        new: dict[int, tuple[list[int], ...] | None] = {}
        now = run.scheduled
        for place in due:
            request = run.requests[place]
            assert request is not None
            before = request.num_computed_tokens
            request.num_computed_tokens = int(run.computed[place]) + now
            tokens = int(run.due[place]) - now + size * ahead
            found = self.kv_cache_manager.allocate_slots(request, tokens)
            request.num_computed_tokens = before
            if found is None:
                raise RuntimeError(f"request {request.request_id}: no KV block where one was free")
            new[place] = found.get_block_ids(allow_none=True)
        run.due[due] += size * ahead
        return [new.get(place) for place in run.places.tolist()]

    def _end(self, run: DecodeRun, places: list[int]) -> dict[int, EngineCoreOutputs]:
        """Deliver the requests in these places, which the last tokens received have ended. Their
        blocks stay theirs until others come: steps are in flight with them."""
        outputs: dict[int, EngineCoreOutputs] = {}
        for place in places:
            request = run.requests[place]
            assert request is not None
            *before, last = run.tokens_of(place)
            self._write_back(run, place, before)
            if self._ahead:
                request.num_output_placeholders += 1
            _, stopped = self._update_request_with_output(request, [last])
            assert stopped, f"request {request.request_id} goes on after its last token"
            name = request.request_id
            if (packed := self.recordings.get(name)) is not None:
                run.file(place, packed)
                self.finished_blocks[name] = self.kv_cache_manager.get_block_ids(name)[0]
            run.live[place] = False
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
        if places and not run.live.any():
            self.keel_flush()
        return outputs

    def _drop(self, run: DecodeRun, places: Collection[int]) -> None:
        """Those that have ended leave the batch."""
        if not places:
            return
        requests = {it for place in places if (it := run.requests[place]) is not None}
        for place in places:
            run.leave(place)
        run.settle()
        self.running = [request for request in self.running if request not in requests]
        for request in requests:
            super()._free_request(request)

    def keel_flush(self) -> None:
        """Write the run back into its requests; they are as after vLLM's own steps."""
        run, self._run = self._run, None
        self._beside = []
        if run is None or not run.scheduled:
            return
        for place in run.places[run.live[run.places]].tolist():
            request = run.requests[place]
            assert request is not None
            tokens = run.tokens_of(place)
            self._write_back(run, place, tokens)
            if tokens:
                self._undelivered.setdefault(request.request_id, []).extend(tokens)
            if (packed := self.recordings.get(request.request_id)) is not None:
                run.file(place, packed)
        if ended := run.ended():
            self._drop(run, ended)
            self._stuck = False

    def _write_back(self, run: DecodeRun, place: int, tokens: list[int]) -> None:
        """Bring a request to where the run is; these are its `tokens` in it."""
        run.write_back(place, tokens, self.current_step if self._ahead else None)

    def _complete(self, output: EngineCoreOutput) -> None:
        """Flushed tokens go before the new one; what is recorded stays here."""
        if (packed := self.recordings.get(output.request_id)) is not None:
            packed.take(output)
        if before := self._undelivered.pop(output.request_id, None):
            output.new_token_ids = before + output.new_token_ids


class FastScheduler(_FastPath):
    """Steps one after the other."""


class AsyncFastScheduler(_FastPath, AsyncScheduler):
    """A step is scheduled while the one before it runs."""
