"""Imports of every rank: `scenarios.run_all` forks ranks from a process that has loaded this."""

from keel.model.imports import heavy_imports

with heavy_imports():
    # First, as it imports DeepSpeed without MLflow.
    from keel.trainer.engine import engine  # noqa: F401

with heavy_imports():
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.ops.op_builder.all_ops
    import deepspeed.runtime.superoffload.superoffload_stage3
    import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed.utils.nvtx
    import setuptools  # noqa: F401
    import torch._dynamo.backends.debugging
    import torch._dynamo.backends.inductor
    import torch.export._trace  # noqa: F401
    import transformers.models.deepseek_v2.modeling_deepseek_v2
    import transformers.models.deepseek_v3.modeling_deepseek_v3
    import transformers.models.deepseek_v32.modeling_deepseek_v32
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.qwen2_moe.modeling_qwen2_moe
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    from tests.trainer.engine import test_expert_parallel  # noqa: F401

# No profiler marks around DeepSpeed's functions.
deepspeed.utils.nvtx.enable_nvtx = False
