"""Invalid routes and unsupported models are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.model.routing.replay import replay_routes
from keel.model.routing.routers import router_modules
from tests.model.families import build
from tests.model.routing.routes import E, logits, other_routes


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
        (lambda r: r[:, :1], "L = 1"),
        (lambda r: r[..., :1], "K = 1"),
        (lambda r: edited(r, (4, 1), [0, E]), "token 4, MoE layer 1"),
        (lambda r: edited(r, (4, 1), [0, -2]), "token 4, MoE layer 1"),
        (lambda r: edited(r, (4, 1), [-1, 0]), "token 4, MoE layer 1"),
        (lambda r: edited(r, (4, 1), [0, 0]), "token 4, MoE layer 1"),
        (lambda r: edited(r, (slice(None), 1), 0), "token 0, MoE layer 1"),
    ],
)
def test_invalid_routes_are_located(qwen, edit, message):
    context = replay_routes(qwen, edit(other_routes(qwen)))
    with pytest.raises(ValueError, match=message), context:
        pass


def test_wrong_number_of_tokens_is_refused(qwen):
    with pytest.raises(ValueError, match="9 tokens"), replay_routes(qwen, other_routes(qwen)[:9]):
        logits(qwen)


def test_unapplied_routes_are_an_error(qwen):
    with pytest.raises(RuntimeError, match=r"\[0, 1\]"), replay_routes(qwen, other_routes(qwen)):
        pass


class MysteryRouter(nn.Linear):
    pass


class MysteryExperts(nn.Module):
    pass


@pytest.mark.parametrize("part", [MysteryRouter(4, 4), MysteryExperts()])
def test_unknown_families_are_refused(part):
    with pytest.raises(ValueError, match=r"Mystery"):
        router_modules(nn.Sequential(part))
