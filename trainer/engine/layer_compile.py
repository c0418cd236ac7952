"""torch.compile of the decoder layers: norms, projections, rotary embedding and residuals fuse.

And a warm-up, which has all that a step needs compiled while nobody waits for it: in the first step
that takes some 20 s, in which the engines do nothing.
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
from keel.trainer.engine.policy import Inputs, PolicyNetwork, Reference, recorded_routes
from keel.trainer.placement.memory import rank_tokens, sums_in_float32

_LOG = logging.getLogger(__name__)
BACKEND = "inductor"
"""torch.compile's; on a CPU it needs a C++ compiler, and minutes."""
SEGMENTS, TOKENS, PROMPT, KEPT, SHARED = 3, 61, 16, 4, 37
"""Of the dummy batch: trajectories, tokens of each and of its prompt, ids of a sampling mask, and
tokens of a beginning that all share. Their products are no sizes of a model: torch.compile takes
equal sizes for one, and would compile again for others."""


def compile_layers(model: PreTrainedModel) -> None:
    """Have each decoder layer compiled at its first call, in place.

    A layer is one graph: with several, the host takes longer to call them than a GPU needs for a
    micro-batch of a few thousand tokens. But a mixture-of-experts block stays as it is inside its
    layer: which experts run, and on how many tokens, is known only when it runs, and Keep Routing's
    hooks act there. So does attention without flash attention (`keel.model.attention`). Numbers of
    tokens do not recompile.
    """
    routers = set(router_modules(model))
    for block in model.modules():
        if routers & set(block.children()):
            block.forward = torch.compiler.disable(block.forward)
    specialise_and_recompute()
    for layer in decoder_layers(model):
        layer.compile(backend=BACKEND, dynamic=True)


ENOUGH = 20_480
"""Tokens of a whole micro-batch's dummy, at most. Inductor sums the gradients of a norm with other
kernels from some bound on: 4,096 rows, 5 Mi elements and twice as many rows as columns, which
models of up to 8,192 columns, and of 512 or more in all heads of keys, have by then."""


def worth_it(config: Config, *, gpu: bool, whole: bool) -> bool:
    """Whether ranks have the memory for it while engines sample (those that sleep take it), and
    anything to compile. Under ZeRO 3 weights are gathered by passes that DeepSpeed drives. whole:
    with a micro-batch that may be too large for one rank and not for another, which would wait for
    it in the middle of a layer."""
    trainer = config.trainer
    alone = trainer.sequence_parallel == trainer.expert_parallel == 1
    fits = gpu and not config.rollout.time_share and trainer.zero_stage != 3
    return fits and (not whole or (trainer.compile and alone))


def scores_apart(config: Config) -> bool:
    """Whether there may be trajectories that no micro-batch holds whole: of several contexts. They
    are looked at before a step without gradient, by graphs of their own."""
    return config.algorithm.mask_delta is not None and config.with_agents


def segments_of(tokens: int) -> int:
    """Trajectories of a dummy batch of so many tokens at most, but `SEGMENTS` at least. Beyond that
    they are even in number: offsets, one more, are odd then, which no size of a model is."""
    return max(SEGMENTS, tokens // TOKENS // 2 * 2)


def dummy_batch(
    network: PolicyNetwork, *, routed: bool, truncated: bool, tokens: int = 0, shared: bool = False
) -> MicroBatch:
    """Of `segments_of` so many tokens, and `shared`: those that they begin with. Its routes are
    left to the routers."""
    begun = SHARED if shared else 0
    segments = segments_of(tokens) | shared  # with the beginning even again
    count = begun + segments * TOKENS
    vocabulary = network.model.config.get_text_config().vocab_size
    token_ids = np.arange(count, dtype=np.int32) % (vocabulary - KEPT)
    own = np.concatenate([np.zeros(begun, np.int32), np.tile(np.arange(TOKENS), segments)])
    owner = np.concatenate([np.zeros(begun, np.int64), np.repeat(np.arange(segments), TOKENS)])
    position = np.concatenate([np.arange(begun), begun + own[begun:]]).astype(np.int32)
    segment = owner if not shared else np.where(np.arange(count) < begun, 0, 1 + owner)
    sampled = own >= PROMPT
    routers = router_modules(network.model)
    shape = (count, len(routers), getattr(routers[0], "top_k", 0) if routers else 0)
    masks = [
        np.arange(token, token + KEPT * kept)
        for token, kept in zip(token_ids, sampled, strict=True)
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
    reference: Reference | None,
    config: Config,
    device: torch.device,
    part: Slice,
    *,
    whole: bool = False,
) -> None:
    """A forward and a backward pass over a dummy batch, on all ranks, and one without gradient
    where steps have such (`scores_apart`). It has few tokens, or with `whole` as many as steps
    have, up to `ENOUGH`: the memory of a step, and compiled layers are compiled again for them. No
    parameter's gradient is kept and no random number drawn: what is trained afterwards is the same.
    Out of memory, it ends, and the first step compiles what is left."""
    routed = bool(router_modules(network.model)) and config.algorithm.keep_routing
    truncated = config.algorithm.keep_sampling_mask and config.rollout.sampling.truncated
    tokens = min(ENOUGH, int(rank_tokens(config))) if whole else 0
    kinds = (False, True) if config.trainer.share_prompts else (False,)
    layers = decoder_layers(network.model)
    head: Any = network.model.get_output_embeddings()
    # Down to the first layer, through all others; kernels of the head's gradient are its own.
    learning = [*layers[0].parameters(), *head.parameters()]
    learning = [one for one in learning if one.requires_grad]
    try:
        for shared in kinds:
            batch = dummy_batch(
                network, routed=routed, truncated=truncated, tokens=tokens, shared=shared
            )
            inputs = Inputs.of(batch, device, part)
            if reference is not None:
                reference.logp(inputs)
            with recorded_routes(network, inputs) if routed else nullcontext():
                logp, _, log_mass, *_ = network(inputs=inputs)
                if learning:
                    # Asked for like this, it is added to no parameter's gradient, and DeepSpeed is
                    # told of none.
                    torch.autograd.grad(logp.sum() + log_mass.sum(), learning, allow_unused=True)
                if scores_apart(config):
                    with torch.no_grad():
                        network(inputs=inputs)
        if device.type == "cuda" and sums_in_float32(config.model.dtype, config.trainer):
            from keel.trainer.engine.grad_kernels import add  # noqa: PLC0415  (Triton: on GPUs)

            sums = torch.zeros(1024, device=device)
            add(sums, sums.to(torch.bfloat16))
    except torch.OutOfMemoryError as error:
        _LOG.info("not warmed up: %s", error)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
