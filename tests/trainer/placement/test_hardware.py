"""Placement of actors on GPUs: exclusive, shared, or rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    JudgeConfig,
    JudgeServerConfig,
    RewardsConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.trainer.placement.hardware import (
    ENGINE,
    JUDGE,
    RANK,
    Node,
    Placement,
    allowed,
    place,
)


def config(*, engines: int = 1, width: int = 1, ranks: int = 1) -> Config:
    source = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
    return Config(
        data=DataConfig(sources=(source,)),
        rollout=RolloutConfig(engines=engines, tensor_parallel=width),
        trainer=TrainerConfig(ranks=ranks),
    )


def nodes(*sizes: int, cpus: int = 64) -> list[Node]:
    return [
        Node(name=f"n{i}", id=f"id{i}", gpus=size, cpus=cpus, free_gpus=size, free_cpus=cpus)
        for i, size in enumerate(sizes)
    ]


def homes(placement: Placement, kind: str) -> list[str]:
    """Return the node name of each actor of one kind, by index."""
    seats = sorted((s for s in placement.seats if s.kind == kind), key=lambda s: s.index)
    return [seat.node.name for seat in seats]


@pytest.mark.parametrize(
    ("shape", "sizes", "engines", "ranks"),
    [
        ((1, 2, 2), (4,), ["n0"], ["n0"] * 2),
        # Ranks stay together, next to the engines or on a separate node.
        ((2, 2, 4), (4, 4), ["n0"] * 2, ["n1"] * 4),
        ((4, 1, 8), (8, 8), ["n1"] * 4, ["n0"] * 8),
        ((2, 1, 8), (2, 8), ["n0"] * 2, ["n1"] * 8),
        # They split only if no node holds them all; neighbours stay together.
        ((1, 4, 8), (4, 4, 4), ["n0"], ["n1"] * 4 + ["n2"] * 4),
        # An engine never spans nodes, even if that splits the ranks.
        ((2, 2, 2), (3, 3), ["n0", "n1"], ["n0", "n1"]),
        ((3, 2, 0), (2, 4), ["n1", "n1", "n0"], []),
    ],
)
def test_engines_never_span_nodes_and_ranks_stay_together(
    shape: tuple[int, int, int], sizes: tuple[int, ...], engines: list[str], ranks: list[str]
) -> None:
    recipe = config(engines=shape[0], width=shape[1], ranks=max(1, shape[2]))
    room = nodes(*sizes) if shape[2] else [*nodes(*sizes), *nodes(1)]
    placement = place(recipe, room)
    assert homes(placement, ENGINE) == engines
    if ranks:
        assert homes(placement, RANK) == ranks


def test_colocated_engines_share_gpus_with_ranks() -> None:
    recipe = config(engines=6, ranks=6)
    recipe = replace(recipe, rollout=replace(recipe.rollout, colocated=True))
    placement = place(recipe, nodes(4, 4))
    assert homes(placement, ENGINE) == homes(placement, RANK) == ["n0"] * 4 + ["n1"] * 2
    for seat in placement.seats:
        owner = placement.owner(seat.kind, seat.index)
        assert seat.shared and (owner.kind, owner.first) == (RANK, seat.first)
    assert list(placement.lines()) == [
        "n0: engines 0–3 on GPUs 0–3, shared; trainer ranks 0–3 on GPUs 0–3, shared",
        "n1: engines 4–5 on GPUs 0–1, shared; trainer ranks 4–5 on GPUs 0–1, shared",
    ]
    with pytest.raises(
        ConfigError, match=r"needs 6 GPU\(s\) \(6 trainer rank\(s\) with an engine each"
    ):
        place(recipe, nodes(4))
    with pytest.raises(ConfigError, match="one node"):
        place(recipe, nodes(8, cpus=7))  # each pair needs two cores


def test_each_server_of_the_judge_gets_its_gpus() -> None:
    server = JudgeServerConfig(replicas=3, tensor_parallel=2)
    judge = JudgeConfig(model="m", serve=True, server=server)
    recipe = replace(config(engines=1, ranks=1), rewards=RewardsConfig(judge=judge))
    placement = place(recipe, nodes(4, 4))
    assert (homes(placement, JUDGE), placement.gpus) == (["n0", "n0", "n1"], 8)
    with pytest.raises(ConfigError, match=r"3 judge\(s\) of 2.*server.replicas"):
        place(recipe, nodes(4, 3))


def test_recipe_limits_nodes_and_gpus() -> None:
    run = RunConfig(gpus_per_node=2, nodes=2)
    few, many, busy = nodes(1, 8, 8)
    busy = replace(busy, free_gpus=1)
    kept = allowed([few, many, busy], run)
    assert [(n.name, n.gpus, n.free_gpus, n.in_use) for n in kept] == [
        ("n1", 2, 2, False),
        ("n0", 1, 1, False),
    ]
    assert allowed([few, many, busy], RunConfig()) == [few, many, busy]
    # A run limited to one GPU shares it, even if the machine has more.
    one = RunConfig(gpus_per_node=1)
    recipe = replace(config(), run=one)
    assert place(recipe, allowed([many], one)).shared
    (line,) = place(recipe, allowed([busy], one)).lines()
    assert line.startswith("n2: engine 0 on 1 of its 1 GPUs, shared; trainer")
    with pytest.raises(
        ConfigError, match=r"has 1: n1 \(1\) \(run\.gpus_per_node = 1, run\.nodes = 1\)"
    ):
        place(replace(recipe, trainer=TrainerConfig(ranks=2)), allowed([many], one))
