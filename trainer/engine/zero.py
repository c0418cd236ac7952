"""What Keel asks of DeepSpeed."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from keel.configs.schema import Config, TrainerConfig
from keel.model.torch_internals import check_torch
from keel.trainer.engine.deepspeed_internals import (
    DeepSpeedEngine,
    check_experts,
    deepspeed,
    gradient_sums,
    skip_shared_memory_op,
    whole_shape,
)
from keel.trainer.engine.expert_parallel import autoep_config, by_expert_group, clip_gradients
from keel.trainer.engine.state.optimizer_internals import forget_sums, grow_loss_scale
from keel.trainer.placement.memory import bucket_elements
from keel.trainer.run.restarts import UpdateOutOfMemory

SCALE_POWER = 16
"""float16: the loss is first multiplied by 2 to this power, and half of it after an overflow."""
SCALE_WINDOW = 100
"""float16: optimizer steps without an overflow after which the loss's scale is doubled."""
NEVER = 2**31
"""Steps."""


def check_libraries(*, expert_parallel: int) -> str:
    """Look at what is used of PyTorch and DeepSpeed beyond their public names, before anything is
    loaded. Returns a line about what is lost, if anything.

    Raises `RuntimeError` for what nothing can replace.
    """
    check_torch()
    if expert_parallel > 1:
        check_experts()
    return skip_shared_memory_op()


def initialize(
    model: nn.Module,
    config: Mapping[str, Any],
    device: torch.device,
    optimizer: Callable[[Any], Optimizer] | None = None,
) -> DeepSpeedEngine:
    """Hand a model in host memory over to DeepSpeed, in a process group that exists.

    Under ZeRO-3 the parameters reach the device one by one, each as this rank's shard, so the
    model may be larger than the device. `optimizer` is called when DeepSpeed has made of the model
    what it trains: under expert parallelism with other parameters than before.

    What DeepSpeed prints is dropped; what it logs (warnings and errors) still appears.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    with redirect_stdout(io.StringIO()):
        if config["zero_optimization"]["stage"] == 3:
            dtype = next(model.parameters()).dtype
            for parameter in model.parameters():
                # Beside float16 transformers keeps some in float32, which one buffer cannot hold;
                # at the other stages DeepSpeed rounds them, too.
                parameter.data = parameter.data.to(dtype)
            deepspeed.zero.Init(module=model, config_dict_or_path=dict(config), dtype=dtype)
            for buffer in model.buffers():
                buffer.data = buffer.data.to(device)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
    if (scaler := getattr(engine.optimizer, "loss_scaler", None)) is not None:
        scaler.raise_error_at_min_scale = False  # `Skips` ends a run, and says why
    return engine


def deepspeed_config(
    trainer: TrainerConfig,
    dtype: torch.dtype,
    device: torch.device,
    model: PreTrainedModel,
) -> dict[str, Any]:
    """DeepSpeed's configuration dict.

    Gradients accumulate and are reduced in float32 whatever the compute dtype. The number of
    micro-batches varies from step to step, so DeepSpeed is told 1 and the engine marks the
    boundaries itself.
    """
    stage = zero_stage(trainer, dtype)
    # DeepSpeed has its bucket as large as it is told, however small the model.
    elements = sum(one.numel() for one in model.parameters() if one.requires_grad)
    bucket = min(bucket_elements(trainer), elements)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": trainer.grad_clip if stage else 0.0,  # the engine clips at stage 0
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    if dtype == torch.bfloat16:
        # Stage 1: each gradient joins the float32 sum, and is freed, as soon as it is there.
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
    elif dtype == torch.float16:
        # The loss's scale: halved after each step that overflows, doubled after a window of steps
        # that do not (`grow_loss_scale`). A run has hundreds, not the hundred thousands that
        # DeepSpeed's window is for.
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": SCALE_POWER,
            "loss_scale_window": NEVER,
            "hysteresis": 1,
        }
    if trainer.offload_optimizer:
        on_gpu = device.type == "cuda"
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        config["zero_force_ds_cpu_optimizer"] = False  # PyTorch's fused AdamW is one for the CPU
    if stage == 3:
        # Parameters up to a few rows of the hidden size (norms, biases, routers) stay whole.
        hidden_size = model.config.get_text_config().hidden_size
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 10 * hidden_size
    if trainer.expert_parallel > 1:
        grouped = device.type == "cuda" and dtype == torch.bfloat16
        text = model.config.get_text_config()
        config["expert_parallel"] = autoep_config(trainer.expert_parallel, text, grouped=grouped)
    return config


def frozen_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a model that is not trained: below ZeRO-3 there is nothing else to shard.

    There it stays in the dtype it was loaded in: told of another, DeepSpeed wants an optimizer.
    """
    if config["zero_optimization"]["stage"] == 3:
        return dict(config)
    rest = {name: value for name, value in config.items() if name not in ("bf16", "fp16")}
    return {**rest, "zero_optimization": {"stage": 0}}


def zero_stage(trainer: TrainerConfig, dtype: torch.dtype) -> int:
    """The stage in use: DeepSpeed keeps float32 master weights from stage 1 up only."""
    return trainer.zero_stage if dtype == torch.float32 else max(1, trainer.zero_stage)


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """On a CPU always float32: there less would cost accuracy and save no time."""
    return getattr(torch, config.model.dtype) if device.type == "cuda" else torch.float32


def adam_for(module: nn.Module, trainer: TrainerConfig, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        optimizer_groups(module, trainer.weight_decay),
        lr=trainer.lr,
        betas=(trainer.beta1, trainer.beta2),
        eps=trainer.eps,
        fused=device.type == "cuda" or trainer.offload_optimizer,
    )


def apply_gradients(
    engine: DeepSpeedEngine, module: nn.Module, *, stage: int, clip: float
) -> float:
    """An optimizer step, unless the gradient norm (returned, before clipping) is not finite: then
    gradients are dropped, and weights and optimizer are as they were. clip: 0 for none."""
    if stage > 0:  # DeepSpeed clips, and skips a norm that is not finite
        engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None  # only where its computation is switched off
        if math.isfinite(norm):
            grow_loss_scale(engine, SCALE_WINDOW)
        else:
            forget_sums(engine)
        return float(norm)
    norm = clip_gradients(module.parameters(), clip or math.inf)
    if math.isfinite(norm):
        engine.step()
    else:
        engine.zero_grad()
    return norm


@contextmanager
def room_to_update(config: Config) -> Iterator[None]:
    """Raises `UpdateOutOfMemory` where the GPU is too small for what is done in it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UpdateOutOfMemory(
            f"there is no room to update the weights ({error}). Smaller micro-batches do not help "
            f"there; what may: {update_memory_knobs(config)}"
        ) from None


def update_memory_knobs(config: Config) -> str:
    """Knobs that free memory for an optimizer step, when activations are already gone."""
    trainer, rollout = config.trainer, config.rollout
    ways: list[str] = []
    if rollout.colocated and not rollout.time_share:
        ways += ["rollout.time_share: true", "a smaller rollout.gpu_memory_utilization"]
    if not trainer.offload_optimizer:
        ways.append("trainer.offload_optimizer: true")
    if trainer.zero_stage < 3:
        ways.append(f"trainer.zero_stage: {'3' if trainer.zero_stage == 2 else '2 or 3'}")
    return ", ".join([*ways, "more trainer.ranks"])


def drop_gradients(engine: DeepSpeedEngine, module: nn.Module) -> None:
    """Of a backward pass that was cut short, on a single rank: as if it had not begun."""
    module.zero_grad(set_to_none=True)
    for summed in gradient_sums(engine.optimizer):
        if summed.untyped_storage().nbytes():  # it may be offloaded
            summed.zero_()
    torch.cuda.empty_cache()


def optimizer_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: no decay on vectors (norms, biases)."""
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            decay = weight_decay if len(whole_shape(parameter)) >= 2 else 0.0
            groups.setdefault(decay, []).append(parameter)
    return [
        {**group, "weight_decay": decay}
        for decay, parameters in groups.items()
        for group in by_expert_group(parameters)
    ]
