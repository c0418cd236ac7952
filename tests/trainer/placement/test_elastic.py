"""Starts of an elastic run with all or fewer nodes, on a fake clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keel.configs.schema import Config, ConfigError, RolloutConfig, RunConfig, TrainerConfig
from keel.trainer.placement.choose import choose
from keel.trainer.placement.elastic import ElasticLayouts, OomRecovery, smaller_configs
from keel.trainer.placement.hardware import Hardware, Node, idle_nodes
from keel.trainer.run.journal import EVENTS
from keel.trainer.run.restarts import OutOfMemory
from tests.trainer.placement import shapes

BOTH = idle_nodes(2, 4)
FACTS = shapes.facts("1.7b")


def recipe(*, engines: int = 4, elastic_wait_s: float = 60.0, **trainer: int) -> Config:
    return replace(
        shapes.recipe(),
        run=RunConfig(elastic_wait_s=elastic_wait_s, startup_timeout_s=100.0),
        rollout=RolloutConfig(engines=engines),
        trainer=TrainerConfig(**{"ranks": 4, "zero_stage": 1, **trainer}),
    )


class Cluster:
    """A cluster whose nodes change over time, and the messages of a run on it."""

    def __init__(self, at: Callable[[float], list[Node]], folder: Path) -> None:
        self.now, self.said = 0.0, list[str]()
        self.at, self._folder = at, folder

    def layouts(
        self, config: Config, *, gib: float = 79.0, left: frozenset[str] = frozenset()
    ) -> ElasticLayouts:
        gpu = bool(gib)
        hardware = Hardware(gpu=gpu, nodes=tuple(BOTH) if gpu else (), gpu_gib=gib)
        choice = choose(config, left, FACTS, hardware)

        def pause(seconds: float) -> None:
            self.now += seconds

        return ElasticLayouts(
            lowering=OomRecovery(config=choice.config, folder=self._folder),
            whole=choice.config,
            facts=FACTS,
            hardware=hardware,
            chosen=choice.values,
            say=self.said.append,
            nodes=lambda: self.at(self.now),
            clock=lambda: self.now,
            pause=pause,
        )

    def begun(self, layouts: ElasticLayouts) -> Config:
        """Start with all nodes and return the config."""
        at, self.at = self.at, lambda _: BOTH
        config = layouts.next()
        self.at = at
        return config


@pytest.fixture
def halved(tmp_path: Path) -> Cluster:
    return Cluster(lambda _: BOTH[:1], tmp_path)


def cores(*free: float) -> list[Node]:
    """Return single-core nodes with these numbers of free cores."""
    nodes = zip(idle_nodes(len(free), 0), free, strict=True)
    return [replace(node, cpus=1, free_cpus=left) for node, left in nodes]


@pytest.mark.parametrize("first", [True, False])
def test_lost_node_halves_ranks_and_engines(halved: Cluster, tmp_path: Path, first: bool) -> None:
    layouts = halved.layouts(recipe(min_ranks=1))
    if not first:
        assert halved.begun(layouts) == recipe(min_ranks=1) and not halved.said
    config = layouts.next()
    assert (config.trainer.ranks, config.rollout.engines) == (2, 2)
    assert 60 <= halved.now <= 64
    assert len(halved.said) == 2 and "trainer.ranks is now 2, not 4" in halved.said[1]
    events = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert [event["kind"] for event in events] == ["restart", "fewer"]
    assert layouts.lowering.config == config and layouts.lowering.fewer


def test_returning_node_is_used_again(tmp_path: Path) -> None:
    back_s = 30.0
    cluster = Cluster(lambda now: BOTH if now >= back_s else BOTH[:1], tmp_path)
    layouts = cluster.layouts(recipe(min_ranks=1))
    cluster.begun(layouts)
    assert layouts.next() == recipe(min_ranks=1) and 30 <= cluster.now <= 34
    back_s = 200.0
    assert layouts.next().trainer.ranks == 2
    tokens = layouts.whole.trainer.micro_batch_tokens
    layouts.lowering.after(OutOfMemory("too small"))
    cluster.now = 200.0
    config = layouts.next()
    assert (config.trainer.ranks, layouts.lowering.fewer) == (4, False)
    assert config.trainer.micro_batch_tokens == tokens // 2, "a reduction stays"


@pytest.mark.parametrize("trainer", [{}, {"min_ranks": 3, "sequence_parallel": 2}])
def test_run_times_out_if_fewer_ranks_are_forbidden(
    halved: Cluster, trainer: dict[str, int]
) -> None:
    layouts = halved.layouts(recipe(**trainer))
    halved.begun(layouts)
    with pytest.raises(TimeoutError):
        layouts.next()
    assert halved.now == 100
    assert ("min_ranks to continue" in halved.said[0]) == (not trainer)


def test_local_cluster_does_not_wait_for_nodes(tmp_path: Path) -> None:
    cluster = Cluster(lambda _: cores(0), tmp_path)  # as Ray reports right after a start
    less = cluster.layouts(recipe(ranks=3, min_ranks=2), gib=0)
    less.joinable = False
    assert less.next().trainer.ranks == 2 and len(cluster.said) == 1
    whole = cluster.layouts(recipe(ranks=3), gib=0)
    whole.joinable = False
    with pytest.raises(ConfigError, match="min_ranks"):
        whole.next()
    assert cluster.now == 0


@pytest.mark.parametrize(
    ("shape", "gpus", "best"),
    [
        ({}, 6, (3, 3)),
        ({"sequence_parallel": 2}, 6, (4, 2)),
        ({"sequence_parallel": 2}, 3, (2, 1)),
        ({"engines": 12}, 8, (2, 6)),
    ],
)
def test_ranks_and_engines_shrink_in_proportion(
    shape: dict[str, int], gpus: int, best: tuple[int, int]
) -> None:
    first = next(smaller_configs(recipe(**shape), 1, gpus=gpus))
    assert (first.trainer.ranks, first.rollout.engines) == best
