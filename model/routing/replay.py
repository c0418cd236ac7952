"""Keep Routing: the trainer sends each token to the experts that the rollout engine recorded.

DeepSeek-V3.2 (2025), section 3.1. Only the choice of experts is replayed. Their weights are
computed from the current scores at the recorded indices, so gradient reaches the router; a row
of −1 was not recorded and uses the live router.

**Activation recomputation.** A checkpointed layer runs its router a second time, inside the
backward pass, and must then see the routes of the forward pass it repeats, whatever is replayed by
then. Autograd numbers its nodes in the order of their making; a context notes the numbers that
fell into it, and a router that runs during a backward pass looks up to which context the node at
work belongs. So backward may run inside the with-block or after it, in any order, with reentrant
and non-reentrant checkpoints, and a layer that ran without replay is recomputed without replay.
The routes of the last `REMEMBERED` closed contexts are kept for this; recomputing an older one is
an error. Not supported: a reentrant checkpoint nested in another, whose nodes are made too late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keel.model.device import to_device
from keel.model.routing.checks import check_routes
from keel.model.routing.routers import ROUTERS, router_modules
from keel.model.torch_internals import next_node_number, node_at_work
from keel.rl.metrics import Mean
from keel.rl.types import NO_ROUTE

REMEMBERED = 8
"""Closed contexts whose layers can still be recomputed."""
HOOKED = "keel_hooked"
"""Attribute of a router that has the hooks."""
_KNOWN_AS_OLD = 1024
"""Closed contexts whose recomputation is recognised, if only to be refused."""


@contextmanager
def replay_routes(
    module: nn.Module, routes: Tensor | NDArray[Any], *, by_token: bool = False
) -> Iterator[Replay]:
    """Within the block, forward passes of `module` use the recorded experts.

    Args:
        module: holds the routers; a transformers model or anything around one.
        routes: [tokens, L, K] integers, input-aligned. tokens are all rows that the routers see
            (batch × length, flattened); L counts MoE layers only, in layer order. A row of −1
            uses the live router. Host memory is checked and sent to the device once; routes that
            are on a device are taken as they are.
        by_token: also count for `Replay.overlap_N`.

    Yields:
        A `Replay`, for its metrics.

    Raises:
        ValueError: on entry, naming the token and layer, for routes that cannot be: of another
            number of layers or experts a token than the model's, out of range, partly −1, with an
            expert twice in a row (all zeros, say), or all zero in a whole layer; and if the
            model's family is not in `keel.model.routing.routers.ROUTERS`. In the forward pass, for
            another number of tokens.
        RuntimeError: at the end of the block, if a router never ran in it, so that its routes
            were not applied; on entry, if one of the routers is already being replayed.
    """
    routers = router_modules(module)
    if not routers:
        raise ValueError(f"{type(module).__name__} has no routers, so there is nothing to replay")
    check_routes(routes, routers)
    if any(_replaying(router) for router in routers):
        raise RuntimeError("replay_routes: a router of this module is already being replayed")
    _hook(routers)
    replay = Replay(routers, torch.as_tensor(routes), by_token=by_token)
    _open.append(replay)
    try:
        yield replay
    finally:
        _open.remove(replay)
        _remember(replay)
    replay.check_applied()


@contextmanager
def record_routes(module: nn.Module) -> Iterator[Recording]:
    """Within the block, note which experts the live routers choose, replayed or not."""
    routers = router_modules(module)
    _hook(routers)
    recording = Recording(routers)
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings.remove(recording)


class Replay:
    """One `replay_routes` context. Its metrics may be read inside it or after."""

    def __init__(self, routers: list[nn.Module], routes: Tensor, *, by_token: bool = False) -> None:
        self._layer_of = WeakKeyDictionary({router: at for at, router in enumerate(routers)})
        self._routes_LNK: Tensor | None = routes.transpose(0, 1).contiguous()
        self._on_device: Tensor | None = None
        self._start = next_node_number()
        self._stop: int | None = None
        self._calls = [0] * len(routers)
        self._experts = routes.shape[2]
        self._rows = 0
        self._counts: list[Tensor] = []
        self._counts_tokens = by_token
        self._by_token_2N: Tensor | None = None
        """Recorded experts of each token that the live router chooses too, and layers that have any
        recorded, so far."""

    def overlap_N(self) -> Tensor | None:
        """Share of each token's recorded experts, over all layers, that the live router chooses
        too; NaN for a token without. On the device. None without `by_token`."""
        if self._by_token_2N is None:
            return None
        same_N, layers_N = self._by_token_2N
        return same_N / (layers_N * self._experts)

    def metrics(self, *, ends: int = 0) -> dict[str, Mean]:
        """`routing/overlap`: share of recorded experts that the live router chooses too.
        `routing/fallback_fraction`: share of (token, layer) rows that should have been recorded and
        were not; `ends` tokens (the last of each segment) were never an input, so they have none.

        Forward passes count, recomputation does not. Waits for the device, once.
        """
        same, recorded = torch.stack(self._counts).sum(0).tolist() if self._counts else (0, 0)
        routable = self._rows - ends * len(self._calls)
        return {
            "routing/overlap": Mean(same / self._experts, recorded),
            "routing/fallback_fraction": Mean(routable - recorded, routable),
        }

    def apply(self, router: nn.Module, output: Any, *, again: bool) -> Any:
        """The router's output with the recorded experts; `again` while recomputing."""
        family = ROUTERS[type(router).__name__]
        layer = self._layer_of[router]
        live = family.experts(output)
        recorded = self._layer(layer, live.device)
        if len(recorded) != len(live):
            raise ValueError(
                f"routes are for {len(recorded)} tokens, but the router of MoE layer {layer} got "
                f"{len(live)}"
            )
        known = recorded[:, :1] != NO_ROUTE
        if not again:
            same = recorded.unsqueeze(-1) == live.unsqueeze(-2)
            self._counts.append(torch.stack([same.sum(), known.sum()]))
            if self._counts_tokens:
                here = torch.stack([same.sum((-2, -1), dtype=torch.int32), known[:, 0].int()])
                so_far = self._by_token_2N
                self._by_token_2N = here if so_far is None else so_far + here
            self._rows += len(live)
            self._calls[layer] += 1
        return family.replay(router, output, recorded.where(known, live))

    def owns(self, router: nn.Module, node: int) -> bool:
        """Whether the autograd node of this number was made while `router` was replayed here."""
        closed = self._stop is not None and node >= self._stop
        return router in self and node >= self._start and not closed

    def __contains__(self, router: nn.Module) -> bool:
        return router in self._layer_of

    def close(self) -> bool:
        """End the context. Whether a backward pass may come back to it."""
        self._stop = next_node_number()
        self._on_device = None
        return self._stop > self._start

    def forgotten(self) -> Replay:
        """What is left to know of it, without the routes; what its metrics are made of goes with
        whoever is going to read them."""
        self._routes_LNK = self._on_device = None
        known = copy(self)
        known._counts, known._by_token_2N = [], None
        return known

    def check_applied(self) -> None:
        idle = [layer for layer, calls in enumerate(self._calls) if calls == 0]
        if idle:
            raise RuntimeError(
                f"replay_routes: the routers of MoE layers {idle} did not run inside the context, "
                "so their routes were not applied. Was another module run than the one given?"
            )

    def _layer(self, layer: int, device: torch.device) -> Tensor:
        """[tokens, K] int64. All layers go to the device together."""
        if self._on_device is None or self._on_device.device != device:
            routes = self._routes_LNK
            if routes is None:
                raise RuntimeError(
                    f"recomputation of a forward pass more than {REMEMBERED} replays ago, whose "
                    "routes are gone: run its backward pass earlier, or inside replay_routes"
                )
            self._on_device = to_device(routes, device)
        return self._on_device[layer].long()


class Recording:
    """What `record_routes` saw: for each router, the experts of each forward pass."""

    def __init__(self, routers: list[nn.Module]) -> None:
        self._passes: dict[nn.Module, list[Tensor]] = {router: [] for router in routers}

    def add(self, router: nn.Module, experts: Tensor) -> None:
        if router in self._passes:
            self._passes[router].append(experts.detach())

    def routes(self, index: int = -1) -> Tensor:
        """[tokens, L, K] int64 of one forward pass, by default the last."""
        return torch.stack([passes[index] for passes in self._passes.values()], dim=1)


# Hooks stay on the routers after a context, since a recomputation may come later. They find what
# to do here rather than in themselves, so that a copy of a model does not act as the original.
_open: list[Replay] = []
_closed: deque[Replay] = deque(maxlen=_KNOWN_AS_OLD)
_recordings: list[Recording] = []
_logits: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""What a gate just computed, until its router is done."""


def _hook(routers: list[nn.Module]) -> None:
    for router in routers:
        if not getattr(router, HOOKED, False):  # a copy of a router brings both along
            setattr(router, HOOKED, True)
            router.register_forward_hook(_on_router)
            if gate := ROUTERS[type(router).__name__].gate:
                router.get_submodule(gate).register_forward_hook(_on_gate)


def _on_gate(gate: nn.Module, _arguments: Any, logits: Tensor) -> None:
    _logits[gate] = logits


def _on_router(router: nn.Module, _arguments: Any, output: Any) -> Any:
    family = ROUTERS[type(router).__name__]
    if family.gate:
        output = (_logits.pop(router.get_submodule(family.gate)), *output)
    node = node_at_work()
    if node is not None:  # inside a backward pass: a recomputation
        for replay in (*_open, *reversed(_closed)):
            if replay.owns(router, node):
                return replay.apply(router, output, again=True)
        return None
    for recording in _recordings:
        recording.add(router, family.experts(output))
    replay = _replaying(router)
    return replay and replay.apply(router, output, again=False)


def _replaying(router: nn.Module) -> Replay | None:
    return next((replay for replay in _open if router in replay), None)


def _remember(replay: Replay) -> None:
    if replay.close():
        _closed.append(replay)
        if len(_closed) > REMEMBERED:
            _closed[-1 - REMEMBERED] = _closed[-1 - REMEMBERED].forgotten()
