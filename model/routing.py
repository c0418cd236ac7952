"""Keep Routing: the trainer routes each token to the experts that the rollout engine recorded.

DeepSeek-V3.2 (2025), section 3.1. Only the choice of experts is replayed. The experts' weights come
from the router's current scores at the recorded indices, so gradients reach the router. A row of −1
means that nothing was recorded, and the live router chooses the experts. `ROUTERS` defines how each
kind of router weighs its experts; docs/adding-a-model-family.md shows how to add one.

**Activation recomputation.** A checkpointed layer runs its router again during the backward pass.
It must then use the same routes as in the forward pass. Autograd numbers its nodes in order of
creation, and each replay context records its range of node numbers. A router in a backward pass
finds its context by the number of the running node. The backward pass may therefore run inside the
with-block or after it, in any order, with reentrant and non-reentrant checkpoints. A layer that ran
without replay is also recomputed without replay. The routes from the last `_REMEMBERED` closed
contexts are kept. Recomputing layers from an older context is an error. Nested reentrant
checkpoints are not supported, because the nodes of the inner checkpoint are created too late.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keel.model.torch_internals import next_node_number, running_node_number, to_device
from keel.rl.metrics import Mean
from keel.rl.recordings import NO_ROUTE

_Output = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Router:
    """Describes how to replay routes in a router class. Instances of the class must have `top_k`
    and `num_experts`."""

    experts: Callable[[_Output], Tensor]
    replay: Callable[[Any, _Output, Tensor], _Output]
    """Takes (router, output, experts [tokens, K] int64) and returns the output for these experts.
    The weights are computed from the current scores and are differentiable."""
    gate: str = ""
    """Submodule that computes the logits, for routers whose output does not include them. The
    logits are prepended to the output. The submodule is not called again, because under ZeRO-3 such
    a call is a collective, and ranks without routes to replay would not take part."""


def _triple(weigh: Callable[[Any, Tensor, Tensor], Tensor]) -> _Router:
    """Describe a router that returns three tensors: logits, weights and experts. `weigh(router,
    logits, experts)` computes the weights."""

    def replay(router: Any, output: _Output, experts: Tensor) -> _Output:
        logits, weights, _live = output
        return logits, weigh(router, logits, experts).to(weights.dtype), experts

    return _Router(experts=lambda output: output[2], replay=replay)


def _softmax(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights


def _softmax_normalised(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True)


def _softmax_scaled(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Compute expert weights for DeepSeek-V2. Group limits only affect which experts are chosen."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    return weights * router.routed_scaling_factor


def _softmax_of_chosen(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.gather(1, experts).softmax(-1)


def _sigmoid_scaled(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Compute expert weights for DeepSeek-V3. The correction bias only affects which experts are
    chosen."""
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


def _sigmoid_normalised(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().sigmoid().gather(1, experts)
    return weights / weights.sum(-1, keepdim=True)


def _replay_autoep(router: Any, output: _Output, experts: Tensor) -> _Output:
    """Recompute the output (weights, experts, tokens per expert) of a DeepSpeed AutoEP router for
    the recorded experts."""
    logits, weights, _live, counts = output
    logits = logits.float()
    scores = logits.sigmoid() if router.score_func == "sigmoid" else logits.softmax(-1)
    chosen = scores.gather(1, experts)
    if router.route_norm:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    flat = experts.reshape(-1)
    counts = torch.zeros_like(counts).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=counts.dtype)
    )
    return (chosen * router.route_scale).to(weights.dtype), experts, counts


ROUTERS: Mapping[str, _Router] = {
    "DeepseekV2TopkRouter": _triple(_softmax_scaled),
    "DeepseekV32TopkRouter": _triple(_sigmoid_scaled),
    "DeepseekV3TopkRouter": _triple(_sigmoid_scaled),
    "FlexOlmoTopKRouter": _triple(_softmax),
    "Glm4MoeLiteTopkRouter": _triple(_sigmoid_scaled),
    "Glm4MoeTopkRouter": _triple(_sigmoid_scaled),
    "GlmMoeDsaTopkRouter": _triple(_sigmoid_scaled),
    "GptOssTopKRouter": _triple(_softmax_of_chosen),
    "MiniMaxM2TopKRouter": _triple(_sigmoid_normalised),
    "MixtralTopKRouter": _triple(_softmax_normalised),
    "OlmoeTopKRouter": _triple(_softmax),
    "Qwen2MoeTopKRouter": _triple(_softmax),
    "Qwen3MoeTopKRouter": _triple(_softmax),
    "Qwen3NextTopKRouter": _triple(_softmax),
    "Qwen3_5MoeTopKRouter": _triple(_softmax_normalised),
    "TokenChoiceTopKRouter": _Router(
        experts=lambda output: output[2], replay=_replay_autoep, gate="gate"
    ),
}
"""How to replay each router. The keys are class names, so no model code has to be imported."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LOOKS_ROUTED = re.compile(r"(Router|Experts|MoE|Moe|MoEBlock|MoeBlock)$")


def is_moe(config: Any) -> bool:
    """Return True if a transformers config describes a mixture of experts, even one with a single
    expert."""
    config = config.get_text_config()
    return any((getattr(config, name, None) or 0) > 0 for name in _EXPERT_COUNTS)


def router_modules(module: nn.Module) -> list[nn.Module]:
    """Return the routers in `module` in layer order, or an empty list if the model is dense. Raises
    ValueError if the routers or experts belong to a family that isn't in `ROUTERS`."""
    kinds = [(type(child).__name__, child) for child in module.modules()]
    routers = [child for kind, child in kinds if kind in ROUTERS]
    unknown = {
        kind
        for kind, _ in kinds
        if kind not in ROUTERS
        and _LOOKS_ROUTED.search(kind)
        # Experts and blocks next to known routers belong to them.
        and (not routers or kind.endswith("Router"))
    }
    if unknown:
        raise ValueError(
            f"{type(module).__name__}: routing of {', '.join(sorted(unknown))} is not supported. "
            "See docs/models.md for supported families, and docs/adding-a-model-family.md"
        )
    return routers


_REMEMBERED = 8
_HOOKED = "keel_hooked"

_SUSPECT_ROWS = 16
"""Minimum number of tokens for rejecting a layer of zeros if there is one expert per token. With
several experts per token, such a layer is always rejected, because a token cannot have the same
expert twice."""


@contextmanager
def replay_routes(
    module: nn.Module, routes: Tensor | NDArray[Any], *, by_token: bool = False
) -> Iterator[Replay]:
    """Replay recorded experts in all forward passes of `module` inside this context.

    Args:
        module: a module with routers, such as a transformers model.
        routes: [tokens, L, K] integers, input-aligned. The tokens are all rows that the routers
            receive (batch × length, flattened), and L counts only MoE layers, in layer order. Rows
            of −1 use the live router. Routes in host memory are validated and copied to the device
            once. Routes on a device are not validated.
        by_token: if set, also compute `Replay.overlap_N`.

    Yields:
        A `Replay` with metrics.

    Raises:
        ValueError: the model family is not in `ROUTERS`, or the routes have a wrong shape, a
            value out of range, a row that is partly −1, a repeated expert, or a whole layer of
            zeros. The error names the token and layer. A wrong number of tokens raises in the
            forward pass instead.
        RuntimeError: one of the routers is already being replayed, or never ran inside the
            context, so that its routes were not applied.
    """
    routers = router_modules(module)
    if not routers:
        raise ValueError(f"{type(module).__name__} has no routers: nothing to replay")
    _check_routes(routes, routers)
    if any(_replaying(router) for router in routers):
        raise RuntimeError("replay_routes: a router of this module is already being replayed")
    for router in routers:
        if not getattr(router, _HOOKED, False):  # a copy of a router has both
            setattr(router, _HOOKED, True)
            router.register_forward_hook(_on_router)
            if gate := ROUTERS[type(router).__name__].gate:
                router.get_submodule(gate).register_forward_hook(_on_gate)
    replay = Replay(routers, torch.as_tensor(routes), by_token=by_token)
    _open.append(replay)
    try:
        yield replay
    finally:
        _open.remove(replay)
        if replay.close():
            _closed.append(replay)
            while len(_closed) > _REMEMBERED:
                _closed.popleft().forget()
    if idle := [layer for layer, calls in enumerate(replay._calls) if calls == 0]:
        raise RuntimeError(
            f"replay_routes: the routers of MoE layers {idle} did not run in the block, so their "
            "routes were not applied. Run the module that was passed"
        )


class Replay:
    """State and metrics of one `replay_routes` context. The metrics can be read inside the context
    or after it exits."""

    def __init__(self, routers: list[nn.Module], routes: Tensor, *, by_token: bool = False) -> None:
        self._layer_of = WeakKeyDictionary({router: at for at, router in enumerate(routers)})
        self._routes_LNK = routes.transpose(0, 1).contiguous()
        self._on_device: Tensor | None = None
        self._start = next_node_number()
        self._stop: int | None = None
        self._calls = [0] * len(routers)
        self._experts = routes.shape[2]
        self._rows = 0
        self._counts: list[Tensor] = []
        self._counts_tokens = by_token
        self._by_token_2N: Tensor | None = None
        """Per token, the number of recorded experts that the live router also chooses, and the
        number of recorded layers."""

    def overlap_N(self) -> Tensor | None:
        """Return the fraction of each token's recorded experts that the live router also
        chooses, across all layers, or NaN for tokens without routes. Returns None unless
        `by_token` was set."""
        if self._by_token_2N is None:
            return None
        same_N, layers_N = self._by_token_2N
        return same_N / (layers_N * self._experts)

    def metrics(self, *, unrouted: int = 0) -> dict[str, Mean]:
        """Return the metrics of the forward passes, not counting recomputation. Synchronizes with
        the device once.

        routing/overlap            fraction of recorded experts that the live router also chooses
        routing/fallback_fraction  fraction of (token, layer) rows that were not recorded. The
                                   last token of each segment is excluded

        `unrouted` is the number of these last tokens.
        """
        same, recorded = torch.stack(self._counts).sum(0).tolist() if self._counts else (0, 0)
        routable = self._rows - unrouted * len(self._calls)
        return {
            "routing/overlap": Mean(same / self._experts, recorded),
            "routing/fallback_fraction": Mean(routable - recorded, routable),
        }

    def apply(self, router: nn.Module, output: Any, *, recomputing: bool) -> Any:
        family = ROUTERS[type(router).__name__]
        layer = self._layer_of[router]
        live = family.experts(output)
        recorded = self._layer(layer, live.device)
        if len(recorded) != len(live):
            raise ValueError(
                f"routes have {len(recorded)} tokens, but the router of MoE layer {layer} got "
                f"{len(live)}"
            )
        known = recorded[:, :1] != NO_ROUTE
        if not recomputing:
            same = recorded.unsqueeze(-1) == live.unsqueeze(-2)
            self._counts.append(torch.stack([same.sum(), known.sum()]))
            if self._counts_tokens:
                here = torch.stack([same.sum((-2, -1), dtype=torch.int32), known[:, 0].int()])
                total = self._by_token_2N
                self._by_token_2N = here if total is None else total + here
            self._rows += len(live)
            self._calls[layer] += 1
        return family.replay(router, output, recorded.where(known, live))

    def owns(self, router: nn.Module, node: int) -> bool:
        closed = self._stop is not None and node >= self._stop
        return router in self and node >= self._start and not closed

    def __contains__(self, router: nn.Module) -> bool:
        return router in self._layer_of

    def close(self) -> bool:
        """End the context. Returns True if a backward pass may still need the routes."""
        self._stop = next_node_number()
        self._on_device = None
        return self._stop > self._start

    def forget(self) -> None:
        """Drop the routes, and record for each router that forward passes up to this one can't be
        recomputed."""
        self._routes_LNK = self._routes_LNK.new_empty(0)
        for router in self._layer_of:
            _forgotten[router] = self._stop or 0

    def _layer(self, layer: int, device: torch.device) -> Tensor:
        if self._on_device is None or self._on_device.device != device:
            self._on_device = to_device(self._routes_LNK, device)
        return self._on_device[layer].long()


# Hooks stay on the routers after a context, because a recomputation may follow. Their state is here
# and not in the hooks, so that a copy of a model is not replayed like the original.
_open: list[Replay] = []
_closed: deque[Replay] = deque()
_forgotten: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The node number up to which the routes of each router have been dropped."""
_logits: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""The output of each gate, stored until its router returns."""


def _on_gate(gate: nn.Module, _arguments: Any, logits: Tensor) -> None:
    _logits[gate] = logits


def _on_router(router: nn.Module, _arguments: Any, output: Any) -> Any:
    family = ROUTERS[type(router).__name__]
    if family.gate:
        output = (_logits.pop(router.get_submodule(family.gate)), *output)
    node = running_node_number()
    if node is not None:  # a recomputation in a backward pass
        for replay in (*_open, *reversed(_closed)):
            if replay.owns(router, node):
                return replay.apply(router, output, recomputing=True)
        if node < _forgotten.get(router, 0):
            raise RuntimeError(
                f"recomputation of a forward pass more than {_REMEMBERED} replays ago, whose "
                "routes were dropped. Run its backward pass earlier, or inside replay_routes"
            )
        return None
    replay = _replaying(router)
    return replay and replay.apply(router, output, recomputing=False)


def _replaying(router: nn.Module) -> Replay | None:
    return next((replay for replay in _open if router in replay), None)


def _check_routes(routes: Tensor | NDArray[Any], routers: list[nn.Module]) -> None:
    dtype = routes.dtype
    floating = dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype.kind not in "iu"
    if routes.ndim != 3 or floating or dtype == torch.bool:
        raise ValueError(
            f"routes must be integers [tokens, L, K], is {dtype} of shape {tuple(routes.shape)}"
        )
    _, layers, experts = routes.shape
    if layers != len(routers):
        raise ValueError(
            f"routes have L = {layers} layers, but the model has {len(routers)} MoE layers"
        )
    for layer, router in enumerate(routers):
        if router.top_k != experts:
            raise ValueError(
                f"routes have K = {experts} experts per token, but MoE layer {layer} chooses "
                f"{router.top_k}"
            )
    if isinstance(routes, Tensor):
        if routes.device.type != "cpu":
            return
        routes = routes.detach().numpy()
    _check_values(routes, [int(router.num_experts) for router in routers])  # type: ignore[arg-type]


def _check_values(routes: NDArray[Any], num_experts: list[int]) -> None:
    tokens, _, experts = routes.shape
    columns = np.ascontiguousarray(routes.transpose(2, 0, 1))  # [K, tokens, L]
    limit = np.array(num_experts)

    def reject(where: NDArray[np.bool_], reason: str) -> None:
        if where.any():
            token, layer = (int(at) for at in np.argwhere(where)[0])
            row = routes[token, layer].tolist()
            raise ValueError(f"routes: token {token}, MoE layer {layer} is {row}: {reason}")

    missing = columns == NO_ROUTE
    for column, absent in zip(columns, missing, strict=True):
        reject(absent != missing[0], "some experts are −1")
        reject((column < NO_ROUTE) | (column >= limit), f"experts are 0 … {limit.min() - 1}, or −1")
    for one, other in combinations(columns, 2):
        reject((one == other) & ~missing[0], "an expert is repeated")
    if experts == 1 and tokens:
        recorded = (~missing[0]).sum(0)
        zero = ((columns[0] == 0) | missing[0]).all(0) & (recorded >= _SUSPECT_ROWS)
        if zero.any():
            raise ValueError(
                f"routes: MoE layer {int(zero.argmax())} routes all {int(recorded[zero][0])} "
                "tokens to expert 0, like a tensor that was never filled"
            )
