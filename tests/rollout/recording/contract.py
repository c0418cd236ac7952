"""Tests that every recorder must pass: the V1 recorder on a CPU, and the GPU recorders in
`tests/gpu`.

An engine in a separate process samples from a tiny random mixture-of-experts model, and
transformers computes the expected recording in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from keel.configs.schema import SamplingConfig
from keel.rl.types import Group
from keel.rollout.engine.jobs import NOT_FINITE
from tests.rollout.recording.conversations import Conversations
from tests.rollout.recording.reference import Reference, Report, Tolerance, check_groups
from tests.rollout.remote_engine import OPEN, TRUNCATED, RemoteEngine, prompts
from tests.rollout.tiny_model import checkpoint_tensors, perturbed


class RecorderContract:
    """Tests for an engine that records sampling masks.

    Subclasses provide the fixtures `reference`, `engine`, `tolerance` and `open_engine` (which
    samples without truncation). Weight updates are tested last, because the final one breaks the
    engine.
    """

    way = ""
    """Part of `RemoteEngine.updates` that is expected. Empty accepts anything."""

    def check(
        self,
        groups: Sequence[Group],
        reference: Reference,
        tolerance: Tolerance,
        sampling: SamplingConfig = TRUNCATED,
    ) -> Report:
        report = check_groups(groups, reference, sampling, tolerance)
        lengths = [t.sampled_tokens for group in groups for t in group.trajectories]
        assert max(lengths) > 4, lengths
        return report

    def test_truncated_sampling(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        groups = engine.sample(prompts(3, shared=10, own=7, tag="t"), group_size=4)
        report = self.check(groups, reference, tolerance)
        assert 1 < np.mean(report.kept_sizes) < TRUNCATED.top_k
        answers = [trajectory.messages[0]["raw"] for trajectory in groups[0].trajectories]
        assert len(set(answers)) > 1
        assert [t.sibling for t in groups[0].trajectories] == [0, 1, 2, 3]
        assert {v for t in groups[0].trajectories for v in t.segments[0].version_T} == {-1, 0}

    def test_untruncated_sampling(
        self, open_engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        groups = open_engine.sample(prompts(2, shared=0, own=9, tag="o"), 3, OPEN)
        self.check(groups, reference, tolerance, OPEN)

    def test_chunked_prefill(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        engine.watch()
        groups = engine.sample(prompts(4, shared=0, own=120, tag="c"), group_size=1)
        self.check(groups, reference, tolerance)
        assert engine.watch().discarded > 0

    def test_prefix_cache_hits(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        engine.sample(prompts(1, shared=70, own=5, tag="h"))
        engine.watch()
        groups = engine.sample(prompts(3, shared=70, own=9, tag="i"), group_size=2)
        self.check(groups, reference, tolerance)
        assert engine.watch().cached_tokens >= 3 * 64

    def test_preemption(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        engine.watch()
        groups = engine.sample(prompts(6, shared=0, own=60, tag="x"), group_size=4)
        self.check(groups, reference, tolerance)
        assert engine.watch().preempted > 0

    def test_stop_strings(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        first = engine.sample(prompts(2, shared=0, own=12, tag="s"), group_size=4)
        texts = [t.messages[0]["raw"] for group in first for t in group.trajectories]
        pairs = (text[i : i + 2] for text in texts for i in range(4, len(text) - 1))
        word = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
        sampling = SamplingConfig(temperature=0.8, top_p=0.9, top_k=12, max_tokens=40, stop=(word,))
        groups = engine.sample(prompts(2, shared=0, own=12, tag="s"), 4, sampling)
        self.check(groups, reference, tolerance)
        stopped = [
            trajectory.messages[0]["raw"]
            for group in groups
            for trajectory in group.trajectories
            if trajectory.messages[0]["raw"].endswith(word)
        ]
        assert stopped
        assert all(word not in text[: -len(word)] for text in stopped)

    def test_batching_changes_no_sample(self, engine: RemoteEngine) -> None:
        asked = prompts(3, shared=0, own=100, tag="d")
        together = engine.sample(asked, group_size=2)
        alone = [engine.sample([prompt], group_size=2)[0] for prompt in asked]
        same = [
            np.array_equal(a.segments[0].token_ids_T, b.segments[0].token_ids_T)
            for one, other in zip(together, alone, strict=True)
            for a, b in zip(one.trajectories, other.trajectories, strict=True)
        ]
        assert np.mean(same) > 0.5  # float noise may change some draws, other seeds change all

    def test_deadline_cuts(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        groups = engine.sample_cut(prompts(3, shared=10, own=7, tag="k"), group_size=4)
        self.check_cut(engine, groups, reference, tolerance, size=4)

    def test_deadline_cuts_while_preempted_or_waiting(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        engine.watch()
        groups = engine.sample_cut(prompts(9, shared=0, own=60, tag="y"), group_size=4)
        self.check_cut(engine, groups, reference, tolerance, size=4)
        assert engine.watch().preempted > 0
        reasons = {reason for group in groups for reason in group.dropped}
        assert len(reasons) == 1 and "had no token" in reasons.pop()

    def check_cut(
        self,
        engine: RemoteEngine,
        groups: Sequence[Group],
        reference: Reference,
        tolerance: Tolerance,
        *,
        size: int,
    ) -> None:
        """Check that completions cut at a deadline are recorded and leave no state behind."""
        self.check([replace(group, dropped=()) for group in groups], reference, tolerance)
        longest = TRUNCATED.max_tokens
        answers = [t for group in groups for t in group.trajectories]
        cut = [t.sampled_tokens for t in answers if t.finish_reason == "deadline"]
        assert cut and max(cut) < longest
        assert all(t.sampled_tokens == longest for t in answers if t.finish_reason == "length")
        assert {len(group.trajectories) + len(group.dropped) for group in groups} == {size}
        stats = engine.stats()
        assert stats["groups"] == 0 and stats["recordings"] == 0

    def test_evaluation_records_only_logprobs(self, engine: RemoteEngine) -> None:
        (group,) = engine.sample(prompts(1, shared=0, own=9, tag="e"), 2, OPEN, record=False)
        for trajectory in group.trajectories:
            (segment,) = trajectory.segments
            assert segment.routes_TLK is None and segment.sampling_mask is None
            assert (segment.logp_old_T[segment.trainable_T] < 0).any()

    def test_no_state_remains(self, engine: RemoteEngine) -> None:
        engine.sample(prompts(2, shared=0, own=9, tag="l"), group_size=2)
        assert engine.cancel(prompts(4, shared=0, own=60, tag="m"), group_size=4) > 0
        engine.sample(prompts(1, shared=0, own=9, tag="n"))
        stats = engine.stats()
        assert stats["groups"] == 0 and stats["recordings"] == 0

    def test_too_long_prompts_are_named(self, engine: RemoteEngine) -> None:
        with pytest.raises(ValueError, match="long0"):
            engine.sample(prompts(1, shared=0, own=240, tag="long"))

    def test_turns_reuse_the_prefix_cache(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        play = Conversations(3, own=40, tag="a")
        for turn in range(3):
            play.take(engine.sample_items(play.ask()))
            if turn < 2:
                play.answer()
        repeated = sum(request.routes_from for request in play.asked)
        cached = sum(result.cached_tokens for result in play.results)
        # All full blocks, of 32 or 16 tokens.
        assert cached >= repeated - 33 * len(play.results), (cached, repeated)
        play.check(reference, tolerance)

    def test_turns_across_weight_updates(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        """Routes of earlier turns must be those of the weights that first computed them."""
        play = Conversations(9, own=60, tag="b")
        version = int(engine.stats()["version"])
        engine.watch()
        play.take(engine.sample_items(play.ask()))
        play.answer()
        reference.older[version] = copy.deepcopy(reference.model)
        engine.update(version + 1, perturbed(reference.model, seed=11))
        play.take(engine.sample_items(play.ask()))
        play.answer()
        reference.older[version + 1] = copy.deepcopy(reference.model)
        tensors = perturbed(reference.model, seed=12)
        play.take(engine.items_across_update(play.ask(), version + 2, tensors))
        play.check(reference, tolerance)
        spans = [set(record.segment().version_T.tolist()) for record in play.records]
        assert {-1, version, version + 1, version + 2} in spans, spans
        assert engine.watch().preempted > 0
        stats = engine.stats()
        assert stats["groups"] == 0 and stats["recordings"] == 0

    def test_weight_update_during_sampling(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        asked = prompts(5, shared=40, own=9, tag="f")
        before = int(engine.stats()["version"])
        reference.older[before] = copy.deepcopy(reference.model)
        tensors = perturbed(reference.model, seed=2)
        engine.watch()
        groups = engine.sample_across_update(asked, 3, 4, tensors)
        self.check(groups, reference, tolerance)
        spans = [set(t.segments[0].version_T.tolist()) for g in groups for t in g.trajectories]
        assert sum(span == {-1, before, 4} for span in spans) > len(spans) // 3, spans
        assert engine.watch().preempted > 0
        stats = engine.stats()
        assert stats["groups"] == 0 and stats["recordings"] == 0

    def test_deadline_cuts_during_a_weight_update(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        """Completions that are cut must end with a token sampled from the new weights."""
        asked = prompts(5, shared=40, own=9, tag="g")
        reference.older[int(engine.stats()["version"])] = copy.deepcopy(reference.model)
        tensors = perturbed(reference.model, seed=3)
        groups = engine.sample_across_update(asked, 3, 5, tensors, cut=True)
        self.check_cut(engine, groups, reference, tolerance, size=3)
        cut = [t for g in groups for t in g.trajectories if t.finish_reason == "deadline"]
        assert {int(t.segments[0].version_T[-1]) for t in cut} == {5}

    def test_weight_update(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        asked = prompts(3, shared=70, own=9, tag="u")
        before = engine.sample(asked, group_size=2)
        self.check(before, reference, tolerance)
        if engine.sleeps:
            engine.sleep()
        engine.update(6, perturbed(reference.model, seed=1))
        assert all(self.way in way for way in engine.updates())
        engine.watch()
        groups = engine.sample(asked, group_size=2)
        self.check(groups, reference, tolerance)
        assert {t.segments[0].version_T[-1] for group in groups for t in group.trajectories} == {6}

    def test_non_finite_completions_are_dropped(
        self, engine: RemoteEngine, reference: Reference
    ) -> None:
        """After the next weight update, sampling must work again.

        If only one logit is NaN, GPU kernels may treat its id as never sampled.
        """
        tensors = checkpoint_tensors(reference.model)
        asked = prompts(1, shared=0, own=9, tag="q")
        for version, (name, place) in enumerate(
            (("model.norm.weight", 3), ("lm_head.weight", 100)), start=7
        ):
            bad = {**tensors, name: tensors[name].clone()}
            bad[name][place] = torch.nan
            engine.update(version, bad)
            (group,) = engine.sample(asked, group_size=3)
            whole = 0 if name == "model.norm.weight" else len(group.trajectories)
            assert group.dropped == (NOT_FINITE,) * (3 - whole)
            for segment in (t.segments[0] for t in group.trajectories):
                assert np.isfinite(segment.logp_old_T).all()
                assert segment.sampling_mask is not None and 100 not in segment.sampling_mask.ids
        engine.update(9, tensors)
        (group,) = engine.sample(asked, group_size=3)
        assert len(group.trajectories) == 3
        stats = engine.stats()
        assert stats["groups"] == 0 and stats["recordings"] == 0

    def test_unknown_weights_are_refused(self, engine: RemoteEngine, reference: Reference) -> None:
        tensors = checkpoint_tensors(reference.model)
        name = "model.layers.2.mlp.experts.3.up_proj.weight"
        with pytest.raises(ValueError, match=f"{name}x"):
            engine.update(7, {**tensors, f"{name}x": tensors[name]})
        with pytest.raises(RuntimeError, match="ValueError"):
            engine.sample(prompts(1, shared=0, own=9, tag="w"))
