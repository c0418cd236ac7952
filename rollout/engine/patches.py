"""Patches that engines apply to vLLM before they are built. Context managers undo theirs; batch
invariance lasts as long as the process. Fixes for vLLM's CPU build are in `shims`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import rms_norm
from vllm import ModelRegistry, SamplingParams
from vllm.config.vllm import default_breakable_cudagraph_architectures
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import layernorm, linear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.warmup import kernel_warmup
from vllm.v1.engine import core as engine_core

from keel.model.layers.residual import OUTPUTS, linear_float32

_core: Any = engine_core
_layernorm: Any = layernorm
_linear: Any = linear
_params: Any = SamplingParams
_kernels: Any = kernel_warmup

# Size of the KV cache.

SPARE = 1.25  # enlarges the cache, so that later completions may share prompts with finished ones
_SPARE_PAGES = 16  # per completion, because Keel's scheduler allocates several pages at once


@contextmanager
def cap_kv_cache(conversations: int = 0) -> Iterator[None]:
    """Cap the KV cache of engines built inside this context at the size that their completions can
    use.

    By default, vLLM allocates all available memory. With `rollout.time_share`, this wastes time:
    the memory has to be remapped at each update, at only about 100 GiB per second. vLLM's options
    cannot express this limit, since the size of a completion is known only after the model is
    loaded.
    """
    original = _core.get_kv_cache_configs

    def get_kv_cache_configs(
        vllm_config: Any, kv_cache_specs: list[dict[str, Any]], available_memory: list[int]
    ) -> Any:
        contexts = max(vllm_config.scheduler_config.max_num_seqs, conversations)
        sizes: list[int] = []
        for spec, memory in zip(kv_cache_specs, available_memory, strict=True):
            layers = spec.values()
            if len({(type(layer), layer.page_size_bytes) for layer in layers}) == 1:
                one = sum(layer.max_memory_usage_bytes(vllm_config) for layer in layers)
                spare = _SPARE_PAGES * sum(layer.page_size_bytes for layer in layers)
                memory = min(memory, int(SPARE * contexts * (one + spare)))
            sizes.append(memory)
        return original(vllm_config, kv_cache_specs, sizes)

    _core.get_kv_cache_configs = get_kv_cache_configs
    try:
        yield
    finally:
        _core.get_kv_cache_configs = original


# Start-up time.


@contextmanager
def shorten_warm_up(architectures: Sequence[str], *, gpu: bool) -> Iterator[None]:
    """Skip the parts of vLLM's warm-up that Keel does not need. They account for about 40 of 112
    seconds of startup time on an H100 host.

    The model classes in `architectures` are inspected in this process, which loads them anyway.
    vLLM itself would start another process just to import vLLM again.
    """
    if gpu and default_breakable_cudagraph_architectures() & set(architectures):
        # vLLM sets it later, but these classes read it when they are imported. Without it, CUDA
        # graphs would contain sparse attention with the sequence lengths of a warm-up step.
        os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    for name in architectures:
        known = ModelRegistry.models.get(name)
        if known is not None:
            with suppress(ImportError):  # vLLM reports it better
                ModelRegistry.register_model(name, known.load_model_cls())
    if not gpu:
        yield
        return

    def warm_up_routers(model: nn.Module) -> None:
        # Loads CUTLASS, so only for models that have such a router.
        if _kernels._ll_bf16_router_shapes_from_model(model):
            routers(model)

    # `enable_jit_warmup: false` would also skip the steps that size vLLM's workspaces.
    sampling, routers = _params.for_sampler_warmup, _kernels._warmup_ll_bf16_router_gemm
    # Without kernels for penalties, biases and bad words, which no request of Keel uses.
    _params.for_sampler_warmup = staticmethod(lambda: SamplingParams(temperature=1.0, seed=0))
    _kernels._warmup_ll_bf16_router_gemm = warm_up_routers
    try:
        yield
    finally:
        _params.for_sampler_warmup = staticmethod(sampling)
        _kernels._warmup_ll_bf16_router_gemm = routers


# Batch-invariant layers.


def install_invariant_kernels() -> None:
    """Replace vLLM's batch-invariant kernels with faster ones that return bitwise identical
    results.

    For all but five shapes, vLLM's GEMM tiles are tuned for large batches; its tiles for experts
    are small; and its QK norm makes a copy of the input. The functions are patched because vLLM's
    registry can only replace whole layers.
    """
    from keel.model.batch_invariant import vllm_kernels  # noqa: PLC0415  (needs Triton)

    vllm_kernels.use_larger_expert_tiles()
    if hasattr(_linear.linear_batch_invariant, "keel_patch"):
        return
    gemm, norm = _linear.linear_batch_invariant, _layernorm.rms_norm_batch_invariant

    def linear_batch_invariant(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        out = vllm_kernels.linear_like(gemm, rows, weight, bias)
        return out.view(*input.shape[:-1], out.shape[-1])

    def rms_norm_batch_invariant(
        input: Tensor, weight: Tensor | None, eps: float = 1e-6, residual: Tensor | None = None
    ) -> Any:
        if residual is None and weight is not None and input.ndim == 3:  # heads
            return vllm_kernels.norm_heads_like(norm, input, weight, eps)
        return norm(input, weight, eps, residual=residual)

    linear_batch_invariant.keel_patch = True  # type: ignore[attr-defined]
    _linear.linear_batch_invariant = linear_batch_invariant
    _layernorm.rms_norm_batch_invariant = rms_norm_batch_invariant


# Residual stream in float32.

_wide_outputs: list[_SummedLinearMethod] = []  # linear methods of the engine that is being built


@contextmanager
def patch_residual_stream(layers: int, *, wide: bool) -> Iterator[None]:
    """Give engines built inside this context a float32 residual stream if `wide` is set
    (`keel.model.layers.residual`).

    vLLM's norm layers add a block's output to the residual stream and pass the sum on. With this
    patch, they no longer round the sum. Raises RuntimeError if attention could not be set up in
    some of the `layers`.
    """
    _wide_outputs.clear()
    for kind in (_Float32Norm, _Float32Output):
        name = kind.__bases__[0].__name__
        op_registry_oot.pop(name, None)
        if wide:
            op_registry_oot[name] = kind
    yield
    if wide and len(_wide_outputs) < layers:
        raise RuntimeError(
            f"model.residual_dtype = float32: of {layers} layers only {len(_wide_outputs)} "
            "products could be set up, perhaps because the checkpoint is quantised. Remove the knob"
        )


class _Float32Norm(RMSNorm):
    """RMS norm that adds a block's output to the residual stream in float32, and rounds only the
    normalized result."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return super().forward_native(x)
        total = x.float() + residual.float()
        weight = self.weight.data
        out = rms_norm(total, weight.shape, weight.float(), self.variance_epsilon)
        return out.to(weight.dtype), total

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return self.forward_native(x, residual)


class _Float32Output(RowParallelLinear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.prefix.endswith(OUTPUTS) and type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = _SummedLinearMethod()
            _wide_outputs.append(self.quant_method)


class _SummedLinearMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        """Skip the weight packing that vLLM does on CPUs."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = linear_float32(x, layer.weight)
        return out if bias is None else out + bias
