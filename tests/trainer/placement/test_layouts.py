"""Layout search finds every fitting layout and respects fixed knobs."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from benchmarks.peers.shape import model_config
from benchmarks.peers.workload import drawn
from keel.configs.auto import KNOBS
from keel.configs.diff import flatten_config
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RewardsConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from keel.configs.sections.rewards import JudgeConfig, JudgeServerConfig
from keel.model.load import ModelFacts, facts_of
from keel.rl.packing.prefix_sharing import prefix_group_size
from keel.trainer.placement.choose import CACHED, Choice, choose, relevant_knobs
from keel.trainer.placement.hardware import GpuSpec, Hardware, idle_nodes, place
from keel.trainer.placement.layouts import STRICTNESSES, TIE, Layout, LayoutSearch, with_values
from keel.trainer.placement.memory import GIB, trainer_memory
from keel.trainer.placement.plan import make_plan
from keel.trainer.placement.step_time import sft_seconds
from tests.trainer.placement.shapes import SHAPES, SOURCE, facts, machine, recipe, sft_recipe


@pytest.fixture
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suggestions take a second to search and have their own tests."""
    monkeypatch.setattr("keel.trainer.placement.suggestions.TRIED", 1)
    monkeypatch.setattr("keel.trainer.placement.layouts.SUGGESTIONS_TRIED", 1)


def chosen(shape: str, gpus: int, gib: float, config: Config | None = None, **fixed: Any) -> Choice:
    """Choose all knobs except `fixed` ones, whose names have `__` for a dot."""
    values = {name.replace("__", "."): value for name, value in fixed.items()}
    config = with_values(config or recipe(), values)
    return choose(config, KNOBS - set(values), facts(shape), machine(gpus, gib))


def search_of(shape: str, gpus: int, gib: float, config: Config) -> LayoutSearch:
    hardware = machine(gpus, gib)
    return LayoutSearch(config, relevant_knobs(config, hardware), facts(shape), hardware)


def with_rollout(config: Config, **knobs: Any) -> Config:
    return replace(config, rollout=replace(config.rollout, **knobs))


def exhaustive(search: LayoutSearch) -> list[Layout]:
    """Enumerate all layouts that pass the search's memory check."""
    options, layouts = search.options, list[Layout]()
    for seats in options.placements:
        ranks = seats.get("trainer.ranks", search.config.trainer.ranks)
        learning = [way for sizes in options.learning(ranks) for way in sizes]
        sampling = options.sampling(seats, fewer=search.strictness.fewer)
        for parts in product(learning, options.turns, sampling):
            values = {**seats, **parts[0], **parts[1], **parts[2]}
            offloads = values.get("trainer.offload_optimizer")
            if offloads and not search.strictness.offload:
                continue
            if layout := search.layout(values):
                layouts.append(layout)
    return layouts


@pytest.mark.parametrize(
    ("shape", "gpus", "gib", "config"),
    [
        ("0.6b", 1, 79.2, recipe()),
        ("0.6b", 1, 46.0, recipe()),
        ("1.7b", 4, 79.2, recipe(prompts_per_step=32, group_size=16)),
        ("8b", 1, 139.8, recipe()),
        ("1.4b-a0.4b", 1, 46.0, recipe(prompts_per_step=8, group_size=32)),
        ("1.4b-a0.4b", 1, 46.0, recipe(prompts_per_step=64, group_size=4, max_lag=1)),
        ("0.6b", 1, 23.0, recipe(prompts_per_step=32, group_size=32, max_lag=1)),
        ("1.4b-a0.4b", 1, 41.0, sft_recipe(conversations_per_step=256, max_context_tokens=4096)),
    ],
)
def test_search_is_as_good_as_exhaustive(shape: str, gpus: int, gib: float, config: Config) -> None:
    search = search_of(shape, gpus, gib, config)
    best = search.best()
    assert best is not None
    layouts = exhaustive(search)
    assert len(layouts) >= len([*search.fitting()])
    assert best.cost <= TIE * min(layout.cost for layout in layouts)


def some_layout_fits(config: Config, shape: str, hardware: Hardware) -> bool:
    """Try the layouts that may need the least memory."""
    gpus = sum(node.gpus for node in hardware.nodes)
    beside = [(n, n, True) for n in range(1, gpus + 1)]
    apart = [(n, gpus - n, False) for n in range(1, gpus)]
    shares = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
    for (ranks, engines, colocated), stage in product([*beside, *apart], (1, 2, 3)):
        for share, shares_time, offload in product(shares, (True, False), (True, False)):
            values = {
                "trainer.ranks": ranks,
                "rollout.engines": engines,
                "rollout.colocated": colocated,
                "rollout.gpu_memory_utilization": share,
                "rollout.time_share": shares_time and (colocated or gpus == 1),
                "rollout.max_num_seqs": 1,
                "trainer.zero_stage": stage,
                "trainer.offload_optimizer": offload,
                "trainer.activation_checkpointing": True,
                "trainer.micro_batch_tokens": 1152,
            }
            try:
                changed = with_values(config, values)
                shared = place(changed, hardware.idle).shared
                size = hardware.gpu_gib
                make_plan(changed, facts(shape), gpu=True, gpu_gib=size, shared=shared)
            except ConfigError:
                continue
            return True
    return False


@pytest.mark.usefixtures("quick_refusals")
@pytest.mark.parametrize("shape", SHAPES)
def test_everything_that_fits_is_accepted(shape: str) -> None:
    config, refused = recipe(), 0
    for gpus, gib in product((1, 4, 8), (139.0, 79.0, 23.0)):
        hardware = machine(gpus, gib)
        try:
            choice = choose(config, KNOBS, facts(shape), hardware)
        except ConfigError as error:
            refused += 1
            assert not some_layout_fits(config, shape, hardware), (gpus, gib)
            assert "GiB" in str(error), error
            continue
        shared = place(choice.config, hardware.idle).shared
        make_plan(choice.config, facts(shape), gpu=True, gpu_gib=gib, shared=shared)
        assert set(choice.values) == set(choice.reasons) == KNOBS
        assert all(choice.reasons.values())
        if shape in ("0.6b", "1.7b", "1.4b-a0.4b"):
            assert choice.config.trainer.ranks == gpus
            assert choice.config.trainer.micro_batch_tokens >= 8192
    assert refused == {"8b": 1, "30b-a3b": 4}.get(shape, 0)


def test_small_model_and_engine_run_side_by_side() -> None:
    config = chosen("0.6b", 1, 139.0).config
    assert config.rollout.gpu_memory_utilization < 0.25 and not config.rollout.time_share
    assert config.trainer.compile and not config.trainer.activation_checkpointing
    assert config.trainer.micro_batch_tokens >= 17_280
    # Three steps do not win back the time to compile.
    few = replace(recipe(), run=replace(recipe().run, steps=3))
    assert not chosen("0.6b", 1, 139.0, few).config.trainer.compile


@pytest.mark.parametrize(
    "values",
    [
        {"rollout.gpu_memory_utilization": 0.5},
        {"trainer.micro_batch_tokens": 5000},
        {"rollout.time_share": True, "trainer.offload_while_sampling": True},
        {"trainer.activation_checkpointing": True, "trainer.compile": False},
        {"trainer.zero_stage": 2, "trainer.offload_optimizer": True},
        {"rollout.max_num_seqs": 7},
        {"trainer.ranks": 3, "rollout.engines": 1},
        {"rollout.colocated": False},
    ],
)
def test_fixed_knobs_stay(values: dict[str, Any]) -> None:
    config = with_values(recipe(), values)
    choice = choose(config, KNOBS - set(values), facts("1.7b"), machine(4, 139.0))
    flat = flatten_config(choice.config)
    assert {knob: flat[knob] for knob in values} == values
    assert not set(values) & set(choice.values)


def test_impossible_fixed_knobs_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"To make it fit: trainer\.micro_batch_tokens="):
        chosen("1.7b", 1, 23.0, trainer__micro_batch_tokens=2_000_000)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 0\.02"):
        chosen("1.7b", 1, 23.0, rollout__gpu_memory_utilization=0.02)
    with pytest.raises(ConfigError, match="time_share"):
        chosen("1.7b", 4, 139.0, rollout__time_share=True, rollout__colocated=False)


def test_offloading_only_where_needed() -> None:
    seen = set[bool]()
    for shape, gpus, gib in (
        ("1.7b", 1, 79.0),
        ("8b", 4, 139.0),
        ("8b", 8, 79.0),
        ("1.4b-a0.4b", 1, 79.0),
        ("1.7b", 1, 40.0),
        ("8b", 2, 139.0),
    ):
        choice = chosen(shape, gpus, gib)
        needed = choice.plan.offload.sampling + choice.plan.offload.training > 0
        assert choice.plan.peak <= choice.plan.trainer.total
        if choice.config.rollout.time_share:
            assert choice.config.trainer.offload_while_sampling == needed, (shape, gpus, gib)
            seen.add(needed)
    assert seen == {True, False}


def test_completions_are_sampled_in_equal_waves() -> None:
    large = recipe(prompts_per_step=32)
    assert chosen("0.6b", 1, 79.0, large).config.rollout.max_num_seqs == 256
    halves = chosen("0.6b", 1, 26.0, large)
    assert halves.config.rollout.max_num_seqs == 128 <= (halves.plan.cached or 0)
    whole = chosen("0.6b", 1, 26.0, large, rollout__max_num_seqs=256)
    assert whole.plan.time and halves.plan.time
    assert whole.plan.time.total > halves.plan.time.total


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_asynchronous_engines_do_not_time_share(gpus: int) -> None:
    assert not chosen("8b", gpus, 139.0, recipe(max_lag=1)).config.rollout.time_share


@pytest.mark.parametrize("hardware", [Hardware(gpu=False), machine(4, 0.0)])
def test_nothing_is_chosen_without_known_memory(hardware: Hardware) -> None:
    choice = choose(recipe(), KNOBS, facts("0.6b"), hardware)
    assert choice.config == recipe() and choice.lines() == []


def test_assumed_hardware_fixes_the_number_of_actors() -> None:
    choice = choose(recipe(), KNOBS, facts("0.6b"), machine(8, 139.0, assumed=True))
    assert (choice.config.trainer.ranks, choice.config.rollout.engines) == (1, 1)
    assert "trainer.ranks" not in choice.values


@pytest.mark.usefixtures("quick_refusals")
def test_memory_of_other_processes_is_subtracted() -> None:
    hardware = machine(1, 139.0, taken_gib=90.0)
    choice = choose(recipe(), KNOBS, facts("1.7b"), hardware)
    total = choice.plan.engine.total + choice.plan.trainer.total
    assert 90.0 + total / GIB <= 139.0 or choice.config.rollout.time_share
    assert choice.plan.peak / GIB <= 49.0 < chosen("1.7b", 1, 139.0).plan.peak / GIB
    assert "90.0 GiB" in hardware.taken_warning
    with pytest.raises(ConfigError, match=r"137\.0 GiB"):
        choose(recipe(), KNOBS, facts("1.7b"), machine(1, 139.0, taken_gib=137.0))


def test_resumed_run_keeps_its_choice() -> None:
    first = chosen("1.7b", 1, 139.0)
    previous = {**first.values, "trainer.micro_batch_tokens": 4608}  # reduced meanwhile
    again = choose(recipe(), KNOBS, facts("1.7b"), machine(1, 139.0), previous)
    assert again.values == previous and set(again.reasons.values()) == {CACHED}
    config = with_values(recipe(), {"trainer.micro_batch_tokens": 2304})
    open_knobs = KNOBS - {"trainer.micro_batch_tokens"}
    other = choose(config, open_knobs, facts("1.7b"), machine(1, 139.0), previous)
    assert other.config.trainer.micro_batch_tokens == 2304
    smaller = choose(recipe(), KNOBS, facts("1.7b"), machine(1, 23.0), first.values)
    assert CACHED not in smaller.reasons.values()


def test_sft_chooses_trainer_knobs_only() -> None:
    choice = chosen("1.7b", 4, 79.0, sft_recipe(conversations_per_step=64))
    assert choice.values["trainer.ranks"] == 4
    assert all(knob.startswith("trainer.") for knob in choice.values)
    assert choice.config.rollout == RolloutConfig()


def on_host(memory_gib: float, gpus: int, gib: float) -> Hardware:
    (node,) = idle_nodes(1, gpus)
    nodes = (replace(node, memory_gib=memory_gib),)
    return Hardware(gpu=True, nodes=nodes, gpu_gib=gib, note="x")


@pytest.mark.usefixtures("quick_refusals")
def test_offloaded_optimizer_must_fit_the_host() -> None:
    """147 GB of an 8B model's optimizer on one GPU of 79 GiB."""
    for memory_gib in (0.0, 256.0):  # unknown; enough
        choice = choose(recipe(), KNOBS, facts("8b"), on_host(memory_gib, 1, 79.0))
        assert choice.values["trainer.offload_optimizer"]
    with pytest.raises(ConfigError, match="memory of node 0"):
        choose(recipe(), KNOBS, facts("8b"), on_host(64.0, 1, 79.0))


def test_models_of_all_reading_ranks_must_fit() -> None:
    """Four ranks with different experts read 57 GiB each."""
    trainer = replace(recipe().trainer, ranks=8, expert_parallel=4, zero_stage=1)
    config = replace(recipe(), trainer=trainer)
    open_knobs = KNOBS - {"trainer.zero_stage", "trainer.ranks"}
    for memory_gib in (0.0, 1024.0):
        choice = choose(config, open_knobs, facts("30b-a3b"), on_host(memory_gib, 8, 139.0))
        assert choice.config.trainer.zero_stage == 1
    with pytest.raises(ConfigError, match=r"4 trainer rank\(s\) read the model, 56\.9 GiB"):
        choose(config, open_knobs, facts("30b-a3b"), on_host(200.0, 8, 139.0))


AGAIN = {"trainer__activation_checkpointing": True}


@pytest.mark.parametrize(
    ("tokens", "gib", "fixed", "kept"),
    [
        (30_000, 50.0, {}, (True, True)),
        (1_000, 139.0, {}, (False, False)),
        (1_000, 139.0, AGAIN, (True, False)),
        (30_000, 26.0, {}, (True, False)),
    ],
)
def test_attention_is_kept_in_long_contexts(
    tokens: int, gib: float, fixed: dict[str, Any], kept: tuple[bool, bool]
) -> None:
    config = with_rollout(recipe(), sampling=SamplingConfig(max_tokens=tokens, top_k=512))
    trainer = chosen("1.7b", 1, gib, config, **fixed).config.trainer
    assert (trainer.activation_checkpointing, trainer.keep_attention) == kept


@pytest.mark.parametrize(("stage", "kept"), [(2, True), (3, False)])
def test_attention_is_not_kept_under_zero_3(stage: int, kept: bool) -> None:
    config = with_rollout(recipe(), sampling=SamplingConfig(max_tokens=30_000, top_k=512))
    choice = chosen("8b", 8, 139.0, config, trainer__zero_stage=stage, **AGAIN)
    assert choice.config.trainer.keep_attention == kept


def test_batch_invariance_excludes_compiling_and_zero_3() -> None:
    for shape, gpus, gib in (("1.7b", 1, 139.0), ("8b", 8, 79.0)):
        model = replace(recipe().model, batch_invariant=True)
        config = replace(recipe(), model=model, run=replace(recipe().run, steps=2000))
        values = chosen(shape, gpus, gib, config).values
        assert not values["trainer.compile"] and values["trainer.zero_stage"] < 3


@pytest.mark.parametrize(
    ("dtype", "compiled"), [("bfloat16", True), ("float16", True), ("float32", False)]
)
def test_half_precision_is_compiled(dtype: Any, compiled: bool) -> None:
    config = replace(recipe(dtype=dtype), run=replace(recipe().run, steps=2000))
    assert chosen("1.7b", 1, 139.0, config).values["trainer.compile"] == compiled


def test_activations_are_kept_in_smaller_micro_batches() -> None:
    """Large micro-batches would halve the engine's concurrency on 79 GiB."""
    search = LayoutSearch(recipe(), KNOBS, facts("0.6b"), machine(1, 79.2))
    search.strictness = STRICTNESSES[0]
    best = search.best()
    assert best is not None and not best.config.trainer.activation_checkpointing
    assert best.config.rollout.max_num_seqs == 128 and not best.config.rollout.time_share


def test_any_split_of_gpus_is_tried() -> None:
    """With asynchronous sampling, 5 ranks and 3 engines beat 6 and 2 by a third."""
    config = recipe(prompts_per_step=64, group_size=16, max_lag=1)
    config = with_rollout(config, sampling=replace(config.rollout.sampling, max_tokens=4096))
    search = search_of("30b-a3b", 8, 139.8, config)
    best = search.best()
    assert best is not None
    assert (best.config.trainer.ranks, best.config.rollout.engines) == (5, 3)
    six = [one.cost for one in search.candidates if one.config.trainer.ranks == 6]
    assert min(six) > 1.4 * best.cost


def test_busiest_rank_determines_the_cost() -> None:
    """Nine sequences on eight ranks take as long as sixteen."""
    trainer = TrainerConfig(ranks=8, micro_batch_tokens=16_384, share_prompts=False)

    def seconds(sequences: int) -> list[float]:
        sft = sft_recipe(conversations_per_step=sequences, max_context_tokens=16_384)
        config = recipe(prompts_per_step=1, group_size=sequences)
        config = with_rollout(config, sampling=replace(config.rollout.sampling, max_tokens=16_000))
        plan = make_plan(replace(config, trainer=trainer), facts("0.6b"), gpu=True)
        assert plan.time is not None
        supervised = sft_seconds(replace(sft, trainer=trainer), facts("0.6b"), GpuSpec())
        return [supervised, plan.time.training]

    assert seconds(9) == pytest.approx(seconds(16), rel=0.01)
    assert all(one < 0.6 * two for one, two in zip(seconds(8), seconds(9), strict=True))
    config = sft_recipe(conversations_per_step=9, max_context_tokens=4096)
    search = search_of("0.6b", 6, 139.8, config)
    best = search.best()
    assert best is not None and best.config.trainer.ranks == 6
    four = min(one.cost for one in search.candidates if one.config.trainer.ranks == 4)
    assert four > 1.25 * best.cost


def test_equally_fast_sft_layouts_prefer_less_memory() -> None:
    config = sft_recipe(conversations_per_step=12, max_context_tokens=8192)
    best = search_of("8b", 8, 79.2, config).best()
    assert best is not None and best.gib == best.plan.peak / GIB
    assert best.config.trainer.ranks == 8


def test_fixed_engines_leave_the_rest_to_ranks() -> None:
    config, open_knobs = with_rollout(recipe(), engines=3), KNOBS - {"rollout.engines"}
    choice = choose(config, open_knobs, facts("1.7b"), machine(8, 79.0)).config
    assert (choice.trainer.ranks, choice.rollout.engines) == (5, 3)
    wide = with_rollout(recipe(), tensor_parallel=4)
    choice = chosen("1.7b", 12, 79.0, wide).config
    assert choice.trainer.ranks + 4 * choice.rollout.engines == 12


@pytest.mark.parametrize("gpus", [2, 3])
def test_last_gpu_next_to_a_judge_is_shared(gpus: int) -> None:
    server = JudgeServerConfig(tensor_parallel=gpus - 1)
    judge = JudgeConfig(model="m", serve=True, server=server)
    config = replace(recipe(), rewards=RewardsConfig(judge=judge))
    choice = chosen("1.7b", gpus, 139.0, config).config
    assert choice.rollout.colocated and (choice.trainer.ranks, choice.rollout.engines) == (1, 1)
    assert len(place(choice, machine(gpus, 139.0).nodes).seats) == 3


def test_micro_batch_holds_whole_prefix_groups() -> None:
    """Two groups per rank, so a larger micro-batch gains nothing."""
    choice = chosen("0.6b", 8, 79.0).config
    a = choice.algorithm
    assert choice.trainer.share_prompts and a.prompts_per_step == 2 * choice.trainer.ranks
    group = prefix_group_size(a.group_size, choice.data.max_prompt_tokens, choice.max_context)
    assert choice.trainer.micro_batch_tokens == 2 * group


def test_odd_numbers_of_trajectories_are_tried() -> None:
    """Five took 11 % less time than four."""
    config = sft_recipe(dtype="float16", tokens_per_step=524_288, max_context_tokens=8192)
    choice = chosen("30b-a3b", 1, 79.2, config).config
    assert choice.trainer.micro_batch_tokens == 5 * 8192


def test_lone_float16_rank_uses_the_cheaper_stage() -> None:
    """ZeRO-2 has 7.5 GiB of buckets; ZeRO-1 has gradients twice in an update."""
    config = sft_recipe(dtype="float16", conversations_per_step=64, max_context_tokens=2048)
    assert chosen("8b", 1, 178.0, config).values["trainer.zero_stage"] == 2
    small = LayoutSearch(config, KNOBS, facts("0.6b"), machine(1, 24.0)).best()
    assert small is not None and small.config.trainer.zero_stage == 1
    second = replace(config, trainer=replace(config.trainer, zero_stage=2))
    other = LayoutSearch(
        second, KNOBS - {"trainer.zero_stage"}, facts("0.6b"), machine(1, 24.0)
    ).best()
    assert other is not None and other.cost > 2 * small.cost


def test_refusal_names_a_gpu_that_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.trainer.placement.layouts.SUGGESTIONS_TRIED", 1)
    with pytest.raises(ConfigError) as error:
        chosen("0.6b", 1, 3.0)
    (size,) = re.findall(r"with (\d+) GiB each", str(error.value))
    chosen("0.6b", 1, float(size))
    with pytest.raises(ConfigError, match=f"with {size} GiB"):
        chosen("0.6b", 1, float(size) - 1)


def test_offloaded_optimizer_holds_gradients_once() -> None:
    """An 8.2 B model on an H200 next to an awake engine: under ZeRO-1 a rank held 62.5 GiB after
    its backward passes and asked for 30.5 more."""
    values = chosen("8b", 1, 139.8).values
    assert (values["trainer.offload_optimizer"], values["trainer.zero_stage"]) == (True, 2)

    def needs(stage: int) -> float:
        config = with_values(
            recipe(),
            {
                "rollout.gpu_memory_utilization": 0.32,
                "rollout.time_share": False,
                "trainer.activation_checkpointing": True,
                "trainer.micro_batch_tokens": 49_324,
                "trainer.offload_optimizer": True,
                "trainer.zero_stage": stage,
            },
        )
        return trainer_memory(config, facts("8b"), gpu=True).total / GIB

    assert 62.5 + 30.5 < needs(1) < 62.5 + 30.5 + 5
    assert needs(2) == pytest.approx(needs(1) - (30.5 - 25.6), abs=1.0)
    assert needs(3) < needs(2) - 30


@pytest.mark.parametrize(
    ("draw", "allowed", "beyond", "stays"),
    [(14, 26.3, 0.8, 3.3), (17, 26.8, 0.6, 2.4), (19, 21.1, 1.0, 2.1)],
)
def test_measured_memory_fits_next_to_the_engine(
    draw: int, allowed: float, beyond: float, stays: float
) -> None:
    """Measured on an H200 in GiB: engine overhead beyond its share, and an offloaded rank."""
    workload = drawn(draw)
    shape = workload.shape
    sampling = SamplingConfig(
        max_tokens=workload.completion_tokens, top_p=workload.top_p, top_k=workload.top_k
    )
    config = Config(
        model=ModelConfig(path="some/model", dtype="bfloat16"),
        data=DataConfig(sources=(SOURCE,), max_prompt_tokens=workload.prompt_tokens),
        rollout=RolloutConfig(sampling=sampling),
        algorithm=AlgorithmConfig(
            prompts_per_step=workload.prompts_per_step, group_size=workload.group_size
        ),
    )
    model = replace(facts_of(model_config(shape)), max_context=shape.max_context)
    choice = choose(config, KNOBS, model, machine(1, allowed)).config
    assert choice.rollout.time_share and choice.trainer.offload_while_sampling
    assert choice.rollout.gpu_memory_utilization * allowed + beyond + stays <= allowed


@pytest.mark.parametrize(
    ("invariant", "changes", "shared"),
    [(False, {}, True), (True, {}, False), (False, {"head_size": 0}, False)],
)
def test_prompts_are_shared_where_possible(
    invariant: bool, changes: dict[str, Any], shared: bool
) -> None:
    config = replace(recipe(), model=replace(recipe().model, batch_invariant=invariant))
    model: ModelFacts = replace(facts("0.6b"), **changes)
    choice = choose(config, KNOBS, model, machine(1, 139.0))
    assert choice.values["trainer.share_prompts"] == shared


FEW = sft_recipe(conversations_per_step=2)
FEW = sft_recipe(conversations_per_step=2)
SPREAD = replace(recipe(), trainer=TrainerConfig(ranks=2, sequence_parallel=2))


@pytest.mark.parametrize(
    ("knob", "config", "shape", "gpus", "gib", "fixed", "reason"),
    [
        (
            "trainer.ranks",
            sft_recipe(conversations_per_step=2),
            "1.7b",
            8,
            79.0,
            {},
            "no sequences",
        ),
        ("rollout.colocated", recipe(), "1.7b", 2, 23.0, {}, "does not fit"),
        ("rollout.colocated", recipe(), "1.7b", 4, 79.0, {}, "% slower"),
        ("trainer.compile", SPREAD, "1.7b", 4, 79.0, {}, "sequence_parallel"),
        ("trainer.micro_batch_tokens", recipe(), "0.6b", 1, 46.0, {}, "less than 2 % faster"),
        ("trainer.micro_batch_tokens", recipe(), "0.6b", 1, 32.0, {}, "25.9 GiB"),
        ("trainer.offload_while_sampling", recipe(), "1.7b", 1, 23.0, {}, "% slower"),
        (
            "rollout.time_share",
            recipe(),
            "1.7b",
            1,
            79.0,
            {"rollout__gpu_memory_utilization": 0.2},
            "less than 2 % faster",
        ),
        (
            "trainer.activation_checkpointing",
            sft_recipe(conversations_per_step=32, max_context_tokens=1024),
            "8b",
            1,
            46.0,
            {},
            "in smaller micro-batches",
        ),
    ],
)
def test_reason_compares_with_the_alternative(
    knob: str, config: Config, shape: str, gpus: int, gib: float, fixed: Any, reason: str
) -> None:
    assert reason in chosen(shape, gpus, gib, config, **fixed).reasons[knob]
