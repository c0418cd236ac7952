"""Compiles the decoder layers with torch.compile, and has a warm-up that does this while the
engines start.

Without the warm-up, the first step spends about 20 s on compiling while the engines are idle.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from keel.configs.schema import Config
from keel.model.routing.routers import router_modules
from keel.model.torch_internals import specialise_and_recompute
from keel.model.trainable import decoder_layers
from keel.model.ulysses import Slice
from keel.rl.packing import MicroBatch
from keel.rl.types import NO_ROUTE, SamplingMasks
from keel.trainer.engine.policy import (
    BasePolicy,
    Inputs,
    PolicyNetwork,
    ReferencePolicy,
    recorded_routes,
)
from keel.trainer.placement.memory import rank_tokens, sums_in_float32

_LOG = logging.getLogger(__name__)
BACKEND = "inductor"
"""The backend for torch.compile. On a CPU it needs a C++ compiler and takes minutes."""
SEGMENTS, TOKENS, PROMPT, KEPT, SHARED = 3, 61, 16, 4, 37
"""The dummy batch: number of trajectories, tokens in each of them and in its prompt, ids in a
sampling mask, and tokens in a shared beginning. No product of these equals a size in a model,
because torch.compile treats equal sizes as the same and would recompile when they differ."""
MAX_TOKENS = 20_480
"""Number of tokens in a dummy for a whole micro-batch. Inductor uses different kernels for the
gradients of norms from 4,096 rows, from 5 Mi elements and from rows = 2 · columns. A dummy with
this many tokens is beyond all of these limits for models with up to 8,192 columns, and with at
least 512 in all key heads together."""


def compile_layers(model: PreTrainedModel) -> None:
    """Make each decoder layer compile at its first call.

    A layer is compiled as one graph, since launching several graphs takes longer than the GPU needs
    for a small micro-batch. MoE blocks are not compiled, because their shapes depend on routing and
    Keep Routing hooks into them. Attention is not compiled either, unless it uses flash attention.
    The number of tokens is dynamic.
    """
    routers = set(router_modules(model))
    for block in model.modules():
        if routers & set(block.children()):
            block.forward = torch.compiler.disable(block.forward)
    specialise_and_recompute()
    for layer in decoder_layers(model):
        layer.compile(backend=BACKEND, dynamic=True)


def needs_warm_up(config: Config, *, gpu: bool, whole: bool) -> bool:
    """Return True if there is something to compile and the ranks have enough memory to warm up
    while engines sample. There is no warm-up under ZeRO-3, which gathers weights only in passes
    that DeepSpeed runs. `whole` asks about a warm-up with a full micro-batch. If that did not fit
    on one rank, other ranks could hang waiting for it inside a layer."""
    trainer = config.trainer
    alone = trainer.sequence_parallel == trainer.expert_parallel == 1
    fits = gpu and not config.rollout.time_share and trainer.zero_stage != 3
    return fits and (not whole or (trainer.compile and alone))


def _scores_first(config: Config) -> bool:
    """Return True if trajectories may be split over micro-batches. These are scored before a
    step."""
    return config.algorithm.mask_delta is not None and config.with_agents


def _segment_count(tokens: int) -> int:
    """Return the number of trajectories in a dummy batch: as many as fit into `tokens`, but at
    least `SEGMENTS`. Larger counts are even, so that the number of offsets is odd and differs from
    every size in a model."""
    return max(SEGMENTS, tokens // TOKENS // 2 * 2)


def _dummy_batch(
    network: PolicyNetwork, *, routed: bool, truncated: bool, tokens: int = 0, shared: bool = False
) -> MicroBatch:
    begun = SHARED if shared else 0
    segments = _segment_count(tokens) | shared  # even again with the shared beginning
    count = begun + segments * TOKENS
    vocabulary = network.model.config.get_text_config().vocab_size
    token_ids = np.arange(count, dtype=np.int32) % (vocabulary - KEPT)
    local = np.concatenate([np.zeros(begun, np.int32), np.tile(np.arange(TOKENS), segments)])
    owner = np.concatenate([np.zeros(begun, np.int64), np.repeat(np.arange(segments), TOKENS)])
    position = np.concatenate([np.arange(begun), begun + local[begun:]]).astype(np.int32)
    segment = owner if not shared else np.where(np.arange(count) < begun, 0, 1 + owner)
    sampled = local >= PROMPT
    routers = router_modules(network.model)
    shape = (count, len(routers), getattr(routers[0], "top_k", 0) if routers else 0)
    masks = [
        np.arange(token, token + KEPT * truncates)
        for token, truncates in zip(token_ids, sampled, strict=True)
    ]
    return MicroBatch(
        token_ids_N=token_ids,
        position_N=position,
        segment_N=segment.astype(np.int32),
        sequence_N=owner,
        trainable_N=sampled,
        logp_old_N=np.where(sampled, -1.0, 0.0).astype(np.float32),
        advantage_N=np.zeros(count, np.float32),
        kl_coef_N=np.zeros(count, np.float32),
        sequence_tokens_S=np.full(segments, TOKENS - PROMPT),
        sequence_weight_S=np.ones(segments, np.float32),
        routes_NLK=np.full(shape, NO_ROUTE, np.int16) if routed else None,
        sampling_mask=SamplingMasks.from_lists(masks) if truncated else None,
        follows=np.array([-1] + [0] * segments) if shared else None,
    )


def warm_up(
    network: PolicyNetwork,
    reference: ReferencePolicy | BasePolicy | None,
    config: Config,
    device: torch.device,
    part: Slice,
    *,
    whole: bool = False,
) -> None:
    """Run forward and backward passes over dummy batches, so that kernels are compiled.

    With `whole`, a batch has as many tokens as in a step, up to `MAX_TOKENS`, and needs as much
    memory. No gradient is kept and no random number is drawn. The warm-up ends silently if it runs
    out of memory.
    """
    routed = bool(router_modules(network.model)) and config.algorithm.keep_routing
    truncated = config.algorithm.keep_sampling_mask and config.rollout.sampling.truncated
    tokens = min(MAX_TOKENS, int(rank_tokens(config))) if whole else 0
    kinds = (False, True) if config.trainer.share_prompts else (False,)
    layers = decoder_layers(network.model)
    head: Any = network.model.get_output_embeddings()
    # Reaches the first layer through all others; the head's gradient has its own kernels.
    parameters = [*layers[0].parameters(), *head.parameters()]
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for shared in kinds:
            batch = _dummy_batch(
                network, routed=routed, truncated=truncated, tokens=tokens, shared=shared
            )
            inputs = Inputs.of(batch, device, part)
            if reference is not None:
                reference.logp(inputs)
            with recorded_routes(network, inputs) if routed else nullcontext():
                logp, _, log_mass, *_ = network(inputs=inputs)
                if parameters:
                    # Accumulates nothing and triggers no hook of DeepSpeed.
                    torch.autograd.grad(logp.sum() + log_mass.sum(), parameters, allow_unused=True)
                if _scores_first(config):
                    with torch.no_grad():
                        network(inputs=inputs)
        if device.type == "cuda" and sums_in_float32(config.model.dtype, config.trainer):
            from keel.trainer.engine.grad_kernels import add  # noqa: PLC0415  (needs Triton)

            sums = torch.zeros(1024, device=device)
            add(sums, sums.to(torch.bfloat16))
    except torch.OutOfMemoryError as error:
        _LOG.info("not warmed up: %s", error)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
