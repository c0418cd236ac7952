"""What the users of an engine may ask of it at once, in an order that a seed draws: groups, turns
of conversations, cancellations, deadlines that pass, new weights. Runs in the engine's process."""

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
CONVERSATIONS, AT_ONCE = 10, 14
WINDOW, LONGEST = 256, 190
"""Tokens of a context, and of a conversation that goes on."""


@dataclass(kw_only=True)
class Asked:
    """Of a group."""

    sampling: SamplingConfig
    record: bool
    size: int


@dataclass(kw_only=True)
class Seen:
    groups: list[tuple[Asked, Group]] = field(default_factory=list[Any])
    segments: list[Segment] = field(default_factory=list[Segment])
    errors: list[str] = field(default_factory=list[str])
    cancelled: int = 0
    stats: dict[str, float] = field(default_factory=dict[str, float])


def traffic(seed: int, actions: int, tokens: int, updates: Sequence[Sequence[Any]]) -> Seen:
    """Act at least `actions` times, and on until there is enough to judge on any machine.

    Enough are `tokens` sampled for the record, a preemption and a cancelled answer. `updates` holds
    the buckets of each weight update, which come at drawn times among the first actions.
    """
    return Traffic(seed).run(actions, tokens, updates)


class Traffic:
    def __init__(self, seed: int) -> None:
        self._draw, self._ids = random.Random(seed), np.random.default_rng(seed)
        self._engine: Any = remote_engine._ENGINE
        self._talks = [SegmentRecord(f"talk{i}", self._words(5, 90)) for i in range(CONVERSATIONS)]
        self._free = [*range(CONVERSATIONS)]
        self._open: dict[Future[Any], Asked | tuple[int, TurnRequest]] = {}
        self._seen = Seen()

    def run(self, actions: int, tokens: int, updates: Sequence[Sequence[Any]]) -> Seen:
        at = sorted(self._draw.sample(range(5, actions), len(updates)))
        end = time.monotonic() + remote_engine.DEADLINE_S / 2
        for number in count():
            self._gather()
            if number >= actions and (self._enough(tokens) or time.monotonic() > end):
                break
            if number in at:
                version = at.index(number) + 1
                remote_engine._update(version, updates[version - 1])
            else:
                self._act(number)
        wait_for(lambda: self._gather() == 0, "answers to all that was asked")
        segments = [talk.segment() for talk in self._talks]
        self._seen.segments = [segment for segment in segments if segment is not None]
        self._seen.stats = self._engine.stats()
        return self._seen

    def _enough(self, tokens: int) -> bool:
        if not (self._seen.cancelled and remote_engine._WATCH.preempted):
            return False
        groups = (group for asked, group in self._seen.groups if asked.record)
        turns = (talk.segment() for talk in self._talks)
        sampled = sum(one.sampled_tokens for group in groups for one in group.trajectories)
        return tokens <= sampled + sum(int(t.trainable_T.sum()) for t in turns if t is not None)

    def _act(self, number: int) -> None:
        chance = self._draw.random()
        if chance < 0.4 and len(self._open) < AT_ONCE:
            self._ask_group(number)
        elif chance < 0.75 and self._free:
            self._ask_turn(self._free.pop(self._draw.randrange(len(self._free))))
        elif chance < 0.8 and self._open:
            self._draw.choice([*self._open]).cancel()
        elif chance < 0.86 and self._open:
            self._engine._enqueue(self._some_are_late).result(remote_engine.DEADLINE_S)
        else:
            time.sleep(self._draw.random() * 0.1)

    def _ask_group(self, number: int) -> None:
        sampling = self._draw.choice(SAMPLINGS)
        sampling = replace(sampling, max_tokens=self._draw.randint(1, sampling.max_tokens))
        shared = WORDS[: self._draw.choice([0, 0, 40, 64, 100])]
        text = f"{shared}{number}:{'ab cd' * self._draw.randint(0, 10)}"
        message = {"role": "user", "content": text}
        prompt = Prompt(prompt_id=f"group{number}", domain="t", messages=(message,))
        asked = Asked(
            sampling=sampling, record=self._draw.random() < 0.85, size=self._draw.randint(1, 5)
        )
        answer = self._engine.submit(
            prompt, group_size=asked.size, sampling=sampling, record=asked.record
        )
        self._open[answer] = asked

    def _ask_turn(self, number: int) -> None:
        talk = self._talks[number]
        request = talk.request(
            f"talk{number}",
            max_tokens=min(WINDOW - len(talk.ids), self._draw.randint(1, 25)),
            seed=self._draw.randrange(2**40),
            stop_ids=self._draw.choice([(0,), (0, 60, 61, 62, 63)]),
        )
        if self._draw.random() < 0.2:
            request = replace(request, timeout_s=self._draw.choice([0.0, 0.05, 0.2]))
        self._open[self._engine.turn(request, sampling=TRUNCATED)] = number, request

    def _some_are_late(self, _: Any) -> None:
        for flight in self._engine._in_flight.values():
            if self._draw.random() < 0.4:
                flight.deadline = 0.0

    def _gather(self) -> int:
        """What has been answered; how much has not."""
        for answer, asked in [*self._open.items()]:
            if not answer.done():
                continue
            del self._open[answer]
            if answer.cancelled():
                self._seen.cancelled += 1
            elif (error := answer.exception()) is not None:
                self._seen.errors.append(repr(error))
            elif isinstance(asked, Asked):
                self._seen.groups.append((asked, answer.result()))
            elif len((result := answer.result()).token_ids_N):
                talk = self._talks[asked[0]]
                talk.append(asked[1], result)
                talk.extend([*talk.ids, *self._words(1, 12)])
            if isinstance(asked, tuple) and len(self._talks[asked[0]].ids) < LONGEST:
                self._free.append(asked[0])
        return len(self._open)

    def _words(self, least: int, below: int) -> list[int]:
        return self._ids.integers(3, VOCABULARY, int(self._ids.integers(least, below))).tolist()
