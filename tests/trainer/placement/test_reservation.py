"""Placement groups on a Ray cluster with fake GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from keel.commands.cli import main
from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TinyModelConfig,
    TrainerConfig,
)
from keel.model.load import facts_of
from keel.model.tiny.build import model_config
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.placement.downloads import download_on_nodes
from keel.trainer.placement.elastic import elastic_layouts
from keel.trainer.placement.hardware import ENGINE, RANK, Hardware
from keel.trainer.placement.nodes import (
    QUOTED_PYTHON,
    cluster_nodes,
    detect_hardware,
    planned_hardware,
    seat_lines,
)
from keel.trainer.placement.ray_internals import without_unused_processes
from keel.trainer.placement.reservation import Reservation, reserve_gpus
from tests.model.hub import SIZES, Hub
from tests.waiting import PATIENCE_S, patiently, wait_for

pytestmark = pytest.mark.e2e
SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
CPUS = 8


def config(*, engines: int = 1, width: int = 1, ranks: int = 1) -> Config:
    return Config(
        data=DataConfig(sources=(SOURCE,)),
        rollout=RolloutConfig(engines=engines, tensor_parallel=width),
        trainer=TrainerConfig(ranks=ranks),
    )


def sit(reservation: Reservation, kind: str, count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Start `count` actors on their seats; returns their nodes and GPU ids by index."""
    return report([reservation.options(kind, index) for index in range(count)])


def report(options: list[dict[str, Any]]) -> list[tuple[str, tuple[int, ...]]]:
    class Reporter:  # local class: pickled by value, so the actor does not import this module
        def where(self) -> tuple[str, tuple[int, ...]]:
            ids = tuple(int(gpu) for gpu in ray.get_gpu_ids())
            return ray.get_runtime_context().get_node_id(), ids

    actors = [ray.remote(Reporter).options(**each).remote() for each in options]
    places = ray.get([actor.where.remote() for actor in actors], timeout=PATIENCE_S)
    for actor in actors:
        ray.kill(actor)
    return places


def placement_groups() -> list[Any]:
    """Placement groups that are not removed."""
    return [g for g in placement_group_table().values() if g["state"] != "REMOVED"]


def wait_until_free(gpus: int) -> None:
    wait_for(lambda: sum(node.free_gpus for node in cluster_nodes()) == gpus, "free GPUs")


@pytest.fixture(scope="module")
def fake_gpus() -> Iterator[None]:
    """Unset the variable that hides GPUs, which Ray uses to count them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """Address of a fake hub for the nodes of the cluster."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hub cache of the second node."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def cluster(fake_gpus: None, hub: str, cache: Path) -> Iterator[Cluster]:
    variables = {"HF_ENDPOINT": hub, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    with without_unused_processes():
        head = {"num_cpus": CPUS, "num_gpus": 2, "include_dashboard": False}
        cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        patiently(lambda: cluster.add_node(num_cpus=CPUS, num_gpus=4, env_vars=variables))
    cluster.wait_for_nodes(PATIENCE_S)
    ray.init(cluster.address, runtime_env=QUOTED_PYTHON, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def two_nodes(cluster: Cluster) -> str:
    """A cluster with six free GPUs; Ray frees the GPUs of a removed reservation late."""
    wait_until_free(6)
    return cluster.address


@pytest.fixture
def outside(two_nodes: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster that this process has not joined, as for a command."""
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    yield two_nodes
    ray.init(two_nodes, runtime_env=QUOTED_PYTHON, log_to_driver=False)
    wait_for(lambda: not placement_groups())


def test_actors_run_on_their_planned_gpus(two_nodes: str) -> None:
    large, small = cluster_nodes()
    assert (large.gpus, small.gpus) == (4, 2)
    with reserve_gpus(config(engines=1, width=3, ranks=3), timeout_s=PATIENCE_S) as reservation:
        planned = {(s.kind, s.index): (s.node.id, s.ids) for s in reservation.placement.seats}
        assert planned == {
            (ENGINE, 0): (large.id, (0, 1, 2)),
            (RANK, 0): (small.id, (0,)),
            (RANK, 1): (small.id, (1,)),
            (RANK, 2): (large.id, (3,)),
        }
        ranks = sit(reservation, RANK, 3)
        assert ranks == [planned[RANK, index] for index in range(3)]
        # A seat outlives its actor: a dead engine restarts on the same GPUs.
        for _ in range(2):
            assert sit(reservation, ENGINE, 1) == [planned[ENGINE, 0]]
    wait_until_free(6)


def test_model_is_downloaded_on_nodes_with_actors(two_nodes: str, cache: Path) -> None:
    large, small = cluster_nodes()
    download_on_nodes("owner/model", timeout_s=PATIENCE_S, nodes=[small.id])  # this node
    assert not list(cache.iterdir())
    for _ in range(2):  # the second download finds everything cached
        download_on_nodes("owner/model", timeout_s=PATIENCE_S, nodes=[large.id, small.id])
        (folder,) = cache.glob("models--owner--model/snapshots/*")
        there = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert there == {name: size for name, size in SIZES.items() if "/" not in name}


def test_impossible_placement_is_refused_at_once(two_nodes: str) -> None:
    for shape, message in (
        ({"width": 5}, r"^rollout\.tensor_parallel = 5: each engine needs its GPUs on one"),
        ({"ranks": 6}, r"needs 7 GPU\(s\) .* the cluster has 6"),
    ):
        recipe = config(**shape)
        with pytest.raises(ConfigError, match=message), reserve_gpus(recipe, timeout_s=600):
            pass
    wait_for(lambda: not placement_groups())


def test_busy_gpus_are_awaited_until_the_deadline(two_nodes: str) -> None:
    with reserve_gpus(config(ranks=5), timeout_s=PATIENCE_S):
        with (
            pytest.raises(TimeoutError, match="startup_timeout_s"),
            reserve_gpus(config(), timeout_s=1),
        ):
            pass
        wait_for(lambda: len(placement_groups()) == 1)
    with reserve_gpus(config(), timeout_s=PATIENCE_S) as reservation:
        assert len(reservation.placement.seats) == 2


def test_run_continues_on_the_remaining_nodes(
    two_nodes: str, cluster: Cluster, tmp_path: Path
) -> None:
    third = cluster.add_node(num_cpus=CPUS, num_gpus=2)
    wait_until_free(8)
    recipe = replace(config(engines=4, ranks=4), run=RunConfig(elastic_wait_s=0.1))
    recipe = replace(recipe, trainer=replace(recipe.trainer, min_ranks=2))
    output: list[str] = []
    facts = facts_of(model_config(TinyModelConfig(), build_tokenizer()))
    start = elastic_layouts(
        recipe, tmp_path, facts=facts, hardware=Hardware(gpu=True), chosen={}, say=output.append
    )
    with reserve_gpus(start.next(), timeout_s=PATIENCE_S) as reservation:
        assert len({seat.node.id for seat in reservation.placement.seats}) == 3
    cluster.remove_node(third, allow_graceful=False)
    wait_until_free(6)
    with reserve_gpus(start.next(), timeout_s=PATIENCE_S) as reservation:
        seats = reservation.placement.seats
        assert [sum(s.kind == kind for s in seats) for kind in (RANK, ENGINE)] == [3, 3]
        sit(reservation, RANK, 3)
    assert "trainer.ranks is now 3, not 4, rollout.engines is now 3, not 4" in output[-1] or (
        "rollout.engines is now 3, not 4, trainer.ranks is now 3, not 4" in output[-1]
    )
    wait_until_free(6)
    later = elastic_layouts(
        recipe, tmp_path, facts=facts, hardware=Hardware(gpu=True), chosen={}, say=output.append
    )
    with reserve_gpus(later.next(), timeout_s=PATIENCE_S) as reservation:
        assert len(reservation.placement.seats) == 6, "a first start, too"


def test_check_uses_the_cluster(outside: str) -> None:
    recipe = replace(config(engines=1, width=2, ranks=4), run=RunConfig(device="gpu"))
    hardware = planned_hardware(recipe)
    assert hardware == detect_hardware(recipe)
    assert not ray.is_initialized()
    assert f"the cluster at {outside}" in str(hardware)
    assert [line.split(": ")[1] for line in seat_lines(recipe, hardware)] == [
        "trainer ranks 0–3 on GPUs 0–3",
        "engine 0 on GPUs 0–1",
    ]


@pytest.mark.usefixtures("outside")
def test_unplaceable_run_fails_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ("train", "quickstart", "run.device=gpu", f"run.dir={tmp_path / 'run'}")
    assert main([*recipe, "rollout.tensor_parallel=5", "rollout.engines=1"]) == 2
    output = capsys.readouterr()
    assert "rollout.tensor_parallel = 5: each engine needs its GPUs on one node" in output.err
    assert "starting" not in output.out and "cold start" not in output.out
    assert not ray.is_initialized()


@pytest.mark.usefixtures("outside")
def test_check_plans_all_ranks_of_an_elastic_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ("check", "quickstart", "run.device=gpu", f"run.dir={tmp_path / 'run'}")
    knobs = ("trainer.ranks=4", "rollout.engines=4", "run.gpu_gib=80")
    assert main([*recipe, *knobs]) == 0
    assert "shared" in capsys.readouterr().out, "the cluster holds it so"
    apart = ("rollout.colocated=false", "rollout.time_share=false")
    assert main([*recipe, *knobs, *apart]) == 2
    assert "needs 8 GPU(s)" in capsys.readouterr().err
    assert main([*recipe, *knobs, "trainer.min_ranks=2"]) == 0
    assert "missing" not in capsys.readouterr().out
    assert main([*recipe, *knobs, *apart, "trainer.min_ranks=2"]) == 0
    output = capsys.readouterr().out
    assert "1 of these nodes absent now" in output and "missing node 0: " in output
    assert "warning      the recipe needs 8 GPU(s)" in output
    assert "starts with fewer ranks, 2 of 4 at least (trainer.min_ranks); on a" in output


def test_engine_and_rank_share_a_single_gpu(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = replace(cluster_nodes()[1], gpus=1, free_gpus=1)
    monkeypatch.setattr("keel.trainer.placement.reservation.cluster_nodes", lambda: [single])
    with reserve_gpus(config(), timeout_s=PATIENCE_S) as reservation:
        options = [reservation.options(kind, 0) for kind in (ENGINE, RANK)]
        assert report(options) == [(single.id, (0,))] * 2
