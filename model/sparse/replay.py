"""Index replay: the trainer attends to the positions that the rollout engine selected.

As Keep Routing does for experts (`keel.model.routing.replay`): the selection is replayed, and all
that is computed of it is live. An engine's recorder hands over, for each token as an input and each
layer with an indexer, in order, the positions it attended to, counted from the start of the token's
segment: [T, L, k], −1 where fewer than k were selected. A row of −1 was not recorded, and has the
live selection. For a context that is no longer than k there is nothing to record: all of it is
selected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keel.model.sparse.attention import indexers
from keel.model.sparse.indexer import NONE


def recorded_selection(
    model: nn.Module, selected_NLk: NDArray[Any], position_N: NDArray[Any]
) -> Tensor:
    """What `keel.model.sparse.attention.SparsePass.recorded_LNk` takes, checked.

    selected_NLk: positions of a packed row's N tokens, as above; position_N: each token's own.

    Raises ValueError naming the first token and layer whose selection cannot be an engine's: of
    later tokens, of one twice, of more or fewer than the model selects; or for another number of
    layers than the model has indexers.
    """
    own = indexers(model)
    if selected_NLk.ndim != 3 or selected_NLk.shape[:2] != (len(position_N), len(own)):
        raise ValueError(
            f"recorded selection: has the shape {selected_NLk.shape}, for {len(position_N)} tokens "
            f"and {len(own)} layers with an indexer"
        )
    top_k = int(getattr(own[0], "index_topk", 0)) if own else 0
    by_layer = np.empty((len(own), len(position_N), selected_NLk.shape[2]), np.int32)
    for layer, selected_Nk in enumerate(by_layer):  # one at a time: all of them can be gigabytes
        selected_Nk[:] = selected_NLk[:, layer]
        _check(selected_Nk, position_N, top_k, layer)
    return torch.from_numpy(by_layer)


def _check(
    selected_Nk: NDArray[np.int32], position_N: NDArray[Any], top_k: int, layer: int
) -> None:
    """Raises ValueError for what no engine can have selected in a layer."""
    ordered = np.sort(selected_Nk, -1)
    count = (ordered != NONE).sum(-1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NONE)
    faults = {
        "a position before the segment": ordered[:, 0] < NONE,
        "a later token": ordered[:, -1] > position_N,
        "a position twice": twice.any(-1),
        f"another number of positions than min(position + 1, {top_k})": (count > 0)
        & (count != np.minimum(position_N + 1, top_k)),
    }
    for fault, where in faults.items():
        if where.any():
            token = int(where.argmax())
            raise ValueError(
                f"recorded selection: token {token} (position {position_N[token]}), layer {layer}: "
                f"{fault}"
            )
