"""Routing replay: every supported family, activation recomputation, and invalid routes."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.model import routing
from keel.model.routing import ROUTERS, replay_routes, router_modules
from tests.model.families import FAMILIES, VOCAB, build

TOKENS = torch.arange(10).reshape(2, 5) * 7 % VOCAB
N, K, E = TOKENS.numel(), 2, 8


def logits(model: PreTrainedModel) -> Tensor:
    return model(TOKENS, use_cache=False).logits


def live_routes(model: PreTrainedModel) -> Tensor:
    chosen: list[Tensor] = []

    def record(router: nn.Module, _: object, output: Any) -> None:
        chosen.append(ROUTERS[type(router).__name__].experts(output).detach())

    hooks = [router.register_forward_hook(record) for router in router_modules(model)]
    logits(model)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)


def other_routes(model: PreTrainedModel, seed: int = 0) -> Tensor:
    """Draw random routes with distinct experts."""
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


@torch.no_grad()
def test_live_routes_and_unrecorded_rows_change_nothing(model):
    routes, expected = live_routes(model), logits(model)
    for unrecorded in (0, 3):
        routes = routes.to(torch.int16)
        routes[:unrecorded] = -1
        with replay_routes(model, routes.numpy()) as replay:
            torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
        metrics = replay.metrics()
        assert metrics["routing/overlap"].value == 1
        assert metrics["routing/overlap"].count == (N - unrecorded) * routes.shape[1]
        assert metrics["routing/fallback_fraction"].value == pytest.approx(unrecorded / N)


def expected_weights(model_type: str, router: nn.Module, scores: Tensor, experts: Tensor) -> Tensor:
    """Compute the papers' formulas per expert."""
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


def test_replayed_experts_use_current_scores_with_gradient(model):
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


def test_copies_are_not_replayed(qwen):
    with replay_routes(qwen, other_routes(qwen)):
        logits(qwen)
        twin = copy.deepcopy(qwen)
        changed = logits(twin)
    assert torch.equal(changed, logits(twin))


def test_overlap_ignores_the_order_of_experts(qwen):
    routes = live_routes(qwen)
    with replay_routes(qwen, routes.flip(-1)) as replay:
        logits(qwen)
    assert replay.metrics()["routing/overlap"].value == 1
    half = routes.clone()
    others = [[min(set(range(E)) - set(row)) for row in token] for token in routes.tolist()]
    half[..., 1] = torch.tensor(others)
    with replay_routes(qwen, half) as replay:
        logits(qwen)
        assert replay.metrics()["routing/overlap"].value < 0.75


def test_overlap_per_token(qwen):
    routes = live_routes(qwen).to(torch.int16)
    layers, experts = routes.shape[1:]
    routes[2, 0, 0] = min(set(range(E)) - set(routes[2, 0].tolist()))
    routes[4] = -1
    with replay_routes(qwen, routes, by_token=True) as replay, torch.no_grad():
        logits(qwen)
    overlap_N = replay.overlap_N()
    assert overlap_N is not None and len(overlap_N) == N
    assert overlap_N[4].isnan() and overlap_N[:2].tolist() == [1, 1]
    known_N = ~overlap_N.isnan()
    of_all = replay.metrics()["routing/overlap"]
    assert float(overlap_N[known_N].mean()) == pytest.approx(of_all.value)
    # Later layers get other hidden states, this layer does not.
    assert 1 - overlap_N[2] >= 1 / (layers * experts) - 1e-6
    with replay_routes(qwen, routes) as replay, torch.no_grad():
        logits(qwen)
    assert replay.overlap_N() is None


class TokenChoiceTopKRouter(nn.Module):
    """Imitates the router of DeepSpeed AutoEP, without group limits."""

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
def test_expert_parallel_routers_are_replayed(score_func, norm):
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
    assert len(calls) == 1, "a second call would be an extra collective under ZeRO-3"
    assert torch.equal(experts, forced)
    assert torch.equal(counts, torch.bincount(forced.flatten(), minlength=E).int())
    weights.pow(2).sum().backward()
    assert router.gate.weight.grad.abs().max() > 0


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
    monkeypatch.setattr(routing, "_REMEMBERED", 1)
    checkpointed(qwen, reentrant)
    losses = []
    for seed in (0, 1):
        with replay_routes(qwen, other_routes(qwen, seed)):
            losses.append(loss_of(qwen))
    losses[1].backward()
    with pytest.raises(RuntimeError, match="more than 1"):
        losses[0].backward()


def test_only_the_last_replays_keep_their_routes(qwen):
    """A training step holds the replay of each micro-batch until it ends."""
    routes, replays = other_routes(qwen), []
    for _ in range(12):
        with replay_routes(qwen, routes) as replay:
            loss_of(qwen).backward()
        replays.append(replay)
    assert [replay._routes_LNK.numel() > 0 for replay in replays] == [False] * 4 + [True] * 8
    assert all(replay.metrics() == replays[0].metrics() for replay in replays)


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
