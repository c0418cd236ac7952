"""The layout search finds every layout that fits; elastic runs continue with fewer nodes."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.configs.diff import flatten_config
from keel.configs.load import load_recipe
from keel.configs.schema import (
    LAYOUT_KNOBS,
    Config,
    ConfigError,
    DataConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from keel.trainer.placement import elastic as elastic_layouts
from keel.trainer.placement.elastic import ElasticLayouts
from keel.trainer.placement.hardware import Hardware, Node, idle_nodes, place
from keel.trainer.placement.layouts import (
    _CACHED,
    _STRICTNESSES,
    _TIE,
    Choice,
    Layout,
    LayoutSearch,
    _relevant_knobs,
    choose,
    load_choice,
    save_choice,
    update_choice,
    with_values,
)
from keel.trainer.placement.memory import GIB, RANK_SPARE
from keel.trainer.placement.plan import make_plan, plan_on
from keel.trainer.run.checkpoint import _STATE
from keel.trainer.run.errors import OutOfMemory
from keel.trainer.run.journal import EVENTS
from tests.trainer.placement.shapes import (
    SHAPES,
    SOURCE,
    facts,
    machine,
    recipe,
    sft_recipe,
    v32_facts,
)


def chosen(shape: str, gpus: int, gib: float, config: Config | None = None, **fixed: Any) -> Choice:
    """Choose all knobs except the `fixed` ones. In their names, `__` stands for a dot."""
    values = {name.replace("__", "."): value for name, value in fixed.items()}
    config = with_values(config or recipe(), values)
    return choose(config, LAYOUT_KNOBS - set(values), facts(shape), machine(gpus, gib))


def search_of(shape: str, gpus: int, gib: float, config: Config) -> LayoutSearch:
    hardware = machine(gpus, gib)
    return LayoutSearch(config, _relevant_knobs(config), facts(shape), hardware)


def with_rollout(**knobs: Any) -> Config:
    return replace(recipe(), rollout=replace(recipe().rollout, **knobs))


def exhaustive(search: LayoutSearch) -> list[Layout]:
    """Return all layouts that pass the search's memory check, by trying every combination."""
    layouts = list[Layout]()
    for seats in search.placements:
        ranks = seats.get("trainer.ranks", search.config.trainer.ranks)
        learning = [way for sizes in search.trainer_values(ranks) for way in sizes]
        sampling = search.sequence_counts(seats, fewer=search.strictness.fewer)
        for parts in product(learning, search.sharing_modes, sampling):
            values = {**seats, **parts[0], **parts[1], **parts[2]}
            offloads = values.get("trainer.offload_optimizer")
            if offloads and not search.strictness.offload:
                continue
            if layout := search.layout(values):
                layouts.append(layout)
    return layouts


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("shape", "gpus", "gib", "config"),
    [
        ("0.6b", 1, 79.2, recipe()),
        ("1.7b", 2, 46.0, recipe(max_lag=1)),
        ("8b", 1, 139.8, recipe()),
        ("1.4b-a0.4b", 1, 46.0, recipe(prompts_per_step=64, group_size=4, max_lag=1)),
        ("1.4b-a0.4b", 1, 41.0, sft_recipe(conversations_per_step=256, max_context_tokens=4096)),
    ],
)
def test_search_is_as_good_as_exhaustive(shape: str, gpus: int, gib: float, config: Config) -> None:
    search = search_of(shape, gpus, gib, config)
    best = search.best()
    assert best is not None
    for strictness in _STRICTNESSES:
        fastest = search.fastest(strictness)
        layouts = exhaustive(search)
        assert (fastest is None) == (not layouts)
        if fastest is not None:
            assert fastest.cost <= _TIE * min(layout.cost for layout in layouts)
            assert best.cost <= strictness.gain * fastest.cost


@pytest.mark.e2e
@pytest.mark.parametrize("shape", SHAPES)
def test_everything_that_fits_is_accepted(shape: str) -> None:
    refused = 0
    for gpus, gib in product((1, 4, 8), (139.0, 79.0, 23.0)):
        hardware = machine(gpus, gib)
        try:
            choice = choose(recipe(), LAYOUT_KNOBS, facts(shape), hardware)
        except ConfigError as error:
            refused += 1
            assert "GiB" in str(error), error
            continue
        shared = place(choice.config, hardware.idle).shared
        make_plan(choice.config, facts(shape), machine(1, gib), shared=shared)
        assert set(choice.values) == LAYOUT_KNOBS and "layouts that fit" in choice.reason
        if shape in ("0.6b", "1.7b", "1.4b-a0.4b"):
            assert choice.config.trainer.ranks == gpus
            assert choice.config.trainer.micro_batch_tokens >= 8192
    assert refused == {"8b": 1, "30b-a3b": 4}.get(shape, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"rollout.time_share": True, "trainer.zero_stage": 2, "trainer.offload_optimizer": True},
        {"trainer.ranks": 3, "rollout.engines": 1, "rollout.max_num_seqs": 7}
        | {"rollout.gpu_memory_utilization": 0.5, "trainer.compile": False},
    ],
)
def test_fixed_knobs_stay(values: dict[str, Any]) -> None:
    config = with_values(recipe(), values)
    choice = choose(config, LAYOUT_KNOBS - set(values), facts("1.7b"), machine(4, 139.0))
    flat = flatten_config(choice.config)
    assert {knob: flat[knob] for knob in values} == values
    assert not set(values) & set(choice.values)


INVARIANT = replace(recipe(), model=replace(recipe().model, batch_invariant=True))
SHORT = replace(recipe(), run=replace(recipe().run, steps=3))
THREE = with_rollout(engines=3)
LONG = with_rollout(sampling=SamplingConfig(max_tokens=30_000, top_k=512))
LARGE = recipe(prompts_per_step=32)
GATHERED = {"trainer__activation_checkpointing": True, "trainer__zero_stage": 3}
NOTHING_SAVED = {"time_share": False, "activation_checkpointing": False}
FLOAT16 = sft_recipe(dtype="float16", conversations_per_step=64, max_context_tokens=2048)
ODD = sft_recipe(dtype="float16", tokens_per_step=524_288, max_context_tokens=8192)

# fmt: off
CHOICES: list[tuple[Any, ...]] = [
    # A small model needs no memory saving; three steps do not win back the time to compile.
    ("0.6b", 1, 139.0, recipe(), {}, {**NOTHING_SAVED, "compile": True}),
    ("0.6b", 1, 139.0, SHORT, {}, {"compile": False}),
    ("8b", 8, 79.0, INVARIANT, {}, {"compile": False, "share_prompts": False}),
    # Completions are sampled in equal waves, and asynchronous engines keep their GPU.
    ("0.6b", 1, 79.0, LARGE, {}, {"max_num_seqs": 256}),
    ("8b", 1, 139.0, recipe(max_lag=1), {}, {"time_share": False}),
    # The output of attention is kept only in long contexts, and not under ZeRO 3.
    ("0.6b", 1, 46.0, LONG, {}, {"keep_attention": True}),
    ("8b", 8, 139.0, LONG, GATHERED, {"keep_attention": False}),
    # Engines that are fixed, or a judge, leave the rest to ranks.
    ("1.7b", 8, 79.0, THREE, {"rollout__engines": 3}, {"ranks": 5, "engines": 3}),
    # Five trajectories took 11 % less time than four.
    ("30b-a3b", 1, 83.0, ODD, {}, {"micro_batch_tokens": 5 * 8192}),
    # ZeRO-2 has 7.5 GiB of buckets; ZeRO-1 has float16 gradients twice in an update.
    ("8b", 1, 178.0, FLOAT16, {}, {"zero_stage": 2}),
    ("0.6b", 1, 24.0, FLOAT16, {}, {"zero_stage": 1}),
    # With the optimizer in host memory, micro-batches are five times as large and four times as
    # fast; where that gains little, the optimizer stays.
    ("1.7b", 1, 46.0, recipe(max_lag=1), {}, {"offload_optimizer": True}),
    ("8b", 8, 79.0, recipe(), {}, {"offload_optimizer": False}),
    # Under ZeRO-1, an offloaded optimizer would hold gradients twice.
    ("8b", 1, 139.8, recipe(), {}, {"offload_optimizer": True, "zero_stage": 2}),
]
# fmt: on


@pytest.mark.parametrize(("shape", "gpus", "gib", "config", "fixed", "expected"), CHOICES)
def test_choices(
    shape: str, gpus: int, gib: float, config: Config, fixed: Any, expected: dict[str, Any]
) -> None:
    choice = chosen(shape, gpus, gib, config, **fixed)
    values = {
        k.partition(".")[2]: v
        for k, v in flatten_config(choice.config).items()
        if k.startswith(("trainer.", "rollout."))
    }
    assert {knob: values[knob] for knob in expected} == expected


def test_copy_of_parameters_is_not_split_over_nodes() -> None:
    nodes = Hardware(gpu=True, nodes=tuple(idle_nodes(2, 8)), gpu_gib=139.0)
    values = {"trainer.ranks": 12, "trainer.zero_stage": 3, "trainer.hpz_partition_size": 12}
    with pytest.raises(ConfigError, match="hpz_partition_size"):
        plan_on(with_values(recipe(), values), facts("8b"), nodes)


def test_nothing_is_chosen_without_known_memory() -> None:
    for hardware in (Hardware(gpu=False), machine(4, 0.0)):
        assert choose(recipe(), LAYOUT_KNOBS, facts("0.6b"), hardware).config == recipe()


def test_resumed_run_keeps_its_choice() -> None:
    first = chosen("1.7b", 1, 139.0)
    previous = {**first.values, "trainer.micro_batch_tokens": 4608}  # reduced meanwhile
    again = choose(recipe(), LAYOUT_KNOBS, facts("1.7b"), machine(1, 139.0), previous)
    assert again.values == previous and again.reason == _CACHED
    smaller = choose(recipe(), LAYOUT_KNOBS, facts("1.7b"), machine(1, 23.0), first.values)
    assert smaller.reason != _CACHED


def chosen_v32(nodes: int, *overrides: str) -> Choice:
    """Choose a layout of DeepSeek-V3.2 for nodes of eight H200s."""
    config, open_knobs = load_recipe("deepseek-v3.2-256x139", list(overrides))
    gib = config.run.gpu_gib
    hardware = Hardware(gpu=True, nodes=tuple(idle_nodes(nodes, 8)), gpu_gib=gib, note="x")
    return choose(config, open_knobs, v32_facts(), hardware)


@pytest.mark.parametrize(
    ("nodes", "engines", "ranks", "minutes"),
    [(16, 5, 48, 25.4), (32, 8, 128, 15.4), (64, 16, 256, 7.5)],
)
def test_deepseek_v32_fits_as_documented(
    nodes: int, engines: int, ranks: int, minutes: float
) -> None:
    """The table in docs/scaling.md. On 16 nodes, only with the optimizer in host memory."""
    choice = chosen_v32(nodes)
    trainer, plan, gib = choice.config.trainer, choice.plan, choice.config.run.gpu_gib
    assert (choice.config.rollout.engines, trainer.ranks) == (engines, ranks)
    assert trainer.offload_optimizer == (nodes == 16)
    assert RANK_SPARE * plan.peak <= gib * GIB and plan.engine.total <= 0.95 * gib * GIB
    assert plan.time is not None and round(plan.time.total / 60, 1) == minutes


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (2, r"needs 17 GPU.*fit on 5 nodes"),
        (3, r"several of trainer\.expert_parallel, .*one is not enough.*fit on 5 nodes"),
        (4, r"with trainer\.expert_parallel=2, trainer\.sequence_parallel=2, roll.*on 5 nodes"),
    ],
)
def test_misfit_names_only_sufficient_changes(nodes: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        chosen_v32(nodes, "trainer.expert_parallel=1")
    assert "run.device=cpu" not in str(raised.value)
    if nodes == 4:
        for fix in (
            "trainer.expert_parallel=2",
            "trainer.sequence_parallel=2",
            "rollout.sampling.max_tokens=4096",
        ):
            chosen_v32(nodes, "trainer.expert_parallel=1", fix)


def on_host(memory_gib: float) -> Hardware:
    (node,) = idle_nodes(1, 1)
    return Hardware(gpu=True, nodes=(replace(node, memory_gib=memory_gib),), gpu_gib=79.0, note="x")


def test_models_and_optimizer_must_fit_the_host() -> None:
    for memory_gib in (0.0, 256.0):  # unknown; enough
        choice = choose(recipe(), LAYOUT_KNOBS, facts("8b"), on_host(memory_gib))
        assert choice.values["trainer.offload_optimizer"]
    with pytest.raises(ConfigError, match=r"memory of node 0.*Save host memory with trainer.off"):
        choose(recipe(), LAYOUT_KNOBS, facts("8b"), on_host(64.0))


@pytest.mark.parametrize(
    ("values", "gpus"),
    [({"rollout.tensor_parallel": 2}, 3), ({"trainer.ranks": 4}, 5), ({"rollout.engines": 2}, 3)],
)
def test_misfit_names_the_smallest_layout(values: dict[str, Any], gpus: int) -> None:
    config = with_values(recipe(), values)
    with pytest.raises(ConfigError, match=f"needs {gpus} GPU.*Lower trainer.ranks, rollout.eng"):
        choose(config, LAYOUT_KNOBS - set(values), facts("0.6b"), machine(1, 79.2))


VALUES = {"trainer.micro_batch_tokens": 18_432, "trainer.ranks": 4, "rollout.time_share": False}
FOUR = Hardware(gpu=True, nodes=tuple(idle_nodes(1, 4)), gpu_gib=139.7).signature


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The config of a run that has a checkpoint and a saved choice."""
    saved = tmp_path / "checkpoints" / "step_000002"
    saved.mkdir(parents=True)
    (saved / _STATE).write_text("{}")
    save_choice(tmp_path, VALUES, FOUR)
    return Config(run=RunConfig(dir=str(tmp_path)), data=DataConfig(sources=(SOURCE,)))


def test_choice_is_reused_on_the_same_hardware(config: Config, tmp_path: Path) -> None:
    assert load_choice(config, FOUR) == (VALUES, "")
    update_choice(tmp_path, {"trainer.micro_batch_tokens": 9216, "trainer.compile": True})
    assert load_choice(config, FOUR)[0] == {**VALUES, "trainer.micro_batch_tokens": 9216}
    started_over = replace(config, run=replace(config.run, resume="never"))
    assert load_choice(started_over, FOUR) == ({}, "")


def test_choice_needs_its_file_and_a_checkpoint(config: Config, tmp_path: Path) -> None:
    (tmp_path / "chosen.json").write_text('{"values": 3')
    assert load_choice(config, FOUR) == ({}, "")
    save_choice(tmp_path, VALUES, FOUR)
    (tmp_path / "checkpoints" / "step_000002" / _STATE).unlink()
    assert load_choice(config, FOUR) == ({}, "")


BOTH = idle_nodes(2, 4)


def elastic(*, engines: int = 4, elastic_wait_s: float = 60.0, **trainer: int) -> Config:
    return replace(
        recipe(),
        run=RunConfig(elastic_wait_s=elastic_wait_s, startup_timeout_s=100.0),
        rollout=RolloutConfig(engines=engines),
        trainer=TrainerConfig(**{"ranks": 4, "zero_stage": 1, **trainer}),
    )


class Cluster:
    """A cluster whose nodes change over time, and the messages of a run on it."""

    def __init__(
        self, at: Callable[[float], list[Node]], folder: Path, patch: pytest.MonkeyPatch
    ) -> None:
        self.now, self.said = 0.0, list[str]()
        self.at = at
        patch.chdir(folder)
        Path(elastic().run.dir).mkdir(parents=True)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        patch.setattr(elastic_layouts, "time", clock)
        patch.setattr(elastic_layouts, "cluster_nodes", lambda *, gpus: self.at(self.now))
        patch.setattr(elastic_layouts, "_silent_nodes", list[str])
        patch.setenv("RAY_ADDRESS", "head:6379")

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def layouts(
        self, config: Config, *, gib: float = 79.0, left: frozenset[str] = frozenset()
    ) -> ElasticLayouts:
        gpu = bool(gib)
        hardware = Hardware(gpu=gpu, nodes=tuple(BOTH) if gpu else (), gpu_gib=gib)
        choice = choose(config, left, facts("1.7b"), hardware)
        return ElasticLayouts(
            choice.config,
            facts=facts("1.7b"),
            hardware=hardware,
            chosen=choice.values,
            say=self.said.append,
        )

    def begun(self, layouts: ElasticLayouts) -> Config:
        """Start with all nodes and return the config."""
        at, self.at = self.at, lambda _: BOTH
        config = layouts.next()
        self.at = at
        return config


@pytest.fixture
def halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(lambda _: BOTH[:1], tmp_path, monkeypatch)


def cores(*free: float) -> list[Node]:
    """Return single-core nodes with these numbers of free cores."""
    nodes = zip(idle_nodes(len(free), 0), free, strict=True)
    return [replace(node, cpus=1, free_cpus=left) for node, left in nodes]


@pytest.mark.parametrize("first", [True, False])
def test_lost_node_halves_ranks_and_engines(halved: Cluster, first: bool) -> None:
    layouts = halved.layouts(elastic(min_ranks=1))
    if not first:
        assert halved.begun(layouts) == elastic(min_ranks=1) and not halved.said
    config = layouts.next()
    assert (config.trainer.ranks, config.rollout.engines) == (2, 2)
    assert 60 <= halved.now <= 64
    assert len(halved.said) == 2 and "trainer.ranks is now 2, not 4" in halved.said[1]
    folder = Path(config.run.dir)
    events = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    assert [event["kind"] for event in events] == ["restart", "fewer"]
    assert layouts.oom_recovery.config == config and layouts.oom_recovery.fewer


def test_engines_share_gpus_if_that_keeps_enough_ranks(halved: Cluster) -> None:
    config = elastic(min_ranks=4, elastic_wait_s=0.0)
    config = replace(config, algorithm=replace(config.algorithm, max_lag=1))
    layouts = halved.layouts(config, left=LAYOUT_KNOBS)
    assert not halved.begun(layouts).rollout.colocated
    config = layouts.next()
    assert (config.trainer.ranks, config.rollout.engines, config.rollout.colocated) == (4, 4, True)


def test_engine_is_not_split_over_more_nodes_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = [replace(node, free_gpus=3) for node in idle_nodes(4, 4)]
    cluster = Cluster(lambda _: busy, tmp_path, monkeypatch)
    config = elastic(engines=1, min_ranks=1, ranks=2)
    rollout = replace(config.rollout, tensor_parallel=4)
    layouts = cluster.layouts(replace(config, rollout=rollout))
    cluster.begun(layouts)
    with pytest.raises(TimeoutError, match="No layout of at"):
        layouts.next()


def test_returning_node_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back_s = 30.0
    cluster = Cluster(lambda now: BOTH if now >= back_s else BOTH[:1], tmp_path, monkeypatch)
    layouts = cluster.layouts(elastic(min_ranks=1))
    cluster.begun(layouts)
    assert layouts.next() == elastic(min_ranks=1) and 30 <= cluster.now <= 34
    back_s = 200.0
    assert layouts.next().trainer.ranks == 2
    tokens = layouts.whole.trainer.micro_batch_tokens
    layouts.oom_recovery.reduce_memory(OutOfMemory("too small"))
    cluster.now = 200.0
    config = layouts.next()
    assert (config.trainer.ranks, layouts.oom_recovery.fewer) == (4, False)
    assert config.trainer.micro_batch_tokens == tokens // 2, "a reduction stays"


@pytest.mark.parametrize("trainer", [{}, {"min_ranks": 3, "sequence_parallel": 2}])
def test_run_times_out_if_fewer_ranks_are_forbidden(
    halved: Cluster, trainer: dict[str, int]
) -> None:
    layouts = halved.layouts(elastic(**trainer))
    halved.begun(layouts)
    with pytest.raises(TimeoutError):
        layouts.next()
    assert halved.now == 100
    assert ("min_ranks to continue" in halved.said[0]) == (not trainer)
