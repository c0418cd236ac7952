"""Time per token of sparse and dense attention in one layer of DeepSeek-V3.2.

    python -m benchmarks.training.sparse_attention             # one GPU
    python -m benchmarks.training.sparse_attention --small     # smoke test on a CPU

Attention and its projections on one context of each length, bfloat16, random weights: forward, and
with backward for all gradients, in µs per token (median over rounds after a first one). *sparse*
attends to the indexer's selection, *with loss* also trains the indexer, *dense* and *warm-up* are
these values of `trainer.attention`, and *expanded* is DeepSeek-V3's attention with keys of every
head. In the warm-up, only the indexer has gradients.
"""

import statistics
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import arguments, run_facts
from benchmarks.training.support_head import milliseconds
from keel.model.attention import Segments, use_packed_attention
from keel.model.sparse.attention import SparsePass, use_sparse_attention

LAYER = {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32}
SMALL |= {"qk_rope_head_dim": 8, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sparse": ("deepseek_v32", {}),
    "with loss": ("deepseek_v32", {"loss": True}),
    "dense": ("deepseek_v32", {"dense": True}),
    "warm-up": ("deepseek_v32", {"dense": True, "loss": True}),
    "expanded": ("deepseek_v3", {}),
}


def measure(case: str, length: int, rounds: int, *, small: bool) -> tuple[float, float]:
    """Return the milliseconds of a forward pass, and of a forward and backward pass."""
    device, dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
    family, how = CASES[case]
    dense = {"mlp_layer_types": ["dense"]} if family == "deepseek_v32" else {}
    config = AutoConfig.for_model(family, **{**LAYER, **dense, **(SMALL if small else {})})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        hidden = torch.randn(1, length, config.hidden_size, dtype=dtype).requires_grad_()
        rotary = model.model.rotary_emb(hidden.detach(), torch.arange(length)[None])
    use_sparse_attention(model)
    use_packed_attention(model)
    layer: Any = model.model.layers[0].self_attn
    if case == "warm-up":
        layer.requires_grad_(False)
        layer.indexer.requires_grad_(True)
        hidden.requires_grad_(False)
    segments = Segments.of([length], device)

    def forward() -> Tensor:
        sparse = SparsePass(**how)
        output, _ = layer(hidden, rotary, None, segments=segments, sparse=sparse)
        loss = output.float().square().mean()
        return loss + sparse.loss_sum() / length if sparse.losses else loss

    def both() -> None:
        layer.zero_grad(set_to_none=True)
        forward().backward()

    both()
    times = [(milliseconds(forward), milliseconds(both)) for _ in range(rounds)]
    first, second = (statistics.median(column) for column in zip(*times, strict=True))
    return first, second


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16_384, 65_536, 131_072])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--small", action="store_true", help="use small sizes on a CPU")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in run_facts().items()), flush=True)
    print("| context | attention | forward, µs | forward and backward, µs |\n|---|---|---|---|")
    for length in options.lengths:
        for case in options.cases:
            torch.cuda.empty_cache()  # memory of the last case
            try:
                times = measure(case, length, options.rounds, small=options.small)
                shown = " | ".join(f"{1e3 * time / length:.2f}" for time in times)
            except torch.OutOfMemoryError:
                shown = "– | –"
            print(f"| {length:,} | {case} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
