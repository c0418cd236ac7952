"""The support head against a dense softmax, from packed rows, and inside models."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keel.model import logprobs
from keel.model.head import cpu
from keel.model.logprobs import (
    SupportHead,
    _logit_shape,
    install_support_head,
    support_head,
    support_logprobs,
)
from keel.rl.packing import MicroBatch
from keel.rl.recordings import SamplingMasks
from keel.trainer.engine.policy import HeadInputs
from tests.model.families import VOCAB, build


def dense(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: SamplingMasks,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    mask = torch.zeros_like(logits, dtype=torch.bool)
    for row in range(len(targets)):
        span = torch.as_tensor(kept[row], dtype=torch.long)
        mask[row, span if len(span) else slice(None)] = True
    logp = (logits / temperature).masked_fill(~mask, -torch.inf).log_softmax(-1)
    entropy = -torch.where(mask, logp.exp() * logp, 0.0).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def case(sizes: list[int], vocab: int, dim: int, seed: int = 0, dtype=torch.float32):
    """Draw inputs whose token t keeps sizes[t] ids; 0 means no truncation."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    spans = [rng.permutation(vocab)[:size] for size in sizes]
    targets = [rng.choice(span) if len(span) else rng.integers(vocab) for span in spans]
    hidden = torch.randn(len(sizes), dim).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim).to(dtype).requires_grad_()
    return hidden, weight, torch.tensor(targets, dtype=torch.long), SamplingMasks.from_lists(spans)


def tensors(kept: SamplingMasks) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(kept.ids), torch.from_numpy(kept.offsets)


def against_dense(hidden, weight, targets, kept, *, temperature=1.0, tolerance=1e-4, **shape):
    inputs = [hidden, weight] + ([shape["bias"]] if shape.get("bias") is not None else [])
    logp, entropy = support_head(
        hidden, weight, targets, *tensors(kept), temperature=temperature, **shape
    )
    expected, expected_entropy = dense(hidden, weight, targets, kept, temperature, **shape)
    assert logp.dtype == torch.float32 and logp.shape == targets.shape
    close(logp, expected, tolerance)
    close(entropy, expected_entropy, tolerance)
    assert not entropy.requires_grad
    upstream = torch.linspace(-1, 1, len(targets))
    grads = torch.autograd.grad(logp, inputs, upstream)
    for grad, expected_grad, value in zip(
        grads, torch.autograd.grad(expected, inputs, upstream.double()), inputs, strict=True
    ):
        assert grad.dtype == value.dtype
        close(grad, expected_grad, tolerance * (100 if value.dtype == torch.bfloat16 else 1))


@pytest.fixture(params=["gather", "gemm"])
def plan(request, monkeypatch):
    monkeypatch.setattr(cpu, "_GATHER_COST", 0 if request.param == "gather" else 10**9)
    monkeypatch.setattr(cpu, "_GATHER_ELEMENTS", 40)
    monkeypatch.setattr(cpu, "_GEMM_ELEMENTS", 1)
    monkeypatch.setattr(cpu, "_GEMM_ROWS", 3)


@pytest.mark.parametrize("sizes", [[3, 1, 7, 11, 2, 5, 4], [0] * 7, [0, 4, 0, 1, 0, 11, 6], [2]])
def test_batches_match_a_dense_softmax(plan, sizes):
    against_dense(*case(sizes, vocab=11, dim=6), temperature=0.7)


@given(
    sizes=st.lists(st.integers(0, 13), min_size=1, max_size=12),
    gemm=st.booleans(),
    temperature=st.floats(0.3, 3.0),
    scale=st.floats(0.25, 4.0),
    softcap=st.none() | st.floats(2.0, 30.0),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_spans_match_a_dense_softmax(sizes, gemm, temperature, scale, softcap, biased, seed):
    hidden, weight, targets, kept = case(sizes, vocab=13, dim=5, seed=seed)
    bias = torch.randn(13, requires_grad=True) if biased else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_GATHER_COST", 10**9 if gemm else 0)
        shape = {"bias": bias, "scale": scale, "softcap": softcap}
        # float32 rounds logits relative to their size.
        tolerance = 1e-4 * max(1.0, scale / temperature)
        against_dense(
            hidden, weight, targets, kept, temperature=temperature, tolerance=tolerance, **shape
        )


def test_other_dtypes_match_a_dense_softmax(plan):
    double = case([3, 0, 5, 1], vocab=9, dim=4, dtype=torch.float64)
    against_dense(*double, softcap=5.0, tolerance=1e-6)
    against_dense(*case([3, 0, 30, 7], vocab=40, dim=256, dtype=torch.bfloat16), tolerance=2e-4)


def test_huge_logits_stay_finite(plan):
    hidden, weight, targets, kept = case([3, 0, 5], vocab=9, dim=4)
    logp, entropy = support_head(
        (hidden * 1e4).detach(), weight, targets, *tensors(kept), temperature=0.5
    )
    assert torch.isfinite(logp).all() and torch.isfinite(entropy).all()


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize(("size", "most"), [(4, 10_000), (0, cpu._GEMM_ROWS * 1000)])
def test_tokens_times_vocabulary_never_exists(size, most):
    hidden, weight, targets, kept = case([size] * 600, vocab=1000, dim=10)
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as largest:
        patch.setattr(cpu, "_GEMM_ELEMENTS", 1)
        support_logprobs(hidden, weight, targets, *tensors(kept)).sum().backward()
    assert largest.elements <= max(most, weight.numel(), 600 * 4 * 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.long)}, "hidden"),
        ({"weight": torch.zeros(8, 5)}, "weight"),
        ({"targets": torch.tensor([1, 2, 8])}, "targets: row 2"),
        ({"targets": torch.tensor([1, 2, -1])}, "targets: row 2"),
        ({"targets": torch.tensor([1, 5, 3])}, "targets: row 1"),
        ({"kept_ids": torch.tensor([1, 0, 2, 8])}, "kept_ids: row 1"),
        ({"kept_ids": torch.tensor([1, -1, 2, 4])}, "kept_ids: row 0"),
        ({"kept_ids": torch.tensor([1, 1, 2, 4])}, "kept_ids: row 0"),
        ({"kept_ids": torch.tensor([1, 0, 2])}, "kept_offsets"),
        ({"kept_offsets": torch.tensor([0, 2, 4])}, "kept_offsets"),
        ({"kept_offsets": torch.tensor([1, 2, 4, 4])}, "kept_offsets"),
        ({"kept_offsets": torch.tensor([0, 4, 2, 4])}, "kept_offsets"),
        ({"bias": torch.zeros(7)}, "bias"),
    ],
)
def test_invalid_arguments_are_named(change, message):
    arguments = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(8, 4),
        "targets": torch.tensor([1, 2, 3]),
        "kept_ids": torch.tensor([1, 0, 2, 4]),
        "kept_offsets": torch.tensor([0, 2, 4, 4]),
    }
    support_head(**arguments)
    with pytest.raises(ValueError, match=message):
        support_head(**{**arguments, **change})


@given(st.data())
def test_masks_are_validated_like_sets(data):
    vocab, token = 7, st.integers(-1, 7)  # one beyond either end
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    dtype = data.draw(st.sampled_from([torch.int8, torch.int32, torch.int64]))
    spans = [[data.draw(token) for _ in range(size)] for size in sizes]
    targets = [data.draw(token) for _ in sizes]
    valid = all(
        t in range(vocab)
        and all(i in range(vocab) for i in span)
        and len(set(span)) == len(span)
        and (t in span or not span)
        for t, span in zip(targets, spans, strict=True)
    )
    ids = torch.tensor([i for span in spans for i in span], dtype=dtype)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    with nullcontext() if valid else pytest.raises(ValueError, match="row"):
        logprobs._check_values(torch.tensor(targets), ids, offsets, vocab)


def micro_batch(seed: int = 0, vocab: int = 12, kept: bool = True) -> MicroBatch:
    """Two segments of 5 and 4 tokens; trainable tokens 2, 4, 6 and 7."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(vocab, size=9).astype(np.int32)
    trainable = np.zeros(9, np.bool_)
    trainable[[2, 4, 6, 7]] = True
    spans = [
        np.union1d(rng.permutation(vocab)[:3], tokens[t]) if trainable[t] and t != 6 else []
        for t in range(9)
    ]
    position = np.r_[np.arange(5), np.arange(4)].astype(np.int32)
    return MicroBatch(
        token_ids_N=tokens,
        position_N=position,
        segment_N=np.repeat([0, 1], [5, 4]).astype(np.int32),
        sequence_N=np.repeat([0, 1], [5, 4]).astype(np.int64),
        trainable_N=trainable,
        logp_old_N=np.zeros(9, np.float32),
        advantage_N=np.ones(9, np.float32),
        kl_coef_N=np.zeros(9, np.float32),
        sequence_tokens_S=np.array([2, 2]),
        sequence_weight_S=np.ones(2, np.float32),
        sampling_mask=SamplingMasks.from_lists(spans) if kept else None,
    )


def head_of(weight: Tensor):
    return lambda hidden, *rest, **options: support_head(hidden, weight, *rest, **options)


@pytest.mark.parametrize("kept", [True, False])
def test_token_is_scored_from_the_position_before(kept):
    batch = micro_batch(kept=kept)
    hidden, weight = torch.randn(9, 6, requires_grad=True), torch.randn(12, 6)
    logp, entropy = HeadInputs.of(batch).logprobs(hidden, head_of(weight), temperature=0.8)
    assert batch.sampled_rows.tolist() == [2, 4, 6, 7]
    spans = [batch.sampling_mask[t] if kept else [] for t in (2, 4, 6, 7)]
    targets = torch.from_numpy(batch.token_ids_N[[2, 4, 6, 7]]).long()
    expected, expected_entropy = dense(
        hidden[[1, 3, 5, 6]], weight, targets, SamplingMasks.from_lists(spans), 0.8
    )
    close(logp, expected, 1e-5)
    close(entropy, expected_entropy, 1e-5)
    logp.sum().backward()
    assert hidden.grad.any(-1).nonzero()[:, 0].tolist() == [1, 3, 5, 6]


@pytest.mark.parametrize("most", [1, 2, 64])
def test_mask_mass_matches_a_dense_softmax(most: int):
    torch.manual_seed(0)
    batch = micro_batch()
    hidden = torch.randn(9, 6, requires_grad=True)
    weight = torch.randn(12, 6, requires_grad=True)
    inputs, head = HeadInputs.of(batch, probes=most), head_of(weight)
    logp, _ = inputs.logprobs(hidden, head, temperature=0.8)
    log_mass = inputs.kept_mass(hidden, head, logp, temperature=0.8)
    tokens = inputs.rows[inputs.probes].tolist()
    whole = (hidden.double() @ weight.double().t() / 0.8).log_softmax(-1)
    spans = [torch.as_tensor(batch.sampling_mask[t]).long() for t in tokens]
    expected = torch.stack(
        [
            whole[t - 1, span].logsumexp(-1) if len(span) else whole.new_zeros(())
            for t, span in zip(tokens, spans, strict=True)
        ]
    )
    assert -9 < expected.min().item() < -0.1
    close(log_mass, expected, 1e-5)
    factors = torch.randn(len(tokens))
    for actual, exact in zip(
        torch.autograd.grad((factors * log_mass).sum(), (hidden, weight)),
        torch.autograd.grad((factors * expected).sum(), (hidden, weight)),
        strict=True,
    ):
        close(actual, exact, 1e-4)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_probes_depend_on_their_segment_only(most: int):
    batch = micro_batch()
    whole = HeadInputs.of(batch, probes=most)
    tokens = whole.rows[whole.probes]
    halves = [HeadInputs.of(batch, start, stop, probes=most) for start, stop in ((0, 4), (4, 9))]
    assert torch.equal(torch.cat([half.rows[half.probes] for half in halves]), tokens)
    assert torch.equal(torch.cat([half.probe_weight for half in halves]), whole.probe_weight)
    sampled = batch.sampled_rows
    for segment in np.unique(batch.segment_N[sampled]):
        members = sampled[batch.segment_N[sampled] == segment]
        stride = -(-len(members) // most)
        probed = batch.segment_N[tokens.numpy()] == segment
        places = np.searchsorted(members, tokens[probed].numpy())
        assert len(places) in (len(members) // stride, -(-len(members) // stride))
        assert len(places) <= most
        assert (np.diff(places) == stride).all()
        owner = batch.sequence_N[members[0]]
        each = batch.sequence_weight_S[owner] / batch.sequence_tokens_S[owner]
        assert float(whole.probe_weight[probed].sum()) == pytest.approx(len(members) * each)


def test_empty_micro_batches_reach_all_parameters():
    nothing = {"trainable_N": np.zeros(9, np.bool_), "split_S": np.arange(2)}
    batch = replace(micro_batch(), sampling_mask=SamplingMasks.empty(9), **nothing)
    hidden = torch.randn(9, 6, requires_grad=True)
    weight = torch.randn(12, 6, requires_grad=True)
    head = head_of(weight)
    logp, entropy = HeadInputs.of(batch).logprobs(hidden, head)
    probed = HeadInputs.of(replace(micro_batch(), **nothing), probes=2)
    log_mass = probed.kept_mass(hidden, head, torch.zeros(0))
    assert logp.shape == entropy.shape == log_mass.shape == (0,)
    for empty in (logp, log_mass):
        empty.sum().backward()
        assert not hidden.grad.any() and not weight.grad.any()


TOKENS = torch.arange(12).reshape(1, 12) * 5 % VOCAB


def scored(model, head: SupportHead, temperature: float = 1.0):
    """Log-probabilities of tokens 1 … 11 from the backbone's hidden states."""
    hidden = model.model(TOKENS, use_cache=False).last_hidden_state[0, :-1]
    offsets = torch.zeros(len(hidden) + 1, dtype=torch.long)
    empty = torch.zeros(0, dtype=torch.long)
    return head(hidden, TOKENS[0, 1:], empty, offsets, temperature=temperature)[0]


FAMILIES = {
    "qwen3_moe": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"logits_scaling": 4.0, "num_local_experts": 4},
    "hyperclovax": {"logits_scaling": 3.0},
    "falcon_h1": {"lm_head_multiplier": 3.0, "mamba_d_ssm": 32, "mamba_n_heads": 2}
    | {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_match_the_models_logits(family):
    model = build(family, tie_word_embeddings=False, **FAMILIES[family])
    nn.init.normal_(model.lm_head.weight, std=0.5)
    logits = model(TOKENS, use_cache=False).logits[0, :-1].float()
    expected = (logits / 0.7).log_softmax(-1).gather(1, TOKENS[0, 1:, None])[:, 0]
    head = install_support_head(model)
    torch.testing.assert_close(scored(model, head, 0.7), expected, rtol=1e-4, atol=1e-5)
    changes_logits = _logit_shape(model.config) != {"scale": 1.0, "softcap": None}
    assert changes_logits == (family != "qwen3_moe")


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_keep_their_identity_and_names(tied):
    model = build("qwen3_moe", tie_word_embeddings=tied)
    names, parameter = list(model.state_dict()), model.lm_head.weight
    plain = model(TOKENS).logits
    head = install_support_head(model)
    assert model.lm_head is head is model.get_output_embeddings()
    assert head.weight is parameter and list(model.state_dict()) == names
    assert (head.weight is model.get_input_embeddings().weight) == tied
    assert torch.equal(model(TOKENS).logits, plain)
    assert install_support_head(model) is head

    model.tie_weights()
    assert (head.weight is model.get_input_embeddings().weight) == tied
    scored(model, head).sum().backward()
    assert head.weight.grad.abs().max() > 0
