"""What the memory and time model of `keel check` says past the machines it was measured on.

    python -m benchmarks.training.scaling          # the tables of docs/scaling.md; no GPU

The first two tables hold the model against measured figures, the others are estimates alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from benchmarks.common.batch_shape import SOURCE
from benchmarks.common.models import DEEPSEEK_V3, QWEN3_06B, QWEN3_30B_A3B, REPLAY
from benchmarks.training.cases import Case, estimates, facts_at, with_stock_layers
from benchmarks.training.measured import BEFORE, MEASURED
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from keel.model.load import ModelFacts, facts_of
from keel.trainer.planning.gpus import Machine
from keel.trainer.planning.memory import (
    BYTES,
    GIB,
    TRAINER_CUDA_GIB,
    engine_sequences,
    key_width,
    support_head_bytes,
)
from keel.trainer.planning.placement import Node, place
from keel.trainer.planning.plan import Plan, count, make_plan
from keel.trainer.planning.step_time import StepTime, compute_seconds, seconds, step_time

H200, H200_GIB = Machine(), 139.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Engines and ranks on so many GPUs."""

    engines: int
    tensor_parallel: int
    ranks: int
    zero_stage: int
    expert_parallel: int
    turns: bool = False
    """Engine and rank share each GPU (`rollout.colocated`, `rollout.sleep`)."""

    def __str__(self) -> str:
        engines = f"{self.engines} engines" + (
            f" of {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        )
        experts = f", experts over {self.expert_parallel}" * (self.expert_parallel > 1)
        by = "by turns, " * self.turns
        return f"{by}{engines}, {self.ranks} ranks, ZeRO {self.zero_stage}{experts}"

    @property
    def gpus(self) -> int:
        apart = self.engines * self.tensor_parallel + self.ranks
        return self.ranks if self.turns else apart


@dataclass(frozen=True, kw_only=True)
class Workload:
    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts × {self.group} completions, {self.prompt_tokens:,} + "
            f"{self.completion_tokens:,} tokens each"
        )


@dataclass(frozen=True, kw_only=True)
class Study:
    title: str
    model: PreTrainedConfig
    workload: Workload
    layouts: tuple[Layout, ...]


def layout(engines: int, width: int, ranks: int, stage: int, experts: int) -> Layout:
    return Layout(
        engines=engines,
        tensor_parallel=width,
        ranks=ranks,
        zero_stage=stage,
        expert_parallel=experts,
    )


def by_turns(gpus: int) -> Layout:
    seats = {"engines": gpus, "tensor_parallel": 1, "ranks": gpus}
    return Layout(**seats, zero_stage=3, expert_parallel=1, turns=True)


STUDIES = (
    Study(
        title="Qwen3-30B-A3B",
        model=QWEN3_30B_A3B,
        workload=Workload(prompts=64, group=16, prompt_tokens=1024, completion_tokens=8192),
        layouts=(
            by_turns(4),
            by_turns(8),
            layout(4, 1, 4, 3, 4),
            layout(2, 1, 6, 3, 2),
            layout(16, 1, 16, 2, 8),
            layout(8, 1, 24, 2, 8),
        ),
    ),
    Study(
        title="DeepSeek-V3.2-sized",
        model=DEEPSEEK_V3,
        workload=Workload(prompts=256, group=16, prompt_tokens=1024, completion_tokens=16_384),
        layouts=(
            layout(16, 8, 128, 3, 64),
            layout(8, 16, 128, 3, 64),
            layout(4, 16, 192, 3, 64),
            layout(16, 16, 256, 3, 64),
        ),
    ),
)


def recipe(workload: Workload, layout: Layout) -> Config:
    """Truncated sampling, checkpointing, a reference policy: what such a run would use."""
    longest = workload.prompt_tokens + workload.completion_tokens
    return Config(
        model=ModelConfig(path="made"),
        data=DataConfig(
            sources=(replace(SOURCE, kl_coef=0.01),), max_prompt_tokens=workload.prompt_tokens
        ),
        algorithm=AlgorithmConfig(prompts_per_step=workload.prompts, group_size=workload.group),
        rollout=RolloutConfig(
            engines=layout.engines,
            tensor_parallel=layout.tensor_parallel,
            colocated=layout.turns,
            sleep=layout.turns,
            max_num_seqs=256,
            gpu_memory_utilization=0.9,
            sampling=SamplingConfig(top_p=0.95, top_k=512, max_tokens=workload.completion_tokens),
        ),
        trainer=TrainerConfig(
            ranks=layout.ranks,
            zero_stage=layout.zero_stage,  # type: ignore[arg-type]
            expert_parallel=layout.expert_parallel,
            micro_batch_tokens=longest,
            activation_checkpointing=True,
        ),
    )


def verdict(config: Config, facts: ModelFacts, gpus: int) -> tuple[str, Plan | None]:
    """What `keel check` says on nodes of H200s, and the plan if the GPUs are large enough."""
    size = H200.node_gpus
    # A core for each engine and each rank.
    nodes = [
        Node(name=f"n{i}", gpus=size, cpus=2 * size, free_gpus=size, free_cpus=2 * size)
        for i in range(-(-gpus // size))
    ]
    plan = None
    try:
        shared = config.rollout.colocated
        plan = make_plan(config, facts, gpu=True, gpu_gib=H200_GIB, shared=shared)
        place(config, nodes)
    except ConfigError as error:
        words = str(error)
        for start, meaning in (
            ("an engine's GPU", "refused: an engine's GPU is too small"),
            ("a trainer rank", "refused: a rank's GPU is too small"),
            ("rollout.tensor_parallel", "refused: an engine over two nodes"),
        ):
            if words.startswith(start):
                return meaning, plan
        raise
    return "fits", plan


def study_lines(study: Study) -> Iterator[str]:
    """One table of what fits, one of how long it takes."""
    facts = facts_of(study.model)
    kv = facts.layers * facts.kv_width * 2
    yield (
        f"{count(facts.parameters)} parameters, {count(facts.active_parameters)} active, "
        f"{count(facts.expert_parameters)} of experts, {kv / 2**10:.0f} KiB of cache a token; "
        f"{study.workload}."
    )
    yield ""
    yield (
        "| GPUs | layout | `keel check` | engine's GPU, without cache "
        "| sequences cached, of those wanted | rank's GPU |"
    )
    yield "|---|---|---|---|---|---|"
    times: list[str] = []
    for each in study.layouts:
        config = recipe(study.workload, each)
        said, plan = verdict(config, facts, each.gpus)
        unchecked = make_plan(config, facts, gpu=True, shared=each.turns)
        engine = unchecked.engine.total - unchecked.engine.parts["KV cache"]
        cached = "" if plan is None else f"{plan.cached} of {engine_sequences(config)}"
        yield (
            f"| {each.gpus} | {each} | {said} | {engine / GIB:.0f} GiB | {cached} "
            f"| {unchecked.peak / GIB:.0f} GiB |"
        )
        if plan is not None:
            assert plan.time is not None
            times.append(time_row(plan.time, each))
    yield ""
    yield (
        "| GPUs | layout | rollout | training: compute | traffic | weights, turns | step "
        "| step, sampling ahead |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    yield from times


def time_row(time: StepTime, each: Layout) -> str:
    ahead = seconds(max(time.rollout, time.training + time.weights))
    parts = (time.rollout, time.compute, time.traffic, time.weights + time.turns, time.total)
    row = " | ".join([*map(seconds, parts), "not by turns" if each.turns else ahead])
    return f"| {each.gpus} | {each} | {row} |"


def parts_lines() -> Iterator[str]:
    """Where a rank's memory goes, for the layouts whose GPUs are large enough."""
    for study in STUDIES:
        facts = facts_of(study.model)
        for each in study.layouts:
            config = recipe(study.workload, each)
            _, plan = verdict(config, facts, each.gpus)
            if plan is not None:
                apart = f"; peak {plan.peak / GIB:.1f} GiB" * each.turns
                yield f"- {study.title}, {each}: {plan.trainer}{apart}"


def training_lines() -> Iterator[str]:
    """Steps of benchmarks/training/__main__.py beside the model's."""
    yield (
        "| step | measured s | model | off by | measured GiB | model | off by |\n"
        "|---|---|---|---|---|---|---|"
    )
    for each in MEASURED:
        facts = facts_at(each.case.shape, stock=each.stock)
        took, held = estimates(each.case, facts, gpu=True, rates=each.rates)
        held = (held + (repeated_bytes(each.case, facts) if each.earlier else 0.0)) / GIB
        yield (
            f"| {each} | {each.seconds:.3f} | {took:.3f} | {took / each.seconds - 1:+.0%} "
            f"| {each.gib:.1f} | {held:.1f} | {held / each.gib - 1:+.0%} |"
        )


def repeated_bytes(case: Case, facts: ModelFacts) -> float:
    """Of keys and values for the query heads that share them: kept at an earlier commit."""
    layers = 1 if case.recompute else facts.layers
    more = 2 * (facts.attention_width - key_width(facts))
    return layers * more * BYTES["bfloat16"] * case.micro_batch_tokens


def check_lines() -> Iterator[str]:
    """Other measured figures beside the model's."""
    facts = facts_of(REPLAY)
    workload = Workload(prompts=8, group=8, prompt_tokens=128, completion_tokens=896)
    one = recipe(workload, layout(1, 1, 1, 1, 1))
    source = replace(one.data.sources[0], kl_coef=0.0)
    one = replace(
        one,
        data=replace(one.data, sources=(source,)),
        trainer=TrainerConfig(zero_stage=1, micro_batch_tokens=16_384),
    )
    whole = replace(one, rollout=RolloutConfig(sampling=SamplingConfig(max_tokens=896)))
    rows: list[tuple[str, str, float, float, str, str]] = []
    steps = (("sampling masks", one, 0.822), ("whole vocabulary", whole, 0.928))
    for name, config, measured in steps:
        got = compute_seconds(config, with_stock_layers(facts), 65_536, 4, H200, BEFORE)
        what = f"training step, 65,536 tokens, {name}"
        rows.append((what, "benchmarks/training/replay.py", measured, got, "s", "checked"))
    for vocabulary, hidden, measured in (
        (151_936, 2048, 0.72),
        (151_936, 1024, 0.37),
        (262_144, 640, 0.37),
    ):
        shape = replace(facts, vocab_size=vocabulary, hidden_size=hidden)
        config = replace(one, trainer=TrainerConfig(micro_batch_tokens=32_768))
        got = support_head_bytes(config, shape, 2) / GIB
        what = f"support head's extra memory, {vocabulary:,} × {hidden:,}"
        rows.append((what, "benchmarks/training/support_head.py", measured, got, "GiB", "checked"))
    host = recipe(replace(workload, prompts=32, completion_tokens=512), layout(1, 1, 1, 1, 1))
    for recorder, measured in (("native", 11.48), ("packed", 3.03)):
        config = replace(host, rollout=replace(host.rollout, recorder=recorder))
        got = 1e3 * step_time(config, facts, micro_batches=1, rates=BEFORE).decode_step
        what = f"engine's step, 256 sequences, {recorder} recorder"
        rows.append((what, "benchmarks/rollout/__main__.py", measured, got, "ms", "fitted"))
    peer = Workload(prompts=16, group=8, prompt_tokens=128, completion_tokens=1024)
    small = recipe(peer, layout(1, 1, 1, 1, 1))
    small = replace(
        small,
        rollout=replace(small.rollout, recorder="native"),
        trainer=replace(small.trainer, micro_batch_tokens=9216),
    )
    time = step_time(small, facts_of(QWEN3_06B), micro_batches=16, rates=BEFORE)
    by = "benchmarks/peers"
    what = "Qwen3-0.6B shape, 128 × (128 + 1,024) tokens"
    rows.append((f"rollout, {what}", by, 6.91, time.rollout, "s", "fitted"))
    # Before prompts were read once for a group.
    packed = replace(small.rollout, recorder="packed", cascade_attention=False)
    quick = replace(small, rollout=packed)
    got = step_time(quick, facts_of(QWEN3_06B), micro_batches=16).rollout
    rows.append(("rollout, the same, packed recorder", by, 4.55, got, "s", "fitted"))
    what = "training, the same, recomputed, micro-batches of 9,216"
    rows.append((what, by, 3.89, time.training, "s", "checked"))
    kept = replace(small.trainer, compile=True, activation_checkpointing=False)
    step = replace(small, trainer=kept)
    for size, measured, kind in (
        (4608, 3.727, "fitted"),
        (9216, 2.344, "fitted"),
        (18_432, 1.591, "checked"),
    ):
        micro_batches = 147_456 // size
        time = step_time(step, facts_of(QWEN3_06B), micro_batches=micro_batches, rates=BEFORE)
        got = time.compute
        what = f"training, the same, compiled, micro-batches of {size:,}"
        rows.append((what, "benchmarks/training/__main__.py --peers", measured, got, "s", kind))
    turns = Case(
        shape="qwen3-0.6b",
        length=1152,
        micro_batch_tokens=14_976,
        step_tokens=147_456,
        compiled=True,
        reference=True,
    )
    got = estimates(turns, facts_at(turns.shape), gpu=True)[1] / GIB - TRAINER_CUDA_GIB
    what = "a rank's memory, the same, compiled, micro-batches of 14,976"
    rows.append((what, by, 26.86, got, "GiB", "checked"))
    yield "| what | measured by | measured | model | off by | |"
    yield "|---|---|---|---|---|---|"
    for what, by, measured, got, unit, kind in rows:
        yield (
            f"| {what} | {by} | {measured:g} {unit} | {got:.3g} {unit} | {got / measured - 1:+.0%} "
            f"| {kind} |"
        )


def tables() -> dict[str, str]:
    """Markdown by title."""
    made = {
        "Training steps, measured and modelled": "\n".join(training_lines()),
        "Other measured figures": "\n".join(check_lines()),
    }
    made |= {study.title: "\n".join(study_lines(study)) for study in STUDIES}
    return {**made, "A rank's memory": "\n".join(parts_lines())}


def main() -> None:
    for title, text in tables().items():
        print(f"## {title}\n\n{text}\n")


if __name__ == "__main__":
    main()
