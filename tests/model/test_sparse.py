"""Sparse attention over packed rows: results of transformers, the indexer's loss, index replay."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

from keel.model.attention import Segments, use_packed_attention
from keel.model.sparse.attention import (
    ChunkAttention,
    SparsePass,
    _select_in_chunks,
    _sparse_layers,
    recorded_selection,
    use_sparse_attention,
)
from keel.model.sparse.indexer import NONE, select_top_keys
from tests.model.families import VOCAB, build

TOP_K = 6
LENGTHS = (3, 19, 1, 7, 16)
TOKENS = sum(LENGTHS)
SIZES = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}


def theirs(**changes: Any) -> PreTrainedModel:
    """Build transformers' model, with eight index heads so that ties are rare."""
    model = build("deepseek_v32", **{"index_topk": TOP_K, "index_n_heads": 8} | SIZES | changes)
    for name, parameter in model.named_parameters():
        if "self_attn" in name and parameter.ndim == 2:
            parameter.data.mul_(8)  # makes attention far from uniform
    return model


def ours(model: PreTrainedModel) -> PreTrainedModel:
    copy = deepcopy(model)
    use_sparse_attention(copy)
    use_packed_attention(copy)
    return copy


def segments_of_ids() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1, length), generator=generator) for length in LENGTHS]


def run(model: PreTrainedModel, ids: list[Tensor], sparse: SparsePass) -> Tensor:
    """Return the hidden states [N, D] of the packed row."""
    lengths = [part.shape[1] for part in ids]
    return model.get_decoder()(
        input_ids=torch.cat(ids, 1),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        use_cache=False,
        segments=Segments.of(lengths),
        sparse=sparse,
    ).last_hidden_state[0]


def weighted(hidden: Tensor) -> Tensor:
    """Sum hidden states with random weights."""
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    return (hidden * weights).sum()


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that gradients agree up to rounding, relative to each tensor's largest entry."""
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        bound = 2e-5 * max(float(grad.abs().max()), 1e-3)
        torch.testing.assert_close(actual[name], grad, rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize("top_k", [TOP_K, 64], ids=["sparse", "all selected"])
def test_packed_equals_transformers_per_segment(top_k: int) -> None:
    plain, ids = theirs(index_topk=top_k), segments_of_ids()
    packed = ours(plain)
    alone = torch.cat([plain.get_decoder()(x, use_cache=False).last_hidden_state[0] for x in ids])
    weighted(alone).backward()
    together = run(packed, ids, SparsePass(chunk=5))
    weighted(together).backward()
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(packed), gradients(plain))  # none for the indexer
    dense = run(packed, ids, SparsePass(dense=True))
    assert torch.allclose(dense, together, atol=1e-4) == (top_k == 64)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_chunks_recomputation_and_packing_are_equivalent(dense: bool) -> None:
    ids = segments_of_ids()
    results = []
    for way in ("whole", "chunks", "recomputed", "apart"):
        model = ours(theirs()).train()
        if way == "recomputed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        rows = [[part] for part in ids] if way == "apart" else [ids]
        chunk = 4 if way == "chunks" else None
        passes = [SparsePass(dense=dense, loss=True, chunk=chunk) for _ in rows]
        hidden = torch.cat([run(model, row, one) for row, one in zip(rows, passes, strict=True)])
        loss = torch.stack([one.loss_sum() for one in passes]).sum()
        (weighted(hidden) + loss).backward()
        assert all(len(one.losses) == 2 for one in passes)
        topk_attention = torch.stack(
            [torch.stack(one.topk_attention).sum(0) for one in passes]
        ).sum(0)
        results.append((hidden.detach(), loss.detach(), topk_attention, gradients(model)))
    hidden, loss, topk_attention, expected = results[0]
    assert loss > 0.1
    for other in results[1:]:
        torch.testing.assert_close(other[:3], (hidden, loss, topk_attention), rtol=1e-5, atol=1e-5)
        assert_same_gradients(other[3], expected)


def test_ties_go_to_later_tokens() -> None:
    scores = torch.tensor([[[0.0, 3.0, -1.0, 0.0], [0.0, -0.0, 0.0, -2.0]]])
    chosen = select_top_keys(2, scores, 2)  # queries 2 and 3 of a segment
    assert [sorted(row) for row in chosen[0].tolist()] == [[0, 1], [1, 2]]
    assert sorted(select_top_keys(39, torch.zeros(1, 1, 40), 5)[0, 0].tolist()) == [
        35,
        36,
        37,
        38,
        39,
    ]
    assert sorted(select_top_keys(0, scores[:, :1], 3)[0, 0].tolist()) == [NONE, NONE, 0]


def test_logits_are_exact_for_bfloat16_inputs() -> None:
    query = torch.tensor([[[[4.0, 1 / 32]]]]).bfloat16()  # [B, c, H, r]
    key = torch.tensor([[[5.0, 0.0], [5.0, 2.0]]]).bfloat16()
    zeros = torch.zeros(1, 2, 2).bfloat16()
    index = zeros[:, :1, None], torch.zeros(1, 1, 1), zeros
    chosen = torch.tensor([[[0, 1]]])
    chunk = ChunkAttention(scaling=1.0, rank=2, top_k=2, loss=False)
    share = torch.tensor([0.0, 1 / 16]).softmax(0)[1]
    for mixed, *_ in (
        chunk.dense(1, query, index[0], index[1], key, index[2]),
        chunk.chosen(1, query, index[0], index[1], chosen, key, index[2]),
    ):
        torch.testing.assert_close(mixed[0, 0, 0, 1].float(), 2 * share, rtol=2**-8, atol=0)
        assert mixed[0, 0, 0, 1] != 1.0


# --- the indexer's loss


def by_definition(dense: bool) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Compute the loss, the attention on the top k keys, and the gradients from full attention
    weights [H, T, T]."""
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
            among = causal
            if not dense:
                among = causal & torch.zeros_like(causal).scatter(1, chosen.long(), True)
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
    expected, topk_attention, expected_grads = by_definition(dense)
    model = ours(theirs())
    sparse = SparsePass(dense=dense, loss=True, chunk=5)
    run(model, segments_of_ids(), sparse)
    sparse.loss_sum().backward()
    torch.testing.assert_close(sparse.loss_sum().detach(), expected, rtol=1e-5, atol=0)
    if dense:
        total, queries = torch.stack(sparse.topk_attention).sum(0).tolist()
        # Queries with more than k keys in three segments, for two layers.
        assert queries == 2 * sum(length - TOP_K for length in (19, 7, 16))
        assert total == pytest.approx(topk_attention, rel=1e-5)
    actual = {name for name, grad in gradients(model).items() if grad.any()}
    assert actual == {n for n, _ in model.named_parameters() if ".indexer." in n}
    assert_same_gradients(gradients(model), expected_grads)


# --- index replay

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


def bitmaps(selected: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert positions [N, L, k], padded with −1, to bitmaps [N, L, b]."""
    attended = (selected[..., None] == np.arange(selected.max(initial=0) + 1)).any(2)
    return np.packbits(attended, axis=-1, bitorder="little")


@pytest.mark.parametrize("recomputed", [False, True])
def test_recorded_positions_match_transformers(recomputed: bool) -> None:
    plain, ids, selected = theirs(), segments_of_ids(), drawn()
    model = ours(plain).train()
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    start, alone = 0, []
    for part in ids:
        stop = start + part.shape[1]
        for layer, attention in enumerate(_sparse_layers(plain)):
            # Padding with a selected position has no effect in transformers' mask.
            own = torch.from_numpy(selected[start:stop, layer]).clone()
            own = own.where(own >= 0, own[:, :1])[None]
            attention.get_submodule("indexer").forward = lambda *_, own=own, **__: own
        alone.append(plain.get_decoder()(part, use_cache=False).last_hidden_state[0])
        start = stop
    expected = torch.cat(alone)
    recorded = recorded_selection(model, bitmaps(selected), POSITIONS)
    sparse = SparsePass(loss=True, chunk=5, recorded_LNb=recorded)
    hidden = run(model, ids, sparse)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
    weighted(expected).backward()
    (weighted(hidden) + sparse.loss_sum()).backward()
    actual = gradients(model)
    learned = {name for name in actual if ".indexer." in name}
    assert learned and all(actual.pop(name).any() for name in learned)
    assert_same_gradients(actual, gradients(plain))


def test_unrecorded_rows_use_the_live_selection() -> None:
    model, ids = ours(theirs()), segments_of_ids()
    live = run(model, ids, SparsePass())

    def replayed(recorded: NDArray[np.uint8]) -> Tensor:
        selection = recorded_selection(model, recorded, POSITIONS)
        return run(model, ids, SparsePass(recorded_LNb=selection))

    recorded = bitmaps(drawn())
    torch.testing.assert_close(replayed(np.zeros_like(recorded)), live)
    recorded[22:] = 0  # only the first two segments are recorded
    some = replayed(recorded)
    assert not torch.allclose(some[:22], live[:22], atol=1e-3)
    torch.testing.assert_close(some[22:], live[22:])


def test_overlap_is_the_share_that_the_indexer_also_selects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, length = ours(theirs()).train(), 24
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = [torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(1))]
    selections: list[Tensor] = []

    def remember(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        chosen, overlap = _select_in_chunks(*args, **options)
        selections.append(chosen[0])
        return chosen, overlap

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr("keel.model.sparse.attention._select_in_chunks", remember)
        run(model, ids, SparsePass())
    own = torch.stack(selections, 1).numpy()  # [T, L, k]

    def overlap(recorded: NDArray[np.uint8]) -> list[list[float]]:
        selection = recorded_selection(model, recorded, np.arange(length))
        sparse = SparsePass(chunk=5, recorded_LNb=selection)
        run(model, ids, sparse).sum().backward()
        return torch.stack(sparse.overlap).tolist()

    bits = np.unpackbits(bitmaps(own), axis=-1, bitorder="little", count=length).astype(bool)
    assert overlap(np.packbits(bits, axis=-1, bitorder="little")) == [[length, length]] * LAYERS
    for token in range(TOP_K, length):  # another position instead of a selected one
        bits[token, 0, bits[token, 0].argmax()] = False
        others = ~bits[token, 0] & (np.arange(length) <= token)
        others[own[token, 0]] = False
        bits[token, 0, others.argmax()] = True
    bits[:TOP_K] = False  # not recorded
    (total, count), _ = overlap(np.packbits(bits, axis=-1, bitorder="little"))
    assert count == length - TOP_K
    assert total == pytest.approx(count * (TOP_K - 1) / TOP_K)
