"""Conversations with several turns and random tool outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keel.agents.conversation import SegmentRecord
from keel.rl.turns import TurnRequest, TurnResult
from tests.rollout.recording.reference import Reference, Report, Tolerance, trajectory_of
from tests.rollout.remote_engine import TRUNCATED
from tests.rollout.tiny_model import VOCABULARY

TOKENS = 20
"""Number of tokens per turn."""


class Conversations:
    """A number of concurrent conversations (`count`)."""

    def __init__(self, count: int, *, own: int, tag: str) -> None:
        """Start the conversations. `own` is the number of tokens in each opening."""
        self.draw = np.random.default_rng(len(tag) + own)
        self.tag = tag
        self.records = [SegmentRecord(f"{tag}{i}", self.words(own)) for i in range(count)]
        self.asked: list[TurnRequest] = []
        self.results: list[TurnResult] = []

    def words(self, count: int) -> list[int]:
        return self.draw.integers(3, VOCABULARY, count).tolist()

    def ask(self) -> list[TurnRequest]:
        """Return the requests for the next turn of each conversation."""
        requests = [
            record.request(f"{self.tag}{i}", max_tokens=TOKENS, seed=100 * i + record.turns)
            for i, record in enumerate(self.records)
        ]
        self.asked += requests
        return requests

    def take(self, results: Sequence[TurnResult]) -> None:
        for record, request, result in zip(
            self.records, self.asked[-len(self.records) :], results, strict=True
        ):
            record.append(request, result)
        self.results += results

    def answer(self) -> None:
        """Append a tool output of 1 to 9 tokens to each conversation."""
        for record in self.records:
            record.extend([*record.ids, *self.words(int(self.draw.integers(1, 10)))])

    def check(self, reference: Reference, tolerance: Tolerance) -> None:
        report = Report()
        for record in self.records:
            segment = record.segment()
            assert segment is not None
            trajectory = trajectory_of(segment)
            assert trajectory.sampled_tokens == record.sampled_tokens
            reference.check(trajectory, TRUNCATED, report, tolerance)
        report.assert_rare(tolerance)
