"""Plain attention on packed rows, also as a stand-in for PyTorch's kernels on GPUs."""

from collections.abc import Iterable
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


class PlainFlash:
    """Runs PyTorch's flash attention on the CPU, in float64, and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._library = torch.library.Library("aten", "IMPL")
        for name, run in (("forward", self._forward), ("backward", self._backward)):
            self._library.impl(f"_flash_attention_{name}", run, "CPU")

    def close(self) -> None:
        self._library._destroy()

    def _run(
        self, inputs: Iterable[Tensor], longest: tuple[int, int], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        *qkv, cu_q, cu_k = inputs
        assert longest == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        assert options["window_size_right"] == 0
        left = options["window_size_left"]
        return attention(*(x.double() for x in qkv), cu_q, cu_k, options["scale"], left)

    def _forward(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        self.calls.append("forward")
        query, max_q, max_k = args[0], args[5], args[6]
        out, sums = self._run(args[:5], (max_q, max_k), options)
        none = torch.zeros(2, dtype=torch.uint64)
        return out.to(query.dtype), sums.float(), none, none, none

    def _backward(self, slope: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        self.calls.append("backward")
        *inputs, _, _, cu_q, cu_k, max_q, max_k = args[:9]

        def differentiate() -> tuple[Tensor, ...]:
            leaves = [x.detach().double().requires_grad_() for x in inputs]
            again, _ = self._run((*leaves, cu_q, cu_k), (max_q, max_k), options)
            return torch.autograd.grad(again, leaves, slope.double())

        with ThreadPoolExecutor(1) as pool:  # autograd is off inside an operator
            grads = pool.submit(differentiate).result()
        return tuple(grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))
