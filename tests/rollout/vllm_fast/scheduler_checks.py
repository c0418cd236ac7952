"""Checks the fast scheduler against vLLM's scheduler. Both must give the same results, and routes
must stay with their tokens. This module imports vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from keel.rollout.recording.base import Recorder, RecordingOptions
from keel.rollout.recording.packed import PackedRecorder
from keel.rollout.vllm_fast.scheduler import AsyncFastScheduler, FastScheduler
from tests.rollout.vllm_fast.play import (
    BLOCK,
    END,
    Play,
    Runner,
    kept_of,
    logp_of,
    make_config,
    token_of,
)

__all__ = ["make_config"]


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
        (AsyncScheduler, AsyncFastScheduler) if ahead else (Scheduler, FastScheduler)
    )
    for seed in range(2):
        plain = Play(config, plain_kind, ahead=ahead, blocks=blocks)
        short = Play(config, fast_kind, ahead=ahead, blocks=blocks)
        plain.run(seed, updates=updates, cuts=cuts)
        short.run(seed, updates=updates, cuts=cuts)
        assert bool(short.longest) == cuts
        assert all(len(short.answers[name]) <= most for name, most in short.longest.items())
        assert isinstance(short.scheduler, FastScheduler | AsyncFastScheduler)
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

    def take(self, request_id: str, prompt_tokens: int, output: Any) -> Any: ...


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
            blocks = self.scheduler.finished_blocks.pop(name)  # type: ignore[attr-defined]
            first = self.wanted[name].routes_from
            rows = self.saver._rows(name, blocks, first, tokens, self.read)
            versions = self.versions[name]
            assert rows[:, 1].tolist() == list(range(first, tokens))
            of_all = [versions[0]] * len(self.contexts[name]) + versions[1:]
            assert rows[:, 0].tolist() == of_all[first:]
            self.checked += 1


def routes_belong_to_the_sampling_weights(config: Any, ahead: bool, blocks: int) -> None:
    """Run with many preemptions, and with a weight update every 17 steps."""
    for seed in range(6):
        kind = AsyncFastScheduler if ahead else FastScheduler
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
        recording = recorder.take("r", 3, completion)
        assert np.array_equal(recording.logp, np.array([-1, value], np.float32), equal_nan=True)
        assert recording.sampling_mask is None and recording.routes is None
        assert recorder.pending() == 0
        assert not scheduler.recordings  # type: ignore[attr-defined]
