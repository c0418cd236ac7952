"""Routing replay in every supported family, and under activation recomputation."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model import routing
from model.routers import ROUTERS, is_moe, moe_layers, router_modules
from model.routing import record_routes, replay_routes
from tests.model.families import FAMILIES, VOCAB, build

TOKENS = torch.arange(10).reshape(2, 5) * 7 % VOCAB
N, K, E = TOKENS.numel(), 2, 8


def logits(model: PreTrainedModel) -> Tensor:
    return model(TOKENS, use_cache=False).logits


def live_routes(model: PreTrainedModel) -> Tensor:
    with torch.no_grad(), record_routes(model) as recording:
        logits(model)
    return recording.routes()


def other_routes(model: PreTrainedModel, seed: int = 0) -> Tensor:
    """Random ones, of distinct experts."""
    generator = torch.Generator().manual_seed(seed)
    layers = len(router_modules(model))
    return torch.rand(N, layers, E, generator=generator).argsort(-1)[..., :K].to(torch.int16)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {}


@pytest.fixture(params=FAMILIES)
def model(request, models) -> PreTrainedModel:
    if request.param not in models:
        models[request.param] = build(request.param)
    model = models[request.param]
    model.zero_grad()
    return model


@pytest.fixture
def qwen() -> PreTrainedModel:
    return build("qwen3_moe")


def test_its_own_routes_change_nothing(model):
    routes = live_routes(model)
    with replay_routes(model, routes) as replay, torch.no_grad():
        replayed = logits(model)
    torch.testing.assert_close(replayed, logits(model).detach(), rtol=1e-5, atol=1e-6)
    metrics = replay.metrics()
    assert metrics["routing/overlap"].value == 1
    assert metrics["routing/fallback_fraction"].value == 0
    assert metrics["routing/overlap"].count == N * routes.shape[1]


def expected_weights(model_type: str, router: nn.Module, scores: Tensor, experts: Tensor) -> Tensor:
    """The papers' formulas, expert by expert."""
    weights = []
    for row, chosen in zip(scores.tolist(), experts.tolist(), strict=True):
        if model_type in ("deepseek_v3", "deepseek_v32", "glm4_moe", "minimax_m2"):
            score = [1 / (1 + math.exp(-x)) for x in row]
        else:
            score = [math.exp(x) / sum(math.exp(y) for y in row) for x in row]
        picked = [score[expert] for expert in chosen]
        normalised = model_type not in ("deepseek_v2", "qwen2_moe", "qwen3_next", "olmoe")
        if getattr(router, "norm_topk_prob", normalised):
            picked = [weight / sum(picked) for weight in picked]
        scale = getattr(router, "routed_scaling_factor", 1.0)
        weights.append([scale * weight for weight in picked])
    return torch.tensor(weights)


def test_other_routes_are_weighed_by_the_current_scores_and_train_the_gate(model):
    """Softmax over the chosen (gpt_oss) is softmax over all, normalised over the chosen."""
    routes = other_routes(model)
    seen = []
    router = router_modules(model)[0]
    with replay_routes(model, routes):
        handle = router.register_forward_hook(lambda _m, _a, output: seen.append(output))
        changed = logits(model)
        handle.remove()
    scores, weights, experts = seen[0]
    assert torch.equal(experts, routes[:, 0].long())
    expected = expected_weights(model.config.model_type, router, scores, experts)
    torch.testing.assert_close(weights.float(), expected, rtol=1e-5, atol=1e-6)
    assert (changed - logits(model)).abs().max() > 1e-4

    changed.logsumexp(-1).sum().backward()
    assert all(router.weight.grad.abs().max() > 0 for router in router_modules(model))


def test_rows_of_minus_one_use_the_live_router(model):
    routes = live_routes(model).to(torch.int16)
    routes[3:6] = -1
    with replay_routes(model, routes.numpy()) as replay, torch.no_grad():
        replayed = logits(model)
    torch.testing.assert_close(replayed, logits(model).detach(), rtol=1e-5, atol=1e-6)
    metrics = replay.metrics()
    assert metrics["routing/overlap"].value == 1
    assert metrics["routing/fallback_fraction"].value == pytest.approx(0.3)


def test_dense_layers_have_no_routes(model):
    family = model.config.model_type
    dense = {"qwen2_moe": 1, "qwen3_moe": 1, "qwen3_next": 1, "mixtral": None, "olmoe": None}
    dense |= {"gpt_oss": None, "minimax_m2": None}
    expected = tuple(layer for layer in range(3) if layer != dense.get(family, 0))
    assert moe_layers(model) == moe_layers(model.config) == expected
    assert is_moe(model.config)


# Activation recomputation


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def loss_of(model: PreTrainedModel) -> Tensor:
    return logits(model).float().log_softmax(-1)[..., 3].sum()


def checkpointed(model: PreTrainedModel, reentrant: bool) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # a reentrant checkpoint only runs backward if an input asks for gradient
        model.enable_input_require_grads()


@pytest.fixture(params=[False, True], ids=["non_reentrant", "reentrant"])
def reentrant(request) -> bool:
    return request.param


def test_recomputation_repeats_the_replay_inside_and_after_the_context(qwen, reentrant):
    routes = other_routes(qwen)
    with replay_routes(qwen, routes):
        loss_of(qwen).backward()
    expected = gradients(qwen)
    checkpointed(qwen, reentrant)
    with replay_routes(qwen, routes) as replay:
        loss_of(qwen).backward()
    same(gradients(qwen), expected)
    assert replay.metrics()["routing/overlap"].count == N * 2, "recomputation must not count"
    with replay_routes(qwen, routes):
        loss = loss_of(qwen)
    loss.backward()
    same(gradients(qwen), expected)


def test_recomputation_finds_its_own_replay_among_others(qwen, reentrant):
    """Two replays and a live pass wait for backward, which then runs inside a third replay."""
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


def test_recomputing_a_forgotten_replay_is_refused(qwen, reentrant, monkeypatch):
    monkeypatch.setattr(routing, "REMEMBERED", 1)
    checkpointed(qwen, reentrant)
    losses = []
    for seed in (0, 1):
        with replay_routes(qwen, other_routes(qwen, seed)):
            losses.append(loss_of(qwen))
    losses[1].backward()
    with pytest.raises(RuntimeError, match="more than 1 replays ago"):
        losses[0].backward()


# Around the context


def test_nothing_is_left_after_the_context_or_an_error_in_it(qwen):
    before = logits(qwen)
    with pytest.raises(KeyError), replay_routes(qwen, other_routes(qwen)):
        raise KeyError
    assert torch.equal(logits(qwen), before)


def test_a_copy_of_a_replayed_model_is_not_replayed(qwen):
    with replay_routes(qwen, other_routes(qwen)):
        logits(qwen)
        twin = copy.deepcopy(qwen)
        changed = logits(twin)
    assert torch.equal(changed, logits(twin))


def test_a_copy_of_a_replayed_model_counts_each_pass_once(qwen):
    routes = other_routes(qwen)
    with replay_routes(qwen, routes) as original:
        logits(qwen)
    twin = copy.deepcopy(qwen)
    with record_routes(twin) as recording, replay_routes(twin, routes) as copied:
        logits(twin)
    assert copied.metrics() == original.metrics()
    assert torch.equal(recording.routes()[:, 0], live_routes(qwen)[:, 0])


def test_two_models_can_be_replayed_at_once(qwen):
    other = build("mixtral")
    with (
        replay_routes(qwen, other_routes(qwen)),
        replay_routes(other, live_routes(other)) as replay,
    ):
        logits(qwen)
        logits(other)
    assert replay.metrics()["routing/overlap"].value == 1


def test_overlap_counts_experts_in_any_order(qwen):
    routes = live_routes(qwen)
    with replay_routes(qwen, routes.flip(-1)) as replay:
        logits(qwen)
    assert replay.metrics()["routing/overlap"].value == 1
    half = routes.clone()
    half[..., 1] = torch.tensor(
        [[min(set(range(E)) - set(row)) for row in token] for token in routes.tolist()]
    )
    with replay_routes(qwen, half) as replay:
        logits(qwen)
        assert replay.metrics()["routing/overlap"].value < 0.75


def test_a_recording_sees_the_live_router_behind_a_replay(qwen):
    routes = other_routes(qwen)
    live_first_layer = live_routes(qwen)[:, 0]
    with replay_routes(qwen, routes), record_routes(qwen) as recording:
        logits(qwen)
    assert torch.equal(recording.routes()[:, 0], live_first_layer)


def test_uint8_routes_are_taken(qwen):
    with replay_routes(qwen, other_routes(qwen).numpy().astype(np.uint8)) as replay:
        logits(qwen)
    assert replay.metrics()["routing/fallback_fraction"].value == 0


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
    with pytest.raises(
        ValueError, match=r"Mystery\w+ is not known.*Qwen3Moe.*adding-a-model-family"
    ):
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


# DeepSpeed AutoEP's router, by its interface


class TokenChoiceTopKRouter(nn.Module):
    """What DeepSpeed's router of this name does, without its group limits."""

    def __init__(self, score_func: str, norm: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(6, E, bias=False)
        self.num_experts, self.top_k = E, K
        self.score_func, self.route_norm, self.route_scale = score_func, norm, 1.5

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, ...]:
        scores = self.gate(x)
        scores = scores.sigmoid() if self.score_func == "sigmoid" else scores.softmax(-1)
        experts = (scores if expert_bias is None else scores + expert_bias).topk(K, -1).indices
        weights = scores.gather(1, experts)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        counts = torch.bincount(experts.flatten(), minlength=E).int()
        return weights * self.route_scale, experts, counts


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_the_expert_parallel_router_is_replayed(score_func, norm):
    torch.manual_seed(0)
    router, x, bias = TokenChoiceTopKRouter(score_func, norm), torch.randn(N, 6), torch.randn(E)
    live = router(x, bias)
    with replay_routes(router, live[1][:, None]):
        for actual, expected in zip(router(x, bias), live, strict=True):
            torch.testing.assert_close(actual, expected)
    forced = torch.rand(N, E).argsort(-1)[:, :K]
    calls = []
    router.gate.register_forward_hook(lambda *_: calls.append(1))
    with replay_routes(router, forced[:, None].to(torch.int16)):
        weights, experts, counts = router(x, bias)
    assert len(calls) == 1, "under ZeRO-3 another call is another collective"
    assert torch.equal(experts, forced)
    assert torch.equal(counts, torch.bincount(forced.flatten(), minlength=E).int())
    weights.pow(2).sum().backward()
    assert router.gate.weight.grad.abs().max() > 0


def test_every_known_router_is_of_a_family_tested_here_or_an_equal_of_one():
    tested = {type(r).__name__ for family in FAMILIES for r in router_modules(build(family))}
    equals = {"FlexOlmoTopKRouter", "Glm4MoeLiteTopkRouter", "GlmMoeDsaTopkRouter"}
    equals |= {"Qwen3_5MoeTopKRouter", "TokenChoiceTopKRouter"}
    assert tested | equals == set(ROUTERS)
