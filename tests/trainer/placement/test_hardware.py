"""The hardware of a run: detection, placement of actors on GPUs, and dtypes on a CPU."""

import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from keel.configs.dump import dump_config
from keel.configs.load import load_recipe
from keel.configs.schema import (
    DTYPE,
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
from keel.model import ray_timeouts
from keel.trainer.placement import layouts, nodes
from keel.trainer.placement.hardware import (
    ENGINE,
    JUDGE,
    RANK,
    Node,
    Placement,
    limit_nodes,
    place,
)
from keel.trainer.placement.layouts import _has_bfloat16, with_dtype
from keel.trainer.placement.nodes import (
    detect_hardware,
    planned_hardware,
    reserve_gpus,
    start_ray,
    with_missing_nodes,
)
from keel.trainer.run import checkpoint
from keel.trainer.run.checkpoint import State
from keel.trainer.run.signals import Preempted, watching
from tests.trainer.placement.shapes import SOURCE


def sized(*, engines: int = 1, width: int = 1, ranks: int = 1) -> Config:
    source = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
    return Config(
        data=DataConfig(sources=(source,)),
        rollout=RolloutConfig(engines=engines, tensor_parallel=width),
        trainer=TrainerConfig(ranks=ranks),
    )


def empty_nodes(*sizes: int, cpus: int = 64) -> list[Node]:
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
        # They split only if no node holds them all; neighbours stay together.
        ((1, 4, 8), (4, 4, 4), ["n0"], ["n1"] * 4 + ["n2"] * 4),
        # An engine that fits on a node stays there, even if that splits the ranks.
        ((2, 2, 2), (3, 3), ["n0", "n1"], ["n0", "n1"]),
        ((3, 2, 0), (2, 4), ["n1", "n1", "n0"], []),
    ],
)
def test_engines_and_ranks_stay_together(
    shape: tuple[int, int, int], sizes: tuple[int, ...], engines: list[str], ranks: list[str]
) -> None:
    recipe = sized(engines=shape[0], width=shape[1], ranks=max(1, shape[2]))
    room = empty_nodes(*sizes) if shape[2] else [*empty_nodes(*sizes), *empty_nodes(1)]
    placement = place(recipe, room)
    assert homes(placement, ENGINE) == engines
    if ranks:
        assert homes(placement, RANK) == ranks


def test_engine_larger_than_a_node_takes_equal_parts_of_several() -> None:
    placement = place(sized(engines=2, width=6, ranks=4), empty_nodes(4, 4, 2, 4, 4))
    assert homes(placement, ENGINE) == ["n0", "n1", "n3", "n4"]
    assert homes(placement, RANK) == ["n2", "n2", "n0", "n1"]
    assert placement.gpus == 16
    assert [*placement.lines()][1] == "n1: engine 0 on GPUs 0–2; trainer rank 3 on GPU 3"
    with pytest.raises(ConfigError, match="room on 2 nodes for each engine of 6"):
        place(sized(width=6, ranks=1), empty_nodes(4, 2, 2))
    with pytest.raises(ConfigError, match="multiple of 2, or at most 4"):
        place(sized(width=7, ranks=1), empty_nodes(4, 4, 4))
    assert homes(place(sized(width=7, ranks=1), empty_nodes(4), only=RANK), RANK) == ["n0"]


def test_groups_are_removed_if_a_later_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    created, removed = iter(["first"]), list[str]()
    monkeypatch.setattr(nodes, "cluster_nodes", lambda: empty_nodes(4, 4))
    monkeypatch.setattr(nodes, "_create_group", lambda seats: next(created))
    monkeypatch.setattr(nodes, "remove_placement_group", removed.append)
    with pytest.raises(RuntimeError), reserve_gpus(sized(width=6), timeout_s=1):
        pass
    assert removed == ["first"]


def test_colocated_engines_share_gpus_with_ranks() -> None:
    recipe = sized(engines=6, ranks=6)
    recipe = replace(recipe, rollout=replace(recipe.rollout, colocated=True))
    placement = place(recipe, empty_nodes(4, 4))
    assert homes(placement, ENGINE) == homes(placement, RANK) == ["n0"] * 4 + ["n1"] * 2
    for seat in placement.seats:
        owner = placement.owner(seat.kind, seat.index)
        assert seat.shared and (owner.kind, owner.first) == (RANK, seat.first)
    with pytest.raises(ConfigError, match="needs 6 GPU"):
        place(recipe, empty_nodes(4))
    with pytest.raises(ConfigError, match="one node"):
        place(recipe, empty_nodes(8, cpus=7))  # each pair needs two cores


def test_each_server_of_the_judge_gets_its_gpus() -> None:
    server = JudgeServerConfig(replicas=3, tensor_parallel=2)
    judge = JudgeConfig(model="m", serve=True, server=server)
    recipe = replace(sized(engines=1, ranks=1), rewards=RewardsConfig(judge=judge))
    placement = place(recipe, empty_nodes(4, 4))
    assert (homes(placement, JUDGE), placement.gpus) == (["n0", "n0", "n1"], 8)
    assert placement.required_nodes == {"id1"}, "other judge servers are there"
    alone = replace(judge, server=JudgeServerConfig(tensor_parallel=4))
    recipe_alone = replace(recipe, rewards=RewardsConfig(judge=alone))
    assert place(recipe_alone, empty_nodes(4, 4)).required_nodes == {"id0", "id1"}
    with pytest.raises(ConfigError, match=r"3 judge\(s\) of 2.*server.replicas"):
        place(recipe, empty_nodes(4, 3))


def test_recipe_limits_nodes_and_gpus() -> None:
    run = RunConfig(gpus_per_node=2, nodes=2)
    few, many, busy = empty_nodes(1, 8, 8)
    busy = replace(busy, free_gpus=1)
    kept = limit_nodes([few, many, busy], run)
    assert [(n.name, n.gpus, n.free_gpus, n.in_use) for n in kept] == [
        ("n1", 2, 2, False),
        ("n0", 1, 1, False),
    ]
    assert limit_nodes([few, many, busy], RunConfig()) == [few, many, busy]
    # A run limited to one GPU shares it, even if the machine has more.
    one = RunConfig(gpus_per_node=1)
    recipe = replace(sized(), run=one)
    assert place(recipe, limit_nodes([many], one)).shared
    with pytest.raises(ConfigError, match=r"run\.gpus_per_node = 1"):
        place(replace(recipe, trainer=TrainerConfig(ranks=2)), limit_nodes([many], one))


@pytest.fixture(autouse=True)
def well() -> Iterator[None]:
    yield
    ray_timeouts.new_session()


def test_signal_does_not_interrupt_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def leave(*_: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        ended.append("Ray")

    monkeypatch.setattr(ray_timeouts, "shut_down", leave)
    with watching(), pytest.raises(Preempted):
        nodes.stop_ray()
    assert ended == ["Ray"]


def test_unreachable_or_hung_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr("ray.init", lambda **_: never.wait())
    monkeypatch.setattr(nodes, "_ENTER_S", 0.01)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port.getsockname()[1]}")
        with pytest.raises(ConfigError, match="RAY_ADDRESS"):
            planned_hardware(on_device())
        assert not ray.is_initialized()
        port.listen()
        with pytest.raises(ConfigError, match="RAY_ADDRESS"):
            start_ray()
    never.set()
    assert ray_timeouts.lost_reason()


def on_device(run: RunConfig | None = None, **shape: Any) -> Config:
    run = run or RunConfig(device="gpu")
    return Config(run=run, data=DataConfig(sources=(SOURCE,)), rollout=RolloutConfig(**shape))


def here(monkeypatch: pytest.MonkeyPatch, *, gpus: int, gib: float) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(nodes, "_visible_gpus", lambda: gpus)
    monkeypatch.setattr(nodes, "gpu_gib", lambda: gib)


def test_plan_includes_missing_nodes_of_elastic_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, gpus=4, gib=80.0)
    monkeypatch.setattr(nodes, "available_cores", lambda: 8)
    whole = replace(on_device(engines=4), trainer=TrainerConfig(ranks=4, min_ranks=2))
    here_now = detect_hardware(whole)
    detected = with_missing_nodes(here_now, whole)
    assert detected.missing and "1 of these nodes absent" in str(detected)
    lines = list(place(whole, detected.idle).lines())
    assert lines[1] == "missing node 0: engines 0–3 on GPUs 0–3"
    one_node = replace(whole, run=RunConfig(device="gpu", gpus_per_node=4))
    others = [replace(whole, trainer=TrainerConfig(ranks=4, min_ranks=m)) for m in (0, 4)]
    enough = replace(whole, rollout=RolloutConfig(engines=4, colocated=True))
    for config in (one_node, *others, enough):
        assert with_missing_nodes(here_now, config) == here_now


@pytest.mark.parametrize(
    ("said", "detected", "check", "train"),
    [
        # said: device, gpu_gib, gpus_per_node, nodes; found: GPUs and their memory
        (("auto", 0, 0, 1), (0, 0.0), None, None),
        (("auto", 0, 0, 1), (2, 80.0), ([2], 80.0), ([2], 80.0)),
        (("cpu", 0, 0, 1), (2, 80.0), None, None),
        # GPUs in the recipe are planned for; a run without GPUs does not fall back to CPU.
        (("auto", 139, 0, 1), (0, 0.0), ([8], 139.0), ([], 139.0)),
        (("auto", 139, 4, 2), (0, 0.0), ([4, 4], 139.0), ([], 139.0)),
        # A run uses at most the present GPUs and the recipe's limit.
        (("auto", 139, 8, 1), (2, 80.0), ([8], 139.0), ([2], 80.0)),
        (("auto", 40, 1, 1), (2, 80.0), ([1], 40.0), ([1], 40.0)),
        (("auto", 139, 0, 1), (2, 80.0), ([2], 139.0), ([2], 80.0)),
    ],
)
def test_planned_and_detected_hardware(
    monkeypatch: pytest.MonkeyPatch,
    said: tuple[Any, float, int, int],
    detected: tuple[int, float],
    check: tuple[list[int], float] | None,
    train: tuple[list[int], float] | None,
) -> None:
    here(monkeypatch, gpus=detected[0], gib=detected[1])
    device, gib, gpus, count = said
    needed = on_device(RunConfig(device=device, gpu_gib=gib, gpus_per_node=gpus, nodes=count))
    for hardware, expected in ((planned_hardware(needed), check), (detect_hardware(needed), train)):
        assert hardware.gpu == (expected is not None)
        if expected:
            assert ([node.gpus for node in hardware.nodes], hardware.gpu_gib) == expected


@pytest.fixture(params=[True, False], ids=["avx512_bf16", "avx2"])
def bfloat16(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Fake /proc/cpuinfo. Returns True if the CPU in it has bfloat16 instructions."""
    flags = "fpu avx2" + " avx512f avx512_bf16" * request.param
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    monkeypatch.setattr(layouts, "_CPUINFO", info)
    _has_bfloat16.cache_clear()
    monkeypatch.setattr(layouts, "_has_bfloat16", lambda: _has_bfloat16.__wrapped__())
    return request.param


def of_dtype(tmp_path: Path, dtype: str) -> tuple[Config, frozenset[str]]:
    path = tmp_path / "own.yaml"
    path.write_text(
        f"model: {{path: a/b{dtype}}}\n"
        "data: {sources: [{name: s, source: jsonl, path: s.jsonl}]}\n"
    )
    return load_recipe(path)


@pytest.mark.parametrize("dtype", ["", ", dtype: auto"])
def test_auto_dtype_is_fast_on_the_cpu(bfloat16: bool, tmp_path: Path, dtype: str) -> None:
    config, open_knobs = of_dtype(tmp_path, dtype)
    assert DTYPE in open_knobs
    chosen = with_dtype(config, open_knobs, gpu=False)
    assert chosen.model.dtype == ("bfloat16" if bfloat16 else "float32")
    assert with_dtype(config, open_knobs, gpu=True).model.dtype == "bfloat16"


@pytest.mark.parametrize("first_dtype", ["float32", "bfloat16"])
def test_resumed_run_keeps_its_dtype(bfloat16: bool, tmp_path: Path, first_dtype: str) -> None:
    config, open_knobs = of_dtype(tmp_path, "")
    config = replace(config, run=replace(config.run, dir=str(tmp_path / "run")))
    before = replace(config, model=replace(config.model, dtype=first_dtype))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(before))
    saved = State(step=2, version=2, config="c")
    checkpoint.save(tmp_path / "run" / "checkpoints", saved, lambda _: {}, keep=9)
    assert with_dtype(config, open_knobs, gpu=False).model.dtype == first_dtype


def test_failed_download_is_noticed_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = [{"NodeID": 56 * n, "NodeManagerHostname": f"host-{n}"} for n in "abc"]
    killed = list[str]()

    def get(request: str, *, seconds: float) -> None:
        assert request == "c", "b is still downloading"
        raise ray_timeouts.Unanswered("no space left")

    monkeypatch.setattr(ray_timeouts, "alive_nodes", lambda: alive)
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: 56 * "a")
    )
    requests = iter("bc")
    actor = SimpleNamespace(fetch="")
    monkeypatch.setattr(ray_timeouts, "create", lambda *_: actor)
    monkeypatch.setattr(ray_timeouts, "call", lambda *_: next(requests))
    monkeypatch.setattr(ray_timeouts, "wait", lambda refs, seconds: (["c"], ["b"]))
    monkeypatch.setattr(ray_timeouts, "get", get)
    monkeypatch.setattr(ray_timeouts, "kill", lambda _: killed.append("a"))
    with pytest.raises(RuntimeError, match=r"host-c did not finish.*no space left"):
        nodes.download_on_nodes("some/model")
    assert len(killed) == 2
