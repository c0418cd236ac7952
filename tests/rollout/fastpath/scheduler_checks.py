"""The fast scheduler makes the same decisions as vLLM's own, step by step, both ways of stepping.

The model is a function of a request's name and a token's place, so any two schedules that are right
deliver the same answers with the same recordings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
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

from keel.rollout.fastpath import scheduler as fast
from keel.rollout.fastpath.scheduler import JOIN_COST, AsyncFastScheduler, FastScheduler
from keel.rollout.fastpath.step_arrays import Packed
from keel.rollout.vllm_internals import cut_short
from tests.rollout.tiny_model import make_model

BLOCK = 16
END = 0


def number(*parts: object) -> int:
    return crc32(repr(parts).encode())


def token_of(name: str, place: int) -> int:
    """The `place`th token of an answer; 0 ends it."""
    value = number(name, place) % 251
    return END if value < 3 and place > 5 else value + 1


def kept_of(name: str, place: int) -> list[int]:
    token = token_of(name, place)
    return sorted({token, *range(token + 1, token + 1 + number(place, name) % 4)})


def logp_of(name: str, place: int) -> float:
    return -1.0 - (number(name, place) % 97) / 97


class Runner:
    """What a model runner knows of the requests; checks what it is told."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        """Tokens known of each request, prompt included."""
        self.prompts: dict[str, int] = {}
        self.blocks: dict[str, int] = {}

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
        names, sampled, logp = list(step.num_scheduled_tokens), [], []
        ids: list[int] = []
        offsets = [0]
        for name in names:
            ends = computed[name] + step.num_scheduled_tokens[name]
            assert ends <= self.tokens[name], f"{name}: token {ends} is not known yet"
            assert ends <= self.blocks[name] * BLOCK, f"{name}: no block for token {ends}"
            drawn = ends == self.tokens[name]
            place = self.tokens[name] - self.prompts[name]
            sampled.append([token_of(name, place)] if drawn else [])
            logp.append(logp_of(name, place))
            ids += kept_of(name, place)
            offsets.append(len(ids))
            self.tokens[name] += drawn
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                np.array(sampled and [row[:1] or [0] for row in sampled]),
                np.array(logp, np.float32)[:, None],
                np.zeros(len(names)),
            ),
            sampling_masks=SamplingMaskLists(np.array(ids, np.int32), np.array(offsets)),
        )


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
    """A scheduler under random events; the same ones for every kind of scheduler."""

    def __init__(self, config: Any, kind: type[Scheduler], *, ahead: bool, blocks: int) -> None:
        config.scheduler_config.async_scheduling = ahead
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.enable_prefix_caching = True
        # Model Runner V2: names of sequences and masks as it returns them.
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
        self.recordings: dict[str, Packed] = getattr(self.scheduler, "recordings", {})
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.ahead = ahead
        self.runner = Runner()
        self.queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.contexts: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        """Tokens of contexts that came from the prefix cache."""
        self.versions: dict[str, list[int]] = {}
        self.version = self.preempted = 0
        self.longest: dict[str, int] = {}
        """Most tokens of those that were cut."""

    def add(self, name: str, prompt: int, limit: int, context: Sequence[int] | None = None) -> None:
        """`context`: what the prompt begins with."""
        ids = [number(name) % 100 + i for i in range(prompt)]
        self.contexts[name] = ids = [*(context or ()), *ids][:prompt]
        params = SamplingParams(
            max_tokens=limit,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
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
        self.recordings[name] = Packed(kept_wanted=True)

    def step(self) -> None:
        """As `EngineCore.step` and `step_with_batch_queue`."""
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
                if output.prefill_stats is not None:
                    self.cached[output.request_id] = output.prefill_stats.num_cached_tokens
                if output.finish_reason is not None:
                    self.ended[output.request_id] = str(output.finish_reason)

    def pause_and_reset(self) -> None:
        """As `VllmEngine.begin_update` and `finish_update`."""
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
        """As `VllmEngine.cut`: it ends with its next token, or with those in flight."""
        if name in self.answers and name not in self.ended:
            begun = cut_short(self.scheduler, name)
            request = self.scheduler.requests[name]
            flying = request.num_output_placeholders
            assert begun == bool(request.num_output_tokens + flying)
            if begun:
                self.longest[name] = request.num_output_tokens + max(1, flying)

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
            if cuts and draw.random() < 0.1:
                self.cut(f"r{int(draw.integers(0, 30))}")
            if updates and index % 90 == 89:
                self.pause_and_reset()
            self.step()
        while self.scheduler.has_requests() or self.queue:
            self.step()


def answers_and_recordings_are_whole(
    config: Any, ahead: bool, blocks: int, updates: bool, cuts: bool
) -> None:
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
        # Requests may wait a few steps longer here, so that an abort or a cut finds them elsewhere.
        alike = [n for n in whole if plain.ended[n] != "aborted"]
        alike = [n for n in alike if n not in short.longest and n not in plain.longest]
        assert len(short.ended) == len(plain.ended) and len(alike) > (5 if cuts else 20)
        for name in alike:
            assert short.ended[name] == plain.ended[name]
            assert short.answers[name] == plain.answers[name]
        for name in whole:
            answer = short.answers[name]
            assert answer == [token_of(name, place) for place in range(len(answer))]
            assert END not in answer[:-1]
            assert short.versions[name] == sorted(short.versions[name])
            assert len(short.versions[name]) == len(answer)
        for name in whole:
            packed = short.recordings[name]
            places = range(len(short.answers[name]))
            expected = np.array([logp_of(name, place) for place in places], np.float32)
            assert np.array_equal(packed.logprobs(), expected)
            kept = packed.kept()
            assert [kept[place].tolist() for place in places] == [
                kept_of(name, place) for place in places
            ]
        free = short.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == blocks - 1, "blocks were lost"


def most_steps_of_a_quiet_engine_are_fast(config: Any) -> None:
    play = Play(config, AsyncFastScheduler, ahead=True, blocks=400)
    for index in range(12):
        play.add(f"quiet{index}", 20, 120)
    steps = 0
    while play.scheduler.has_requests() or play.queue:
        play.step()
        steps += 1
    assert isinstance(play.scheduler, AsyncFastScheduler)
    assert play.scheduler.fast_steps > 0.5 * steps


def most_steps_of_turns_are_fast(config: Any, waiting: int) -> None:
    """A request ends and another begins every few steps, as turns of conversations do; each goes on
    from what the one before it said. `waiting`: more of them than the batch has places."""
    steps: list[int] = []
    for kind in (AsyncScheduler, AsyncFastScheduler):
        play = Play(config, kind, ahead=True, blocks=400)
        back: deque[tuple[int, str, list[int]]] = deque()
        index = 0
        for seat in range(12 + waiting):
            play.add(f"0.{seat}", 20, 30 + number(seat) % 30)
        while play.scheduler.has_requests() or play.queue or back:
            before = set(play.ended)
            play.step()
            index += 1
            for name in sorted(set(play.ended) - before):
                turn, seat = (int(part) for part in name.split("."))
                if turn < 3:
                    context = play.contexts[name] + play.answers[name]
                    back.append((index + 3, f"{turn + 1}.{seat}", context))
            while back and back[0][0] <= index:
                _, name, context = back.popleft()
                play.add(name, len(context) + 5, 20 + number(name) % 30, context)
        steps.append(index)
        assert len(play.ended) == 4 * (12 + waiting)
        for name, context in play.contexts.items():
            # The last block may be full but for the last token, whose keys nobody has computed.
            assert name.startswith("0.") or play.cached[name] >= (len(context) - 6) // BLOCK * BLOCK
    plain, short = steps
    assert isinstance(play.scheduler, AsyncFastScheduler)
    assert play.scheduler.fast_steps > 0.5 * short
    assert short < 1.3 * plain, "places of the batch stay unused for too long"


def nobody_waits_for_long(config: Any) -> None:
    """One that comes while all others go on for long."""
    play = Play(config, AsyncFastScheduler, ahead=True, blocks=400)
    for index in range(11):
        play.add(f"quiet{index}", 20, 200)
    for _ in range(8):
        play.step()
    play.add("alone", 20, 5)
    fast.LONGEST_WAIT, before = 4, fast.LONGEST_WAIT
    try:
        for _ in range(8):
            play.step()
    finally:
        fast.LONGEST_WAIT = before
    assert play.answers["alone"], "it would wait for 22 steps"


def nothing_waits_for_an_answer_to_end_while_there_is_room(config: Any, ahead: bool) -> None:
    """A request comes while the prompt of another is read in parts, which may fill whole steps."""
    kinds = (AsyncScheduler, AsyncFastScheduler) if ahead else (Scheduler, FastScheduler)
    for prompt in (64, 100, 128):
        for before in range(6):
            waited: list[int] = []
            for kind in kinds:
                play = Play(config, kind, ahead=ahead, blocks=400)
                play.add("quiet0", prompt, 150)
                for _ in range(before):
                    play.step()
                play.add("second", 20, 5)
                steps = 0
                while not play.answers["second"]:
                    play.step()
                    steps += 1
                waited.append(steps)
            plain, short = waited
            assert plain <= short <= plain + JOIN_COST, f"{short} steps instead of {plain}"
