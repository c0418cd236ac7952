"""What routing replay refuses, with the token and the layer in the message."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keel.rl.types import NO_ROUTE

SUSPECT_ROWS = 16
"""With one expert a token, a layer that only knows expert 0 is refused from so many tokens on.
With more, expert 0 appears twice in a row of zeros, which is refused anyway."""


def check_routes(routes: Tensor | NDArray[Any], routers: list[nn.Module]) -> None:
    """`routes` [tokens, L, K] against the model's routers. Values only of host memory."""
    dtype = routes.dtype
    floating = dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype.kind not in "iu"
    if routes.ndim != 3 or floating or dtype == torch.bool:
        raise ValueError(
            f"routes must be integers [tokens, L, K], is {dtype} of shape {tuple(routes.shape)}"
        )
    _, layers, experts = routes.shape
    if layers != len(routers):
        raise ValueError(
            f"routes have L = {layers} layers, but the model has {len(routers)} MoE layers "
            "(dense layers have no routes)"
        )
    for layer, router in enumerate(routers):
        if router.top_k != experts:
            raise ValueError(
                f"routes have K = {experts} experts a token, but MoE layer {layer} chooses "
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

    def refuse(where: NDArray[np.bool_], why: str) -> None:
        if where.any():
            token, layer = (int(at) for at in np.argwhere(where)[0])
            row = routes[token, layer].tolist()
            raise ValueError(f"routes: token {token}, MoE layer {layer} is {row}: {why}")

    missing = columns == NO_ROUTE
    for column, absent in zip(columns, missing, strict=True):
        refuse(absent != missing[0], "a row is recorded whole or not at all")
        refuse((column < NO_ROUTE) | (column >= limit), f"experts are 0 … {limit.min() - 1}, or −1")
    for one, other in combinations(columns, 2):
        refuse((one == other) & ~missing[0], "an expert is there twice")
    if experts == 1 and tokens:
        recorded = (~missing[0]).sum(0)
        zero = ((columns[0] == 0) | missing[0]).all(0) & (recorded >= SUSPECT_ROWS)
        if zero.any():
            raise ValueError(
                f"routes: MoE layer {int(zero.argmax())} sends all its {int(recorded[zero][0])} "
                "tokens to expert 0, as a tensor does that nobody filled in"
            )
