"""Elastic starts with all nodes or fewer, on a fake clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common import QWEN3_17B
from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.model.load import ModelFacts, facts_of
from keel.trainer.placement.choose import choose
from keel.trainer.placement.elastic import ElasticLayouts, smaller_configs
from keel.trainer.placement.hardware import Hardware, Node, idle_nodes, place
from keel.trainer.placement.oom_recovery import OomRecovery
from keel.trainer.run.journal import EVENTS
from keel.trainer.run.restarts import OutOfMemory

SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
BOTH = idle_nodes(2, 4)


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return replace(facts_of(QWEN3_17B), max_context=40_960)


def recipe(*, engines: int = 4, elastic_wait_s: float = 60.0, **trainer: int) -> Config:
    return Config(
        data=DataConfig(sources=(SOURCE,)),
        model=ModelConfig(path="a/model", dtype="bfloat16"),
        run=RunConfig(elastic_wait_s=elastic_wait_s, startup_timeout_s=100.0),
        rollout=RolloutConfig(engines=engines),
        trainer=TrainerConfig(**{"ranks": 4, "zero_stage": 1, **trainer}),
    )


class Cluster:
    """A cluster whose nodes depend on the time, and the messages of a run on it."""

    def __init__(self, at: Callable[[float], list[Node]]) -> None:
        self.now, self.said = 0.0, list[str]()
        self._at = at

    def layouts(
        self,
        config: Config,
        facts: ModelFacts,
        folder: Path,
        *,
        gib: float = 79.0,
        left: frozenset[str] = frozenset(),
    ) -> ElasticLayouts:
        gpu = bool(gib)
        hardware = Hardware(gpu=gpu, nodes=tuple(BOTH) if gpu else (), gpu_gib=gib)
        choice = choose(config, left, facts, hardware)

        def pause(seconds: float) -> None:
            self.now += seconds

        return ElasticLayouts(
            lowering=OomRecovery(config=choice.config, folder=folder),
            whole=choice.config,
            facts=facts,
            hardware=hardware,
            chosen=choice.values,
            say=self.said.append,
            nodes=lambda: self._at(self.now),
            clock=lambda: self.now,
            pause=pause,
        )

    def begun(self, layouts: ElasticLayouts) -> Config:
        """Start with all nodes and return the config."""
        at, self._at = self._at, lambda _: BOTH
        config = layouts.next()
        self._at = at
        return config


def one_lost(now: float) -> list[Node]:
    return BOTH[:1]


def test_complete_cluster_starts_at_once(facts: ModelFacts, tmp_path: Path) -> None:
    cluster = Cluster(lambda _: BOTH)
    layouts = cluster.layouts(recipe(), facts, tmp_path)
    assert layouts.next() == layouts.next() == recipe()
    assert (cluster.now, cluster.said, layouts.lowering.fewer) == (0, [], False)


def cores(*free: float) -> list[Node]:
    """Single-core nodes with these numbers of free cores."""
    nodes = zip(idle_nodes(len(free), 0), free, strict=True)
    return [replace(node, cpus=1, free_cpus=left) for node, left in nodes]


def test_first_start_without_enough_cores_times_out(facts: ModelFacts, tmp_path: Path) -> None:
    lacking = "needs 3 trainer ranks of 0.5 CPU cores, and the cluster has {} free cores"
    cluster = Cluster(lambda _: cores(0))
    cluster.layouts(recipe(ranks=2), facts, tmp_path, gib=0).next()
    assert (cluster.now, cluster.said) == (0, [])
    three = cluster.layouts(recipe(ranks=3), facts, tmp_path, gib=0)
    with pytest.raises(TimeoutError) as late:
        three.next()
    (line,) = cluster.said
    assert f"{lacking.format(1)}. After 100 s (run.startup_timeout_s) the run ends" in line
    assert cluster.now == 100
    assert lacking.format(0) in str(late.value)
    assert "set trainer.min_ranks" in str(late.value)
    cluster = Cluster(lambda now: cores(0.5) if now < 30 else cores(0.5, 1))
    assert cluster.layouts(three.whole, facts, tmp_path, gib=0).next() == three.whole
    assert 30 <= cluster.now <= 34


def test_first_start_continues_with_fewer_ranks(facts: ModelFacts, tmp_path: Path) -> None:
    cluster = Cluster(one_lost)
    layouts = cluster.layouts(recipe(min_ranks=1), facts, tmp_path)
    config = layouts.next()
    assert (config.trainer.ranks, config.rollout.engines) == (2, 2)
    assert 60 <= cluster.now <= 64 and layouts.lowering.fewer
    waits, goes_on = cluster.said
    assert "waits for room: the recipe needs 8 GPU(s)" in waits
    assert "its next start" in goes_on
    assert "trainer.ranks is now 2, not 4" in goes_on and "needs 8 GPU(s)" in goes_on
    cluster = Cluster(lambda now: BOTH if now >= 30 else BOTH[:1])
    whole = cluster.layouts(recipe(min_ranks=1), facts, tmp_path)
    assert whole.next() == recipe(min_ranks=1) and 30 <= cluster.now <= 34


def test_ctrl_c_interrupts_the_wait(facts: ModelFacts, tmp_path: Path) -> None:
    layouts = Cluster(one_lost).layouts(recipe(min_ranks=1), facts, tmp_path)

    def pause(seconds: float) -> None:
        raise KeyboardInterrupt

    layouts.pause = pause
    with pytest.raises(KeyboardInterrupt):
        layouts.next()


def test_local_cluster_does_not_wait_for_nodes(facts: ModelFacts, tmp_path: Path) -> None:
    cluster = Cluster(lambda _: cores(0))  # as Ray reports right after a start
    less = cluster.layouts(recipe(ranks=3, min_ranks=2), facts, tmp_path, gib=0)
    less.joinable = False
    assert less.next().trainer.ranks == 2 and len(cluster.said) == 1
    whole = cluster.layouts(recipe(ranks=3), facts, tmp_path, gib=0)
    whole.joinable = False
    with pytest.raises(ConfigError, match="min_ranks"):
        whole.next()
    assert cluster.now == 0


def test_half_a_free_core_fits_a_rank(facts: ModelFacts, tmp_path: Path) -> None:
    cluster = Cluster(lambda _: cores(0.5))
    cluster.layouts(recipe(ranks=1, min_ranks=1), facts, tmp_path, gib=0).next()
    assert (cluster.now, cluster.said) == (0, [])


def test_lost_node_halves_ranks_and_engines(facts: ModelFacts, tmp_path: Path) -> None:
    cluster = Cluster(one_lost)
    layouts = cluster.layouts(recipe(min_ranks=1), facts, tmp_path)
    cluster.begun(layouts)
    config = layouts.next()
    assert (config.trainer.ranks, config.rollout.engines) == (2, 2)
    assert 60 <= cluster.now <= 64
    waits, goes_on = cluster.said
    assert (
        "needs 8 GPU(s)" in waits and "After 60 s (run.elastic_wait_s) the run continues" in waits
    )
    assert "trainer.ranks is now 2, not 4" in goes_on
    assert "rollout.engines is now 2, not 4" in goes_on
    events = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert [event["kind"] for event in events] == ["restart", "fewer"]
    assert layouts.lowering.config == config and layouts.lowering.fewer


def test_returning_node_is_used_again(facts: ModelFacts, tmp_path: Path) -> None:
    back_s = 30.0
    cluster = Cluster(lambda now: BOTH if now >= back_s else BOTH[:1])
    layouts = cluster.layouts(recipe(min_ranks=1), facts, tmp_path)
    cluster.begun(layouts)
    assert layouts.next() == recipe(min_ranks=1) and 30 <= cluster.now <= 34
    back_s = 200.0
    assert layouts.next().trainer.ranks == 2
    cluster.now = 200.0
    assert layouts.next() == recipe(min_ranks=1) and not layouts.lowering.fewer


@pytest.mark.parametrize(
    ("trainer", "first"),
    [
        ({}, False),
        ({"min_ranks": 3, "sequence_parallel": 2}, False),
        ({"min_ranks": 3, "sequence_parallel": 2}, True),
    ],
)
def test_run_times_out_if_fewer_ranks_are_forbidden(
    facts: ModelFacts, tmp_path: Path, trainer: dict[str, int], first: bool
) -> None:
    cluster = Cluster(one_lost)
    layouts = cluster.layouts(recipe(**trainer), facts, tmp_path)
    if not first:
        cluster.begun(layouts)
    with pytest.raises(
        TimeoutError,
        match="100 s",
    ):
        layouts.next()
    assert cluster.now == 100
    hint = "set trainer.min_ranks" in cluster.said[0]
    assert hint == (not trainer)


def test_layouts_that_exceed_gpu_memory_are_skipped(facts: ModelFacts, tmp_path: Path) -> None:
    """Master weights and optimizer fit when sharded over four ranks, but not over three."""
    cluster = Cluster(one_lost)
    tight = recipe(min_ranks=1, zero_stage=2, micro_batch_tokens=512)
    layouts = cluster.layouts(tight, facts, tmp_path, gib=24.5)
    cluster.begun(layouts)
    with pytest.raises(TimeoutError, match=r"trainer rank needs .* GiB"):
        layouts.next()


def test_auto_knobs_are_chosen_again(facts: ModelFacts, tmp_path: Path) -> None:
    left = frozenset(
        {"trainer.ranks", "rollout.engines", "trainer.zero_stage", "trainer.micro_batch_tokens"}
    )
    cluster = Cluster(one_lost)
    layouts = cluster.layouts(recipe(), facts, tmp_path, left=left)
    whole = cluster.begun(layouts)
    less = layouts.next()
    assert whole.trainer.ranks + whole.rollout.engines == 8
    assert less.trainer.ranks + less.rollout.engines == 4
    place(less, BOTH[:1])


def test_smaller_micro_batch_survives_a_returning_node(facts: ModelFacts, tmp_path: Path) -> None:
    cluster = Cluster(lambda now: BOTH if now >= 100 else BOTH[:1])
    layouts = cluster.layouts(recipe(min_ranks=2), facts, tmp_path)
    tokens = cluster.begun(layouts).trainer.micro_batch_tokens
    assert layouts.next().trainer.ranks == 2
    layouts.lowering.after(OutOfMemory("too small"))
    assert layouts.lowering.config.trainer.ranks == 2
    cluster.now = 100.0
    config = layouts.next()
    assert (config.trainer.ranks, config.trainer.micro_batch_tokens) == (4, tokens // 2)


def test_silent_node_is_awaited_until_ray_drops_it(facts: ModelFacts, tmp_path: Path) -> None:
    cluster = Cluster(lambda now: BOTH[:1] if now >= 60 else BOTH)
    layouts = cluster.layouts(recipe(min_ranks=1, elastic_wait_s=0.0), facts, tmp_path)

    def silent() -> list[str]:
        cluster.now += 0.01  # a poll takes time
        return ["host-b"] if cluster.now < 60 else []

    layouts.silent = silent
    assert layouts.next().trainer.ranks == 2
    assert 60 <= cluster.now <= 66
    assert cluster.said[0].startswith("warning: node host-b does not answer")
    assert len(cluster.said) == 3, "and once"
    layouts.silent = lambda: ["host-b"]
    cluster.now = 0.0
    layouts.next()
    assert 90 <= cluster.now <= 96, "that Ray never gives up"


def test_ranks_without_gpus_need_half_a_core_each(facts: ModelFacts, tmp_path: Path) -> None:
    cluster = Cluster(lambda now: cores(1) if now else cores(1, 1))
    layouts = cluster.layouts(recipe(min_ranks=1), facts, tmp_path, gib=0.0)
    assert layouts.next() == layouts.next()
    cluster.now = 1.0
    config = layouts.next()
    assert (config.trainer.ranks, config.rollout.engines) == (2, 2)


@pytest.mark.parametrize(
    ("shape", "gpus", "best"),
    [
        ({}, 6, (3, 3)),
        ({"sequence_parallel": 2}, 6, (4, 2)),
        ({"sequence_parallel": 2}, 3, (2, 1)),
        ({"engines": 12}, 8, (2, 6)),
        ({"engines": 1}, 3, (2, 1)),
    ],
)
def test_ranks_and_engines_shrink_in_proportion(
    shape: dict[str, int], gpus: int, best: tuple[int, int]
) -> None:
    first = next(smaller_configs(recipe(**shape), 1, gpus=gpus))
    assert (first.trainer.ranks, first.rollout.engines) == best
