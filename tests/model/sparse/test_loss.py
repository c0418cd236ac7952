"""The indexer's loss (Eq. 3 and 4) matches its definition and trains only the indexer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

from keel.model.sparse.attention import SparsePass
from tests.model.sparse.packed_rows import (
    TOP_K,
    assert_same_gradients,
    gradients,
    ours,
    run,
    segments_of_ids,
    theirs,
)


def by_definition(dense: bool) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Compute loss, attention on the top k, and gradients from full attention weights [H, T, T]."""
    model = theirs(index_topk=64 if dense else TOP_K)
    seen: dict[str, list[tuple[Tensor, ...]]] = {}
    for name, layer in model.named_modules():
        if name.endswith("indexer"):
            layer.register_forward_hook(
                lambda module, given, chosen, name=name: seen.setdefault(name, []).append(
                    (*given[:2], *given[2], chosen)
                )
            )
    losses, shares = [], []
    for at, ids in enumerate(segments_of_ids()):
        attentions = model.get_decoder()(ids, use_cache=False, output_attentions=True).attentions
        length = ids.shape[1]
        causal = torch.ones(length, length).tril().bool()
        for (name, calls), weights in zip(seen.items(), attentions, strict=True):
            indexer: Any = model.get_submodule(name)
            hidden, low, cos, sin, chosen = (x[0].detach() for x in calls[at])
            query = indexer.wq_b(low).view(length, 8, -1)
            key = indexer.k_norm(indexer.wk(hidden))[:, None]
            rope = indexer.qk_rope_head_dim
            turned = apply_rotary_pos_emb(query[..., :rope], key[..., :rope], cos, sin, 1)
            query = torch.cat([turned[0], query[..., rope:]], -1)
            key = torch.cat([turned[1], key[..., rope:]], -1)[:, 0]
            w = indexer.weights_proj(hidden) * 8**-0.5 * key.shape[-1] ** -0.5
            scores = torch.einsum("tj,tjs->ts", w, torch.einsum("tjd,sd->tjs", query, key).relu())
            among = (
                causal
                if dense
                else causal & torch.zeros_like(causal).scatter(1, chosen.long(), True)
            )
            target = weights[0].detach().sum(0) / weights.shape[1]
            log_q = scores.masked_fill(~among, -1e30).log_softmax(-1)
            losses.append((torch.xlogy(target, target) - target * log_q)[among].sum())
            if dense and length > TOP_K:
                best = scores.masked_fill(~causal, -1e30).topk(TOP_K).indices
                shares += target.gather(1, best)[TOP_K:].sum(-1).tolist()
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), sum(shares), gradients(model)


@pytest.mark.parametrize("dense", [True, False], ids=["Eq. 3", "Eq. 4"])
def test_loss_matches_its_definition(dense: bool) -> None:
    expected, held, expected_grads = by_definition(dense)
    model = ours(theirs())
    sparse = SparsePass(dense=dense, loss=True, chunk=5)
    run(model, segments_of_ids(), sparse)
    sparse.loss_sum().backward()
    torch.testing.assert_close(sparse.loss_sum().detach(), expected, rtol=1e-5, atol=0)
    if dense:
        total, queries = torch.stack(sparse.held).sum(0).tolist()
        # Queries with more than k keys in three segments, for two layers.
        assert queries == 2 * sum(length - TOP_K for length in (19, 7, 16))
        assert total == pytest.approx(held, rel=1e-5)
    actual = {name for name, grad in gradients(model).items() if grad.any()}
    assert actual == {n for n, _ in model.named_parameters() if ".indexer." in n}
    assert_same_gradients(gradients(model), expected_grads)
