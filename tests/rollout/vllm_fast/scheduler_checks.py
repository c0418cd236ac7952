"""Compares the fast scheduler with vLLM's, in runs of random requests. Each token depends only on
the request's name and the token's position, so all correct schedules give the same completions and
recordings. This module imports vLLM."""

from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from keel.rl.recordings import Recordings
from keel.rollout.engine.vllm_engine import _end_at_next_token
from keel.rollout.recording.base import Recorder, RecordingOptions
from keel.rollout.recording.packed import PackedRecorder
from keel.rollout.vllm_fast.scheduler import AsyncFastScheduler, _FastPath
from keel.rollout.vllm_fast.step_arrays import PackedRecording
from tests.rollout.tiny_model import make_model

BLOCK = 16
END = 0


def number(*parts: object) -> int:
    return crc32(repr(parts).encode())


def token_of(name: str, place: int) -> int:
    """Return the token at position `place` in a completion. Token 0 ends the completion."""
    value = number(name, place) % 251
    return END if value < 3 and place > 5 else value + 1


def kept_of(name: str, place: int) -> list[int]:
    token = token_of(name, place)
    return sorted({token, *range(token + 1, token + 1 + number(place, name) % 4)})


def logp_of(name: str, place: int) -> float:
    return -1.0 - (number(name, place) % 97) / 97


class Runner:
    """Model runner that tracks requests and checks its inputs."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        """Number of known tokens for each request, including its prompt."""
        self.prompts: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.reused = 0
        """Number of steps that `keel.rollout.vllm_fast.install` would reuse."""
        self._last: tuple[Any, dict[str, int]] | None = None

    def _check_reuse(self, step: Any, computed: dict[str, int]) -> None:
        """Count steps whose rows are unchanged, and check that only their lengths changed."""
        last, self._last = self._last, (step, computed)
        if last is None:
            return
        before, cached = last[0], step.scheduled_cached_reqs
        if (
            step.num_scheduled_tokens is before.num_scheduled_tokens
            and cached.req_ids is before.scheduled_cached_reqs.req_ids
        ):
            assert computed == {name: done + 1 for name, done in last[1].items()}
            assert list(computed) == list(step.num_scheduled_tokens) == list(last[1])
            assert not step.scheduled_new_reqs and not step.finished_req_ids
            self.reused += 1

    def run(self, step: Any) -> ModelRunnerOutput:
        for name in (*step.finished_req_ids, *(step.preempted_req_ids or ())):
            self.tokens.pop(name, None)
        computed: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id] = len(new.prefill_token_ids)
            self.prompts.setdefault(new.req_id, len(new.prompt_token_ids))
            self.blocks[new.req_id] = len(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for name, blocks, done in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self.blocks[name] += len(blocks[0]) if blocks else 0
            computed[name] = done
        self._check_reuse(step, computed)
        names, sampled, logp = list(reversed(step.num_scheduled_tokens)), [], []  # arbitrary order
        ids: list[int] = []
        offsets, firsts = [0], [0]
        for name in names:
            sampled.append([])
            ends = computed[name] + step.num_scheduled_tokens[name]
            assert ends <= self.tokens[name], f"{name}: token {ends} is not known yet"
            assert ends <= self.blocks[name] * BLOCK, f"{name}: no block for token {ends}"
            if ends == self.tokens[name]:
                place = self.tokens[name] - self.prompts[name]
                sampled[-1].append(token_of(name, place))
                logp.append(logp_of(name, place))
                ids += kept_of(name, place)
                offsets.append(len(ids))
                self.tokens[name] += 1
            firsts.append(firsts[-1] + len(sampled[-1]))
        cut = None if all(len(row) == 1 for row in sampled) else firsts
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                np.array([token for row in sampled for token in row])[:, None],
                np.array(logp, np.float32)[:, None],
                np.zeros(len(logp)),
                cut,
            ),
            sampling_masks=SamplingMaskLists(np.array(ids, np.int32), np.array(offsets), cut),
        )


@cache
def make_config(folder: Path) -> Any:
    make_model(folder)
    args = EngineArgs(
        model=str(folder),
        tokenizer=str(folder),
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        block_size=BLOCK,
        dtype="float32",
        enforce_eager=True,
    )
    return args.create_engine_config()


class Play:
    def __init__(self, config: Any, kind: type[Scheduler], *, ahead: bool, blocks: int) -> None:
        config.scheduler_config.async_scheduling = ahead
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.enable_prefix_caching = True
        # Results as in Model Runner V2.
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
        )
        init_none_hash(sha256)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = True
        self.scheduler.return_sampling_mask = True
        self.recordings: dict[str, PackedRecording] = getattr(self.scheduler, "recordings", {})
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.ahead = ahead
        self.runner = Runner()
        self.queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.contexts: dict[str, list[int]] = {}
        self.versions: dict[str, list[int]] = {}
        self.version = self.preempted = 0
        self.longest: dict[str, int] = {}
        """Maximum allowed length of each completion that was cut."""

    def add(self, name: str, prompt: int, limit: int, context: Sequence[int] | None = None) -> None:
        ids = [number(name) % 100 + i for i in range(prompt)]
        self.contexts[name] = ids = [*(context or ()), *ids][:prompt]
        params = SamplingParams(
            max_tokens=limit, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        params._eos_token_id = END
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=ids,
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.hasher,
            )
        )
        self.answers[name], self.versions[name] = [], []
        self.recordings[name] = PackedRecording(with_masks=True)

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.preempted += len(scheduled.preempted_req_ids or ())
            self.queue.append((scheduled, self.runner.run(scheduled)))
            if self.ahead and len(self.queue) < 2:
                return
        if not self.queue:
            return
        for batch in self.scheduler.update_from_output(*self.queue.popleft()).values():
            for output in batch.outputs:
                self.answers[output.request_id] += output.new_token_ids
                self.versions[output.request_id] += [self.version] * len(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ended[output.request_id] = str(output.finish_reason)

    def pause_and_reset(self) -> None:
        """Do what `VllmEngine.begin_update` and `finish_update` do."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(8):
            if not self.scheduler.has_requests() and not self.queue:
                break
            self.step()
        known = {name: len(r.output_token_ids) for name, r in self.scheduler.requests.items()}
        assert known == {name: len(self.answers[name]) for name in known}
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.version += 1
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def cut(self, name: str) -> None:
        """End a request with its next token or the tokens in flight, as `VllmEngine.cut` does."""
        if name in self.answers and name not in self.ended:
            begun = _end_at_next_token(self.scheduler, name)
            request = self.scheduler.requests[name]
            in_flight = request.num_output_placeholders
            assert begun == bool(request.num_output_tokens + in_flight)
            if begun:
                self.longest[name] = request.num_output_tokens + max(1, in_flight)

    def run(self, seed: int, *, updates: bool, cuts: bool = False) -> None:
        draw = np.random.default_rng(seed)
        added = 0
        for index in range(300):
            while added < 30 and draw.random() < (0.8 if index < 3 else 0.08):
                self.add(f"r{added}", int(draw.integers(3, 90)), int(draw.integers(2, 150)))
                added += 1
            victim = f"r{int(draw.integers(0, 30))}"
            if draw.random() < 0.01 and victim in self.answers and victim not in self.ended:
                self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
                self.ended[victim] = "aborted"
            if cuts and draw.random() < 0.3:
                self.cut(f"r{int(draw.integers(0, 30))}")
            if updates and index % 90 == 89:
                self.pause_and_reset()
            self.step()
        self.finish()

    def finish(self) -> None:
        while self.scheduler.has_requests() or self.queue:
            self.step()


def check_whole(play: Play, names: Sequence[str]) -> None:
    """Check completions and recordings, and check that all KV blocks are free."""
    for name in names:
        answer = play.answers[name]
        assert answer == [token_of(name, place) for place in range(len(answer))]
        assert END not in answer[:-1]
        assert play.versions[name] == sorted(play.versions[name])
        assert len(play.versions[name]) == len(answer)
        packed, places = play.recordings[name], range(len(answer))
        expected = np.array([logp_of(name, place) for place in places], np.float32)
        assert np.array_equal(packed.logprobs(), expected)
        kept = packed.sampling_masks()
        assert [kept[place].tolist() for place in places] == [
            kept_of(name, place) for place in places
        ]
    pool = play.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def outputs_equal_vllms(config: Any, ahead: bool, blocks: int, updates: bool, cuts: bool) -> None:
    plain_kind, fast_kind = (
        (AsyncScheduler, AsyncFastScheduler) if ahead else (Scheduler, _FastPath)
    )
    for seed in range(2):
        plain = Play(config, plain_kind, ahead=ahead, blocks=blocks)
        short = Play(config, fast_kind, ahead=ahead, blocks=blocks)
        plain.run(seed, updates=updates, cuts=cuts)
        short.run(seed, updates=updates, cuts=cuts)
        assert bool(short.longest) == cuts
        assert all(len(short.answers[name]) <= most for name, most in short.longest.items())
        assert isinstance(short.scheduler, _FastPath)
        assert short.scheduler.fast_steps > 50
        assert (short.preempted > 0) == (updates or blocks == 30)
        whole = [name for name, reason in short.ended.items() if reason != "aborted"]
        # Requests may start later, so aborts and cuts hit other positions.
        alike = [n for n in whole if plain.ended[n] != "aborted"]
        alike = [n for n in alike if n not in short.longest and n not in plain.longest]
        assert len(short.ended) == len(plain.ended) and len(alike) > (5 if cuts else 20)
        for name in alike:
            assert short.ended[name] == plain.ended[name]
            assert short.answers[name] == plain.answers[name]
        check_whole(short, whole)


class RoutedRunner(Runner):
    """Model runner that stores (weight version, position) for each token in the token's KV slot."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.version = 0
        self.table = np.full((blocks * BLOCK, 2), -1, np.int16)
        self.owned: dict[str, list[int]] = {}

    def run(self, step: Any) -> ModelRunnerOutput:
        begins: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self.owned[new.req_id] = list(new.block_ids[0])
            begins[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for name, more, begin in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self.owned[name] += list(more[0]) if more else []
            begins[name] = begin
        made = super().run(step)
        for name, count in step.num_scheduled_tokens.items():
            places = np.arange(begins[name], begins[name] + count)
            slots = slots_of(self.owned[name], places)
            self.table[slots] = np.stack([np.full(count, self.version), places], 1)
        return made


def slots_of(blocks: Any, places: np.ndarray) -> np.ndarray:
    return np.asarray(blocks, np.int64)[places // BLOCK] * BLOCK + places % BLOCK


class Saver(Recorder):
    """Saves routes before preemptions, like the recorders that read them from cache slots."""

    def attach(self, engine: Any) -> None: ...

    def _logprobs(self, request_id: str, output: Any) -> Any: ...

    def _sampling_masks(self, request_id: str, output: Any) -> Any: ...

    def _routes(self, request_id: str, output: Any, first: int, last: int) -> Any: ...


class RoutedPlay(Play):
    """Reads the stored values when a recorder would: at the end of a request and before
    preemptions."""

    def __init__(self, config: Any, kind: type[Scheduler], *, ahead: bool, blocks: int) -> None:
        super().__init__(config, kind, ahead=ahead, blocks=blocks)
        self.runner: RoutedRunner = RoutedRunner(blocks)
        self.saver = Saver(routes=True, sampling_mask=True)
        self.wanted = self.saver._options
        self.saver._save_before_preemption(self.scheduler, self.read)
        self.checked = 0

    def read(self, blocks: Any, first: int, tokens: int) -> Any:
        return self.runner.table[slots_of(blocks, np.arange(first, tokens))]

    def rows(self, name: str, first: int, tokens: int) -> Any:
        """Return the rows of a finished request."""
        blocks = self.scheduler.finished_blocks.pop(name)  # type: ignore[attr-defined]

        def read_after(count: int) -> Any:
            return self.read(blocks, first + count, tokens)

        return self.saver._rows(name, tokens - first, read_after)

    def add(self, name: str, prompt: int, limit: int) -> None:
        # Every second request acts like a later turn.
        first = prompt // 2 if len(self.wanted) % 2 else 0
        self.wanted[name] = RecordingOptions(routes=True, sampling_mask=True, routes_from=first)
        super().add(name, prompt, limit)

    def step(self) -> None:
        self.runner.version = self.version
        ended = set(self.ended)
        super().step()
        for name in set(self.ended) - ended:
            tokens = len(self.contexts[name]) + len(self.answers[name]) - 1
            first = self.wanted[name].routes_from
            rows = self.rows(name, first, tokens)
            versions = self.versions[name]
            assert rows[:, 1].tolist() == list(range(first, tokens))
            of_all = [versions[0]] * len(self.contexts[name]) + versions[1:]
            assert rows[:, 0].tolist() == of_all[first:]
            self.checked += 1


def routes_belong_to_the_sampling_weights(config: Any, ahead: bool, blocks: int) -> None:
    """Run with many preemptions, and with a weight update every 17 steps."""
    for seed in range(6):
        kind = AsyncFastScheduler if ahead else _FastPath
        play = RoutedPlay(config, kind, ahead=ahead, blocks=blocks)
        draw = np.random.default_rng(seed)
        for index in range(400):
            while len(play.answers) < 40 and draw.random() < (0.8 if index < 3 else 0.15):
                name = f"r{len(play.answers)}"
                play.add(name, int(draw.integers(3, 90)), int(draw.integers(2, 150)))
            if index % 17 == 16:
                play.pause_and_reset()
            play.step()
        while play.scheduler.has_requests() or play.queue:
            play.step()
        assert play.checked == 40 and play.preempted > 20
        assert not play.saver._saved


def non_finite_completions_skip_route_checks(config: Any) -> None:
    """If logits are NaN, a sampled token may be outside its sampling mask."""
    scheduler = Play(config, AsyncFastScheduler, ahead=True, blocks=30).scheduler
    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(use_v2_model_runner=True),
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)),
        collective_rpc=lambda *_, **__: [None],
    )
    recorder = PackedRecorder(routes=True, sampling_mask=True)
    recorder.attach(engine)
    for value in (np.nan, np.inf, -np.inf):
        recorder.expect("r", RecordingOptions(routes=True, sampling_mask=True))
        packed = scheduler.recordings["r"]  # type: ignore[attr-defined]
        packed.logp.append(np.array([-1, value], np.float32))
        packed.ids.append(np.array([7, 8], np.int32))
        packed.sizes.append(np.array([1, 1]))
        completion: Any = SimpleNamespace(token_ids=[7, 0])
        logp, arrays = recorder.take("r", 3, completion)
        assert np.array_equal(logp, np.array([-1, value], np.float32), equal_nan=True)
        assert arrays == Recordings()
        assert not recorder._options
        assert not scheduler.recordings  # type: ignore[attr-defined]
