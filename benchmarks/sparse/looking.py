"""The share of dense attention that k earlier tokens hold, counted while the attention runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keel.model.sparse.attention import Chunk
from keel.model.sparse.indexer import index_scores, products, select, up_to_own

LOOKED = ("indexer", "best", "window", "first and window", "any")
"""Which k: the indexer's, those with most of the attention, the last, the first `FIRST` and the
last, and any (what k hold on average)."""
FIRST = 4


class Shares:
    """Sums, by layer, k and way to choose, over queries with 3/4 of the context or more before
    them."""

    def __init__(
        self, layers: int, context: int, top_k: tuple[int, ...], device: torch.device
    ) -> None:
        self.top_k, self.context = top_k, context
        sizes = (layers, len(top_k), len(LOOKED))
        self._sums = torch.zeros(sizes, dtype=torch.float64, device=device)
        self._counts = torch.zeros(layers, dtype=torch.float64, device=device)
        self._all = torch.zeros(layers, len(top_k), 2, dtype=torch.float64, device=device)
        """The indexer's, over all queries with more than k keys, and their number."""
        self._layer = 0

    def enter(self, layer: int) -> None:
        self._layer = layer

    def look(self, first: int, target: Tensor, scores: Tensor) -> None:
        """target: the attention of each query [B, c, s], a mean over heads; scores: the indexer's.
        first: number of the first query."""
        count = target.shape[1]
        query = torch.arange(first, first + count, device=target.device)
        late = (query >= 3 * self.context // 4).double()
        self._counts[self._layer] += late.sum() * len(target)
        best = target.sort(-1, descending=True).values.cumsum(-1)
        upto = torch.nn.functional.pad(target.cumsum(-1), (1, 0))  # [B, c, s + 1]
        for at, k in enumerate(self.top_k):
            if k >= target.shape[2]:
                continue
            chosen = select(first, scores, k).long()
            own = target.gather(-1, chosen.clamp(min=0)).where(chosen >= 0, 0).sum(-1)
            more = (query >= k).double()
            self._all[self._layer, at, 0] += (own * more).sum()
            self._all[self._layer, at, 1] += more.sum() * len(target)
            end = query + 1

            def within(begin: Tensor, end: Tensor) -> Tensor:
                both = [x.clamp(min=0).expand(len(target), -1)[..., None] for x in (begin, end)]
                begun, ended = (upto.gather(-1, x)[..., 0] for x in both)
                return ended - begun

            four = torch.full_like(end, FIRST)
            found = {
                "indexer": own,
                "best": best[..., k - 1],
                "window": within(end - k, end),
                "first and window": within(0 * end, four) + within(end - (k - FIRST), end),
                "any": (k / end).expand(len(target), -1),
            }
            for way, share in found.items():
                self._sums[self._layer, at, LOOKED.index(way)] += (share * late).sum()

    def share(self, layer: int, k: int, way: str) -> float:
        at = self.top_k.index(k)
        return float(self._sums[layer, at, LOOKED.index(way)] / self._counts[layer])

    def mean(self, k: int, way: str) -> float:
        layers = len(self._counts)
        return sum(self.share(layer, k, way) for layer in range(layers)) / layers

    def as_keel_counts(self, k: int) -> float:
        """What `keel pretrain` calls `indexer/held`, of top k."""
        share, count = self._all[:, self.top_k.index(k)].sum(0).tolist()
        return share / count

    def json(self) -> dict[str, Any]:
        return {
            f"top {k}": {
                way: [self.share(layer, k, way) for layer in range(len(self._counts))]
                for way in LOOKED
            }
            for k in self.top_k
        }


class Looking(Chunk):
    """Dense attention as `keel.model.sparse` computes it, with a look at it."""

    shares: Shares

    @staticmethod
    def into(shares: Shares) -> type[Looking]:
        return type("Looking", (Looking,), {"shares": shares, "__slots__": ()})

    def dense(
        self,
        first: int,
        query: Tensor,
        index_q: Tensor,
        weight: Tensor,
        key: Tensor,
        index_k: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = super().dense(first, query, index_q, weight, key, index_k)
        logits = products(query.flatten(1, 2), key.transpose(1, 2)) * self.scaling
        logits = logits.unflatten(1, query.shape[1:3])
        seen = up_to_own(first, logits[:, :, 0])
        target = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1).mean(2)
        self.shares.look(first, target, index_scores(index_q, weight, index_k))
        return found
