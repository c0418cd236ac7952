"""Set up a rank: its process group, DeepSpeed engine, optimizer, attention kernels and compiled
layers."""

import io
import math
import os
import warnings
from collections.abc import Callable, Mapping, Set
from contextlib import redirect_stdout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer
from transformers import PreTrainedModel

from keel.configs.schema import Config, TrainerConfig
from keel.model.layers import flash4
from keel.model.routing import router_modules
from keel.model.sparse.attention import indexers
from keel.model.tiny.build import default_cache_dir
from keel.model.torch_internals import specialise_and_recompute
from keel.model.trainable import decoder_layers
from keel.trainer.engine.deepspeed_internals import (
    DeepSpeedEngine,
    deepspeed,
    hpz_group,
    whole_shape,
)
from keel.trainer.engine.expert_parallel import autoep_config, by_expert_group

SCALE_POWER = 16
"""Base-2 logarithm of the initial loss scale in float16. The scale is halved after each
overflow."""
SCALE_WINDOW = 100
"""Number of optimizer steps without overflow after which the float16 loss scale is doubled."""
BACKEND = "inductor"
"""The backend for torch.compile. On a CPU, it needs a C++ compiler and takes minutes to compile."""
_NEVER = 2**31  # a number of optimizer steps that is never reached


def join_ranks(
    rank: int, world_size: int, store: Store | None, *, timeout_s: float
) -> torch.device:
    """Create the process group and return this rank's device. Collectives time out after
    `timeout_s`."""
    local = int(os.environ.setdefault("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store or dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    return device


def initialize(
    model: nn.Module,
    config: Mapping[str, Any],
    device: torch.device,
    optimizer: Callable[[Any], Optimizer] | None = None,
) -> DeepSpeedEngine:
    """Wrap a model in host memory in a DeepSpeed engine. Under ZeRO-3, parameters are sharded and
    moved to the device one at a time. `optimizer` is called to create the optimizer once AutoEP has
    replaced parameters."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    with redirect_stdout(io.StringIO()):
        if config["zero_optimization"]["stage"] == 3:
            dtype = next(model.parameters()).dtype
            for parameter in model.parameters():
                # transformers keeps some float32 parameters next to float16 ones, but ZeRO-3 needs
                # one dtype. DeepSpeed rounds them at the other stages, too.
                parameter.data = parameter.data.to(dtype)
            deepspeed.zero.Init(
                module=model,
                config_dict_or_path=dict(config),
                dtype=dtype,
                zero_param_parallel_group=hpz_group(),
            )
            for buffer in model.buffers():
                buffer.data = buffer.data.to(device)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
    if (scaler := getattr(engine.optimizer, "loss_scaler", None)) is not None:
        scaler.raise_error_at_min_scale = False  # `trainer.nonfinite` ends the run instead
    return engine


def deepspeed_config(
    trainer: TrainerConfig, dtype: torch.dtype, device: torch.device, model: PreTrainedModel
) -> dict[str, Any]:
    """Build DeepSpeed's config. Gradients are accumulated and reduced in float32. DeepSpeed is set
    up to accumulate over a single micro-batch, and the engine itself marks the end of a step."""
    stage = trainer.used_zero_stage(float32=dtype == torch.float32)
    # DeepSpeed allocates the whole bucket even for a smaller model.
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bucket = min(trainer.bucket_elements, elements)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": trainer.grad_clip if stage else 0.0,  # at stage 0 the engine clips
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    if dtype == torch.bfloat16:
        # Stage 1: each gradient is added to its float32 sum and freed at once.
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
    elif dtype == torch.float16:
        # DeepSpeed never grows the scale; `grow_loss_scale` does after `SCALE_WINDOW` steps, as a
        # run has hundreds of steps, not the hundred thousand of DeepSpeed's default.
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": SCALE_POWER,
            "loss_scale_window": _NEVER,
            "hysteresis": 1,
        }
    if trainer.offload_optimizer:
        on_gpu = device.type == "cuda"
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        config["zero_force_ds_cpu_optimizer"] = False  # PyTorch's fused AdamW runs on the CPU
    if stage == 3:
        # Norms, biases and routers stay unsharded.
        hidden_size = model.config.get_text_config().hidden_size
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 10 * hidden_size
        config["zero_optimization"]["zero_hpz_partition_size"] = trainer.hpz_partition_size
    if trainer.expert_parallel > 1:
        grouped = device.type == "cuda" and dtype == torch.bfloat16
        text = model.config.get_text_config()
        config["expert_parallel"] = autoep_config(trainer.expert_parallel, text, grouped=grouped)
    return config


def frozen_config(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["zero_optimization"]["stage"] == 3:
        return dict(config)
    rest = {name: value for name, value in config.items() if name not in ("bf16", "fp16")}
    return {**rest, "zero_optimization": {"stage": 0}}


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    return getattr(torch, config.model.dtype) if device.type == "cuda" else torch.float32


def learning_rate(step: int, config: TrainerConfig, *, total_steps: int) -> float:
    """Return the learning rate for a step, counting from 1. It ramps up linearly to `lr` over
    `warmup_steps` steps. The `linear` and `cosine` schedules then decay it to `min_lr` at the last
    step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    done = min(1.0, done)
    share = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * share


def create_adam(
    module: nn.Module, trainer: TrainerConfig, device: torch.device
) -> torch.optim.AdamW:
    """Create an AdamW optimizer without weight decay on vectors (norms and biases). The indexers of
    sparse attention have parameter groups of their own, with `indexers` set."""
    own = {p for indexer in indexers(module) for p in indexer.parameters()}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            decay = trainer.weight_decay if len(whole_shape(parameter)) >= 2 else 0.0
            groups.setdefault((decay, parameter in own), []).append(parameter)
    return torch.optim.AdamW(
        [
            {**group, "weight_decay": decay, "indexers": of_indexers}
            for (decay, of_indexers), parameters in groups.items()
            for group in by_expert_group(parameters)
        ],
        lr=trainer.lr,
        betas=(trainer.beta1, trainer.beta2),
        eps=trainer.eps,
        fused=device.type == "cuda" or trainer.offload_optimizer,
    )


def clipped_apart(module: nn.Module) -> Set[nn.Parameter]:
    """Return the indexers' parameters if they are trained together with other parameters. They have
    a loss of their own, whose scale must not change how the other gradients are clipped."""
    own = {p for indexer in indexers(module) for p in indexer.parameters() if p.requires_grad}
    others = any(p.requires_grad and p not in own for p in module.parameters())
    return own if others else frozenset()


def use_flash4(config: Config, model: PreTrainedModel, device: torch.device) -> str:
    """Use FlashAttention-4 if the recipe allows it. Returns "", or a warning that the package
    cannot be used. Raises RuntimeError instead of warning if the recipe requires it."""
    trainer, longest = config.trainer, config.max_context
    flash4.restore_torch_kernels()  # an earlier engine's
    if config.model.batch_invariant or not trainer.flash4(longest) or device.type != "cuda":
        return ""
    ranks = trainer.sequence_parallel
    reason = flash4.use_flash4(model, device, default_cache_dir(), sequence_parallel=ranks)
    if reason and trainer.attention_kernels == "flash4":
        raise RuntimeError(f"trainer.attention_kernels = flash4: {reason}. Set it to auto")
    if not reason.startswith(flash4.PACKAGE):
        return ""
    return (
        f"{reason}. Attention over {longest:,} tokens uses PyTorch's kernels, which are up to half "
        "as fast. Set trainer.attention_kernels to torch to hide this warning"
    )


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer on its first call, for any number of tokens.

    Each layer becomes a single graph. With several graphs per layer, launching them would take
    longer than a small micro-batch takes on the GPU. MoE blocks aren't compiled, because their
    shapes depend on the routing, and because Keep Routing (`keel.model.routing`) hooks into them.
    Attention is compiled only if it uses flash attention.
    """
    routers = set(router_modules(model))
    for block in model.modules():
        if routers & set(block.children()):
            block.forward = torch.compiler.disable(block.forward)
    specialise_and_recompute()
    for layer in decoder_layers(model):
        layer.compile(backend=BACKEND, dynamic=True)
