"""Sends random concurrent requests to an engine: groups, turns, cancellations, deadlines and weight
updates.

This module runs in the engine's process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from keel.agents.conversation import SegmentRecord
from keel.configs.schema import SamplingConfig
from keel.rl.turns import TurnRequest
from keel.rl.types import Group, Prompt, Segment
from tests.rollout import remote_engine
from tests.rollout.remote_engine import OPEN, TRUNCATED
from tests.rollout.tiny_model import VOCABULARY
from tests.waiting import wait_for

SAMPLINGS = (
    TRUNCATED,
    OPEN,
    SamplingConfig(temperature=0.7, top_k=5, max_tokens=16),
    SamplingConfig(temperature=1.0, top_k=200, top_p=0.5, max_tokens=30),
    SamplingConfig(temperature=0.8, top_p=0.9, top_k=12, max_tokens=40, stop=("a", "e", "Q")),
)
WORDS = "The quick brown fox jumps over the lazy dog. " * 9
CONVERSATIONS, MAX_OPEN = 10, 14
WINDOW, LONGEST = 256, 190
"""Number of tokens in a context window, and in the longest conversation that is continued."""


@dataclass(kw_only=True)
class GroupSpec:
    sampling: SamplingConfig
    record: bool
    size: int


@dataclass(kw_only=True)
class Outcome:
    groups: list[tuple[GroupSpec, Group]] = field(default_factory=list[Any])
    segments: list[Segment] = field(default_factory=list[Segment])
    errors: list[str] = field(default_factory=list[str])
    cancelled: int = 0
    stats: dict[str, float] = field(default_factory=dict[str, float])


def traffic(seed: int, actions: int, tokens: int, updates: Sequence[Sequence[Any]]) -> Outcome:
    """Perform at least `actions` random actions, and more until there is enough data.

    Enough means `tokens` recorded tokens, a preemption and a cancelled completion. `updates` are
    the buckets of the weight updates, which happen at random times among the first actions.
    """
    return Traffic(seed).run(actions, tokens, updates)


class Traffic:
    def __init__(self, seed: int) -> None:
        self._draw, self._ids = random.Random(seed), np.random.default_rng(seed)
        self._engine: Any = remote_engine._ENGINE
        self._records = [
            SegmentRecord(f"talk{i}", self._words(5, 90)) for i in range(CONVERSATIONS)
        ]
        self._free = [*range(CONVERSATIONS)]
        self._open: dict[Future[Any], GroupSpec | tuple[int, TurnRequest]] = {}
        self._outcome = Outcome()

    def run(self, actions: int, tokens: int, updates: Sequence[Sequence[Any]]) -> Outcome:
        at = sorted(self._draw.sample(range(5, actions), len(updates)))
        end = time.monotonic() + remote_engine.DEADLINE_S / 2
        for number in count():
            self._gather()
            if number >= actions and (self._enough(tokens) or time.monotonic() > end):
                break
            if number in at:
                version = at.index(number) + 1
                remote_engine.update(version, updates[version - 1])
            else:
                self._act(number)
        wait_for(lambda: self._gather() == 0, "all results")
        segments = [record.segment() for record in self._records]
        self._outcome.segments = [segment for segment in segments if segment is not None]
        self._outcome.stats = self._engine.stats()
        return self._outcome

    def _enough(self, tokens: int) -> bool:
        if not (self._outcome.cancelled and remote_engine._WATCH.preempted):
            return False
        groups = (group for asked, group in self._outcome.groups if asked.record)
        turns = (record.segment() for record in self._records)
        sampled = sum(one.sampled_tokens for group in groups for one in group.trajectories)
        return tokens <= sampled + sum(int(t.trainable_T.sum()) for t in turns if t is not None)

    def _act(self, number: int) -> None:
        chance = self._draw.random()
        if chance < 0.4 and len(self._open) < MAX_OPEN:
            self._submit_group(number)
        elif chance < 0.75 and self._free:
            self._submit_turn(self._free.pop(self._draw.randrange(len(self._free))))
        elif chance < 0.8 and self._open:
            self._draw.choice([*self._open]).cancel()
        elif chance < 0.86 and self._open:
            self._engine._enqueue(self._expire_some).result(remote_engine.DEADLINE_S)
        else:
            time.sleep(self._draw.random() * 0.1)

    def _submit_group(self, number: int) -> None:
        sampling = self._draw.choice(SAMPLINGS)
        sampling = replace(sampling, max_tokens=self._draw.randint(1, sampling.max_tokens))
        shared = WORDS[: self._draw.choice([0, 0, 40, 64, 100])]
        text = f"{shared}{number}:{'ab cd' * self._draw.randint(0, 10)}"
        message = {"role": "user", "content": text}
        prompt = Prompt(prompt_id=f"group{number}", domain="t", messages=(message,))
        asked = GroupSpec(
            sampling=sampling, record=self._draw.random() < 0.85, size=self._draw.randint(1, 5)
        )
        future = self._engine.submit(
            prompt, group_size=asked.size, sampling=sampling, record=asked.record
        )
        self._open[future] = asked

    def _submit_turn(self, number: int) -> None:
        record = self._records[number]
        request = record.request(
            f"talk{number}",
            max_tokens=min(WINDOW - len(record.ids), self._draw.randint(1, 25)),
            seed=self._draw.randrange(2**40),
            stop_ids=self._draw.choice([(0,), (0, 60, 61, 62, 63)]),
        )
        if self._draw.random() < 0.2:
            request = replace(request, timeout_s=self._draw.choice([0.0, 0.05, 0.2]))
        self._open[self._engine.turn(request, sampling=TRUNCATED)] = number, request

    def _expire_some(self, _: Any) -> None:
        for flight in self._engine._in_flight.values():
            if self._draw.random() < 0.4:
                flight.deadline = 0.0

    def _gather(self) -> int:
        """Collect finished requests, and return how many are still open."""
        for future, asked in [*self._open.items()]:
            if not future.done():
                continue
            del self._open[future]
            if future.cancelled():
                self._outcome.cancelled += 1
            elif (error := future.exception()) is not None:
                self._outcome.errors.append(repr(error))
            elif isinstance(asked, GroupSpec):
                self._outcome.groups.append((asked, future.result()))
            elif len((result := future.result()).token_ids_N):
                record = self._records[asked[0]]
                record.append(asked[1], result)
                record.extend([*record.ids, *self._words(1, 12)])
            if isinstance(asked, tuple) and len(self._records[asked[0]].ids) < LONGEST:
                self._free.append(asked[0])
        return len(self._open)

    def _words(self, least: int, below: int) -> list[int]:
        return self._ids.integers(3, VOCABULARY, int(self._ids.integers(least, below))).tolist()
