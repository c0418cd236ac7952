"""Tests that every recorder must pass. They run with the V1 recorder on a CPU, and with the GPU
recorders in `tests/gpu`. An engine in a separate process samples from a tiny random
mixture-of-experts model. The expected recording is computed by transformers in float32."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from keel.agents.conversation import SegmentRecord
from keel.configs.schema import SamplingConfig
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Prompt
from tests.rollout.recording.reference import (
    Reference,
    Report,
    Tolerance,
    check_groups,
    trajectory_of,
)
from tests.rollout.remote_engine import OPEN, TRUNCATED, Item, RemoteEngine, prompts
from tests.rollout.tiny_model import VOCABULARY, checkpoint_tensors, perturbed

TOKENS = 20
"""Number of tokens per turn of a conversation."""


@dataclass(frozen=True)
class Rig:
    """An engine that records sampling masks, and a reference to compare its recordings to."""

    engine: RemoteEngine
    reference: Reference
    tolerance: Tolerance
    open_engine: RemoteEngine
    """Engine that samples without truncation."""
    way: str = ""
    """Text that `RemoteEngine.updates` is expected to contain. If empty, anything is accepted."""

    def check(self, groups: Sequence[Group], sampling: SamplingConfig = TRUNCATED) -> Report:
        report = check_groups(groups, self.reference, sampling, self.tolerance)
        assert max(t.sampled_tokens for group in groups for t in group.trajectories) > 4
        return report

    def check_empty(self) -> None:
        assert self.engine.pending() == 0

    def check_cut(self, groups: Sequence[Group], *, size: int) -> None:
        """Check that completions cut at a deadline are still recorded and leave no state behind."""
        self.check([replace(group, dropped=()) for group in groups])
        longest = TRUNCATED.max_tokens
        answers = [t for group in groups for t in group.trajectories]
        cut = [t.sampled_tokens for t in answers if t.finish_reason == "deadline"]
        assert cut and max(cut) < longest
        assert all(t.sampled_tokens == longest for t in answers if t.finish_reason == "length")
        assert {len(group.trajectories) + len(group.dropped) for group in groups} == {size}
        self.check_empty()

    def change(self, seed: int) -> tuple[int, dict[str, torch.Tensor]]:
        version = self.engine.version()
        self.reference.older[version] = copy.deepcopy(self.reference.model)
        return version, perturbed(self.reference.model, seed=seed)


def items(asked: Sequence[Prompt], size: int) -> list[Item]:
    return [(prompt, size, None, True) for prompt in asked]


def spans(groups: Sequence[Group]) -> list[set[int]]:
    return [set(t.segments[0].version_T.tolist()) for g in groups for t in g.trajectories]


class Conversations:
    def __init__(self, count: int, *, own: int, tag: str) -> None:
        """Create the conversations. `own` is the number of tokens in each opening."""
        self.draw = np.random.default_rng(len(tag) + own)
        self.tag = tag
        self.records = [SegmentRecord(f"{tag}{i}", self.words(own)) for i in range(count)]
        self.asked: list[TurnRequest] = []
        self.results: list[TurnResult] = []

    def words(self, count: int) -> list[int]:
        return self.draw.integers(3, VOCABULARY, count).tolist()

    def ask(self) -> list[TurnRequest]:
        requests = [
            TurnRequest(
                conversation=f"{self.tag}{i}",
                token_ids_T=np.array(record.ids, np.int32),
                max_tokens=TOKENS,
                seed=100 * i + record.turns,
                routes_from=record.routed_tokens,
            )
            for i, record in enumerate(self.records)
        ]
        self.asked += requests
        return requests

    def take(self, results: Sequence[TurnResult]) -> None:
        asked = self.asked[-len(self.records) :]
        for record, request, result in zip(self.records, asked, results, strict=True):
            record.append_turn(request, result)
            record.extend([*record.ids, *self.words(int(self.draw.integers(1, 10)))])
        self.results += results

    def check(self, rig: Rig) -> None:
        report = Report()
        for record in self.records:
            segment = record.segment()
            assert segment is not None
            trajectory = trajectory_of(segment)
            assert trajectory.sampled_tokens == record.sampled_tokens
            rig.reference.check(trajectory, TRUNCATED, report, rig.tolerance)
        report.assert_rare(rig.tolerance)


class RecorderContract:
    """The tests that every recorder must pass. Subclasses provide the fixture `rig`. Weight updates
    are tested last, because the final one breaks the engine."""

    def test_truncated_sampling(self, rig: Rig) -> None:
        groups = rig.engine.sample(prompts(3, shared=10, own=7, tag="t"), group_size=4)
        assert 1 < np.mean(rig.check(groups).kept_sizes) < TRUNCATED.top_k
        answers = [trajectory.messages[0]["raw"] for trajectory in groups[0].trajectories]
        assert len(set(answers)) > 1
        assert [t.sibling for t in groups[0].trajectories] == [0, 1, 2, 3]
        assert {-1, 0} == set.union(*spans(groups))

    def test_untruncated_sampling(self, rig: Rig) -> None:
        groups = rig.open_engine.sample(prompts(2, shared=0, own=9, tag="o"), 3, OPEN)
        rig.check(groups, OPEN)

    def test_chunked_prefill(self, rig: Rig) -> None:
        rig.engine.watch()
        rig.check(rig.engine.sample(prompts(4, shared=0, own=120, tag="c"), group_size=1))
        assert rig.engine.watch().discarded > 0

    def test_preemption(self, rig: Rig) -> None:
        rig.engine.watch()
        rig.check(rig.engine.sample(prompts(6, shared=0, own=60, tag="x"), group_size=4))
        assert rig.engine.watch().preempted > 0

    def test_stop_strings(self, rig: Rig) -> None:
        asked = prompts(2, shared=0, own=12, tag="s")
        first = rig.engine.sample(asked, group_size=4)
        texts = [t.messages[0]["raw"] for group in first for t in group.trajectories]
        pairs = (text[i : i + 2] for text in texts for i in range(4, len(text) - 1))
        word = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
        groups = rig.engine.sample(asked, 4, replace(TRUNCATED, stop=(word,)))
        rig.check(groups)
        texts = [t.messages[0]["raw"] for group in groups for t in group.trajectories]
        stopped = [text for text in texts if text.endswith(word)]
        assert stopped and all(word not in text[: -len(word)] for text in stopped)

    def test_deadline_cuts_while_preempted_or_waiting(self, rig: Rig) -> None:
        rig.engine.watch()
        asked = prompts(9, shared=0, own=60, tag="y")
        groups = rig.engine.sample_interrupted(items(asked, 4), cut=True)
        rig.check_cut(groups, size=4)
        assert rig.engine.watch().preempted > 0
        reasons = {reason for group in groups for reason in group.dropped}
        assert len(reasons) == 1 and "had no token" in reasons.pop()

    def test_evaluation_records_only_logprobs(self, rig: Rig) -> None:
        (group,) = rig.engine.sample(prompts(1, shared=0, own=9, tag="e"), 2, OPEN, record=False)
        for trajectory in group.trajectories:
            (segment,) = trajectory.segments
            assert segment.routes_TLK is None and segment.sampling_mask is None
            assert (segment.logp_old_T[segment.trainable_T] < 0).any()

    def test_no_state_remains_of_cancelled_groups(self, rig: Rig) -> None:
        assert rig.engine.cancel(prompts(4, shared=0, own=60, tag="m"), group_size=4) > 0
        rig.engine.sample(prompts(1, shared=0, own=9, tag="n"))
        rig.check_empty()

    def test_turns_reuse_the_prefix_cache(self, rig: Rig) -> None:
        play = Conversations(3, own=40, tag="a")
        for _ in range(3):
            play.take(rig.engine.sample_items(play.ask()))
        repeated = sum(request.routes_from for request in play.asked)
        cached = sum(result.cached_tokens for result in play.results)
        # All full blocks, of 32 or 16 tokens.
        assert cached >= repeated - 33 * len(play.results), (cached, repeated)
        play.check(rig)

    def test_turns_across_weight_updates(self, rig: Rig) -> None:
        play = Conversations(9, own=60, tag="b")
        rig.engine.watch()
        play.take(rig.engine.sample_items(play.ask()))
        version, tensors = rig.change(seed=11)
        rig.engine.update(version + 1, tensors)
        play.take(rig.engine.sample_items(play.ask()))
        _, tensors = rig.change(seed=12)
        play.take(rig.engine.sample_interrupted(play.ask(), version + 2, tensors))
        play.check(rig)
        versions = [set(record.segment().version_T.tolist()) for record in play.records]
        assert {-1, version, version + 1, version + 2} in versions, versions
        assert rig.engine.watch().preempted > 0
        rig.check_empty()

    def test_weight_update_during_sampling(self, rig: Rig) -> None:
        asked = items(prompts(5, shared=40, own=9, tag="f"), 3)
        before, tensors = rig.change(seed=2)
        rig.engine.watch()
        groups = rig.engine.sample_interrupted(asked, 4, tensors)
        rig.check(groups)
        assert sum(span == {-1, before, 4} for span in spans(groups)) > 5
        assert rig.engine.watch().preempted > 0
        rig.check_empty()

    def test_deadline_cuts_during_a_weight_update(self, rig: Rig) -> None:
        asked = items(prompts(5, shared=40, own=9, tag="g"), 3)
        _, tensors = rig.change(seed=3)
        groups = rig.engine.sample_interrupted(asked, 5, tensors, cut=True)
        rig.check_cut(groups, size=3)
        cut = [t for g in groups for t in g.trajectories if t.finish_reason == "deadline"]
        assert {int(t.segments[0].version_T[-1]) for t in cut} == {5}

    def test_weight_update(self, rig: Rig) -> None:
        asked = prompts(3, shared=70, own=9, tag="u")
        rig.check(rig.engine.sample(asked, group_size=2))
        rig.engine.watch()
        rig.check(rig.engine.sample(asked, group_size=2))
        assert rig.engine.watch().cached_tokens >= 3 * 64
        if rig.engine.sleeps:
            rig.engine.sleep()
        rig.engine.update(6, perturbed(rig.reference.model, seed=1))
        assert all(rig.way in way for way in rig.engine.updates())
        groups = rig.engine.sample(asked, group_size=2)
        rig.check(groups)
        assert {6, -1} == set.union(*spans(groups))

    def test_non_finite_completions_are_dropped(self, rig: Rig) -> None:
        """Sampling must work again after the next weight update. If only one logit is NaN, GPU
        kernels may treat its id as never sampled."""
        from keel.rollout.engine.vllm_engine import NOT_FINITE  # noqa: PLC0415  (loads vLLM)

        tensors = checkpoint_tensors(rig.reference.model)
        asked = prompts(1, shared=0, own=9, tag="q")
        broken = (("model.norm.weight", 3), ("lm_head.weight", 100))
        for version, (name, place) in enumerate(broken, start=7):
            bad = {**tensors, name: tensors[name].clone()}
            bad[name][place] = torch.nan
            rig.engine.update(version, bad)
            (group,) = rig.engine.sample(asked, group_size=3)
            whole = 0 if name == "model.norm.weight" else len(group.trajectories)
            assert group.dropped == (NOT_FINITE,) * (3 - whole)
            for segment in (t.segments[0] for t in group.trajectories):
                assert np.isfinite(segment.logp_old_T).all()
                assert segment.sampling_mask is not None and 100 not in segment.sampling_mask.ids
        rig.engine.update(9, tensors)
        (group,) = rig.engine.sample(asked, group_size=3)
        assert len(group.trajectories) == 3
        rig.check_empty()

    def test_unknown_weights_are_refused(self, rig: Rig) -> None:
        tensors = checkpoint_tensors(rig.reference.model)
        name = "model.layers.2.mlp.experts.3.up_proj.weight"
        with pytest.raises(ValueError, match=f"{name}x"):
            rig.engine.update(7, {**tensors, f"{name}x": tensors[name]})
        with pytest.raises(RuntimeError, match="ValueError"):
            rig.engine.sample(prompts(1, shared=0, own=9, tag="w"))
