"""Index replay: attention to recorded positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from keel.model.sparse.attention import SparsePass, recorded_selection, sparse_layers
from tests.model.sparse.packed_rows import (
    LENGTHS,
    TOKENS,
    TOP_K,
    assert_same_gradients,
    gradients,
    ours,
    run,
    segments_of_ids,
    theirs,
    weighted,
)

LAYERS = 2
POSITIONS = np.concatenate([np.arange(length) for length in LENGTHS])


def drawn() -> NDArray[Any]:
    """Draw a valid selection [N, L, k]."""
    random = np.random.default_rng(0)
    selected = np.full((TOKENS, LAYERS, TOP_K), -1, np.int32)
    for token, position in enumerate(POSITIONS):
        for layer in range(LAYERS):
            chosen = random.permutation(position + 1)[:TOP_K]
            selected[token, layer, : len(chosen)] = chosen
    return selected


@pytest.mark.parametrize("recomputed", [False, True])
def test_recorded_positions_match_transformers(recomputed: bool) -> None:
    plain, ids, selected = theirs(), segments_of_ids(), drawn()
    model = ours(plain).train()
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    start, alone = 0, []
    for part in ids:
        stop = start + part.shape[1]
        for layer, attention in enumerate(sparse_layers(plain)):
            # Padding with a selected position has no effect in transformers' mask.
            own = torch.from_numpy(selected[start:stop, layer]).clone()
            own = own.where(own >= 0, own[:, :1])[None]
            attention.get_submodule("indexer").forward = lambda *_, own=own, **__: own
        alone.append(plain.get_decoder()(part, use_cache=False).last_hidden_state[0])
        start = stop
    expected = torch.cat(alone)
    sparse = SparsePass(
        loss=True, chunk=5, recorded_LNk=recorded_selection(model, selected, POSITIONS)
    )
    hidden = run(model, ids, sparse)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
    weighted(expected).backward()
    (weighted(hidden) + sparse.loss_sum()).backward()
    actual = gradients(model)
    learned = {name for name in actual if ".indexer." in name}
    assert learned and all(actual.pop(name).any() for name in learned)
    assert_same_gradients(actual, gradients(plain))


def test_unrecorded_rows_use_the_live_selection() -> None:
    model, ids, selected = ours(theirs()), segments_of_ids(), drawn()
    live = run(model, ids, SparsePass())
    selected[:] = -1
    none = recorded_selection(model, selected, POSITIONS)
    torch.testing.assert_close(run(model, ids, SparsePass(recorded_LNk=none)), live)
    selected[:22] = drawn()[:22]  # the first two segments
    some = run(model, ids, SparsePass(recorded_LNk=recorded_selection(model, selected, POSITIONS)))
    assert not torch.allclose(some[:22], live[:22], atol=1e-3)
    torch.testing.assert_close(some[22:], live[22:])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s[:, :1], "shape"),
        (lambda s: np.where(s == 15, 16, s), "token 45 .*layer 1: a later"),
        (lambda s: np.zeros_like(s), "token 0 .*layer 0: a repeated"),
        (lambda s: s[..., :4], "min"),
        (lambda s: np.where(s == 3, -2, s), "before the segment"),
    ],
)
def test_invalid_selections_are_located(change: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        recorded_selection(ours(theirs()), change(drawn()), POSITIONS)
