"""Chooses vLLM's arguments for an engine."""

from typing import Any

from transformers import PreTrainedConfig
from vllm import EngineArgs
from vllm.model_executor.layers.quantization.utils.w8a8_utils import cutlass_block_fp8_supported
from vllm.platforms import current_platform

from keel.model.batch_invariant import BLOCK
from keel.model.hub import fp8_block, has_power_of_two_scales
from keel.model.load import LOAD_FORMAT
from keel.rollout.recording.base import Recorder
from keel.rollout.spec import EngineSpec
from keel.weights.vllm_patches import POWER_OF_TWO_SCALES

_CPU_BLOCK = 32  # tokens per KV block. With vLLM's default of 128, completions rarely share one.
_MAX_CAPTURED = 512  # tokens in the largest step that vLLM captures as a CUDA graph by default
_NGRAMS = 2, 4  # shortest and longest run of tokens to look up for drafts
_GIB = 2**30


def engine_args(spec: EngineSpec, recorder: Recorder, text: PreTrainedConfig) -> EngineArgs:
    config = spec.config
    args: dict[str, Any] = {
        "model": spec.model_path,
        "tokenizer": spec.tokenizer,
        "dtype": spec.dtype,
        "hf_overrides": {"head_dtype": config.head_dtype},
        "max_model_len": spec.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": config.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": recorder.worker_extension,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": spec.seed,
        "additional_config": {},  # part of the key of vLLM's cache of compiled layers
    }
    if fp8_block(spec.model_path, text.to_dict()):
        args["load_format"] = LOAD_FORMAT
        args["hf_overrides"]["quantization_config"] = None
    if current_platform.is_cpu():
        if config.tensor_parallel > 1:
            raise ValueError("rollout.tensor_parallel must be 1 on a CPU")
        args |= {
            "enforce_eager": True,  # compiling takes longer than small models run
            "block_size": _CPU_BLOCK,
            "kv_cache_memory_bytes": int(config.kv_cache_gib * _GIB),
        }
        if getattr(text, "kv_lora_rank", None) is not None:
            # With AMX, vLLM would choose a backend for bfloat16 only.
            args["attention_backend"] = "CPU_MLA"
    else:
        gpu_gib = current_platform.get_device_total_memory() / _GIB
        args |= {
            "enforce_eager": config.enforce_eager,
            "gpu_memory_utilization": spec.gpu_share(gpu_gib),
            "enable_sleep_mode": config.time_share,
            "tensor_parallel_size": config.tensor_parallel,
            "enable_expert_parallel": config.expert_parallel,
        }
        if config.quantization:
            args |= _fp8_args()
            if has_power_of_two_scales(text.to_dict()):
                args["additional_config"][POWER_OF_TWO_SCALES] = True
        if config.draft_tokens:
            args["speculative_config"] = {
                "method": "ngram_gpu",
                "num_speculative_tokens": config.draft_tokens,
                "prompt_lookup_min": _NGRAMS[0],
                "prompt_lookup_max": _NGRAMS[1],
            }
        if "linear_attention" in (getattr(text, "layer_types", None) or ()):
            # On Hopper, vLLM's default kernel is compiled at run time and needs the CUDA toolkit.
            args["gdn_prefill_backend"] = "triton"
        if config.tensor_parallel > 1:
            # Without this, vLLM would always use Ray inside a placement group.
            args["distributed_executor_backend"] = "ray" if spec.spread else "mp"
        if spec.cache_bytes:
            args["kv_cache_memory_bytes"] = spec.cache_bytes
        if not config.enforce_eager:
            tokens = config.max_num_seqs * (1 + config.draft_tokens)
            sizes = _captured_sizes(tokens, config.max_num_batched_tokens)
            args["cudagraph_capture_sizes"] = sizes
        if spec.batch_invariant:
            # Compiled layers would fuse operations and round where the trainer does not.
            args |= {"block_size": BLOCK, "compilation_config": {"mode": 0}}
            if not config.enforce_eager:
                args["compilation_config"]["cudagraph_mode"] = "FULL"
    if spec.wide_residual:
        args["additional_config"]["keel_residual_dtype"] = spec.residual_dtype
    return EngineArgs(**{**args, **recorder.engine_args()})


def _fp8_args() -> dict[str, Any]:
    """Return the arguments for weights in block-wise FP8. Raises ValueError if the GPU does not
    support it.

    By default, vLLM may choose kernels that are compiled at run time, or that round the weights
    again, to scales that are powers of two.
    """
    if not current_platform.has_device_capability(89):
        raise ValueError(
            "rollout.quantization = 'fp8': needs a GPU with FP8 units (Ada, Hopper or newer), not "
            f"{current_platform.get_device_name()}. Leave it out"
        )
    return {
        "quantization": "fp8_per_block",
        "quantization_config": {"ignore": ["*.gate"]},  # routers, as in published checkpoints
        "linear_backend": "cutlass" if cutlass_block_fp8_supported() else "triton",
        "moe_backend": "triton",
    }


def _captured_sizes(seqs: int, most: int) -> list[int]:
    """Return the step sizes, in tokens, to capture as CUDA graphs for a batch of `seqs` rows:
    vLLM's own sizes up to twice the batch, plus eight more up to four times the batch.

    The larger sizes are for conversations, where turns of about 30 tokens start while a full batch
    is decoding. Without a graph, such a step kept the host busy for 23 ms (1.2 B parameters, H200).
    """
    largest = min(2 * seqs, _MAX_CAPTURED)
    fine = [1, 2, 4, *range(8, 256, 8), *range(256, _MAX_CAPTURED + 1, 16)]
    wider = [largest * quarters // 4 for quarters in (5, 6, 7, 8, 10, 12, 14, 16)]
    sizes = [*(size for size in fine if size < largest), largest, min(seqs, largest), *wider]
    return sorted({min(size, most) for size in sizes})
