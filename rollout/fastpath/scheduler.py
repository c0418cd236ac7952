"""vLLM's scheduler with a fast path for steps in which nothing begins.

Most steps sample one token for each running request and begin none. vLLM walks over all requests
three times in such a step (to schedule it, to take its tokens, to pass them on), which at 256
requests takes longer than the GPU needs. Here such steps are a `DecodeRun`. Whenever anything else
is due (requests to begin, to abort, to preempt; a pause), the run is flushed, that is written back
into the requests, and vLLM's own code does the step. Flushed tokens reach the output processor
together with the request's next one, as those of speculative decoding do.

A request that ends goes to the output processor at once, and the run goes on; so it does while
others wait for a place in the batch, in turns of conversations at nearly every step. Both leave
places of the batch unused. The run is flushed for them once what they have lost comes to about what
vLLM's step costs, so that the two together are at most twice the least possible.

`_FastPath` is mixed into the scheduler that vLLM would use itself, so all decisions stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable
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

from keel.rollout.fastpath.decode_run import DecodeRun
from keel.rollout.fastpath.step_arrays import Packed

SHORTEST_RUN = 2
"""Steps that a run must have before it, or it is not worth beginning."""
FLUSH_COST = 2.0
"""What a flush and vLLM's own step cost, in steps of the run: an estimate between several, where
these wait for the host, and one, where they wait for the GPU. With 0.4, 1 and 2.5 the ratio of
`benchmarks.agents` was 0.54, 0.55 and 0.60 (1.2 B parameters, H200, two rounds each, 904e251)."""
LONGEST_WAIT = 64
"""Steps after which the run is flushed for a single one, too."""
AHEAD = 4
"""KV blocks that a request is given at once, where twice as many are free for every one of them."""


class _FastPath(Scheduler):
    """See the module. `recordings` and `finished_blocks` belong to the recorder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recordings: dict[str, Packed] = {}
        """Requests whose log-probabilities and sampling masks stay here."""
        self.finished_blocks: dict[str, list[int]] = {}
        """KV blocks of finished requests that are recorded; valid until the next step."""
        self.fast_steps = 0
        self._run: DecodeRun | None = None
        self._idle = 0.0
        """Places of the batch times steps, since vLLM's last one, in which others could have run:
        those that wait, or come after those that have ended."""
        self._undelivered: dict[str, list[int]] = {}
        """Flushed tokens that the output processor has not seen."""
        self._stuck = False
        """Requests wait, and vLLM's last step could begin none: not for want of a token budget."""
        groups = self.kv_cache_config.kv_cache_groups
        self._possible = (
            len(groups) == 1
            and type(groups[0].kv_cache_spec) is FullAttentionSpec
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
        if self._run is None:
            self._run = self._begin()
        if self._run is not None:
            if (output := self._extend(self._run)) is not None:
                self.fast_steps += 1
                return output
            self.keel_flush()
        self.finished_blocks.clear()
        self._idle = 0
        output = super().schedule(throttle_prefills)
        self._stuck = (
            bool(self.waiting or self.kv_holding_waiting)
            and output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
            and not output.scheduled_new_reqs
            and not output.scheduled_cached_reqs.resumed_req_ids
            and not output.preempted_req_ids
            and len(output.num_scheduled_tokens) == len(self.running)
        )
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        run, unpaused = self._run, self._pause_state == PauseState.UNPAUSED
        if run is not None and run.in_flight and run.in_flight[0] is scheduler_output:
            ended = run.receive(model_runner_output) if unpaused else None
            if ended is not None:
                return self._end(run, ended)
            self.keel_flush()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for batch in outputs.values():
            for output in batch.outputs:
                self._complete(output)
        if self._undelivered and not unpaused:
            # No step may come for them before the weights, and so their version, change.
            mine = outputs.setdefault(0, EngineCoreOutputs(outputs=[]))
            mine.outputs.extend(
                EngineCoreOutput(request_id=name, new_token_ids=self._undelivered.pop(name))
                for name in list(self._undelivered)
            )
        if self.finished_req_ids:
            self.keel_flush()
            self._stuck = False
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
        ):
            return None
        room = self.max_model_len
        stops: list[frozenset[int]] = []
        for request in self.running:
            params = request.sampling_params
            known = request.num_tokens + request.num_output_placeholders
            if (
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
                or (params.logprobs is not None and request.request_id not in self.recordings)
            ):
                return None
            room = min(room, self.max_model_len - known)
            eos = () if params.eos_token_id is None else (params.eos_token_id,)
            stops.append(frozenset((*eos, *(params.stop_token_ids or ()))))
        if room <= SHORTEST_RUN:
            return None
        requests = list(self.running)
        ids = [request.request_id for request in requests]
        computed = np.array([request.num_computed_tokens for request in requests], np.int64)
        size = self.kv_cache_manager.coordinator.single_type_managers[0].block_size
        due: dict[int, list[int]] = {}
        for row, step in enumerate((-computed % size).tolist()):
            due.setdefault(step, []).append(row)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(ids)
        return DecodeRun(
            requests=requests,
            ids=ids,
            computed=computed,
            outputs=np.array([r.num_output_tokens + r.num_output_placeholders for r in requests]),
            limits=np.array([request.max_tokens for request in requests]),
            room=room,
            stops=stops,
            due=due,
            one_each=dict.fromkeys(ids, 1),
            blocked=self._stuck or len(requests) >= self.max_num_running_reqs,
        )

    def _extend(self, run: DecodeRun) -> SchedulerOutput | None:
        """The run's next step; None if vLLM has to decide about it."""
        step, ended = run.scheduled, run.ended
        waiting = len(self.waiting) + len(self.kv_holding_waiting)
        if lost := ended + (min(waiting, ended) if run.blocked else waiting):
            self._idle += max(lost, FLUSH_COST * len(run.ids) / LONGEST_WAIT)
        due = run.due.get(step, [])
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        if (
            step + 1 >= run.room
            or self._idle >= FLUSH_COST * len(run.ids)
            or self._pause_state != PauseState.UNPAUSED
            or len(due) > free
        ):
            return None
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        blocks: list[tuple[list[int], ...] | None] = [None] * len(run.ids)
        if due:
            del run.due[step]
            size = self.kv_cache_manager.coordinator.single_type_managers[0].block_size
            tokens = size * (AHEAD if free >= 2 * AHEAD * len(run.ids) else 1)
            run.due.setdefault(step + tokens, []).extend(due)
            for row in due:
                blocks[row] = self._new_blocks(run, row, step, tokens)
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=run.ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=blocks,
                num_computed_tokens=(run.computed + step).tolist(),
                num_output_tokens=(run.outputs + step).tolist(),
            ),
            num_scheduled_tokens=run.one_each,
            total_num_scheduled_tokens=len(run.ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()
        self.finished_blocks.clear()
        run.scheduled += 1
        run.in_flight.append(output)
        return output

    def _new_blocks(
        self, run: DecodeRun, row: int, step: int, tokens: int
    ) -> tuple[list[int], ...] | None:
        """For this many tokens; None if the request has blocks for them."""
        request = run.requests[row]
        before = request.num_computed_tokens
        request.num_computed_tokens = int(run.computed[row]) + step
        new = self.kv_cache_manager.allocate_slots(request, tokens)
        request.num_computed_tokens = before
        if new is None:
            raise RuntimeError(f"request {request.request_id}: no KV block where one was free")
        return new.get_block_ids(allow_none=True)

    def _end(self, run: DecodeRun, rows: list[int]) -> dict[int, EngineCoreOutputs]:
        """Deliver the requests in these rows, which the last tokens received have ended. Their
        places and blocks stay theirs until the run is flushed: steps are in flight with them."""
        outputs: dict[int, EngineCoreOutputs] = {}
        for row in rows:
            request = run.requests[row]
            *before, last = run.tokens_of(row)
            self._write_back(run, row, before)
            if isinstance(self, AsyncScheduler):
                request.num_output_placeholders += 1
            _, stopped = self._update_request_with_output(request, [last])
            assert stopped, f"request {request.request_id} goes on after its last token"
            name = request.request_id
            if (packed := self.recordings.get(name)) is not None:
                run.file_one(row, packed)
                self.finished_blocks[name] = self.kv_cache_manager.get_block_ids(name)[0]
            run.live[row] = False
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
        if run.ended == len(run.ids):
            self.keel_flush()
        return outputs

    def keel_flush(self) -> None:
        """Write the run back into its requests; they are as after vLLM's own steps."""
        run, self._run = self._run, None
        if run is None or not run.scheduled:
            return
        tokens = np.stack(run.tokens, 1).tolist() if run.tokens else [[] for _ in run.ids]
        ended: set[Request] = set()
        for row, request in enumerate(run.requests):
            if not run.live[row]:
                ended.add(request)
                continue
            self._write_back(run, row, tokens[row])
            if new := tokens[row]:
                self._undelivered.setdefault(request.request_id, []).extend(new)
        run.file(self.recordings)
        if ended:
            self.running = [request for request in self.running if request not in ended]
            for request in ended:
                super()._free_request(request)
            self._stuck = False

    def _write_back(self, run: DecodeRun, row: int, tokens: list[int]) -> None:
        """Bring a request to where the run is; these are its `tokens` in it."""
        request, in_flight = run.requests[row], len(run.in_flight)
        request.num_computed_tokens = int(run.computed[row]) + run.scheduled
        request.num_in_flight_tokens += in_flight
        if isinstance(self, AsyncScheduler):
            request.num_output_placeholders += in_flight
            request.next_decode_eligible_step = self.current_step + 1
        if tokens:
            request.append_output_token_ids(tokens)

    def _complete(self, output: EngineCoreOutput) -> None:
        """Flushed tokens go before the new one; what is recorded stays here."""
        packed = self.recordings.get(output.request_id)
        if packed is not None:
            if output.new_logprobs is not None:
                packed.logp.append(output.new_logprobs.logprobs[:, 0].copy())
                output.new_logprobs = None
            if output.new_sampling_mask is not None:
                if packed.kept_wanted:
                    ids, offsets = output.new_sampling_mask[:2]
                    packed.ids.append(ids.copy())  # a view would hold the whole step
                    packed.sizes.append(
                        np.array([len(ids)]) if offsets is None else np.diff(offsets)
                    )
                output.new_sampling_mask = None
        if before := self._undelivered.pop(output.request_id, None):
            output.new_token_ids = before + output.new_token_ids


class FastScheduler(_FastPath):
    """Steps one after the other."""


class AsyncFastScheduler(_FastPath, AsyncScheduler):
    """A step is scheduled while the one before it runs."""
