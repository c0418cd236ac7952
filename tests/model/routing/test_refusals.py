"""Routes that cannot be, and models that cannot be replayed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.model.routing.replay import replay_routes
from keel.model.routing.routers import is_moe, moe_layers, router_modules
from tests.model.families import build
from tests.model.routing.routes import E, N, logits, other_routes


@pytest.fixture
def qwen() -> PreTrainedModel:
    return build("qwen3_moe")


def edited(routes: Tensor, at: tuple[int, ...], value: object) -> Tensor:
    routes = routes.clone()
    routes[at] = torch.as_tensor(value, dtype=routes.dtype)
    return routes


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r[0], "routes must be integers"),
        (lambda r: r.float(), "routes must be integers"),
        (lambda r: r[:, :1], "L = 1 layers, but the model has 2 MoE layers"),
        (lambda r: r[..., :1], "K = 1 experts a token, but MoE layer 0 chooses 2"),
        (lambda r: edited(r, (4, 1), [0, E]), "token 4, MoE layer 1 is .*experts are 0 … 7"),
        (lambda r: edited(r, (4, 1), [0, -2]), "token 4, MoE layer 1 is .*experts are 0 … 7"),
        (lambda r: edited(r, (4, 1), [-1, 0]), "token 4, MoE layer 1 is .*whole or not at all"),
        (lambda r: edited(r, (4, 1), [0, 0]), "token 4, MoE layer 1 is .*expert is there twice"),
        (lambda r: edited(r, (slice(None), 1), 0), "token 0, MoE layer 1 is .*there twice"),
    ],
)
def test_routes_that_cannot_be_are_refused_on_entry(qwen, edit, message):
    context = replay_routes(qwen, edit(other_routes(qwen)))
    with pytest.raises(ValueError, match=message), context:
        pass


def test_a_layer_of_zeros_is_refused_with_one_expert_a_token():
    model = build("qwen3_moe", num_experts_per_tok=1)
    routes = torch.randint(1, E, (16, 2, 1))
    routes[:, 1] = 0
    with pytest.raises(ValueError, match="MoE layer 1 sends all its 16 tokens"):
        replay_routes(model, routes).__enter__()


def test_routes_for_another_number_of_tokens_are_refused(qwen):
    with (
        pytest.raises(ValueError, match="routes are for 9 tokens, but the router of MoE layer 0"),
        replay_routes(qwen, other_routes(qwen)[:9]),
    ):
        logits(qwen)


def test_routes_that_were_never_applied_are_an_error(qwen):
    with (
        pytest.raises(RuntimeError, match=r"routers of MoE layers \[0, 1\] did not run"),
        replay_routes(qwen, other_routes(qwen)),
    ):
        pass


def test_a_router_is_replayed_by_one_context_at_a_time(qwen):
    routes = other_routes(qwen)
    with replay_routes(qwen, routes):
        logits(qwen)
        with pytest.raises(RuntimeError, match="already being replayed"):
            replay_routes(qwen, routes).__enter__()


class MysteryRouter(nn.Linear):
    pass


class MysteryExperts(nn.Module):
    pass


@pytest.mark.parametrize("part", [MysteryRouter(4, 4), MysteryExperts()])
def test_an_unknown_family_is_refused_with_the_known_ones(part):
    with pytest.raises(ValueError, match=r"Mystery\w+ is not known.*adding-a-model-family"):
        router_modules(nn.Sequential(part))


def test_a_dense_model_has_no_routers():
    model = build("qwen3")
    assert router_modules(model) == [] and not is_moe(model.config) and moe_layers(model) == ()
    with pytest.raises(ValueError, match="no routers"):
        replay_routes(model, np.zeros((N, 0, 2), np.int16)).__enter__()


def test_one_expert_is_a_mixture_too():
    """The model then has routers, which want routes."""
    config = build("qwen3_moe").config
    config.num_experts = 1
    assert is_moe(config) and is_moe(config.get_text_config()) and not is_moe(build("qwen3").config)
