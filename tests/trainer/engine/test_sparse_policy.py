"""The policy with sparse attention: recorded selections, and the weight of the indexer loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from keel.rl.packing import MicroBatch, TrainBatch, pack
from keel.rl.types import Segment
from tests.model.families import VOCAB
from tests.model.test_sparse import TOP_K, theirs
from tests.rl.rollouts import scored, trajectory

pytestmark = pytest.mark.e2e  # loads DeepSpeed
TOKENS = 20


def step(selected_TLk: Any) -> TrainBatch:
    random = np.random.default_rng(0)
    trainable = np.arange(TOKENS) >= 4
    segment = Segment(
        prompt_id="p",
        token_ids_T=random.integers(3, VOCAB, TOKENS).astype(np.int32),
        trainable_T=trainable,
        logp_old_T=np.where(trainable, -1.0, 0.0).astype(np.float32),
        version_T=np.where(trainable, 0, -1).astype(np.int32),
        selected_TLk=selected_TLk,
    )
    return pack([scored([trajectory(segment)], [1.0])], ranks=1, micro_batch_tokens=64)[0]


def latest() -> Any:
    """Select the last `TOP_K` positions of each token in both layers."""
    places = np.arange(TOKENS)[:, None] - np.arange(TOP_K)
    return np.repeat(np.maximum(places, -1)[:, None], 2, 1).astype(np.int32)


def test_policy_replays_selections_and_reference_does_not() -> None:
    from keel.trainer.engine.policy import Inputs, PolicyNetwork, ReferencePolicy  # noqa: PLC0415

    device = torch.device("cpu")

    def logp(batch: MicroBatch, *, reference: bool = False) -> torch.Tensor:
        network = PolicyNetwork(theirs(), temperature=1.0)
        inputs = Inputs.of(batch, device)
        if reference:
            return ReferencePolicy.frozen(network, device, None).logp(inputs)
        logp, _, _, indexers, _ = network.train()(inputs=inputs)
        assert indexers.requires_grad and indexers > 0
        return logp.detach()

    (live,), (recorded,) = step(None).micro_batches, step(latest()).micro_batches
    assert not torch.allclose(logp(recorded), logp(live), atol=1e-3)
    torch.testing.assert_close(logp(recorded, reference=True), logp(live))
    unrecorded = replace(recorded, selected_NLk=np.full_like(recorded.selected_NLk, -1))
    torch.testing.assert_close(logp(unrecorded), logp(live))
    with pytest.raises(ValueError, match="recorded selection: token 0"):
        logp(replace(recorded, selected_NLk=np.zeros_like(recorded.selected_NLk)))
