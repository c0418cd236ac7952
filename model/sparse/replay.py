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
    place = position_N[:, None]
    chosen = selected_NLk != NONE
    count = chosen.sum(-1)
    ordered = np.sort(selected_NLk, -1)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NONE)).any(-1)
    faults = {
        "a position before the segment": (selected_NLk < NONE).any(-1),
        "a later token": selected_NLk.max(-1, initial=NONE) > place,
        "a position twice": twice,
        f"another number of positions than min(position + 1, {top_k})": (count > 0)
        & (count != np.minimum(place + 1, top_k)),
    }
    for fault, where in faults.items():
        if where.any():
            token, layer = np.argwhere(where)[0]
            raise ValueError(
                f"recorded selection: token {token} (position {position_N[token]}), layer {layer}: "
                f"{fault}"
            )
    by_layer = np.ascontiguousarray(selected_NLk.transpose(1, 0, 2), np.int32)
    return torch.from_numpy(by_layer)
