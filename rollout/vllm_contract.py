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
| packed | fastpath/ | the native recorder, vLLM's scheduler and sampler |
| shims, v1 (CPUs) | engine/shims.py, recording/v1.py | an error |

Importing this module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Literal

from keel.rollout.vllm_checks import Has, Need, Takes, Uses

Part = Literal[
    "engine", "begin", "updates", "copies", "kv_cache", "start", "warm_up", "packed", "shims", "v1"
]
WRITTEN_FOR = "0.32"
SCHED = "vllm.v1.core.sched"
GPU = "vllm.v1.worker.gpu"
MODEL = "vllm.model_executor"


PREEMPTION: tuple[Need, ...] = (
    Takes(
        f"{SCHED}.scheduler:Scheduler._preempt_request",
        "self request timestamp drop_stale_output",
    ),
    Uses(f"{SCHED}.scheduler:Scheduler.schedule", "_preempt_request"),
    Uses(f"{SCHED}.scheduler:Scheduler.reset_prefix_cache", "_preempt_request"),
    Has("vllm.v1.core.kv_cache_manager:KVCacheManager", "get_block_ids"),
    Has("vllm.v1.request:Request", "request_id num_computed_tokens"),
)
CACHE_LAYOUT: tuple[Need, ...] = (
    Has("vllm.v1.kv_cache_interface:FullAttentionSpec", "block_size"),
    Has("vllm.v1.kv_cache_interface:KVCacheConfig", "kv_cache_groups num_blocks"),
    Has("vllm.v1.kv_cache_interface:KVCacheGroupSpec", "kv_cache_spec"),
)

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
    ),
    "packed": (
        *PREEMPTION,
        *CACHE_LAYOUT,
        # The scheduler: what ours overrides, calls and keeps in step with.
        Takes(f"{SCHED}.scheduler:Scheduler.schedule", "self throttle_prefills"),
        Takes(
            f"{SCHED}.scheduler:Scheduler.update_from_output",
            "self scheduler_output model_runner_output",
        ),
        Takes(f"{SCHED}.scheduler:Scheduler.finish_requests", "self request_ids finished_status"),
        Uses(f"{SCHED}.scheduler:Scheduler.update_from_output", "_free_request"),
        Uses(f"{SCHED}.scheduler:Scheduler.has_requests", "has_finished_requests"),
        Has(
            f"{SCHED}.scheduler:Scheduler",
            "_free_request _get_new_block_ids_to_zero _pause_state _update_request_with_output "
            "aux_output_connector connector current_step ec_connector enable_kv_cache_events "
            "finished_req_ids has_finished_requests kv_cache_config kv_cache_manager "
            "kv_holding_waiting log_stats max_model_len max_num_active_reqs max_num_running_reqs "
            "max_num_scheduled_tokens num_lookahead_tokens "
            "num_sampled_tokens_per_step num_spec_tokens prev_step_scheduled_req_ids "
            "requests reset_prefix_cache reset_preempted_req_ids running use_pp "
            "use_v2_model_runner waiting",
        ),
        Has(f"{SCHED}.async_scheduler:AsyncScheduler"),
        Has(f"{SCHED}.interface:PauseState", "UNPAUSED"),
        Takes(
            f"{SCHED}.output:CachedRequestData",
            "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids "
            "num_computed_tokens num_output_tokens",
        ),
        Has(
            f"{SCHED}.output:SchedulerOutput",
            "finished_req_ids free_encoder_mm_hashes new_block_ids_to_zero num_scheduled_tokens "
            "preempted_req_ids scheduled_cached_reqs scheduled_encoder_inputs scheduled_new_reqs "
            "scheduled_spec_decode_tokens total_num_scheduled_tokens",
        ),
        Has(
            "vllm.v1.request:Request",
            "append_output_token_ids client_index get_finished_reason is_finished is_prefill_chunk "
            "max_tokens mm_features next_decode_eligible_step num_in_flight_tokens "
            "num_output_placeholders num_output_tokens num_prompt_tokens num_stale_output_tokens "
            "num_tokens resumable sampling_params spec_token_ids stop_reason "
            "structured_output_request take_events trace_headers",
        ),
        Has("vllm.v1.request:RequestStatus"),
        Takes(
            f"{SCHED}.scheduler:Scheduler._update_request_with_output",
            "self request new_token_ids is_stale",
        ),
        Has(
            "vllm.sampling_params:SamplingParams",
            "detokenize eos_token_id logprobs repetition_detection stop_token_ids",
        ),
        Has(
            "vllm.v1.core.kv_cache_manager:KVCacheManager",
            "allocate_slots block_pool coordinator new_step_starts",
        ),
        Has("vllm.v1.core.kv_cache_manager:KVCacheBlocks", "get_block_ids"),
        Has("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator", "single_type_managers"),
        Has("vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager", "block_size"),
        Has("vllm.v1.core.block_pool:BlockPool", "get_num_free_blocks"),
        # What travels between steps.
        Has(
            "vllm.v1.engine:EngineCoreOutput",
            "events finish_reason new_logprobs new_sampling_mask new_token_ids request_id "
            "stop_reason trace_headers",
        ),
        Has("vllm.v1.engine:EngineCoreOutputs", "outputs"),
        Has(
            "vllm.v1.outputs:ModelRunnerOutput",
            "logprobs num_nans_in_logits req_id_to_index req_ids sampled_token_ids sampling_masks",
        ),
        Has(
            "vllm.v1.outputs:LogprobsLists",
            "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens",
        ),
        Has("vllm.v1.outputs:SamplingMaskLists", "token_ids offsets cu_num_generated_tokens"),
        Takes(f"{GPU}.sample.output:SamplingMaskTensors.tolists", "self num_sampled_tokens"),
        Has(f"{GPU}.sample.output:SamplingMaskTensors", "to_cpu_nonblocking"),
        Takes("vllm.v1.outputs:LogprobsTensors.tolists", "self cu_num_generated_tokens"),
        Has("vllm.v1.outputs:LogprobsTensors", "to_cpu_nonblocking"),
        # The sampler.
        Has(
            f"{GPU}.model_runner:GPUModelRunner",
            "batch_sharder device get_model kv_cache_config rejection_sampler sampler",
        ),
        Uses(f"{GPU}.model_runner:GPUModelRunner.sample", "sampler"),
        Takes(f"{GPU}.sample.sampler:Sampler.__call__", "self logits input_batch"),
        Takes(
            f"{GPU}.sample.sampler:Sampler.get_logprobs_dims",
            "self idx_mapping_np include_token_ids",
        ),
        Takes(
            f"{GPU}.sample.sampler:Sampler.apply_sampling_params",
            "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids "
            "expanded_local_pos seq_lens_upper_bound_np skip_top_k_top_p",
        ),
        Has(
            f"{GPU}.sample.sampler:Sampler",
            "compute_nans logits_processors logprobs_mode req_states return_sampling_mask "
            "sampling_states thinking_budget_state trace_replay_state use_fp64_gumbel",
        ),
        Has(
            f"{GPU}.sample.states:SamplingStates",
            "max_num_reqs min_p seeds temperature top_k top_p",
        ),
        Has(f"{GPU}.sample.logit_bias:LogitBiasState", "use_logit_bias"),
        Has(f"{GPU}.sample.penalties:PenaltiesState", "use_penalty"),
        Has(f"{GPU}.sample.bad_words:BadWordsState", "num_bad_words"),
        Has(f"{GPU}.sample.thinking_budget:ThinkingBudgetState", "enabled use_thinking_budget"),
        Has(f"{GPU}.states:RequestState", "prefill_len"),
        Takes(
            f"{GPU}.sample.output:SamplerOutput",
            "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected "
            "sampling_mask_tensors",
        ),
        Takes(
            f"{GPU}.input_batch:get_num_sampled_and_rejected",
            "num_sampled seq_lens cu_num_logits idx_mapping prefill_len",
        ),
        Has(
            f"{GPU}.input_batch:InputBatch",
            "cu_num_logits expanded_idx_mapping expanded_local_pos has_prefill idx_mapping "
            "idx_mapping_np input_ids logits_indices num_reqs positions query_start_loc_np "
            "seq_lens seq_lens_cpu_upper_bound",
        ),
        Has(f"{GPU}.sample.gumbel:gumbel_noised_argmax"),
        # Routes.
        Has(f"{GPU}.model_runner:GPUModelRunner", "aux_output_connector block_tables"),
        Has(
            "vllm.distributed.aux_output_connector.worker:AuxOutputWorkerConnector",
            "_capturer begin_step close prepare_output",
        ),
        Has(
            f"{MODEL}.layers.fused_moe.routed_experts_capturer:RoutedExpertsCapturer",
            "device_buffer",
        ),
        Has(f"{GPU}.block_table:BlockTables", "slot_mappings"),
    ),
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
