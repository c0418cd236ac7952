"""Where the mismatch of engine and trainer comes from: roundings of a model, left out in turn.

    python -m benchmarks.stability.rounding --out OUT [--layers 28] [--dtypes bfloat16 float16]

On a CPU. Engine and trainer are two passes over the same weights and tokens, both in float32, that
round where half precision does, and whose sums differ as sums in another order do: by `NOISE` of
their size, and attention's probabilities by the maximum that they are taken relative to (both are
assumed). Then some of the roundings are left out on both sides: what is gained is what they had
cost. The model has Qwen3-0.6B's shape, `--layers` of them, random weights and logits of deviation
8. Its numbers are above a GPU's; ratios of them are like a GPU's (docs/stability.md).

Writes OUT/rounding.json.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.common.revision import commit
from benchmarks.peers.shape import write_model
from benchmarks.peers.workload import QWEN3_06B

NOISE = 2e-7
"""Of a sum's size: float32's own rounding, in another order."""
DRAWS = 8
"""Tokens that are drawn in each context."""
EPSILON, THETA = 1e-6, 10_000.0
PARTS: Mapping[str, tuple[str, ...]] = {
    "all rounded": (),
    "heads, between norm and rotation": ("heads",),
    "attention's probabilities": ("heads", "probabilities"),
    "what GEMMs are given by norms": ("heads", "normed"),
    "outputs of o and down": ("heads", "outputs"),
    "residual stream": ("heads", "residual"),
    "residual stream, outputs of o and down": ("heads", "residual", "outputs"),
    "these, and q, k and v": ("heads", "residual", "outputs", "qkv"),
    "these, gate and up": ("heads", "residual", "outputs", "qkv", "mlp"),
    "all but what GEMMs are given": (
        *("heads", "residual", "outputs", "qkv", "mlp", "probabilities"),
    ),
}
"""What is not rounded. Compiled layers never round heads between their norm and rotation."""


@dataclass(frozen=True)
class Model:
    tensors: Mapping[str, Tensor]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def layer(self, index: int, name: str) -> Tensor:
        return self.tensors[f"model.layers.{index}.{name}.weight"]


class Pass:
    """One side's forward pass."""

    def __init__(self, dtype: torch.dtype, exact: tuple[str, ...], seed: int) -> None:
        self._dtype, self._exact = dtype, exact
        self._noise = torch.Generator().manual_seed(seed)

    def rounded(self, x: Tensor, part: str = "") -> Tensor:
        return x if part in self._exact else x.to(self._dtype).float()

    def product(self, x: Tensor, weight: Tensor, part: str) -> Tensor:
        return self.rounded(self.summed(x @ self.rounded(weight).T), part)

    def summed(self, x: Tensor) -> Tensor:
        size = x.square().mean(-1, keepdim=True).sqrt()
        return x + NOISE * size * torch.randn(x.shape, generator=self._noise)

    def norm(self, x: Tensor, weight: Tensor, part: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
        return self.rounded(x * scale * self.rounded(weight), part)

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, H, D] each. Probabilities are relative to a maximum that depends on the order of
        keys: here to one that is down to half of the true one."""
        count, _, size = query.shape
        score = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
        score += torch.full((count, count), -torch.inf).triu(1)
        weight = (score - score.amax(-1, keepdim=True)).exp()
        total = weight.sum(-1, keepdim=True)
        scale = 1 + torch.rand(*weight.shape[:2], 1, generator=self._noise)
        weight = self.rounded(weight * scale, "probabilities") / scale / total
        out = torch.einsum("hqk,khd->qhd", weight, value).flatten(1)
        return self.rounded(self.summed(out))

    @torch.no_grad()
    def logp(self, model: Model, ids: Tensor) -> Tensor:
        """[T, V]"""
        angle = torch.arange(0, model.head_dim, 2).float() / model.head_dim
        angle = torch.outer(torch.arange(len(ids)).float(), THETA**-angle).repeat(1, 2)[:, None]
        group = model.heads // model.kv_heads

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return self.rounded(x * angle.cos() + torch.cat([-second, first], -1) * angle.sin())

        stream = self.rounded(model.tensors["model.embed_tokens.weight"][ids])
        for index in range(model.layers):
            weight = {
                name: model.layer(index, f"self_attn.{name}_proj") for name in ("q", "k", "v", "o")
            }
            x = self.norm(stream, model.layer(index, "input_layernorm"), "normed")
            query, key, value = (
                self.product(x, weight[name], "qkv").unflatten(1, (-1, model.head_dim))
                for name in "qkv"
            )
            query = self.norm(query, model.layer(index, "self_attn.q_norm"), "heads")
            key = self.norm(key, model.layer(index, "self_attn.k_norm"), "heads")
            key, value = (each.repeat_interleave(group, 1) for each in (turned(key), value))
            x = self.attention(turned(query), key, value)
            stream = self.rounded(stream + self.product(x, weight["o"], "outputs"), "residual")
            x = self.norm(stream, model.layer(index, "post_attention_layernorm"), "normed")
            gate, up = (
                self.product(x, model.layer(index, f"mlp.{name}_proj"), "mlp")
                for name in ("gate", "up")
            )
            x = self.product(
                self.rounded(silu(gate) * up), model.layer(index, "mlp.down_proj"), "outputs"
            )
            stream = self.rounded(stream + x, "residual")
        x = self.norm(stream, model.tensors["model.norm.weight"], "normed")
        head = self.rounded(model.tensors["model.embed_tokens.weight"])  # tied
        return (x @ head.T).log_softmax(-1)


def mismatch(model: Model, ids: Tensor, dtype: torch.dtype, exact: tuple[str, ...]) -> float:
    """Mean |Δ log p| of tokens that the first pass draws."""
    engine, trainer = (Pass(dtype, exact, seed).logp(model, ids) for seed in (1, 2))
    draw = torch.Generator().manual_seed(3)
    drawn = torch.multinomial(engine.exp(), DRAWS, replacement=True, generator=draw)
    return float((engine.gather(1, drawn) - trainer.gather(1, drawn)).abs().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=QWEN3_06B.shape.layers)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    options = parser.parse_args()
    shape = replace(QWEN3_06B.shape, layers=options.layers)
    folder = options.out / f"model-{options.layers}-{options.seed}"
    if not folder.exists():
        write_model(folder, shape, seed=options.seed, sharpness=QWEN3_06B.sharpness)
    tensors = {
        name: tensor.float()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    model = Model(tensors, shape.layers, shape.heads, shape.kv_heads, shape.head_dim)
    draw = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(10, shape.tokens, (options.tokens,), generator=draw)
    rows: dict[str, dict[str, float]] = {}
    for name in options.dtypes:
        for part, exact in PARTS.items():
            found = mismatch(model, ids, getattr(torch, name), exact)
            rows.setdefault(part, {})[name] = found
            print(f"{name:9} {found:.4f}  not rounded: {part}", flush=True)
            report = {"commit": commit(), "layers": options.layers, "seed": options.seed}
            text = json.dumps(report | {"mean_abs_logp": rows}, indent=1)
            (options.out / "rounding.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
