"""Estimate the memory and time of a run before it starts, and check that it fits."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from keel.configs.schema import Config, ConfigError, SamplingConfig
from keel.model.load import ModelFacts
from keel.trainer.placement import memory
from keel.trainer.placement.families import check_trainer
from keel.trainer.placement.hardware import Hardware, Placement, place
from keel.trainer.placement.memory import (
    GIB,
    DoesNotFit,
    Memory,
    MemoryLimit,
    count_micro_batches,
    gib,
)
from keel.trainer.placement.step_time import StepTime, seconds, sft_seconds, step_time

_SECTIONS = (
    *("model", "data", "batch", "attention", "steps", "sampling", "stabilisers"),
    *("actors", "hardware", "placement", "memory", "time", "run folder"),
)
"""The sections of a plan in the order in which they are shown."""
_ATTENTION = {
    "warm-up": "dense; the indexers alone are trained, by Eq. 3",
    "dense": "dense; everything but the indexers is trained",
    "sparse": "sparse; the indexers are trained by Eq. 4 alone, the rest by the model's loss",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run's estimated memory and time."""

    engine: Memory
    trainer: Memory
    """All parts of a rank's memory, including parts that are never in use at the same time."""
    peak: float  # maximum number of bytes that a rank holds on its GPU at any time
    cached: int | None
    """Number of full-length trajectories that fit in an engine's KV cache, or None if unknown."""
    offload: memory.OffloadPlan
    time: StepTime | None  # estimated time per step, or None if it is unknown


def _hint(config: Config, facts: ModelFacts, hardware: Hardware, limit: MemoryLimit) -> str:
    trainer, most = config.trainer, max(node.gpus for node in hardware.nodes)
    if limit == "engine":
        return (
            "Spread an engine's weights over more GPUs (rollout.tensor_parallel = "
            f"{config.rollout.tensor_parallel}; above {most}, a multiple of it takes several "
            "nodes), or use larger GPUs"
            + ", or set algorithm.keep_selection=false"
            * config.algorithm.keep_selection
        )
    if limit == "rank":
        return _rank_hint(config, facts, hardware)
    ways = {
        "trainer.offload_optimizer=false": trainer.offload_optimizer,
        "trainer.offload_while_sampling=false": trainer.offload_while_sampling,
        "algorithm.keep_selection=false": config.algorithm.keep_selection,
        "fewer trainer ranks per node": True,
    }
    useful = ", ".join(way for way, helps in ways.items() if helps)
    return f"Save host memory with {useful}, or use larger nodes"


def _rank_hint(config: Config, facts: ModelFacts, hardware: Hardware) -> str:
    """Name changes that alone make the recipe fit, each with the first value that is enough. If
    there are none, name the knobs that save some memory."""
    trainer, factors = config.trainer, [2**n for n in range(1, 10)]
    micro, share = "trainer.micro_batch_tokens", config.rollout.gpu_memory_utilization
    length, tokens = "rollout.sampling.max_tokens", config.rollout.sampling.max_tokens
    if not config.data.sources:
        length, tokens = "sft.max_context_tokens", config.sft.max_context_tokens
    options: dict[str, list[Any]] = {
        "trainer.activation_checkpointing": [True],
        "trainer.zero_stage": [3],
        "trainer.hpz_partition_size": [1],
        "trainer.expert_parallel": [n for n in factors if n > trainer.expert_parallel],
        "trainer.sequence_parallel": [n for n in factors if n > trainer.sequence_parallel],
        "trainer.ranks": [n * trainer.ranks for n in factors],
        "trainer.offload_optimizer": [True],
        "rollout.gpu_memory_utilization": [n / 20 for n in range(math.ceil(20 * share) - 1, 0, -1)],
        micro: [config.max_context],
        length: [max(1, tokens // n) for n in factors],
    }
    enough: list[str] = []
    saving: dict[str, None] = {}
    now = memory.trainer_memory(config, facts, gpu=True).total
    for knob, values in options.items():
        for value in values:
            changes = {knob: value}
            if knob == length:
                context = config.max_context - tokens + value
                changes[micro] = min(trainer.micro_batch_tokens, context)
            with suppress(ConfigError):
                other = config
                for name, new in changes.items():
                    other = _with_knob(other, name, new)
                placement = place(other, hardware.idle)
                try:
                    plan_placed(other, facts, hardware, placement)
                except DoesNotFit:
                    if memory.trainer_memory(other, facts, gpu=True).total < now:
                        saving[knob] = None
                    continue
                texts = (f"{name}={str(new).lower()}" for name, new in changes.items())
                enough.append(" ".join(texts))
                break
    hint = "Use more or larger GPUs"
    if enough:
        hint += f", or save memory with {', '.join(enough)}"
    elif len(saving) > 1:
        hint += f", or save memory with several of {', '.join(saving)} (one is not enough)"
    return hint


def _with_knob(section: Any, path: str, value: Any) -> Any:
    """Return a copy of the section in which the knob at this path has the value."""
    name, _, rest = path.partition(".")
    return replace(
        section, **{name: _with_knob(getattr(section, name), rest, value) if rest else value}
    )


def plan_on(config: Config, facts: ModelFacts, hardware: Hardware) -> Plan:
    """Plan a run on this hardware. Raises ConfigError if it doesn't fit."""
    if not hardware.gpu:
        return make_plan(config, facts, hardware)
    placement = place(config, hardware.idle)
    try:
        return plan_placed(config, facts, hardware, placement)
    except DoesNotFit as error:
        hint = _hint(config, facts, hardware, error.limit)
        raise DoesNotFit(f"{error}. {hint}. ({hardware})", error.limit) from error


def plan_placed(
    config: Config, facts: ModelFacts, hardware: Hardware, placement: Placement
) -> Plan:
    """Plan a run whose actors have already been assigned to GPUs."""
    shares = config.trainer.hpz_partition_size
    for node, ranks in placement.ranks_by_node:
        if ranks % shares:
            raise ConfigError(
                f"trainer.hpz_partition_size = {shares}: {ranks} trainer ranks run on {node.name}, "
                "and ranks that share a copy must be on one node. Use a divisor of the ranks of "
                "every node, or set it to 1"
            )
    plan = make_plan(config, facts, hardware, shared=placement.shared)
    each = memory.host_bytes(config, facts, plan.offload)
    reading = config.trainer.reading_ranks
    whole = facts.parameters * memory.BYTES[config.model.dtype]
    for node, ranks in placement.ranks_by_node:
        here = min(ranks, reading)
        reading -= here
        has = node.memory_gib * GIB
        if 0 < has < max(here * whole, ranks * each):
            raise DoesNotFit(
                f"{ranks} trainer rank(s) in the memory of {node.name}, which has {gib(has)}: "
                f"{here} read the model, {gib(whole)} each (trainer.expert_parallel ranks do, "
                f"under ZeRO 3 one), and all keep {gib(ranks * each)}",
                "host",
            )
    return plan


def make_plan(
    config: Config, facts: ModelFacts, hardware: Hardware, *, shared: bool = False
) -> Plan:
    """Plan a run for a model with these properties. Set `shared` if an engine and a rank share a
    GPU. Raises ConfigError if the recipe isn't suitable for the model, and DoesNotFit if a GPU is
    too small."""
    gpu, gpu_gib = hardware.gpu, hardware.gpu_gib
    check_trainer(config, facts, hardware.spec, gpu=gpu)
    engine = memory.engine_memory(config, facts, gpu=gpu)
    rank = memory.trainer_memory(config, facts, gpu=gpu)
    samples, cached, time = bool(config.data.sources), None, None
    if gpu and gpu_gib:
        if samples:
            cached = memory.cached_sequences(config, engine, gpu_gib)
            reserve = memory.needs_fixed_cache(config, engine)
            room = memory.cache_room(config, engine, gpu_gib, reserve=reserve)
            shrunk = min(1.0, room / memory.cache_bytes(engine))
            caches = {name: shrunk * engine.parts[name] for name in ("KV cache", "selections")}
            engine = Memory(parts={**engine.parts, **caches})
        selections = engine.parts["selections"]
        memory.check_trainer_fits(config, rank, gpu_gib, shared=shared, selections=selections)
    offload = memory.offload_plan(config, rank, gpu_gib, shared=shared and gpu)
    if gpu and samples:
        time = step_time(
            config,
            facts,
            shared=shared,
            sequences=cached,
            woken=engine.total if shared and config.rollout.time_share else 0.0,
            moved=offload.moved,
            spec=hardware.spec,
        )
    peak = memory.peak_bytes(config, rank, offload) if gpu else rank.total
    return Plan(engine=engine, trainer=rank, peak=peak, cached=cached, offload=offload, time=time)


def section_lines(sections: Mapping[str, Sequence[str]]) -> list[str]:
    """Format the sections of a plan as lines. The first line of each section starts with its
    name."""
    return [
        f"{'' if number else name:<12} {text}"
        for name, texts in sections.items()
        for number, text in enumerate(texts)
    ]


def describe(
    config: Config,
    facts: ModelFacts,
    plan: Plan,
    hardware: Hardware,
    data: Sequence[str],
    *,
    passes: float = 0.0,
    placed: bool = False,
    trains: bool = True,
) -> dict[str, Sequence[str]]:
    """Format the plan for `keel check` as sections. `data` has the lines about the data, which
    supervised training goes through `passes` times. `placed` adds the GPUs of each actor, and
    sections about training steps are left out if `trains` is False."""
    gpu, judge, engines = hardware.gpu, config.rewards.judge, ""
    if config.data.sources:
        sections = _rl_sections(config, facts, plan, hardware, trains=trains)
        engines = f"{config.rollout.engines} vLLM engine(s), "
    else:
        sections = _supervised_sections(config, facts, plan, hardware, passes)
    served = f", {judge.server.replicas} vLLM server(s) of the judge {judge.model}" * judge.serve
    sections |= {
        "model": [_model_line(config, facts)],
        "data": data,
        "actors": [f"{engines}{_ranks_line(config, gpu=gpu)}{served}"],
        "hardware": [str(hardware) if gpu else "on CPU"],
        "placement": [*place(config, hardware.idle).lines()] if placed and gpu else [],
        "run folder": [config.run.dir],
    }
    return {name: sections[name] for name in _SECTIONS if name in sections}


def _rl_sections(
    config: Config, facts: ModelFacts, plan: Plan, hardware: Hardware, *, trains: bool
) -> dict[str, Sequence[str]]:
    a, t, sampling = config.algorithm, config.trainer, config.rollout.sampling
    trained, evaluated = _sampling_text(sampling), _sampling_text(config.sampling_for("eval"))
    texts = [f"{trained}, at most {sampling.max_tokens} tokens"]
    if trained != evaluated and any(source.holdout for source in config.data.sources):
        texts.append(f"evaluations: {evaluated}")
    sections: dict[str, Sequence[str]] = {
        "sampling": texts,
        "memory": _memory_lines(config, facts, plan, hardware),
        "time": plan.time.lines() if plan.time else [],
    }
    if not trains:
        return sections
    sequences, steps = a.prompts_per_step * a.group_size, config.run.steps
    mask = "off" if a.mask_delta is None else f"δ = {a.mask_delta:g}"
    held = f", its mass held with weight {a.kept_mass_coef:g}" * bool(a.kept_mass_coef)
    selects = f"; Keep Selection {'on' if a.keep_selection else 'off'}" * bool(facts.index_top_k)
    return sections | {
        "batch": [
            f"{a.prompts_per_step} prompts × {a.group_size} completions = {sequences} "
            f"sequences per step, at most {sequences * config.max_context:,} tokens",
            f"{a.updates_per_batch} optimizer step(s) per batch, at most "
            f"{count_micro_batches(config)[0]} micro-batch(es) of {t.micro_batch_tokens:,} tokens "
            "per rank each",
        ],
        "steps": [
            f"{steps} = {steps * a.updates_per_batch} optimizer steps on "
            f"{steps * sequences:,} completions; lr {t.lr:g} ({t.schedule})"
        ],
        "stabilisers": [
            f"KL {a.kl}; sequence mask {mask}; "
            f"Keep Routing {_replay(bool(facts.moe_layers), a.keep_routing)}; "
            f"Keep Sampling Mask {_replay(sampling.truncated, a.keep_sampling_mask)}{held}{selects}"
        ],
    }


def _memory_lines(config: Config, facts: ModelFacts, plan: Plan, hardware: Hardware) -> list[str]:
    gpu, share = hardware.gpu, config.rollout.gpu_memory_utilization
    lines = [f"{'a GPU of an engine' if gpu else 'engine'}: {plan.engine}"]
    if plan.cached is not None:
        sequences = memory.engine_sequences(config)
        held = f"all {sequences} sequences at full length"
        if plan.cached < sequences:
            held = (
                f"{plan.cached} of {sequences} sequences at full length; others will be preempted "
                "and recomputed (rollout.max_num_seqs)"
            )
        lines.append(
            f"  it takes {gib(share * hardware.gpu_gib * GIB)} (rollout.gpu_memory_utilization = "
            f"{share:g}): its KV cache holds {held}"
        )
    stored = memory.recordings_store_bytes(config, facts)
    if gpu and stored * config.rollout.engines >= GIB:
        lines.append(
            f"  in Ray's object store, a step's routes and selections take {gib(stored)} per engine"
        )
    peak = f", peak {gib(plan.peak)}" if plan.peak < plan.trainer.total else ""
    lines.append(f"trainer rank: {plan.trainer}{peak}")
    if gpu and config.rollout.time_share:
        lines.append(
            "  time-shared with the engine (rollout.time_share): "
            f"{gib(plan.offload.sampling)} of it then wait in host memory"
        )
    host = memory.host_bytes(config, facts, plan.offload)
    if gpu and host >= GIB:
        lines.append(f"  in host memory, each rank needs at least {gib(host)}")
    return lines


def _supervised_sections(
    config: Config, facts: ModelFacts, plan: Plan, hardware: Hardware, passes: float
) -> dict[str, Sequence[str]]:
    sft, trainer, spec, steps = config.sft, config.trainer, hardware.spec, config.run.steps
    what = "windows" if sft.only_text else "conversations"
    size = f"{sft.conversations_per_step} {what}"
    if sft.tokens_per_step:
        size = f"{what} of at most {sft.tokens_per_step:,} tokens together"
    seen = f", {passes:.3g} passes over the data" * bool(passes)
    seen += " (sft.epochs, and not run.steps)" * bool(sft.epochs)
    step = sft_seconds(config, facts, spec) if hardware.gpu else 0.0
    time = (
        f"ESTIMATE, not measured, for {spec.name} and {what} of full length: "
        f"{seconds(step)} per step, {steps * step / 3600:,.1f} hours for {steps:,} steps"
    )
    return {
        "batch": [
            f"{size} a step, in micro-batches of {trainer.micro_batch_tokens:,} tokens; the loss "
            f"is a mean over {sft.mean}"
        ],
        "attention": [_ATTENTION[trainer.attention]] if facts.index_top_k else [],
        "steps": [f"{steps}{seen}; lr {trainer.lr:g} ({trainer.schedule})"],
        "memory": [f"trainer rank: {plan.trainer}"],
        "time": [time] if hardware.gpu else [],
    }


def _model_line(config: Config, facts: ModelFacts) -> str:
    experts, adapters, lora = ", dense", "", config.model.lora
    if facts.moe_layers:
        experts = (
            f", {facts.moe_layers} MoE layers of {facts.experts} experts "
            f"({facts.experts_per_token} per token)"
        )
    if lora.enabled:
        targets = ", ".join(lora.names(facts.projections))
        count = _count(lora.parameters(facts.projections))
        adapters = f"; LoRA of rank {lora.rank} on {targets}: {count} trainable parameters"
    return (
        f"{config.model.path}: {_count(facts.parameters)} parameters "
        f"({_count(facts.active_parameters)} active), {facts.layers} layers{experts}, "
        f"vocabulary {facts.vocab_size:,}, {config.model.dtype}{adapters}"
    )


def _ranks_line(config: Config, *, gpu: bool) -> str:
    t = config.trainer
    return (
        f"{t.ranks} trainer rank(s) with ZeRO {memory.stage_in_use(config, gpu=gpu)}"
        + f" and hpZ over {t.hpz_partition_size} ranks" * (t.hpz_partition_size > 1)
        + f", expert parallelism {t.expert_parallel}" * (t.expert_parallel > 1)
        + f", sequence parallelism {t.sequence_parallel}" * (t.sequence_parallel > 1)
        + ", optimizer in host memory" * t.offload_optimizer
        + ", compiled" * t.compile
    )


def _sampling_text(sampling: SamplingConfig) -> str:
    if sampling.greedy:
        return "greedy"
    truncated = f"top-p {sampling.top_p:g}, top-k {sampling.top_k}"
    support = truncated if sampling.truncated else "whole vocabulary"
    return f"temperature {sampling.temperature:g}, {support}"


def _count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,.0f}"


def _replay(needed: bool, kept: bool) -> str:
    if not needed:
        return "not needed"
    return "on" if kept else "OFF (algorithm.allow_unsound: never for training)"
