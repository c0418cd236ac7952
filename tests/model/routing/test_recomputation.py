"""Routing replay under activation recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.model.routing import replay as routing
from keel.model.routing.replay import replay_routes
from tests.model.families import build
from tests.model.routing.routes import N, logits, other_routes


@pytest.fixture
def qwen() -> PreTrainedModel:
    return build("qwen3_moe")


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    actual = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return actual


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def loss_of(model: PreTrainedModel) -> Tensor:
    return logits(model).float().log_softmax(-1)[..., 3].sum()


def checkpointed(model: PreTrainedModel, reentrant: bool) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # a reentrant checkpoint needs an input that requires grad
        model.enable_input_require_grads()


@pytest.fixture(params=[False, True], ids=["non_reentrant", "reentrant"])
def reentrant(request) -> bool:
    return request.param


def test_recomputation_repeats_its_replay(qwen, reentrant):
    routes = other_routes(qwen)
    with replay_routes(qwen, routes):
        loss_of(qwen).backward()
    expected = gradients(qwen)
    checkpointed(qwen, reentrant)
    with replay_routes(qwen, routes) as replay:
        loss_of(qwen).backward()
    same(gradients(qwen), expected)
    assert replay.metrics()["routing/overlap"].count == N * 2, "recomputation does not count"
    with replay_routes(qwen, routes):
        loss = loss_of(qwen)
    loss.backward()
    same(gradients(qwen), expected)


def test_recomputation_finds_its_replay_among_others(qwen, reentrant):
    """Backward of two replays and a live pass runs inside a third replay."""
    first, second = other_routes(qwen, 1), other_routes(qwen, 2)
    expected = []
    for routes in (first, second):
        with replay_routes(qwen, routes):
            loss_of(qwen).backward()
        expected.append(gradients(qwen))
    loss_of(qwen).backward()
    expected.append(gradients(qwen))

    checkpointed(qwen, reentrant)
    losses = []
    for routes in (first, second):
        with replay_routes(qwen, routes):
            losses.append(loss_of(qwen))
    losses.append(loss_of(qwen))
    with replay_routes(qwen, other_routes(qwen, 3)):
        loss_of(qwen)
        for loss, grads in zip(losses, expected, strict=True):
            loss.backward()
            same(gradients(qwen), grads)


def test_recomputing_a_dropped_replay_fails(qwen, reentrant, monkeypatch):
    monkeypatch.setattr(routing, "REMEMBERED", 1)
    checkpointed(qwen, reentrant)
    losses = []
    for seed in (0, 1):
        with replay_routes(qwen, other_routes(qwen, seed)):
            losses.append(loss_of(qwen))
    losses[1].backward()
    with pytest.raises(RuntimeError, match="more than 1"):
        losses[0].backward()
