"""Whether sparse attention finds what dense attention finds, at the embedded model's size.

    python -m benchmarks.sparse.quality [seed …]

A model learns to find letters again in long synthetic text with dense attention; its indexers learn
from that attention (Eq. 3); then it goes on, once dense and once sparse (Eq. 4). Prints the share
of attention that the indexers' top k hold, and the share of asked digits that are right, on texts
that it was not trained on.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from benchmarks.common.revision import commit
from keel.configs.schema import EmbeddedConfig
from keel.data.text.retrieval import pieces, retrieval_texts, tokens_of_pairs
from keel.model.attention import Segments, use_packed_attention
from keel.model.embedded.build import build_model
from keel.model.embedded.tokenizer import build_tokenizer
from keel.model.sparse.attention import SparsePass, indexers, use_sparse_attention

LENGTH, ROWS, TOP_K = 128, 8, 12
LETTERS, DIGITS = 16, 4
"""All letters are in each text, so that the top k have to be chosen by what is asked."""
GROWING = ((0.7, 64),)
"""The model first learns from shorter texts: up to this share of its steps, of this length."""
DENSE_STEPS, WARM_UP_STEPS, FURTHER_STEPS = 350, 150, 50
LR, WARM_UP_LR, FURTHER_LR = 3e-3, 5e-3, 3e-4
TESTS = 48
Batch = tuple[Tensor, Tensor]
"""[rows, tokens] ids, and which of them are asked for."""


class Text:
    """Endless batches of windows, and held-out ones."""

    def __init__(self, seed: int) -> None:
        self.tokenizer = build_tokenizer(tokens_of_pairs(LETTERS, DIGITS))
        texts_of = partial(retrieval_texts, letters=LETTERS, digits=DIGITS)
        self._training = {
            length: texts_of(10**9, length=length, seed=seed)
            for length in (LENGTH, *(length for _, length in GROWING))
        }
        texts = list(texts_of(TESTS, length=LENGTH, seed=-1 - seed))
        self.held_out = [self._encoded(texts[at : at + ROWS]) for at in range(0, TESTS, ROWS)]

    def batch(self, length: int = LENGTH) -> Batch:
        return self._encoded(list(islice(self._training[length], ROWS * LENGTH // length)))

    def _encoded(self, texts: Sequence[str]) -> Batch:
        """Texts of one length, which have equally many tokens."""
        rows = [
            [
                (token, asked)
                for piece, asked in pieces(text)
                for token in self.tokenizer(piece)["input_ids"]
            ]
            for text in texts
        ]
        both = torch.tensor(rows)
        return both[..., 0], both[..., 1].bool()


def logits(model: PreTrainedModel, ids: Tensor, sparse: SparsePass) -> Tensor:
    """[rows, length, V] of packed rows."""
    rows, length = ids.shape
    hidden = model.get_decoder()(
        input_ids=ids.view(1, -1),
        position_ids=torch.arange(length).repeat(rows)[None],
        use_cache=False,
        segments=Segments.of([length] * rows),
        sparse=sparse,
    ).last_hidden_state
    head = model.get_output_embeddings()
    assert head is not None
    return head(hidden).view(rows, length, -1)


def train(
    model: PreTrainedModel,
    text: Text,
    steps: int,
    lr: float,
    *,
    dense: bool,
    stage: str,
    growing: bool = False,
) -> None:
    """`stage`: `language` (indexers frozen), `warm-up` (indexers alone) or `both`. The language
    model's loss is that of the asked digits: nothing else can be known."""
    own = {id(p) for module in indexers(model) for p in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(stage == "both" or (id(parameter) in own) == (stage == "warm-up"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    began = time.process_time()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * schedule(step, steps)
        sparse = SparsePass(dense=dense, loss=stage != "language")
        grown = stage != "language" or not growing
        length = LENGTH if grown else next((n for s, n in GROWING if step < s * steps), LENGTH)
        ids, asked = text.batch(length)
        if stage == "warm-up":
            loss = sparse_loss = run_decoder(model, ids, sparse)
        else:
            scores = logits(model, ids, sparse)
            loss = functional.cross_entropy(scores[:, :-1][asked[:, 1:]], ids[asked])
            sparse_loss = sparse.loss_sum() / ids.numel() if sparse.losses else loss
            loss = loss + sparse_loss if stage == "both" else loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(1, steps // 6) == 0:
            spent, kind = time.process_time() - began, "dense" if dense else "sparse"
            numbers = f"loss {loss.item():.3f}, indexers {sparse_loss.item():.3f}"
            print(f"  {stage}, {kind} {step + 1}/{steps}: {numbers}, {spent:.0f} CPU s", flush=True)


def run_decoder(model: PreTrainedModel, ids: Tensor, sparse: SparsePass) -> Tensor:
    logits(model, ids, sparse)
    return sparse.loss_sum() / ids.numel()


def schedule(step: int, steps: int) -> float:
    warm = max(1, steps // 20)
    rest = (step - warm) / max(1, steps - warm)
    return (step + 1) / warm if step < warm else 0.1 + 0.45 * (1 + math.cos(math.pi * rest))


@torch.no_grad()
def right(model: PreTrainedModel, text: Text, *, dense: bool) -> float:
    """Share of asked digits that are the likeliest token."""
    found = count = 0
    for ids, asked in text.held_out:
        best = logits(model.eval(), ids, SparsePass(dense=dense)).argmax(-1)
        found += int((best[:, :-1][asked[:, 1:]] == ids[asked]).sum())
        count += int(asked.sum())
    return found / count


@torch.no_grad()
def held(model: PreTrainedModel, text: Text) -> list[float]:
    """Share of dense attention that each layer's top k hold."""
    total = torch.zeros(len(indexers(model)), 2)
    for ids, _ in text.held_out:
        sparse = SparsePass(dense=True, loss=True)
        logits(model.eval(), ids, sparse)
        total += torch.stack(sparse.held)
    return (total[:, 0] / total[:, 1]).tolist()


def measure(seed: int, top_k: int) -> dict[str, float]:
    shape = EmbeddedConfig(
        family="deepseek_v32",
        layers=2,
        heads=2,
        experts=4,
        latent_size=32,
        max_context=LENGTH,
        index_top_k=top_k,
    )
    text = Text(seed)
    torch.manual_seed(seed)
    model = build_model(shape, text.tokenizer, seed=seed)
    model.set_experts_implementation("grouped_mm")
    use_sparse_attention(model)
    use_packed_attention(model)
    train(model, text, DENSE_STEPS, LR, dense=True, stage="language", growing=True)
    found = {"dense, before": right(model, text, dense=True)}
    found["sparse, indexers untrained"] = right(model, text, dense=False)
    found |= {f"held before, layer {i}": share for i, share in enumerate(held(model, text))}
    train(model, text, WARM_UP_STEPS, WARM_UP_LR, dense=True, stage="warm-up")
    found["sparse, after the warm-up"] = right(model, text, dense=False)
    found |= {f"held, layer {i}": share for i, share in enumerate(held(model, text))}
    for dense in (True, False):
        further = deepcopy(model)
        stage = "language" if dense else "both"
        train(further, text, FURTHER_STEPS, FURTHER_LR, dense=dense, stage=stage)
        found[f"{'dense' if dense else 'sparse'}, trained on"] = right(further, text, dense=dense)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--top-k", type=int, default=TOP_K)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"commit {commit()}, {LENGTH} tokens, top {options.top_k}")
    for seed in options.seeds:
        for name, value in measure(seed, options.top_k).items():
            print(f"seed {seed}  {name}: {value:.3f}", flush=True)


if __name__ == "__main__":
    main()
