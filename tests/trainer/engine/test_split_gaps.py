"""Log-probability gaps of trajectories that are split over micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keel.rl.packing import TrainBatch, pack
from keel.rl.sft import SftExample, pack_sft
from keel.trainer.engine.objectives import SplitGaps
from keel.trainer.engine.policy import Inputs
from tests.trainer.engine.batches import Rollouts

CPU = torch.device("cpu")


def metrics_of(batch: TrainBatch) -> list[str]:
    gaps = SplitGaps.begun(batch, CPU, lambda _: pytest.fail("nothing has to be scored first"))
    for micro_batch in batch.micro_batches:
        inputs = Inputs.of(micro_batch, CPU)
        gaps.add(inputs, torch.full((len(inputs.logp_old_R),), -1.0))
    return [*gaps.metrics()]


def test_given_conversations_have_no_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even when split, `keel sft` has no metric of a sequence mask."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: None)  # of one rank
    groups = Rollouts(0, Path(), windows=7).groups(2, 3)
    trajectories = [trajectory for group in groups for trajectory in group.group.trajectories]
    (sampled,) = pack(groups, ranks=1, micro_batch_tokens=16, sequence_mask=False)
    lessons = [
        SftExample(prompt_id=str(number), segments=trajectory.segments)
        for number, trajectory in enumerate(trajectories)
    ]
    (settings,) = pack_sft(lessons, ranks=1, micro_batch_tokens=16)
    assert sampled.split_sequences == settings.split_sequences > 0
    assert metrics_of(sampled) == ["mask/logp_gap_max"]
    assert metrics_of(settings) == []
