"""Plain attention on packed rows, and stand-ins for GPU kernels that compute it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import MistralConfig, Qwen3Config

SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FAMILIES = {"full": Qwen3Config(**SMALL), "sliding": MistralConfig(**SMALL, sliding_window=5)}


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float | None, left: int
) -> tuple[Tensor, Tensor]:
    """Return outputs and logsumexps. A segment's queries are the last positions of its keys, and
    attend to `left` earlier tokens, or to all if it is below 0."""
    outputs, sums = list[Tensor](), list[Tensor]()
    keys = zip(*(x.tensor_split(cu_k[1:-1].long()) for x in (k, v)), strict=True)
    for query, (key, value) in zip(q.tensor_split(cu_q[1:-1].long()), keys, strict=True):
        key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (key, value))
        step = torch.arange(len(key))
        back = step[len(key) - len(query) :, None] - step
        far = (back < 0) | ((back > left) if left >= 0 else False)
        scores = torch.einsum("ihd,jhd->hij", query, key) * (scale or q.shape[-1] ** -0.5)
        scores = scores.masked_fill(far, -torch.inf)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), value))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, 1)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *longest: int, **options: Any
) -> Tensor:
    """Imitate PyTorch's varlen attention."""
    assert longest == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    left, right = options["window_size"]
    assert right == 0
    return attention(q, k, v, cu_q, cu_k, options["scale"], left)[0]


class Plain:
    """Imitates the module of FlashAttention-4, in float64."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _run(self, options: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        left = options.get("window_size_left", -1)
        assert options["causal"] == (left < 0)
        ends = options["cu_seqlens_q"], options["cu_seqlens_k"]
        return attention(*(x.double() for x in tensors), *ends, options["softmax_scale"], left)

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, **options: Any
    ) -> None:
        self.calls.append("forward")
        assert options["return_lse"]
        for into, value in zip((out, lse), self._run(options, q, k, v), strict=True):
            into.copy_(value)

    def _flash_attn_bwd(
        self, *tensors: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **options: Any
    ) -> None:
        self.calls.append("backward")
        *inputs, out, slope, lse = tensors

        def differentiate() -> tuple[Tensor, ...]:
            leaves = [x.detach().double().requires_grad_() for x in inputs]
            again, sums = self._run(options, *leaves)
            for value, expected in ((again, out), (sums, lse)):
                torch.testing.assert_close(value.to(expected.dtype), expected)
            return torch.autograd.grad(again, leaves, slope.double())

        with ThreadPoolExecutor(1) as pool:  # autograd is off inside an operator
            grads = pool.submit(differentiate).result()
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)
