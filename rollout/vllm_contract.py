"""What Keel leans on in vLLM that vLLM does not promise: every name and signature, checked once
before an engine is built. A part of Keel that no longer fits is then named, and not used
(`keel.rollout.engine.fallbacks`).

Each part's own files are the only ones that touch these things (tests/test_vllm_fence.py):

| part | stands in | for lack of it |
|---|---|---|
| engine | vllm_internals.py | an error |
| begin | engine/begin.py | vLLM's own way for every request |
| updates | weight_loading/ | an error |
| copies | weight_loading/ | vLLM's loader for every update |
| kv_cache | engine/kv_cache.py | vLLM's own size of the cache |
| start, warm_up (GPUs) | engine/quick_start.py | vLLM's own, slower start |
| invariant (GPUs) | engine/invariant.py | vLLM's own, slower batch-invariant layers |
| residual | engine/residual.py | an error |
| packed | fastpath/ | the native recorder, vLLM's scheduler and sampler |
| cascade | fastpath/cascade/backend.py | vLLM's own attention |
| steady | fastpath/steady_steps.py | vLLM's preparing of every step |
| bursts | fastpath/bursts.py, fastpath/steady_steps.py | one step at a time |
| shims, v1 (CPUs) | engine/shims.py, recording/v1.py | an error |

Importing this module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Literal

from keel.rollout.fastpath.contract import (
    BURSTS,
    CACHE_LAYOUT,
    CASCADE,
    PACKED,
    PREEMPTION,
    STEADY,
)
from keel.rollout.vllm_checks import MODEL, SCHED, Has, Need, Takes, Uses

Part = Literal[
    "engine",
    "begin",
    "updates",
    "copies",
    "kv_cache",
    "start",
    "warm_up",
    "invariant",
    "residual",
    "packed",
    "cascade",
    "steady",
    "bursts",
    "shims",
    "v1",
]
WRITTEN_FOR = "0.32"
WARM_UP = f"{MODEL}.warmup.kernel_warmup"
NEEDS: dict[Part, tuple[Need, ...]] = {
    "engine": (
        Has("vllm.v1.engine.llm_engine:LLMEngine", "engine_core vllm_config model_executor"),
        Takes("vllm.v1.engine.llm_engine:LLMEngine.abort_request", "self request_ids internal"),
        Takes("vllm.v1.engine.llm_engine:LLMEngine.sleep", "self level mode"),
        Takes("vllm.v1.engine.llm_engine:LLMEngine.wake_up", "self tags"),
        Has("vllm.v1.engine.llm_engine:LLMEngine", "collective_rpc set_weight_version"),
        Has("vllm.v1.engine.core_client:InprocClient", "engine_core"),
        Has("vllm.v1.engine.core:EngineCore", "scheduler batch_queue"),
        Has(f"{SCHED}.scheduler:Scheduler", "requests has_requests"),
        Has("vllm.v1.request:Request", "max_tokens num_output_tokens num_output_placeholders"),
        Has("vllm.outputs:CompletionOutput", "routed_experts sampling_mask weight_versions"),
        Has("vllm.config:VllmConfig", "use_v2_model_runner"),
    ),
    "begin": (
        # What a request goes through, and that nothing more has come to it.
        Takes(
            "vllm.v1.engine.llm_engine:LLMEngine.add_request",
            "self request_id prompt params arrival_time lora_request tokenization_kwargs "
            "trace_headers priority session_id prompt_text kv_hints",
        ),
        Uses(
            "vllm.v1.engine.llm_engine:LLMEngine.add_request",
            "assign_request_id engine_core output_processor process_inputs",
        ),
        Uses(
            "vllm.v1.engine.core_client:InprocClient.add_request",
            "add_request engine_core preprocess_add_request",
        ),
        Has(
            "vllm.v1.engine.llm_engine:LLMEngine",
            "engine_core get_supported_tasks input_processor output_processor renderer",
        ),
        Takes(
            "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
            "self request_id prompt params supported_tasks arrival_time lora_request "
            "tokenization_kwargs trace_headers priority data_parallel_rank resumable session_id "
            "kv_hints",
        ),
        Takes(
            "vllm.v1.engine.output_processor:OutputProcessor.add_request",
            "self request prompt parent_req request_index queue",
        ),
        Takes("vllm.renderers.base:BaseRenderer.validate_token_ids", "self token_ids parameter"),
        Has(
            "vllm.v1.engine:EngineCoreRequest",
            "arrival_time external_req_id prompt_token_ids request_id sampling_params",
        ),
        Has("vllm.sampling_params:SamplingParams", "max_tokens routed_experts_prompt_start seed"),
        Has("vllm.v1.engine.core_client:InprocClient", "engine_core"),
        Takes("vllm.v1.engine.core:EngineCore.preprocess_add_request", "self request"),
        Takes("vllm.v1.engine.core:EngineCore.add_request", "self request request_wave"),
        # Hashes of blocks.
        Has("vllm.v1.engine.core:EngineCore", "request_block_hasher scheduler"),
        Uses("vllm.v1.engine.core:EngineCore.preprocess_add_request", "request_block_hasher"),
        Has(f"{SCHED}.scheduler:Scheduler", "hash_block_size"),
        Has("vllm.v1.request:Request", "block_hashes output_token_ids"),
        Uses("vllm.v1.request:Request.update_block_hashes", "_block_hasher block_hashes"),
    ),
    "updates": (
        Takes(f"{MODEL}.model_loader.reload:initialize_layerwise_reload", "model"),
        Has(f"{MODEL}.model_loader.reload:finalize_layerwise_reload"),
        Takes(f"{MODEL}.model_loader.reload:finalize_layerwise_processing", "model model_config"),
        Has(f"{MODEL}.layers.fused_moe.runner.moe_runner:MoERunner", "layer_id"),
        Has(f"{MODEL}.layers.vocab_parallel_embedding:ParallelLMHead", "quant_method"),
        Has(f"{MODEL}.layers.vocab_parallel_embedding:VocabParallelEmbedding"),
        Has("vllm.v1.worker.worker_base:WorkerBase", "model_runner rank device vllm_config"),
        Has("vllm.config:VllmConfig", "model_config parallel_config"),
        Has("vllm.config:set_current_vllm_config"),
    ),
    "copies": (
        Has(f"{MODEL}.layers.attention:is_deferred_attention_layer"),
        Takes(
            f"{MODEL}.layers.attention:Attention.process_weights_after_loading", "self act_dtype"
        ),
        Takes(
            f"{MODEL}.layers.attention:MLAAttention.process_weights_after_loading", "self act_dtype"
        ),
        Uses(
            f"{MODEL}.model_loader.reload.layerwise:_finalize_attention_layer",
            "process_weights_after_loading",
        ),
        Has("vllm.config:VllmConfig", "quant_config"),
        Has("vllm.config:ParallelConfig", "enable_eplb"),
    ),
    "kv_cache": (
        Takes(
            "vllm.v1.engine.core:get_kv_cache_configs",
            "vllm_config kv_cache_specs available_memory",
        ),
        Uses("vllm.v1.engine.core:EngineCore._initialize_kv_caches", "get_kv_cache_configs"),
        Takes("vllm.v1.kv_cache_interface:KVCacheSpec.max_memory_usage_bytes", "self vllm_config"),
        Has("vllm.v1.kv_cache_interface:KVCacheSpec", "page_size_bytes"),
        Has("vllm.config:SchedulerConfig", "max_num_seqs"),
    ),
    "start": (
        Has("vllm.model_executor.models.registry:_ModelRegistry", "models register_model"),
        Has("vllm.model_executor.models.registry:_LazyRegisteredModel", "load_model_cls"),
    ),
    "warm_up": (
        Takes("vllm.sampling_params:SamplingParams.for_sampler_warmup", ""),
        Uses("vllm.v1.worker.gpu.warmup:_warmup_kernels", "for_sampler_warmup"),
        Uses(f"{WARM_UP}:kernel_warmup", "_warmup_ll_bf16_router_gemm"),
        Takes(f"{WARM_UP}:_warmup_ll_bf16_router_gemm", "model"),
        Uses(f"{WARM_UP}:_warmup_ll_bf16_router_gemm", "_ll_bf16_router_shapes_from_model"),
        Takes(f"{WARM_UP}:_ll_bf16_router_shapes_from_model", "model"),
    ),
    "invariant": (
        Uses(f"{MODEL}.layers.linear:UnquantizedLinearMethod.apply", "linear_batch_invariant"),
        Takes(f"{MODEL}.layers.linear:linear_batch_invariant", "input weight bias"),
        Uses(f"{MODEL}.layers.layernorm:RMSNorm.forward_cuda", "rms_norm_batch_invariant"),
        Takes(f"{MODEL}.layers.layernorm:rms_norm_batch_invariant", "input weight eps residual"),
    ),
    "residual": (
        Has(f"{MODEL}.custom_op:op_registry_oot", "pop"),
        Uses("vllm.config.vllm:VllmConfig.compute_hash", "additional_config"),
        Uses(f"{MODEL}.custom_op:CustomOp.__new__", "op_registry_oot"),
        Uses(f"{MODEL}.custom_op:PluggableLayer.__new__", "op_registry_oot"),
        Takes(f"{MODEL}.layers.layernorm:RMSNorm.forward_native", "self x residual"),
        Takes(f"{MODEL}.layers.layernorm:RMSNorm.forward_cuda", "self x residual"),
        Has(f"{MODEL}.layers.layernorm:RMSNorm", "weight variance_epsilon"),
        Has(f"{MODEL}.layers.linear:RowParallelLinear", "prefix quant_method"),
        Takes(f"{MODEL}.layers.linear:UnquantizedLinearMethod.apply", "self layer x bias"),
    ),
    "packed": PACKED,
    "cascade": CASCADE,
    "steady": STEADY,
    "bursts": BURSTS,
    "shims": (
        Takes(
            f"{MODEL}.layers.fused_moe.unquantized_fused_moe_method:"
            "UnquantizedFusedMoEMethod._setup_kernel",
            "self layer w13 w2",
        ),
        Uses(
            f"{MODEL}.layers.fused_moe.unquantized_fused_moe_method:"
            "UnquantizedFusedMoEMethod.process_weights_after_loading",
            "_setup_kernel",
        ),
        Has(
            f"{MODEL}.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
            "moe_kernel",
        ),
        Takes(
            f"{MODEL}.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",
            "self positions query key",
        ),
        Has(
            f"{MODEL}.layers.rotary_embedding.base:RotaryEmbedding",
            "forward_native head_size is_neox_style rotary_dim",
        ),
        Takes(
            "vllm.v1.worker.cpu_model_runner:CPUModelRunner.sample_tokens", "self grammar_output"
        ),
        Has("vllm.v1.worker.cpu_model_runner:CPUModelRunner", "discard_request_mask input_batch"),
        Has("vllm.v1.worker.gpu_input_batch:InputBatch", "generators num_reqs"),
    ),
    "v1": (
        *PREEMPTION,
        *CACHE_LAYOUT,
        Has("vllm.v1.executor.uniproc_executor:UniProcExecutor", "driver_worker"),
        Has(
            "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
            "discard_request_mask input_batch kv_cache_config model sampler scheduler_config",
        ),
        Has(
            "vllm.v1.worker.gpu_input_batch:InputBatch",
            "block_table num_reqs req_id_to_index req_ids",
        ),
        Has("vllm.v1.worker.block_table:MultiGroupBlockTable", "__getitem__"),
        Has("vllm.v1.worker.block_table:BlockTable", "get_numpy_array"),
        Has("vllm.v1.sample.sampler:Sampler", "topk_topp_sampler"),
        Uses("vllm.v1.sample.sampler:Sampler.sample", "topk_topp_sampler"),
        Has("vllm.forward_context:ForwardContext", "slot_mapping"),
        Has("vllm.forward_context:get_forward_context"),
        Takes(
            f"{MODEL}.layers.fused_moe.router.base_router:BaseRouter.set_capture_fn",
            "self capture_fn",
        ),
        Has(f"{MODEL}.layers.fused_moe.runner.moe_runner:MoERunner", "moe_config router"),
    ),
}


def changes(part: Part) -> list[str]:
    """What vLLM no longer has of what this part needs; empty: all is there."""
    return [change for need in NEEDS[part] for change in _broken(need)]


def _broken(need: Need) -> Iterator[str]:
    module, _, path = need.where.partition(":")
    try:
        found = import_module(module)
    except ImportError as error:
        yield f"{module} cannot be imported ({error})"
        return
    for name in path.split(".") if path else ():
        if not hasattr(found, name):
            yield f"{need.where} is gone"
            return
        found = getattr(found, name)
    yield from need.broken(found)
