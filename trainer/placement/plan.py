"""What a run will do, before it does it: actors, batch arithmetic, memory and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keel.configs.schema import Config, ConfigError, SamplingConfig
from keel.model.load import ModelFacts
from keel.trainer.placement.families import (
    check_attention_kernels,
    check_parallel,
    check_share_prompts,
    check_warm_up,
)
from keel.trainer.placement.gpus import Machine
from keel.trainer.placement.hardware import Hardware, Placement, place
from keel.trainer.placement.memory import (
    BYTES,
    GIB,
    DoesNotFit,
    Memory,
    cached_sequences,
    engine_memory,
    engine_sequences,
    gib,
    packed,
    reading_ranks,
    stage_in_use,
    trainer_memory,
    within,
)
from keel.trainer.placement.step_time import StepTime, step_time
from keel.trainer.placement.suggestions import cures
from keel.trainer.placement.time_sharing import (
    Waiting,
    check_trainer_fits,
    held_bytes,
    host_bytes,
    peak_bytes,
    waiting_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    sequences: int
    """Trajectories per step."""
    step_tokens: int
    """Tokens per step at most: every prompt and every completion at its limit."""
    micro_batches: int
    """Micro-batches that a rank needs for that, at most."""
    optimizer_steps: int
    engine: Memory
    trainer: Memory
    """All that a rank ever holds."""
    peak: float
    """Bytes of it on the GPU at the same time."""
    cached: int | None
    """Trajectories of full length that an engine's KV cache holds; None: not known."""
    waits: Waiting
    """Of a rank in host memory, in turns with an engine."""
    time: StepTime | None
    """None on a CPU."""


def plan_on(
    config: Config,
    facts: ModelFacts,
    hardware: Hardware,
    cured: Callable[[Config, ModelFacts, Callable[[Config], object]], str] | None = None,
) -> Plan:
    """The plan of a run on this hardware: what `keel check` prints and a run is started by.

    Raises ConfigError where the run finds no place, or a GPU is too small, with what would help
    (`cured`: who says that, by default `cures`).
    """

    def planned(config: Config) -> Plan:
        if not hardware.gpu:
            return make_plan(config, facts, gpu=False)
        placement = place(config, hardware.idle)
        plan = make_plan(
            config,
            facts,
            gpu=True,
            gpu_gib=hardware.gpu_gib,
            shared=placement.shared,
            taken_gib=hardware.taken_gib,
            machine=hardware.machine,
        )
        check_machines(config, facts, plan.waits, placement)
        return plan

    try:
        return planned(config)
    except DoesNotFit as error:
        found = (cured or cures)(config, facts, planned)
        raise ConfigError(f"{error}. {found}. ({hardware})") from error


def check_machines(config: Config, facts: ModelFacts, waits: Waiting, placement: Placement) -> None:
    """Raises DoesNotFit where a machine's memory is too small for what its ranks keep there, or for
    the model where several of them read it at the same time."""
    each, reading = host_bytes(config, facts, waits), reading_ranks(config.trainer)
    whole = facts.parameters * BYTES[config.model.dtype]
    for node, ranks in placement.ranks_by_node:
        here = min(ranks, reading)
        reading -= here
        if 0 < node.memory_gib * GIB < here * whole:
            raise DoesNotFit(
                f"{here} trainer rank(s) read the model, {gib(whole)} each, into the memory of "
                f"{node.name} as they start (as many as trainer.expert_parallel, under ZeRO 3 "
                f"one), which has {gib(node.memory_gib * GIB)}"
            )
        if 0 < node.memory_gib * GIB < ranks * each:
            raise DoesNotFit(
                f"{ranks} trainer rank(s) keep at least {gib(ranks * each)} in the memory of "
                f"{node.name} (trainer.offload_optimizer, trainer.offload_while_sampling), which "
                f"has {gib(node.memory_gib * GIB)}"
            )


def make_plan(
    config: Config,
    facts: ModelFacts,
    *,
    gpu: bool,
    gpu_gib: float = 0.0,
    shared: bool = False,
    taken_gib: float = 0.0,
    machine: Machine | None = None,
) -> Plan:
    """The arithmetic of `config` on a model of this shape.

    `gpu_gib`: memory of a GPU, or 0 where nobody knows; `shared`: an engine and a rank have one GPU
    together; `taken_gib`: of it, by processes of others; `machine`: what the time is estimated for.

    Raises ConfigError where the model's context is too short for the recipe, and DoesNotFit where a
    GPU is too small.
    """
    longest = config.max_context
    if longest > facts.max_context:
        raise ConfigError(
            f"{config.max_context_source}, but the context of {config.model.path} has "
            f"{facts.max_context} tokens. Lower it"
        )
    unsound = config.algorithm.allow_unsound
    if facts.moe_layers and not config.algorithm.keep_routing and not unsound:
        raise ConfigError(
            f"algorithm.keep_routing = False: {config.model.path} is a mixture of experts "
            f"({facts.moe_layers} layers), and engine and trainer would choose different experts. "
            "Switch it on"
        )
    check_parallel(
        config.trainer,
        architecture=facts.architecture,
        experts=facts.experts,
        heads=facts.attention_heads,
    )
    here = machine or Machine()
    check_attention_kernels(config, gpu=gpu, flash4=here.flash4, machine=here.name)
    check_warm_up(config, architecture=facts.architecture, top_k=facts.index_top_k)
    check_share_prompts(config, architecture=facts.architecture, head_size=facts.head_size)
    algorithm = config.algorithm
    sequences = algorithm.prompts_per_step * algorithm.group_size
    micro_batches, _ = packed(config)
    engine = engine_memory(config, facts, gpu=gpu)
    rank = trainer_memory(config, facts, gpu=gpu)
    cached = None
    sampled = bool(config.data.sources)
    if gpu and gpu_gib:
        if sampled:
            cached = cached_sequences(config, engine, gpu_gib, taken_gib=taken_gib)
            engine = within(engine, config.rollout.gpu_memory_utilization * gpu_gib * GIB)
        check_trainer_fits(config, rank, gpu_gib, shared=shared, taken_gib=taken_gib)
    time, turns = None, shared and config.rollout.time_share
    waits = waiting_of(config, rank, gpu_gib, shared=shared and gpu, taken_gib=taken_gib)
    if gpu and sampled:
        time = step_time(
            config,
            facts,
            micro_batches=micro_batches * algorithm.updates_per_batch,
            shared=shared,
            sequences=cached,
            woken=engine.total if turns else 0.0,
            moved=waits.moved,
            machine=machine,
        )
    return Plan(
        sequences=sequences,
        step_tokens=sequences * longest,
        micro_batches=micro_batches,
        optimizer_steps=config.run.steps * algorithm.updates_per_batch,
        engine=engine,
        trainer=rank,
        peak=peak_bytes(config, rank, waits) if gpu else rank.total,
        cached=cached,
        waits=waits,
        time=time,
    )


OF_STEPS = ("batch", "steps", "stabilisers")
"""Rows of the plan that an evaluation has no use for."""


def describe(
    config: Config,
    facts: ModelFacts,
    plan: Plan,
    data: Sequence[str],
    *,
    hardware: Hardware,
    seats: Sequence[str] = (),
    cpu_time: Sequence[str] = (),
    trains: bool = True,
) -> str:
    """The plan as `keel check` prints it.

    `data`: one line per source, from the loader. `seats`: placement, one line per node. `cpu_time`:
    the estimate of a run without a GPU, where `plan` has none. `trains`: false leaves out the rows
    about steps.
    """
    gpu = hardware.gpu
    a, r, t = config.algorithm, config.rollout, config.trainer
    sampling, judge = r.sampling, config.rewards.judge
    measured = drawn(config.sampling("eval")) * any(s.holdout for s in config.data.sources)
    apart = f", peak {gib(plan.peak)}" * (plan.peak < plan.trainer.total)
    rows: list[tuple[str, str]] = [
        ("model", model_line(config, facts)),
        *(("data" if not i else "", line) for i, line in enumerate(data)),
        (
            "batch",
            f"{a.prompts_per_step} prompts × {a.group_size} completions = {plan.sequences} "
            f"sequences per step, at most {plan.step_tokens:,} tokens",
        ),
        (
            "",
            f"{a.updates_per_batch} optimizer step(s) per batch, at most {plan.micro_batches} "
            f"micro-batch(es) of {t.micro_batch_tokens:,} tokens per rank each",
        ),
        (
            "steps",
            f"{config.run.steps} = {plan.optimizer_steps} optimizer steps on "
            f"{config.run.steps * plan.sequences:,} completions; lr {t.lr:g} ({t.schedule})",
        ),
        ("sampling", f"{drawn(sampling)}, at most {sampling.max_tokens} tokens"),
        *([("", f"evaluations: {measured}")] if measured not in ("", drawn(sampling)) else []),
        (
            "stabilisers",
            f"KL {a.kl}; "
            f"sequence mask {'off' if a.mask_delta is None else f'δ = {a.mask_delta:g}'}; "
            f"Keep Routing {replay(bool(facts.moe_layers), a.keep_routing)}; "
            f"Keep Sampling Mask {replay(sampling.truncated, a.keep_sampling_mask)}"
            + (f", its mass held with weight {a.kept_mass_coef:g}" if a.kept_mass_coef else ""),
        ),
        (
            "actors",
            f"{r.engines} vLLM engine(s), {ranks_line(config, gpu=gpu)}"
            + (f", the judge's vLLM server of {judge.model}" if judge.serve else ""),
        ),
        ("hardware", str(hardware) if gpu else "on CPU"),
        *(("placement" if not i else "", line) for i, line in enumerate(seats)),
        ("memory", f"{'a GPU of an engine' if gpu else 'engine'}: {plan.engine}"),
        *(("", line) for line in [cache_line(config, plan, hardware)] if line),
        ("", f"trainer rank: {plan.trainer}{apart}"),
        *(("", line) for line in [sleep_line(config, plan)] if gpu and config.rollout.time_share),
        *(
            ("time" if not i else "", line)
            for i, line in enumerate(plan.time.lines() if plan.time else cpu_time)
        ),
        ("run folder", config.run.dir),
    ]
    shown, head = list[str](), ""
    for name, text in rows:
        head = name or head
        if trains or head not in OF_STEPS:
            shown.append(f"{name:<12} {text}")
    return "\n".join(shown)


def model_line(config: Config, facts: ModelFacts) -> str:
    experts = (
        f", {facts.moe_layers} MoE layers of {facts.experts} experts "
        f"({facts.experts_per_token} per token)"
        if facts.moe_layers
        else ", dense"
    )
    return (
        f"{config.model.path}: {count(facts.parameters)} parameters "
        f"({count(facts.active_parameters)} active), {facts.layers} layers{experts}, "
        f"vocabulary {facts.vocab_size:,}, {config.model.dtype}"
    )


def ranks_line(config: Config, *, gpu: bool) -> str:
    t = config.trainer
    return (
        f"{t.ranks} trainer rank(s) with ZeRO {stage_in_use(config, gpu=gpu)}"
        + (f", expert parallelism {t.expert_parallel}" if t.expert_parallel > 1 else "")
        + (f", sequence parallelism {t.sequence_parallel}" if t.sequence_parallel > 1 else "")
        + ", optimizer in host memory" * t.offload_optimizer
        + ", compiled" * t.compile
    )


def sleep_line(config: Config, plan: Plan) -> str:
    """What a rank's state costs its node, or its GPU, while an engine has its turn there."""
    if not config.trainer.offload_while_sampling:
        held = gib(held_bytes(plan.trainer))
        where = f"{held} of it then stay (trainer.offload_while_sampling)"
    else:
        where = f"{gib(plan.waits.sampling)} of it then wait in host memory"
        if plan.waits.host > plan.waits.sampling:
            where += f", and at other times up to {gib(plan.waits.host)}"
    return f"  time-shared with the engine (rollout.time_share): {where}"


def cache_line(config: Config, plan: Plan, hardware: Hardware) -> str:
    """What the KV cache holds, where the GPU is known."""
    if plan.cached is None:
        return ""
    wanted, share = engine_sequences(config), config.rollout.gpu_memory_utilization
    takes = gib(share * hardware.gpu_gib * GIB)
    budget = f"it takes {takes} (rollout.gpu_memory_utilization = {share:g}"
    if plan.cached >= wanted:
        enough = math.ceil(100 * plan.engine.total / GIB / hardware.gpu_gib) / 100
        budget += f"; {enough:g} would do" * (enough < share)
        return f"  {budget}): its KV cache holds all {wanted} sequences at full length"
    return (
        f"  {budget}): its KV cache holds {plan.cached} of {wanted} sequences at full length; more "
        "will be preempted and computed again (rollout.max_num_seqs)"
    )


def drawn(sampling: SamplingConfig) -> str:
    """How tokens are drawn, in words."""
    if sampling.greedy:
        return "greedy"
    truncated = f"top-p {sampling.top_p:g}, top-k {sampling.top_k}"
    from_what = truncated if sampling.truncated else "whole vocabulary"
    return f"temperature {sampling.temperature:g}, {from_what}"


def count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,.0f}"


def replay(needed: bool, kept: bool) -> str:
    if not needed:
        return "not needed"
    return "on" if kept else "OFF (algorithm.allow_unsound: never for training)"
