"""Shares of attention, against loops over queries and keys; and the text that is learned from."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sparse.looking import FIRST, LOOKED, Shares
from benchmarks.sparse.sources import gathered

CONTEXT, ROWS = 24, 2
TOP_K = (6, 12)


@pytest.mark.parametrize("size", [CONTEXT, 5])
def test_shares_are_those_of_loops(size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(ROWS, CONTEXT, CONTEXT, generator=draw)
    scores = torch.randn(ROWS, CONTEXT, CONTEXT, generator=draw)
    seen = torch.ones(CONTEXT, CONTEXT).tril().bool()
    target = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    shares = Shares(2, CONTEXT, TOP_K, torch.device("cpu"))
    shares.enter(1)
    for first in range(0, CONTEXT, size):  # as chunks come: with keys up to the last query's
        stop = min(first + size, CONTEXT)
        shares.look(first, target[:, first:stop, :stop], scores[:, first:stop, :stop])

    for k in TOP_K:
        found = dict.fromkeys(LOOKED, 0.0)
        count, every, keel = 0, 0, 0.0
        for row in range(ROWS):
            for query in range(CONTEXT):
                own = target[row, query, : query + 1].tolist()
                by_score = scores[row, query, : query + 1].argsort(descending=True).tolist()
                indexer = sum(own[at] for at in by_score[:k])
                if query >= k:
                    every, keel = every + 1, keel + indexer
                if query < 3 * CONTEXT // 4:
                    continue
                count += 1
                found["indexer"] += indexer
                found["best"] += sum(sorted(own, reverse=True)[:k])
                found["window"] += sum(own[-k:])
                found["first and window"] += sum(own[:FIRST]) + sum(own[-(k - FIRST) :])
                found["any"] += k / len(own)
        for way in LOOKED:
            assert shares.share(1, k, way) == pytest.approx(found[way] / count, abs=1e-5), way
        assert shares.as_keel_counts(k) == pytest.approx(keel / every, abs=1e-5)


def test_the_best_k_hold_no_less_than_any_others() -> None:
    draw = torch.Generator().manual_seed(1)
    seen = torch.ones(CONTEXT, CONTEXT).tril().bool()
    target = torch.randn(1, CONTEXT, CONTEXT, generator=draw).masked_fill(~seen, -torch.inf)
    shares = Shares(1, CONTEXT, TOP_K, torch.device("cpu"))
    shares.look(0, target.softmax(-1), target)  # an indexer that scores as the attention does
    for k in TOP_K:
        best = shares.mean(k, "best")
        assert shares.mean(k, "indexer") == pytest.approx(best)
        assert all(shares.mean(k, way) <= best + 1e-5 for way in LOOKED)  # of float32


@pytest.mark.parametrize("name", ["typing_extensions", "sys", "no_such_package"])
def test_only_packages_are_gathered(name: str) -> None:
    """A module of one file lies beside all others, and a built-in one nowhere."""
    with pytest.raises(ValueError, match=f"--packages {name}: no package"):
        gathered([name], 10)
