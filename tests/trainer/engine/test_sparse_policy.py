"""The policy with sparse attention: recorded selections, and the weight of the indexer loss."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keel.rl.packing import MicroBatch, TrainBatch, pack
from keel.rl.types import Segment
from keel.trainer.nonfinite import NanTracer, SkipCounter
from tests.model.families import VOCAB
from tests.model.sparse.packed_rows import TOP_K, theirs
from tests.rl.rollouts import scored, trajectory
from tests.trainer.engine.ranks import make_config

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
            return ReferencePolicy(network, device, None).logp(inputs)
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


def test_indexer_loss_is_a_mean_over_tokens() -> None:
    from keel.trainer.engine.policy import PolicyNetwork, indexer_weight  # noqa: PLC0415

    config, batch = make_config(1, 0, indexer_loss=0.5), step(None)
    network = PolicyNetwork(theirs(), temperature=1.0)
    assert indexer_weight(network, config, batch) == 0.5 / TOKENS
    uncounted = replace(batch, total_tokens=0)
    with pytest.raises(ValueError, match="total_tokens is 0"):
        indexer_weight(network, config, uncounted)
    frozen = PolicyNetwork(theirs(), temperature=1.0, indexer_loss=False)
    assert indexer_weight(frozen, config, uncounted) == 0.0


@pytest.mark.parametrize("examine", [False, True])
def test_skipped_float16_step_is_examined_on_request(
    monkeypatch: pytest.MonkeyPatch, examine: bool
) -> None:
    from keel.trainer.engine import engine as module  # noqa: PLC0415  (loads DeepSpeed)
    from keel.trainer.engine.offload import NoOffload  # noqa: PLC0415

    looked: list[Any] = []
    monkeypatch.setattr(module.SplitGaps, "begun", lambda *_: None)
    rank: Any = SimpleNamespace(
        **{"_device": None, "_score": None, "_version": 0, "_rank": 1, "gave_up": ""},
        _config=SimpleNamespace(algorithm=SimpleNamespace(mask_delta=None)),
        _skips=SkipCounter(16),
        _scaled=True,
        _offload=NoOffload(),
        _apply_gradients=lambda: math.inf,
        _has_gradient=lambda _: True,
        _examine=looked.append,
    )
    batch: Any = SimpleNamespace(micro_batches=())
    module.TrainerEngine._update(rank, batch, examine)
    assert looked == [batch] * examine


@pytest.mark.parametrize("term", ["indexers", "masses"])
def test_trace_sees_all_terms_of_the_loss(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    from keel.trainer.engine import engine as module  # noqa: PLC0415  (loads DeepSpeed)

    @dataclass
    class Share:
        loss: Any

    inputs = SimpleNamespace(
        padding=False, kl_coef_R=None, token_ids=torch.zeros(1, 3), filled=0, ends=None, part=None
    )
    logp, lost = torch.zeros(2), torch.full((), math.nan, requires_grad=True)
    indexers, outside = (lost, torch.zeros(())) if term == "indexers" else (torch.zeros(()), lost)
    monkeypatch.setattr(module, "mass_share", lambda *_: (outside, torch.zeros(4)))
    monkeypatch.setattr(module.Inputs, "of", lambda *_, **options: inputs)
    monkeypatch.setattr(module, "whole_sequences", lambda _, logp, reference: (logp, reference))
    monkeypatch.setattr(module, "indexer_weight", lambda *_: 1.0)
    monkeypatch.setitem(module.LOSSES, "grpo", lambda *_: Share(loss=torch.zeros(())))

    class Network:
        def __call__(self, inputs: Any) -> Any:
            return logp, logp, logp, indexers, torch.zeros(2)

        def backward(self, loss: Any) -> None:
            loss.backward()

    rank: Any = SimpleNamespace(
        _replay=lambda *_: nullcontext(),
        _engine=Network(),
        _config=SimpleNamespace(algorithm=SimpleNamespace(probes=1)),
        _world_size=1,
        **dict.fromkeys(("_device", "_part", "_network", "_reference")),
    )
    look, seen = NanTracer([]), list[float]()
    batch = step(latest()).micro_batches[0]
    split: Any = SimpleNamespace(add=lambda *_: None)
    monkeypatch.setattr(look, "observe", lambda *args: seen.append(float(args[3].detach())) or 1.0)
    whole: Any = SimpleNamespace(total_sequences=1)
    module.TrainerEngine._accumulate(rank, batch, whole, split, look)
    assert math.isnan(seen[0]) and lost.grad is not None
