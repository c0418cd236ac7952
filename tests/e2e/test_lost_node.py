"""A run that starts on too few nodes and later loses some for good.

It starts with fewer ranks. After a step that does not fit, it continues with smaller micro-batches
and with all ranks, since a node has joined. It ends with a single rank. The engine runs on one node
and the environments on another until that is lost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.commands.cli import main
from keel.rollout.engine.worker import RayEngine
from keel.trainer.learner import Learner
from keel.trainer.run.journal import EVENTS
from keel.trainer.work_nodes import WorkNodes
from tests.e2e.test_command import DEADLINE_S, metrics, small
from tests.waiting import add_node, start_cluster, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("forked_ray_workers"),
]
STEPS, SHORT_AFTER, LOST_AFTER = 3, 1, 2
RANKS, ROOM, LEFT = 3, 2, 1
"""Ranks of the recipe, ranks that fit at first, and ranks after the loss; each node holds one."""
RANK_CPUS, WORK_CPUS = 5, 4
"""CPU cores of a rank and its node, and of the node of the environments, which holds no rank."""
SPELLING = {"name": "s", "source": "reasoning_gym", "task": "spell_backward", "size": 64}
ADDER = """
class Adder:
    def opening(self, task, seed): return f"Add {seed}."
    def add(self, a: int, b: int) -> int: return a + b
    def verdict(self, messages): return len(str(messages[-1]["content"])) % 5 / 4
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = start_cluster({"num_cpus": RANK_CPUS}, {"num_cpus": RANK_CPUS})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def short_of_memory(worker: Any) -> None:
    import torch  # noqa: PLC0415  (it travels by value)

    def accumulate(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    worker.engine._forward_backward = accumulate


def test_run_uses_the_ranks_that_fit(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    starts: list[Learner] = []
    work = add_node(cluster, num_cpus=WORK_CPUS).node_id
    head = cluster.head_node.node_id
    episodes = set[tuple[int, str]]()
    jobs = list[tuple[int, str, str]]()
    """Start, node, and the node on which the completions were sampled."""

    def engine_on_head(*arguments: Any, options: Any, **named: Any) -> RayEngine:
        strategy = NodeAffinitySchedulingStrategy(node_id=head, soft=False)
        options = {"scheduling_strategy": strategy}
        return RayEngine(*arguments, options=lambda _: options, **named)

    class Noted(WorkNodes):
        def start(self) -> None:
            super().start()
            if len(starts) < 3:
                wait_for(lambda: self.others, "the node of the environments")

        def _acquire(self, kind: Any, *arguments: Any, **named: Any) -> Any:
            node = super()._acquire(kind, *arguments, **named)
            if kind == "episodes":
                episodes.add((len(starts), node.id))
            else:
                jobs.append((len(starts), node.id, named["sampled_on"]))
            return node

    class Unlucky(Learner):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            starts.append(self)

        def step(self, *arguments: Any, **options: Any) -> Any:
            if (len(starts), self.version) == (1, SHORT_AFTER):
                add_node(cluster, num_cpus=RANK_CPUS)
                ray.get(
                    self._ranks.actors[1].__ray_call__.remote(short_of_memory), timeout=DEADLINE_S
                )
            if (len(starts), self.version) == (2, LOST_AFTER):
                for lost in [*cluster.worker_nodes]:
                    cluster.remove_node(lost, allow_graceful=False)
            return super().step(*arguments, **options)

    monkeypatch.setattr("keel.trainer.launch.Learner", Unlucky)
    monkeypatch.setattr("keel.trainer.launch.RayEngine", engine_on_head)
    monkeypatch.setattr("keel.trainer.launch.WorkNodes", Noted)
    for module in ("placement.hardware", "learner"):
        monkeypatch.setattr(f"keel.trainer.{module}.RANK_CPUS", float(RANK_CPUS))
    folder = tmp_path / "run"
    (tmp_path / "adder.py").write_text(ADDER)
    isolation = {"isolation": "none-i-trust-the-environments"}
    environment = {"target": "adder:Adder", "folder": str(tmp_path), **isolation}
    adder = {"name": "adder", "source": "environment", "environment": environment, "size": 64}

    knobs = [
        *(k for k in small(folder, tmp_path / "cache", steps=STEPS) if "data.sources" not in k),
        f"data.sources={json.dumps([adder, SPELLING])}",
        # As many as reward workers on their node, so that none is left for the driver's.
        *("agents.window=192", "agents.max_turns=2", "agents.max_concurrent_episodes=2"),
        *(f"trainer.ranks={RANKS}", "trainer.min_ranks=1", "trainer.threads=1"),
        *("run.checkpoint_every=1", "run.elastic_wait_s=1", "run.eval_every=-1"),
        "model.tiny.cold_start.steps=0",
    ]
    code, captured = main(["train", *knobs]), capsys.readouterr()
    output = captured.out + captured.err
    assert code == 0, output

    def told(kind: str) -> list[str]:
        lines = map(json.loads, (folder / EVENTS).read_text().splitlines())
        return [event["text"] for event in lines if event["kind"] == kind]

    assert len(starts) == 3, output
    unplaced, memory, loss, *silent, waits = told("restart")
    for line, free in ((unplaced, ROOM * RANK_CPUS + WORK_CPUS), (waits, LEFT * RANK_CPUS)):
        needs = f"{RANKS} trainer ranks of {RANK_CPUS} CPU cores"
        assert f"needs {needs}, and the cluster has {free} free cores" in line
    assert "trainer rank 1 failed during an optimizer step: CUDA out of memory" in memory
    assert "trainer.micro_batch_tokens is now 4096, not 8192" in memory
    assert f"restarts from step {SHORT_AFTER}" in memory
    assert f"restarts from step {LOST_AFTER}" in loss
    assert all("does not answer" in line for line in silent)
    for fewer, free in zip(told("fewer"), (ROOM, LEFT), strict=True):
        assert f"trainer.ranks is now {free}, not {RANKS}" in fewer
        assert fewer in output
    assert [learner._config.trainer.ranks for learner in starts] == [ROOM, RANKS, LEFT]
    assert episodes == {(1, work), (2, work), (3, head)}
    assert {(start, sampled_on) for start, _, sampled_on in jobs} == {(n, head) for n in (1, 2, 3)}
    assert any(start < 3 and node == sampled_on for start, node, sampled_on in jobs)
    assert starts[-1]._config.trainer.micro_batch_tokens == 4096
    assert (folder / "model" / "model.safetensors").exists()
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert [line.get("train/ranks") for line in lines[1:]] == [ROOM, None, LEFT]
