"""Arguments of vLLM's engine and of its requests, from the recipe's."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from vllm import EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from keel.model.batch_invariant import BLOCK
from keel.rollout.engine.jobs import Job
from keel.rollout.engine.request_builder import Asked
from keel.rollout.recording.base import Recorder
from keel.rollout.spec import EngineSpec, captured_sizes, parallel_args

CPU_BLOCK = 32
"""Tokens in a KV-cache block on CPUs; vLLM's default of 128 would hardly ever share a prefix."""
GIB = 2**30
ROUTES_START = ("routed_experts_prompt_start",)
"""Of what recorders ask for, what differs from turn to turn."""


def engine_args(spec: EngineSpec, recorder: Recorder, text: PreTrainedConfig) -> EngineArgs:
    """`text`: the model's configuration, of its language part."""
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
        "worker_extension_cls": "keel.weights.loader.WeightsExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": spec.seed,
    }
    if current_platform.is_cpu():
        if config.tensor_parallel > 1:
            raise ValueError(
                f"rollout.tensor_parallel = {config.tensor_parallel}: on a CPU an engine is one "
                "process, so it must be 1"
            )
        args |= {
            "enforce_eager": True,  # compiling takes longer than small models run
            "block_size": CPU_BLOCK,
            "kv_cache_memory_bytes": int(config.kv_cache_gib * GIB),
        }
        if getattr(text, "kv_lora_rank", None) is not None:
            # On a CPU with AMX vLLM would choose its backend for bfloat16 alone.
            args["attention_backend"] = "CPU_MLA"
    else:
        args |= {
            "enforce_eager": config.enforce_eager,
            "gpu_memory_utilization": spec.gpu_share(
                current_platform.get_device_total_memory() / GIB
            ),
            "enable_sleep_mode": config.time_share,
            **parallel_args(config),
        }
        if spec.cache_bytes:
            args["kv_cache_memory_bytes"] = spec.cache_bytes
        if not config.enforce_eager:
            sizes = captured_sizes(config.max_num_seqs, config.max_num_batched_tokens)
            args["cudagraph_capture_sizes"] = sizes
        if spec.batch_invariant:
            # Compiled layers would fuse operations, and round where the trainer does not.
            args |= {"block_size": BLOCK, "compilation_config": {"mode": 0}}
            if not config.enforce_eager:
                args["compilation_config"]["cudagraph_mode"] = "FULL"
    if spec.wide_residual:
        # Its cache of compiled layers is named by this, too.
        args["additional_config"] = {"keel_residual_dtype": spec.residual_dtype}
    return EngineArgs(**{**args, **recorder.engine_args()})


def asked(job: Job, recorder: Recorder, name: str, seed: int) -> Asked:
    """One of its requests."""
    sampling, wanted = job.sampling, job.wanted
    recorded = recorder.sampling_args(sampling, wanted)
    varying = {"max_tokens": sampling.max_tokens, "seed": seed}
    varying |= {name: recorded[name] for name in ROUTES_START if name in recorded}
    kind = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop)
    return Asked(
        name=name,
        ids=job.context,
        conversation=job.conversation,
        kind=(*kind, job.stop_ids, wanted.routes, wanted.sampling_mask),
        varying=varying,
        params=lambda: SamplingParams(**{**_sampling_args(job), **recorded, **varying}),
    )


def _sampling_args(job: Job) -> dict[str, Any]:
    """What is the same for all requests of its kind, but for what the recorder asks for."""
    sampling = job.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        # The text is decoded once, at the end, unless vLLM has to look for stop strings.
        "detokenize": bool(sampling.stop),
        "stop": list(sampling.stop),
        "stop_token_ids": list(job.stop_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
