"""vLLM's arguments for engines on GPUs."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from keel.model.load import LOAD_FORMAT
from keel.rollout.spec import EngineSpec
from tests.model.quantised import set_block
from tests.rollout.remote_engine import DEADLINE_S, engine_spec, vllm_process
from tests.rollout.tiny_model import make_model

pytestmark = pytest.mark.e2e

NAMES = (
    *("quantization", "linear_backend", "moe_backend", "enable_expert_parallel"),
    *("load_format", "hf_overrides", "additional_config"),
)
LAYERS = tuple(
    f"model.layers.1.{name}" for name in ("self_attn.qkv_proj", "mlp.gate", "mlp.gate_up_proj")
)


def _engine_args(spec: EngineSpec, capability: int, cutlass: bool) -> dict[str, Any]:
    from keel.rollout.engine import engine_args  # noqa: PLC0415  (keeps vLLM out of pytest)
    from keel.rollout.recording.native import NativeRecorder  # noqa: PLC0415

    engine: Any = engine_args
    engine.current_platform = SimpleNamespace(
        is_cpu=lambda: False,
        get_device_total_memory=lambda: 2**37,
        get_device_name=lambda: "NVIDIA A100",
        has_device_capability=lambda least: capability >= least,
    )
    engine.cutlass_block_fp8_supported = lambda: cutlass
    text = AutoConfig.from_pretrained(spec.model_path)
    args = engine_args.engine_args(spec, NativeRecorder(routes=True, sampling_mask=True), text)
    values = {name: getattr(args, name) for name in NAMES}
    return {**values, "quantized": _quantized(args)}


def _quantized(args: Any) -> list[str]:
    """Return which of `LAYERS` vLLM quantizes."""
    from vllm.config.quantization import resolve_quantization_config  # noqa: PLC0415
    from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415
    from vllm.model_executor.layers.quantization.online.base import (  # noqa: PLC0415
        OnlineQuantizationConfig,
    )

    resolved = resolve_quantization_config(args.quantization, args.quantization_config)
    if resolved is None:
        return []
    config = OnlineQuantizationConfig(resolved)
    return [name for name in LAYERS if config.resolve_quant_method_cls(LinearBase, name)]


def test_quantization_and_whole_experts(tmp_path: Path) -> None:
    make_model(tmp_path)
    with vllm_process() as process:

        def make(capability: int = 90, *, cutlass: bool = True, **rollout: Any) -> Any:
            spec = engine_spec(tmp_path, **rollout)
            made = process.submit(partial(_engine_args, spec, capability, cutlass))
            return SimpleNamespace(**made.result(timeout=DEADLINE_S))

        plain, low = make(), make(quantization="fp8")
        assert plain.quantization is None and plain.linear_backend == plain.moe_backend == "auto"
        assert low.quantization == "fp8_per_block"
        assert not plain.quantized
        assert low.quantized == [LAYERS[0], LAYERS[2]], "routers stay as they are"
        assert (low.linear_backend, low.moe_backend) == ("cutlass", "triton")
        ada = make(89, cutlass=False, quantization="fp8")
        assert (ada.linear_backend, ada.moe_backend) == ("triton", "triton")
        with pytest.raises(ValueError, match=r"rollout\.quantization = 'fp8': .*not NVIDIA A100"):
            make(80, quantization="fp8")
        assert not make(tensor_parallel=2).enable_expert_parallel
        assert make(tensor_parallel=2, expert_parallel=True).enable_expert_parallel

        set_block(tmp_path, [128, 128])  # an FP8 checkpoint is dequantized first
        low = make(quantization="fp8")
        assert low.load_format == LOAD_FORMAT and low.quantization == "fp8_per_block"
        assert low.hf_overrides["quantization_config"] is None
        assert not low.additional_config
        set_block(tmp_path, [128, 128], scale_fmt="ue8m0")
        extra = make(quantization="fp8").additional_config
        assert process.submit(_changed_weights, extra).result(timeout=DEADLINE_S) == 0
        assert process.submit(_changed_weights, {}).result(timeout=DEADLINE_S) > 0.5


def test_cuda_graphs_leave_out_sparse_attention() -> None:
    with vllm_process() as process:
        assert process.submit(_leaves_out_attention).result(timeout=DEADLINE_S)


def _leaves_out_attention() -> bool:
    from keel.rollout.engine.patches import shorten_warm_up  # noqa: PLC0415

    with shorten_warm_up(["DeepseekV32ForCausalLM"], gpu=True):
        from vllm.models.deepseek_v32.attention import DeepseekV32Attention  # noqa: PLC0415

        return hasattr(DeepseekV32Attention._sparse_indexer_and_attn, "__wrapped__")


def _changed_weights(extra: dict[str, Any]) -> float:
    """Return the fraction of weights that vLLM changes when it quantizes dequantized weights whose
    scales were powers of two."""
    import torch  # noqa: PLC0415
    from vllm.config import VllmConfig, set_current_vllm_config  # noqa: PLC0415
    from vllm.model_executor.layers.quantization.online import fp8  # noqa: PLC0415

    torch.manual_seed(0)
    scale = torch.tensor([2.0**-9, 2.0**-7]).repeat_interleave(128)[:, None]
    # In float32: with AVX2 and one thread, bfloat16 weights gave zeros on the CPU.
    weight = (300 * torch.rand(256, 128)).to(torch.float8_e4m3fn).float() * scale
    with set_current_vllm_config(VllmConfig(additional_config=extra)):
        low, scales = vars(fp8)["per_block_cast_to_fp8"](
            weight, block_size=[128, 128], use_ue8m0=False
        )
    again = low.float() * scales.repeat_interleave(128, 0)
    return float((again != weight).float().mean())
