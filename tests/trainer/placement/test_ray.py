"""Placement groups on a Ray cluster with fake GPUs, and the private cluster of a run."""

import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from keel.trainer.placement import nodes
from keel.trainer.placement.elastic import ElasticLayouts
from keel.trainer.placement.hardware import ENGINE, RANK, Hardware
from keel.trainer.placement.nodes import QUOTED_PYTHON, Reservation, cluster_nodes, reserve_gpus
from tests.forked import start_worker_server
from tests.trainer.placement.shapes import SOURCE, facts
from tests.waiting import PATIENCE_S, add_node, start_cluster, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_ray_workers")]
CPUS = 8


def config(*, engines: int = 1, width: int = 1, ranks: int = 1) -> Config:
    return Config(
        data=DataConfig(sources=(SOURCE,)),
        rollout=RolloutConfig(engines=engines, tensor_parallel=width),
        trainer=TrainerConfig(ranks=ranks),
    )


def sit(reservation: Reservation, *seats: tuple[str, int]) -> list[tuple[str, tuple[int, ...]]]:
    """Start an actor on each seat. Returns their nodes and GPU ids."""

    class Reporter:  # local class: pickled by value, so the actor does not import this module
        def where(self) -> tuple[str, tuple[int, ...]]:
            ids = tuple(int(gpu) for gpu in ray.get_gpu_ids())
            return ray.get_runtime_context().get_node_id(), ids

    actors = [ray.remote(Reporter).options(**reservation.options(*s)).remote() for s in seats]
    places = ray.get([actor.where.remote() for actor in actors], timeout=PATIENCE_S)
    for actor in actors:
        ray.kill(actor)
    return places


def test_processes_of_a_session_share_a_server_of_workers(
    ray_worker_server: str, tmp_path: Path
) -> None:
    start_worker_server(Path(ray_worker_server), os.getpid())
    with pytest.raises(RuntimeError):
        start_worker_server(tmp_path / ("long" * 30), os.getpid())


def placement_groups() -> list[Any]:
    return [g for g in placement_group_table().values() if g["state"] != "REMOVED"]


def wait_until_free(gpus: int) -> None:
    wait_for(lambda: sum(node.free_gpus for node in cluster_nodes()) == gpus, "free GPUs")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray uses it to count GPUs
        cluster = start_cluster(*({"num_cpus": CPUS, "num_gpus": gpus} for gpus in (2, 4)))
        ray.init(cluster.address, runtime_env=QUOTED_PYTHON, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def two_nodes(cluster: Cluster) -> str:
    """A cluster with six free GPUs. When a reservation is removed, Ray frees its GPUs late."""
    wait_until_free(6)
    return cluster.address


def test_actors_run_on_their_planned_gpus(two_nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = cluster_nodes()
    assert (large.gpus, small.gpus) == (4, 2)
    with reserve_gpus(config(engines=1, width=3, ranks=3), timeout_s=PATIENCE_S) as reservation:
        planned = {
            (ENGINE, 0): (large.id, (0, 1, 2)),
            (RANK, 0): (small.id, (0,)),
            (RANK, 1): (small.id, (1,)),
            (RANK, 2): (large.id, (3,)),
        }
        for _ in range(2):  # a seat outlives its actor: a dead engine restarts on the same GPUs
            assert sit(reservation, *planned) == [*planned.values()]
    wait_until_free(6)
    single = replace(small, gpus=1, free_gpus=1)
    monkeypatch.setattr(nodes, "cluster_nodes", lambda: [single])
    with reserve_gpus(config(), timeout_s=PATIENCE_S) as reservation:
        assert sit(reservation, (ENGINE, 0), (RANK, 0)) == [(small.id, (0,))] * 2, "shared"


def test_each_gpu_of_an_engine_on_two_nodes_has_a_bundle(two_nodes: str, cluster: Cluster) -> None:
    third = add_node(cluster, num_cpus=CPUS, num_gpus=4)
    wait_until_free(10)

    class Engine:
        def workers(self) -> list[tuple[str, list[int]]]:
            """Start an actor in each bundle of its group, as vLLM's executor does."""
            group = ray.util.get_current_placement_group()
            strategies = [
                PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                for index in range(group.bundle_count)
            ]
            place = ray.remote(num_cpus=0, num_gpus=1)(
                lambda: (ray.get_runtime_context().get_node_id(), ray.get_gpu_ids())
            )
            refs = [place.options(scheduling_strategy=s).remote() for s in strategies]
            return ray.get(refs, timeout=PATIENCE_S)

    nodes = cluster_nodes()
    with reserve_gpus(config(width=6, ranks=3), timeout_s=PATIENCE_S) as reservation:
        ranks = sit(reservation, *((RANK, index) for index in range(3)))
        assert [node for node, _ in ranks] == [nodes[2].id] * 2 + [nodes[0].id]
        actor = ray.remote(Engine).options(**reservation.options(ENGINE, 0)).remote()
        workers = ray.get(actor.workers.remote(), timeout=PATIENCE_S)
        assert [node for node, _ in workers] == [nodes[0].id] * 3 + [nodes[1].id] * 3
        assert all(len(gpus) == 1 for _, gpus in workers)
        ray.kill(actor)
    cluster.remove_node(third, allow_graceful=False)
    wait_for(lambda: len(cluster_nodes()) == 2, "the node to leave")


def test_busy_gpus_are_awaited_until_the_deadline(two_nodes: str) -> None:
    for shape in ({"width": 5}, {"ranks": 6}):  # impossible even if the cluster were idle
        with pytest.raises(ConfigError), reserve_gpus(config(**shape), timeout_s=600):
            pass
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
    third = add_node(cluster, num_cpus=CPUS, num_gpus=2)
    wait_until_free(8)
    recipe = replace(
        config(engines=4, ranks=4), run=RunConfig(elastic_wait_s=0.1, dir=str(tmp_path))
    )
    recipe = replace(recipe, trainer=replace(recipe.trainer, min_ranks=2))
    output: list[str] = []
    options: dict[str, Any] = {"facts": facts("0.6b"), "hardware": Hardware(gpu=True)}
    start = ElasticLayouts(recipe, **options, chosen={}, say=output.append)
    with reserve_gpus(start.next(), timeout_s=PATIENCE_S) as reservation:
        assert len({seat.node.id for seat in reservation.placement.seats}) == 3
    cluster.remove_node(third, allow_graceful=False)
    wait_until_free(6)
    with reserve_gpus(start.next(), timeout_s=PATIENCE_S) as reservation:
        seats = reservation.placement.seats
        assert [sum(s.kind == kind for s in seats) for kind in (RANK, ENGINE)] == [3, 3]
    assert "trainer.ranks is now 3, not 4" in output[-1]


ROOT = Path(__file__).parents[3]

STRANGER = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print('is in')"
PROGRAM = f"""
import os, subprocess, sys
import psutil, ray
from keel.trainer.placement.nodes import start_ray
from keel.trainer.placement.ray_internals import own_processes
start_ray()
print(*sorted(own_processes()))
token, address = os.environ["RAY_AUTH_TOKEN"], ray.get_runtime_context().gcs_address
without = {{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}}
without["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or Ray would look at another address for it
few = {{"RAY_NUM_REDIS_GET_RETRIES": "5"}}  # a second each, of 20
modes = few, {{**few, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}}, os.environ
tries = [
    subprocess.Popen([sys.executable, "-c", {STRANGER!r}, address], env={{**without, **mode}},
                     stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for mode in modes
]
print(*("is in" in tried.communicate(timeout=300)[0] for tried in tries))
seen = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
print(any(token in word for words in seen for word in words or ()))
class Worker:
    def where(self): return sys.executable
actor = ray.remote(Worker).options(runtime_env={{"env_vars": {{"A": "1"}}}}).remote()
print(ray.get(actor.where.remote(), timeout=300))
def about(process):
    try:
        return [c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"]
    except psutil.Error:  # the process has just ended
        return []
ours = [about(p) for p in [psutil.Process(), *psutil.Process().children(recursive=True)]]
reached = {{ip.removeprefix("::ffff:") for ports in ours for ip in ports}}
print(bool(reached), *(ip for ip in reached if "127." not in ip))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment whose path contains a space."""
    home = tmp_path_factory.mktemp("environments") / "my environment"
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "python"


def test_local_cluster_is_private(python: Path, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [str(python), "-c", PROGRAM],
        env={**env, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    processes, joined, shown, where, ports = done.stdout.splitlines()
    assert processes == "gcs_server raylet"
    assert joined == "False False True", "joining needs the secret token"
    assert shown == "False" and not (tmp_path / ".ray").exists()
    assert where == str(python)
    assert ports == "True", "no process listens to other machines"
