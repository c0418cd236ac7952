"""What vLLM does at its start for engines of every kind, and Keel's do not need: 14 and some 24 of
112 seconds on an H100's host, and 3 more for every model without experts.

`SamplingParams.for_sampler_warmup` is replaced by a patch: `kernel_config.enable_jit_warmup: false`
would be official, and would leave the whole round of steps out, by which vLLM also gives its
workspaces their size before graphs are captured that point at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from vllm import ModelRegistry, SamplingParams
from vllm.model_executor.warmup import kernel_warmup

from keel.rollout.vllm_pin import check_parameters

params: Any = SamplingParams
kernels: Any = kernel_warmup


def known_here(architectures: Sequence[str]) -> None:
    """Have vLLM look at the model's class in this process, where it is wanted anyway, and not in
    one that imports vLLM again for it."""
    for name in architectures:
        known = ModelRegistry.models.get(name)
        if known is not None:
            with suppress(ImportError):  # vLLM says it better
                ModelRegistry.register_model(name, known.load_model_cls())


@contextmanager
def plain_warm_up() -> Iterator[None]:
    """For engines that are built in here: vLLM tries its sampler on plain requests, and compiles no
    kernel for penalties, biases and words that none of Keel's has. For the kernel of a router's
    product it loads CUTLASS only where the model has such a router."""

    def routers_alone(model: nn.Module) -> None:
        if kernels._ll_bf16_router_shapes_from_model(model):
            routers(model)

    sampling, routers = params.for_sampler_warmup, kernels._warmup_ll_bf16_router_gemm
    check_parameters(sampling, "")
    check_parameters(routers, "model")
    params.for_sampler_warmup = staticmethod(lambda: SamplingParams(temperature=1.0, seed=0))
    kernels._warmup_ll_bf16_router_gemm = routers_alone
    try:
        yield
    finally:
        params.for_sampler_warmup = staticmethod(sampling)
        kernels._warmup_ll_bf16_router_gemm = routers
