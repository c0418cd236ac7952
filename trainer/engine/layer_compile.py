"""torch.compile of the decoder layers, and a warm-up that compiles while engines start.

Without the warm-up the first step compiles for some 20 s, while the engines idle.
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
from keel.trainer.engine.policy import Inputs, PolicyNetwork, ReferencePolicy, recorded_routes
from keel.trainer.placement.memory import rank_tokens, sums_in_float32

_LOG = logging.getLogger(__name__)
BACKEND = "inductor"
"""Backend of torch.compile; on a CPU it needs a C++ compiler, and minutes."""
SEGMENTS, TOKENS, PROMPT, KEPT, SHARED = 3, 61, 16, 4, 37
"""Dummy batch: trajectories, tokens of each and of its prompt, ids of a sampling mask, and tokens
of a shared beginning. Their products match no size of a model, because torch.compile treats equal
sizes as one and would recompile for others."""
MAX_TOKENS = 20_480
"""Tokens of a whole micro-batch's dummy. Inductor's kernels for the gradients of norms change at
4,096 rows, 5 Mi elements and rows = 2 · columns, which models of up to 8,192 columns, and of 512 or
more in all key heads, have reached by then."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer at its first call, in place.

    A layer is one graph, since launching several takes longer than a GPU needs for a small
    micro-batch. MoE blocks stay eager, as their shapes depend on routing and Keep Routing hooks
    into them, and so does attention without flash attention. Numbers of tokens are dynamic.
    """
    routers = set(router_modules(model))
    for block in model.modules():
        if routers & set(block.children()):
            block.forward = torch.compiler.disable(block.forward)
    specialise_and_recompute()
    for layer in decoder_layers(model):
        layer.compile(backend=BACKEND, dynamic=True)


def needs_warm_up(config: Config, *, gpu: bool, whole: bool) -> bool:
    """True if ranks have memory for a warm-up while engines sample, and something to compile.

    ZeRO-3 gathers weights only in passes that DeepSpeed drives. whole: with a full micro-batch,
    which may not fit on one rank while another one would wait for it inside a layer.
    """
    trainer = config.trainer
    alone = trainer.sequence_parallel == trainer.expert_parallel == 1
    fits = gpu and not config.rollout.time_share and trainer.zero_stage != 3
    return fits and (not whole or (trainer.compile and alone))


def _scores_first(config: Config) -> bool:
    """True if trajectories may be split over micro-batches, which are scored before a step."""
    return config.algorithm.mask_delta is not None and config.with_agents


def _segment_count(tokens: int) -> int:
    """Trajectories of a dummy batch of at most `tokens`, but at least `SEGMENTS`.

    Larger counts are even, so that the number of offsets is odd and matches no size of a model.
    """
    return max(SEGMENTS, tokens // TOKENS // 2 * 2)


def _dummy_batch(
    network: PolicyNetwork, *, routed: bool, truncated: bool, tokens: int = 0, shared: bool = False
) -> MicroBatch:
    """A batch of `_segment_count(tokens)` trajectories. shared: with a common beginning."""
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
    reference: ReferencePolicy | None,
    config: Config,
    device: torch.device,
    part: Slice,
    *,
    whole: bool = False,
) -> None:
    """Run forward and backward passes over dummy batches, which change nothing.

    whole: with as many tokens as a step has, up to `MAX_TOKENS`, and its memory. No gradient is
    kept and no random number drawn. Running out of memory ends it silently.
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
