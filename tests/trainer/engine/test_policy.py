"""The policy: masses outside sampling masks, numbers of tokens, selections."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keel.configs.schema import Config, SamplingConfig
from keel.model.load import checkpoint_tensors, load_policy
from keel.model.logprobs import SupportHead
from keel.model.ulysses import Shard
from keel.rl.offpolicy import kept_mass_penalty, kept_mass_shortfall
from keel.rl.packing import MicroBatch, TrainBatch
from keel.rl.types import Segment, TokenNumbers
from keel.trainer.engine import weights
from keel.trainer.engine.policy import (
    _CUT,
    HeadInputs,
    Inputs,
    PolicyNetwork,
    References,
    token_numbers,
)
from keel.trainer.learner import merge_tokens
from tests.model.families import VOCAB
from tests.rl.packed import pack
from tests.rl.rollouts import prompted_groups, random_groups, scored, trajectory
from tests.trainer.engine import batches
from tests.trainer.engine.batches import MOST_KEPT, VOCABULARY, Rollouts
from tests.trainer.engine.ranks import ROOMY, make_config

WIDTH, TOP_P, COEF = 16, 0.6, 0.7
CPU = torch.device("cpu")


def settings(*, coef: float = COEF, top_k: int = _CUT * MOST_KEPT, top_p: float = TOP_P) -> Config:
    config = make_config(1, 0, kept_mass_coef=coef)
    sampling = SamplingConfig(top_p=top_p, top_k=top_k)
    return replace(config, rollout=replace(config.rollout, sampling=sampling))


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(VOCABULARY, WIDTH, requires_grad=True)


def head_of(weight: Tensor) -> SupportHead:
    linear = nn.Linear(WIDTH, VOCABULARY, bias=False)
    linear.weight = nn.Parameter(weight)
    return SupportHead(linear)


def batch_of(tokens: int) -> TrainBatch:
    groups = Rollouts(5).groups(3, 4)
    (batch,) = pack(groups, replicas=1, micro_batch_tokens=tokens)
    return batch


def hidden_of(token_ids: np.ndarray, positions: np.ndarray, embedding: Tensor) -> Tensor:
    """Hidden states that depend on a token and the one before it."""
    here = embedding[torch.from_numpy(token_ids).long()]
    before = here.roll(1, 0) * torch.from_numpy(positions > 0)[:, None]
    return (here + before).tanh() * 2


def mass_penalty(
    head: HeadInputs, log_mass: Tensor, total_sequences: int, config: Config
) -> tuple[Tensor, Tensor]:
    coef, sampling = config.algorithm.kept_mass_coef, config.rollout.sampling
    weight = head.uncut_probe_weight(sampling.top_k) if coef else None
    options = {"coef": coef, "total_sequences": total_sequences}
    return kept_mass_penalty(log_mass, weight, top_p=sampling.top_p, **options)


def penalty(
    batch: TrainBatch, config: Config, weight: Tensor, most: int = 64
) -> tuple[Tensor, Tensor]:
    """Penalty and [4] totals of a step, summed over micro-batches."""
    embedding = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))
    losses, seen = [], []
    head = head_of(weight)
    for row in batch.micro_batches:
        inputs = Inputs.of(row, CPU, probes=most)
        hidden = hidden_of(row.token_ids_N, row.position_N, embedding)
        logp, _ = inputs.head.logprobs(hidden, head)
        log_mass = inputs.head.kept_mass(hidden, head, logp)
        loss, masses = mass_penalty(inputs.head, log_mass, batch.total_sequences, config)
        losses.append(loss)
        seen.append(masses)
    total = torch.stack(losses).sum()
    if total.requires_grad:
        (weight.grad,) = torch.autograd.grad(total, head.weight)
    return total.detach(), torch.stack(seen).sum(0)


def by_enumeration(batch: TrainBatch, config: Config, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Penalty and gradient over every token, by definition."""
    embedding = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))
    exact = weight.detach().double().requires_grad_()
    total = exact.new_zeros(())
    sampling = config.rollout.sampling
    for row in batch.micro_batches:
        hidden = hidden_of(row.token_ids_N, row.position_N, embedding).double()
        probs = (hidden @ exact.t()).softmax(-1)
        assert row.sampling_mask is not None
        for t in np.flatnonzero(row.trainable_N):
            selected = torch.from_numpy(row.sampling_mask[t]).long()
            if not len(selected) or _CUT * len(selected) > sampling.top_k:
                continue
            mass, owner = probs[t - 1, selected].sum(), row.sequence_N[t]
            each = row.sequence_weight_S[owner] / row.sequence_tokens_S[owner]
            short = torch.log(sampling.top_p**2 / mass).clamp(min=0)
            total = total + float(each) * short
    total = config.algorithm.kept_mass_coef / batch.total_sequences * total
    (gradient,) = torch.autograd.grad(total, exact)
    return total.detach(), gradient


@pytest.mark.parametrize("top_k", [_CUT * MOST_KEPT, _CUT * 3])
def test_penalty_matches_its_definition(weight: Tensor, top_k: int) -> None:
    batch, config = batch_of(ROOMY), settings(top_k=top_k)
    total, _ = penalty(batch, config, weight)
    expected, gradient = by_enumeration(batch, config, weight)
    assert float(expected) > 0.05
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad.double(), gradient, rtol=1e-4, atol=1e-6)


def test_probes_are_unbiased(weight: Tensor) -> None:
    config, some, every = settings(), [], []
    for seed in range(20):
        groups = Rollouts(seed).groups(3, 4)
        (batch,) = pack(groups, replicas=1, micro_batch_tokens=ROOMY)
        some.append(float(penalty(batch, config, weight, most=2)[0]))
        every.append(float(penalty(batch, config, weight)[0]))
    error = np.subtract(some, every)
    assert abs(error.mean()) < 3 * error.std() / np.sqrt(len(error))
    assert error.std() < np.mean(every)


@pytest.mark.parametrize("sharpness", [1.0, 3.0, 6.0, 9.0])
@pytest.mark.parametrize("top_k", [64, 512])
def test_fresh_samples_are_not_penalised(sharpness: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = sharpness * torch.randn(60, 20_000, generator=generator, dtype=torch.float64)
    probs = logits.softmax(-1)
    likeliest = probs.topk(top_k).values
    share = likeliest / likeliest.sum(-1, keepdim=True)
    selected = share.cumsum(-1) - share < 0.95
    log_mass = (likeliest * selected).sum(-1).log()
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), selected.sum(-1).cumsum(0)])
    none = torch.zeros(0, dtype=torch.long)
    head = HeadInputs(
        *(none, none, none, none, offsets), probes=torch.arange(60), probe_weight=torch.ones(60)
    )
    loss, (_, tokens, short, counted) = mass_penalty(
        head, log_mass, 60, settings(top_k=top_k, top_p=0.95)
    )
    everything = kept_mass_shortfall(log_mass, top_p=0.95).mean()
    assert loss <= 0.02 * max(everything, 0.01), (loss, everything)
    assert tokens == 60
    if sharpness == 1:
        assert everything > 0.3 and counted == 0
    if sharpness == 9:
        assert counted > 50 and short == 0


def logp_of(token: int) -> float:
    return -(token % 31) / 8


def overlap_of(token: int) -> float:
    return (token % 5) / 4


def seen_by(batch: MicroBatch, part: Shard) -> dict[int, TokenNumbers]:
    """Numbers seen by a rank whose network derives them from token ids."""
    sampled = batch.token_ids_N[batch.trainable_N]
    logp = torch.tensor([logp_of(int(token)) for token in sampled])
    overlap = torch.tensor([overlap_of(int(token)) for token in part.cut(batch.token_ids_N, 0)])
    replay: Any = SimpleNamespace(overlap_N=lambda: overlap)
    return token_numbers(batch, part, logp, replay)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("size", [1, 3], ids=["whole rows", "parts of rows"])
def test_saved_segments_have_their_own_numbers(size: int, share_prompts: bool) -> None:
    for seed in range(8):
        groups = prompted_groups(seed) if share_prompts else random_groups(seed)
        random = Random(seed)
        all_segments = [
            segment
            for group in groups
            for trajectory in group.group.trajectories
            for segment in trajectory.segments
        ]
        saved = random.sample(all_segments, 4)
        batches = pack(
            groups,
            replicas=2,
            micro_batch_tokens=random.choice([7, 40, 400]),
            share_prompts=share_prompts,
            saved=saved,
        )
        results = merge_tokens(
            [
                seen_by(micro_batch, Shard(rank, size))
                for batch in batches
                for micro_batch in batch.micro_batches
                for rank in range(size)
            ]
        )
        assert sorted(results) == [0, 1, 2, 3]
        for number, segment in enumerate(saved):
            ids = segment.token_ids_T.tolist()
            logp = [
                logp_of(token) if sampled else np.nan
                for token, sampled in zip(ids, segment.trainable_T, strict=True)
            ]
            overlap = [np.nan, *map(overlap_of, ids[:-1])]
            np.testing.assert_allclose(results[number].logp_T, logp)
            np.testing.assert_allclose(results[number].overlap_T, overlap)


TOKENS = 20


def sparse_step(selected_TLb: Any) -> TrainBatch:
    random = np.random.default_rng(0)
    trainable = np.arange(TOKENS) >= 4
    segment = Segment(
        prompt_id="p",
        token_ids_T=random.integers(3, VOCAB, TOKENS).astype(np.int32),
        trainable_T=trainable,
        logp_old_T=np.where(trainable, -1.0, 0.0).astype(np.float32),
        version_T=np.where(trainable, 0, -1).astype(np.int32),
        selected_TLb=selected_TLb,
    )
    return pack([scored([trajectory(segment)], [1.0])], replicas=1, micro_batch_tokens=64)[0]


def latest(top_k: int) -> Any:
    """Select the last `top_k` positions of each token in both layers."""
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    rows = np.packbits((distance >= 0) & (distance < top_k), axis=-1, bitorder="little")
    return np.repeat(rows[:, None], 2, 1)


@pytest.mark.e2e
def test_policy_replays_selections_and_reference_does_not() -> None:
    from tests.model.test_sparse import TOP_K, theirs  # noqa: PLC0415  (loads transformers)

    device = torch.device("cpu")

    def logp(batch: MicroBatch, *, reference: bool = False) -> torch.Tensor:
        network = PolicyNetwork(theirs(), make_config(1, 0))
        inputs = Inputs.of(batch, device)
        if reference:
            references = References(device, None)
            references.add_frozen(network)
            return references.logp(inputs)
        output = network.train()(inputs=inputs)
        assert output.indexer_loss.requires_grad and output.indexer_loss > 0
        share, queries = output.selection_overlap.tolist()
        recorded = 0 if inputs.selected_NLb is None else inputs.selected_NLb.any(-1).sum()
        assert queries == recorded and (0 < share < queries or not queries)
        return output.logp.detach()

    (live,), (recorded,) = sparse_step(None).micro_batches, sparse_step(latest(TOP_K)).micro_batches
    assert not torch.allclose(logp(recorded), logp(live), atol=1e-3)
    torch.testing.assert_close(logp(recorded, reference=True), logp(live))
    unrecorded = replace(recorded, selected_NLb=np.zeros_like(recorded.selected_NLb))
    torch.testing.assert_close(logp(unrecorded), logp(live))
    with pytest.raises(ValueError, match="recorded selection: token 0"):
        logp(replace(recorded, selected_NLb=np.full_like(recorded.selected_NLb, 255)))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    batches.write_model(tmp_path / "base", "dense")
    return tmp_path / "base"


def exported(base: Path, **options: Any) -> dict[str, Any]:
    model, out = load_policy(str(base), torch.float32), base.with_name("out")
    weights.write_model(out, model, checkpoint_tensors(model), dtype="float32", **options)
    assert load_policy(str(out), torch.float32).generation_config.top_p == 0.6
    return json.loads((out / "generation_config.json").read_text())


@pytest.mark.parametrize(
    ("eos", "end", "written"),
    [(2, 5, [5, 2]), (2, 2, 2), ([2, 5], 5, [2, 5]), (None, 5, 5), (2, None, 2)],
)
def test_generation_config_is_preserved_with_the_tokenizer_eos(
    base: Path, eos: Any, end: int | None, written: Any
) -> None:
    settings = {"eos_token_id": eos, "temperature": 0.9, "top_p": 0.6}
    (base / "generation_config.json").write_text(json.dumps(settings))
    result = exported(base, end=end)
    assert {name: result.get(name) for name in settings} == {**settings, "eos_token_id": written}


def test_large_models_are_split_into_shards(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "generation_config.json").write_text('{"top_p": 0.6, "do_sample": true}')
    monkeypatch.setattr(weights, "_SHARD_BYTES", 50_000)
    exported(base)
    index = json.loads((base.with_name("out") / "model.safetensors.index.json").read_text())
    written = {path.name for path in base.with_name("out").glob("*.safetensors")}
    assert len(written) > 2 and set(index["weight_map"].values()) == written
