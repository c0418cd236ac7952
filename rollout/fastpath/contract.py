"""What the fast path leans on in vLLM: parts of `keel.rollout.vllm_contract`, which see.

Importing this module does not import vLLM.
"""

from __future__ import annotations

from keel.rollout.vllm_checks import GPU, MODEL, SCHED, Has, Need, Same, Takes, Uses

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

PACKED: tuple[Need, ...] = (
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
        "append_output_token_ids block_hashes client_index "
        "get_finished_reason is_finished is_prefill_chunk "
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
        "batch_sharder cudagraph_manager device get_model input_buffers kv_cache_config "
        "max_num_reqs model rejection_sampler sample sampler vllm_config",
    ),
    Takes(
        f"{GPU}.model_runner:GPUModelRunner.sample",
        "self hidden_states input_batch grammar_output",
    ),
    Uses(f"{GPU}.model_runner:GPUModelRunner.sample", "compute_logits sampler"),
    Uses(f"{GPU}.model_runner:GPUModelRunner.sample_tokens", "sample"),
    Has("vllm.config:VllmConfig", "max_concurrent_batches parallel_config"),
    Has("vllm.config:ParallelConfig", "world_size"),
    Has(f"{GPU}.cudagraph_utils:ModelCudaGraphManager", "hidden_states"),
    Uses(f"{GPU}.cudagraph_utils:ModelCudaGraphManager.run_fullgraph", "hidden_states"),
    Has(f"{GPU}.input_batch:InputBuffers", "positions"),
    Takes(f"{GPU}.sample.sampler:Sampler.add_request", "self req_idx sampling_params"),
    Takes(f"{GPU}.sample.sampler:Sampler.apply_staged_writes", "self"),
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
        "idx_mapping_np input_ids logits_indices num_draft_tokens num_reqs num_tokens "
        "num_tokens_after_padding positions query_start_loc_np seq_lens seq_lens_cpu_upper_bound",
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
)
"""The scheduler, the sampler and the routes."""

FLASH = "vllm.v1.attention.backends.flash_attn"
CASCADE: tuple[Need, ...] = (
    Takes("vllm.v1.attention.backends.registry:register_backend", "backend class_path is_mamba"),
    Has("vllm.v1.attention.backends.registry:AttentionBackendEnum", "FLASH_ATTN clear_override"),
    Has("vllm.v1.attention.selector:_cached_get_attn_backend", "cache_clear"),
    Has("vllm.config.compilation:CUDAGraphMode", "has_full_cudagraphs separate_routine"),
    Has(f"{FLASH}:FlashAttentionBackend", "get_builder_cls get_impl_cls"),
    Takes(
        f"{FLASH}:FlashAttentionMetadataBuilder.build",
        "self common_prefix_len common_attn_metadata fast_build",
    ),
    Has(
        f"{FLASH}:FlashAttentionMetadataBuilder",
        "block_size compilation_config dcp_world_size device headdim kv_cache_dtype "
        "max_cudagraph_size model_config num_heads_kv num_heads_q rswa_window",
    ),
    Has("vllm.v1.attention.backend:AttentionMetadataBuilder", "layer_names vllm_config"),
    Has(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        "block_table_tensor causal max_query_len max_seq_len num_actual_tokens num_reqs "
        "query_start_loc seq_lens slot_mapping",
    ),
    Has(
        f"{FLASH}:FlashAttentionMetadata",
        "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table "
        "slot_mapping",
    ),
    Takes(
        f"{FLASH}:FlashAttentionImpl.forward",
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    Has(
        f"{FLASH}:FlashAttentionImpl",
        "alibi_slopes attn_type batch_invariant_enabled head_size kv_cache_dtype logits_soft_cap "
        "scale sinks sliding_window",
    ),
    # Keys and values are in the cache before a layer's attention, which finds them by block.
    Has(f"{FLASH}:FlashAttentionImpl", "do_kv_cache_update"),
    Has("vllm.v1.attention.backend:AttentionType", "DECODER"),
    Has("vllm.config:get_layers_from_vllm_config"),
    Has(f"{MODEL}.layers.attention:Attention", "impl"),
    Has("vllm.config:ModelConfig", "is_mm_prefix_lm"),
    Has("vllm.config:SchedulerConfig", "max_num_seqs"),
)
"""Attention (cascade/)."""

RUNNER = f"{GPU}.model_runner:GPUModelRunner"
STEADY: tuple[Need, ...] = (
    *CACHE_LAYOUT,
    # All that is done for a step, since it is left out; and all that a step may ask for.
    Same(f"{RUNNER}.execute_model", "a2e18ad74dac"),
    Same(f"{RUNNER}.finish_requests", "e89475fd34ef"),
    Same(f"{RUNNER}.free_states", "d0f5644de77f"),
    Same(f"{RUNNER}.add_requests", "ae331f383472"),
    Same(f"{RUNNER}.update_requests", "2fd3b6e227fe"),
    Same(f"{RUNNER}.gather_batch_req_state", "5ffd2d3fd8db"),
    Same(f"{RUNNER}.prepare_inputs", "6e886388ff9c"),
    Same(f"{RUNNER}.prepare_attn", "4153c33a30ea"),
    Takes(
        f"{SCHED}.output:SchedulerOutput",
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
        "total_num_scheduled_tokens scheduled_spec_decode_tokens scheduled_encoder_inputs "
        "finished_req_ids free_encoder_mm_hashes scheduled_encoder_input_stats "
        "preempted_req_ids has_structured_output_requests "
        "pending_structured_output_tokens num_invalid_spec_tokens kv_connector_metadata "
        "has_sync_kv_loads aux_output_connector_metadata ec_connector_metadata "
        "ec_manager_metadata new_block_ids_to_zero kv_cache_block_copies "
        "kv_connector_block_state num_spec_tokens_to_schedule num_common_prefix_blocks",
    ),
    Has(
        f"{SCHED}.output:SchedulerOutput",
        "aux_output_connector_metadata finished_req_ids free_encoder_mm_hashes "
        "has_structured_output_requests kv_cache_block_copies new_block_ids_to_zero "
        "num_scheduled_tokens preempted_req_ids scheduled_cached_reqs scheduled_new_reqs",
    ),
    Has(f"{SCHED}.output:CachedRequestData", "new_block_ids num_computed_tokens req_ids"),
    Has(
        RUNNER,
        "attn_groups aux_output_connector block_tables cudagraph_manager dcp_size encoder_cache "
        "execute_model execute_model_state fast_prefill input_buffers is_encoder_decoder "
        "kv_cache_config kv_connector lora_config model_config model_state "
        "num_speculative_steps observability_config pcp_manager pooling_runner req_states "
        "sampler ubatch_runner uses_inputs_embeds vllm_config",
    ),
    Has(f"{GPU}.sample.sampler:Sampler", "apply_staged_writes"),
    Has(
        f"{GPU}.model_runner:ExecuteModelState",
        "_replace attn_metadata hidden_states input_batch slot_mappings_by_layer",
    ),
    Takes(
        f"{GPU}.cudagraph_utils:ModelCudaGraphManager.dispatch",
        "self num_reqs num_tokens uniform_token_count num_active_loras max_query_len num_ubatches",
    ),
    Takes(f"{GPU}.cudagraph_utils:ModelCudaGraphManager.run_fullgraph", "self desc"),
    Has("vllm.config.compilation:CUDAGraphMode", "FULL"),
    Has(f"{GPU}.kv_connector:NO_OP_KV_CONNECTOR"),
    Takes(
        f"{GPU}.model_states.default:DefaultModelState.prepare_attn",
        "self input_batch cudagraph_mode block_tables slot_mappings attn_groups kv_cache_config "
        "for_capture ubatch_idx model_specific_attn_metadata",
    ),
    Has(f"{GPU}.model_states.default:DefaultModelState", "prompt_embeds_state rope_state"),
    Has(
        f"{GPU}.states:RequestState",
        "last_sampled_tokens num_computed_tokens num_computed_tokens_np",
    ),
    Has(f"{GPU}.input_batch:InputBuffers", "input_ids positions seq_lens"),
    Has(
        f"{GPU}.input_batch:InputBatch",
        "has_prefill idx_mapping idx_mapping_np num_computed_tokens_np num_draft_tokens num_reqs "
        "num_reqs_after_padding num_tokens num_tokens_after_padding req_ids "
        "seq_lens_cpu_upper_bound",
    ),
    Has(
        f"{GPU}.block_table:BlockTables",
        "append_block_ids apply_staged_writes block_sizes block_tables gather_block_tables "
        "input_block_tables slot_mappings",
    ),
    Has("vllm.config:VllmConfig", "parallel_config"),
    Has("vllm.config:ParallelConfig", "data_parallel_size enable_eplb world_size"),
    Has("vllm.config:ModelConfig", "rswa_window"),
    Has("vllm.config:ObservabilityConfig", "cudagraph_metrics"),
)
"""Steps with the rows of the one before (steady_steps.py)."""

BURSTS: tuple[Need, ...] = (
    # All that is done once a step's hidden states are there, since some of it is left out.
    Same(f"{RUNNER}.sample_tokens", "0c0bd3da3490"),
    Same(f"{RUNNER}.postprocess_sampled", "1a0042e2b19a"),
    Takes(
        f"{RUNNER}.postprocess_sampled",
        "self idx_mapping sampled_tokens num_sampled num_rejected query_start_loc",
    ),
    Has(
        "vllm.distributed.aux_output_connector.worker:AuxOutputWorkerConnector",
        "begin_step prepare_output",
    ),
    Has(RUNNER, "main_stream output_copy_stream postprocess_sampled sample sample_tokens sampler"),
    Has(f"{GPU}.input_batch:InputBatch", "query_start_loc"),
    Has(f"{GPU}.sample.sampler:Sampler", "get_logprobs_dims"),
    Has(
        f"{GPU}.sample.output:SamplerOutput",
        "logprobs_tensors sampled_token_ids sampling_mask_tensors",
    ),
    Same(f"{GPU}.input_batch:post_update", "e2a3c9c2b120"),
    Has("vllm.v1.outputs:AsyncModelRunnerOutput", "get_output"),
    Uses(f"{GPU}.async_utils:AsyncOutput.get_output", "copy_event synchronize"),
    Uses(f"{GPU}.async_utils:AsyncOutput.__init__", "copy_event record to_cpu_nonblocking"),
    # A step is begun as soon as it is scheduled, in this process, and its tokens come later.
    Uses(
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        "execute_model sample_tokens schedule update_from_output",
    ),
    Uses("vllm.v1.executor.uniproc_executor:UniProcExecutor.collective_rpc", "run_method"),
    # Several tokens of a request in one output.
    Uses(
        f"{SCHED}.scheduler:Scheduler.update_from_output",
        "num_in_flight_tokens num_scheduled_tokens sampled_token_ids slice_request",
    ),
    Takes("vllm.v1.outputs:LogprobsLists.slice_request", "self req_idx num_positions"),
    Takes("vllm.v1.outputs:SamplingMaskLists.slice_request", "self req_idx num_positions"),
)
"""Several steps at once (bursts.py, and steady_steps.py that takes them)."""
