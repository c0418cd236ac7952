"""Index replay: attention to the positions that somebody else has selected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from keel.model.sparse.attention import SparsePass, sparse_layers
from keel.model.sparse.replay import recorded_selection
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
    """[N, L, k]: what an engine could have selected, at random."""
    random = np.random.default_rng(0)
    selected = np.full((TOKENS, LAYERS, TOP_K), -1, np.int32)
    for token, position in enumerate(POSITIONS):
        for layer in range(LAYERS):
            chosen = random.permutation(position + 1)[:TOP_K]
            selected[token, layer, : len(chosen)] = chosen
    return selected


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_recorded_positions_are_attended_to_as_transformers_does(recomputed: bool) -> None:
    plain, ids, selected = theirs(), segments_of_ids(), drawn()
    model = ours(plain).train()
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    start, alone = 0, []
    for part in ids:
        stop = start + part.shape[1]
        for layer, attention in enumerate(sparse_layers(plain)):
            # transformers masks what is not selected, so filling up with a selected one is none.
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
    found = gradients(model)
    learned = {name for name in found if ".indexer." in name}  # from the engine's selection
    assert learned and all(found.pop(name).any() for name in learned)
    assert_same_gradients(found, gradients(plain))


def test_rows_that_were_not_recorded_are_selected_here() -> None:
    model, ids, selected = ours(theirs()), segments_of_ids(), drawn()
    live = run(model, ids, SparsePass())
    selected[:] = -1
    none = recorded_selection(model, selected, POSITIONS)
    torch.testing.assert_close(run(model, ids, SparsePass(recorded_LNk=none)), live)
    selected[:22] = drawn()[:22]  # of the first two segments alone
    some = run(model, ids, SparsePass(recorded_LNk=recorded_selection(model, selected, POSITIONS)))
    assert not torch.allclose(some[:22], live[:22], atol=1e-3)
    torch.testing.assert_close(some[22:], live[22:])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s[:, :1], r"shape \(46, 1, 6\), for 46 tokens and 2 layers"),
        (lambda s: np.where(s == 15, 16, s), r"token 45 \(position 15\), layer 1: a later"),
        (lambda s: np.zeros_like(s), r"token 0 \(position 0\), layer 0: a position twice"),
        (lambda s: s[..., :4], r"another number of positions than min\(position \+ 1, 6\)"),
        (lambda s: np.where(s == 3, -2, s), "a position before the segment"),
    ],
)
def test_what_no_engine_selects_is_refused(change: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        recorded_selection(ours(theirs()), change(drawn()), POSITIONS)
