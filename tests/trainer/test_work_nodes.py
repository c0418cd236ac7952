"""Reward workers and environments on several Ray nodes, some of which are lost."""

import asyncio
import math
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from keel.agents.types import EnvironmentLost, NodeLost
from keel.configs.schema import (
    AgentsConfig,
    Config,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    RewardsConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TinyModelConfig,
)
from keel.rewards.custom import TextTrajectory, pickle_functions, prompt_fields
from keel.rewards.pool import VerifierScore
from keel.rewards.scorer import Scorer
from keel.rl.futures import failed
from keel.rl.turns import ToolCall, TurnRequest, TurnResult
from keel.rl.types import Group, Prompt
from keel.rollout.spec import EngineError
from keel.trainer.build_agents import episode_runner
from keel.trainer.placement.hardware import Node
from keel.trainer.placement.nodes import QUOTED_PYTHON
from keel.trainer.work_nodes import WorkNodes, _Node, _NodeWorker
from tests.agents.scripted import CHAT, Policy
from tests.rewards.groups import PROMPT, score, with_message
from tests.trainer.naps import SECONDS, elsewhere, fails, nap, some_seconds
from tests.waiting import PATIENCE_S, add_node, start_cluster, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_ray_workers")]
ADDER = """
import time
class Adder:
    def opening(self, task, seed): return f"Add {seed}."
    def add(self, a: int, b: int) -> int:
        time.sleep(0.5)
        return a + b
    def verdict(self, messages): return float("42" in messages[-1]["content"])
"""


def config(folder: Path, **run: Any) -> Config:
    maths = SourceConfig(
        name="maths",
        source="reasoning_gym",
        task="basic_arithmetic",
        size=4,
        rewards={"correct": 1.0},
    )
    maker = EnvironmentConfig(
        target="adder:Adder", folder=str(folder), isolation="none-i-trust-the-environments"
    )
    agents = SourceConfig(
        name="adder", source="environment", environment=maker, size=4, rewards={"correct": 1.0}
    )
    return Config(
        run=RunConfig(**run),
        model=ModelConfig(dtype="float32", tiny=TinyModelConfig(max_context=2000)),
        data=DataConfig(sources=(maths, agents)),
        rewards=RewardsConfig(workers=1, timeout_s=PATIENCE_S),
        agents=AgentsConfig(window=2000, max_concurrent_episodes=64),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adder.py").write_text(ADDER)
    return tmp_path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = start_cluster({"num_cpus": 1}, {"num_cpus": 4})
    ray.init(cluster.address, runtime_env=QUOTED_PYTHON, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def unreal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkNodes]:
    """Nine nodes without actors. Tests replace `_Node.call`."""
    for name in ("kill", "stop"):
        monkeypatch.setattr(f"keel.model.ray_timeouts.{name}", lambda _: None)
    nodes = WorkNodes(config(folder), say=lambda _: None, log=None, runs_code=False)
    others = [_Node(id=str(number), host="host", workers=99, ready=True) for number in range(9)]
    nodes._nodes, nodes._thread = {node.id: node for node in others}, threading.Thread()
    nodes._thread.start()
    yield nodes
    nodes.close()


def groups(count: int) -> list[Group]:
    """Groups with a right and a wrong completion each."""
    texts = [{"role": "assistant", "content": text} for text in ("3", "4")]
    trajectories = tuple(with_message(text, sibling=i) for i, text in enumerate(texts))
    return [Group(prompt=PROMPT, trajectories=trajectories)] * count


def task(source: str = "adder", text: str = "?") -> Prompt:
    return Prompt(
        prompt_id="a0",
        domain=source,
        messages=({"role": "user", "content": text},),
        environment=source,
        reward={"kind": "environment"},
    )


def test_work_survives_the_loss_of_a_node(cluster: Cluster, folder: Path) -> None:
    big = add_node(cluster, num_cpus=16)
    said: list[str] = []
    recipe, name = config(folder), f"python.{elsewhere.__name__}"
    weights = {"maths": {"correct": 1.0, name: 0.5}}
    turns = ["@add 20, 20", "@add 40, 2", "42"]
    # By the context, because an episode that starts again has the same name.
    policy = Policy(lambda context, _: turns[context.count("<|im_start|>assistant") - 1])

    def played(place: Any, during: Any = lambda: None) -> Group:
        with episode_runner(recipe, CHAT, policy.submit, place) as runner:
            group = runner.submit(task(), group_size=8, purpose="train")
            during()
            return group.result(PATIENCE_S)

    alone = played(None)
    with pickle_functions([elsewhere]):
        nodes = WorkNodes(recipe, say=said.append, log=None, runs_code=False)
        with Scorer(weights, pool=nodes) as scorer:
            first = score(scorer, groups(3))
            nodes.start()
            wait_for(lambda: len(nodes.others) == 2, "nodes")
            busy = [scorer.submit(group) for group in groups(80)]
            time.sleep(1.0)
            cluster.remove_node(big, allow_graceful=False)
            scored = [future.result(PATIENCE_S) for future in busy]
            assert [s.parts_G[i]["correct"] for s in scored for i in (0, 1)] == [1.0, 0.0] * 80
            assert not any(parts["error"] for s in scored for parts in s.parts_G)
            here = sum(not parts[name] for s in scored for parts in s.parts_G)
            assert all(not parts[name] for s in first for parts in s.parts_G)
            assert 0 < here < 80, "shared by the number of workers"
            wait_for(lambda: len(nodes.others) == 1, "the loss")
            assert any("does not run rewards" in line for line in said), said

            def lose() -> None:
                (node,) = nodes.others
                wait_for(lambda: node.load["episodes"] >= 4)
                time.sleep(0.7)
                node.actor.__ray_call__.remote(lambda _: os._exit(1))

            group = played(nodes.environment, lose)
            assert not group.dropped and len(group.trajectories) == 8
            for ours, theirs in zip(group.trajectories, alone.trajectories, strict=True):
                assert (ours.messages, ours.verdict) == (theirs.messages, theirs.verdict)
            loads = [nodes._here, *nodes.others]
            assert not any(node.load["episodes"] or node.load["jobs"] for node in loads)
            nodes._not_before.clear()
            wait_for(lambda: len(nodes.others) == 1, "a new actor")
    wait_for(lambda: ray.available_resources().get("CPU") == 5, "free cores")


SIZES = tuple(map(int, os.environ.get("KEEL_TEST_NODES", "").split()))
"""Numbers of nodes to measure, as in docs/clusters.md."""


EPISODES = 8
"""Open episodes per node in the measurement."""


def measure(work: Sequence[Any], submit: Callable[[Any], Future[Any]]) -> tuple[float, float]:
    """Return the number of finished items per second, and the driver's CPU time per item in ms,
    from the first quarter of the items to the last."""
    times = list[tuple[float, float]]()
    futures = [submit(item) for item in work]
    for future in futures:
        future.add_done_callback(lambda _: times.append((time.monotonic(), time.process_time())))
    for future in futures:
        future.result(PATIENCE_S)
    first, last = len(work) // 4, 3 * len(work) // 4
    (start, start_cpu), (end, end_cpu) = times[first], times[last]
    return (last - first) / (end - start), 1e3 * (end_cpu - start_cpu) / (last - first)


@pytest.mark.skipif(not SIZES, reason="measures a speed: set KEEL_TEST_NODES='1 2'")
def test_nodes_add_up(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring a completion, sampling a turn and calling a tool take `SECONDS` each, on average.
    Each node has two reward workers, and the driver's has one. An episode has three turns and two
    calls."""
    monkeypatch.setattr("keel.configs.schema.EPISODES_PER_NODE", EPISODES)
    (folder / "adder.py").write_text(ADDER.replace("0.5", f"{SECONDS}"))
    limits = {"agents": AgentsConfig(window=2000), "rollout": RolloutConfig(engines=max(SIZES))}
    recipe, shares, delays = replace(config(folder), **limits), list[float](), list[float]()
    turns = ["@add 20, 20", "@add 40, 2", "42"]
    policy = Policy(lambda context, _: turns[context.count("<|im_start|>assistant") - 1])

    def sample(request: TurnRequest, purpose: str) -> Future[TurnResult]:
        future = Future[TurnResult]()
        later = asyncio.get_running_loop().call_later
        later(some_seconds(), lambda: future.set_result(policy.say(request)))
        return future

    async def watch_loop() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.02)
            delays.append(1e3 * (time.monotonic() - start - 0.02))

    with ExitStack() as stack:
        stack.enter_context(pickle_functions([nap]))
        nodes = WorkNodes(recipe, say=print, log=None, runs_code=False)
        weights = {"maths": {f"python.{nap.__name__}": 1.0}}
        scorer = stack.enter_context(Scorer(weights, pool=nodes))
        runner = episode_runner(recipe, CHAT, sample, nodes.environment, nodes.count)
        stack.enter_context(runner)
        nodes.start()

        def play(_: int) -> Future[Group]:
            return runner.submit(task(), group_size=1, purpose="train")

        added: list[Any] = []
        for size in SIZES:
            while len(added) + 1 < size:
                added.append(add_node(cluster, num_cpus=4))
            wait_for(lambda size=size: len(nodes.others) == size, f"{size} nodes")
            score(scorer, groups(4 * size + 2))  # starts the workers
            rate, cost = measure(groups(30 * size), scorer.submit)
            most = EPISODES * (size + 1)
            measure(range(most), play)  # starts the environments' servers
            delays.clear()
            watch = runner._thread.submit(watch_loop())
            played, played_cost = measure(range(6 * most), play)
            watch.cancel()
            shares = [2 * rate * SECONDS / (2 * size + 1), 5 * played * SECONDS / most]
            memory = psutil.Process().memory_full_info().uss / 2**20
            median, worst = np.percentile(delays, [50, 99])
            print(
                f"| {size} | {2 * rate:.1f} | {shares[0]:.0%} | {cost:.1f} ms | {played:.1f} | "
                f"{shares[1]:.0%} | {played_cost:.1f} ms | {median:.1f} / {worst:.1f} ms | "
                f"{memory:.0f} MiB |"
            )
        for node in added[-8:]:
            before, start = len(nodes.others), time.monotonic()
            cluster.remove_node(node, allow_graceful=False)
            wait_for(lambda before=before: len(nodes.others) < before, "the loss")
            print(f"a lost node is noticed after {time.monotonic() - start:.1f} s")
    assert min(shares) > 0.9, shares


def test_recipe_names_the_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Node(name=name, id=name * 2, gpus=0, cpus=4, free_gpus=0, free_cpus=4) for name in "abc"
    ]
    monkeypatch.setattr("keel.trainer.placement.nodes.cluster_nodes", lambda gpus: found)
    said: list[str] = []
    recipe = config(folder, cpu_node_names=("a", "c", "d"))
    nodes = WorkNodes(recipe, say=said.append, log=None, runs_code=False)
    started: list[str] = []
    monkeypatch.setattr(nodes, "_start", lambda name, host, workers: started.append(host))
    nodes._poll_nodes(0.0)
    nodes._poll_nodes(1.0)
    nodes.close()
    assert set(started) == {"a", "c"}
    assert said == ["run.cpu_node_names: the cluster has no node d"]


def test_silent_node_is_given_up(
    cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.trainer.work_nodes._SILENT_S", 3.0)
    nodes = WorkNodes(config(folder), say=lambda _: None, log=None, runs_code=False)
    nodes.start()
    try:
        wait_for(lambda: len(nodes.others) == 1, "a node")
        silent = nodes.others[0]
        silent.actor.__ray_call__.remote(lambda _: time.sleep(1000))  # blocks its event loop
        results = [nodes.submit(PROMPT.reward, ["3"]) for _ in range(30)]
        assert all(result.result(PATIENCE_S)[0].score == 1.0 for result in results)
        assert silent not in nodes.others
    finally:
        nodes.close()


def test_errors_name_the_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    spec = {"kind": "function", "name": f"python.{fails.__name__}", "prompt": prompt_fields(PROMPT)}
    (text,) = (
        TextTrajectory(messages=one.messages, finish_reason="stop", sampled_tokens=1).dumps()
        for one in groups(1)[0].trajectories[:1]
    )

    async def verify() -> list[VerifierScore]:
        node = _NodeWorker()
        assert not await node.start(config(folder), 1, str(folder), {}, None, False)
        scores = await node.verify(spec, [text])
        await node.end()
        return scores

    with pickle_functions([fails]):
        (result,) = asyncio.run(verify())
    assert result.error.endswith(f"/data/answers.json on node {socket.gethostname()}")
    assert re.search(r"naps.py:\d+ in fails$", result.at), "the same on all nodes"


BROKEN = """
import os
class Adder:
    def opening(self, task, seed):
        if os.environ.get("ON_NODE"): raise FileNotFoundError("/data/wiki.db")
        if "bad" in str(task): return 5
        return "Add."
    def add(self, a: int, b: int) -> int: return a + b
    def verdict(self, messages): return 1.0
"""


def test_failing_open_pauses_one_source_of_the_node(
    cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that fails at once would otherwise be idle, and attract all episodes."""
    recipe, said = config(folder), list[str]()
    (folder / "broken.py").write_text(BROKEN)
    maker = replace(recipe.data.sources[1].environment, target="broken:Adder")
    other = replace(recipe.data.sources[1], name="broken", environment=maker)
    recipe = replace(recipe, data=replace(recipe.data, sources=(*recipe.data.sources, other)))
    policy = Policy(lambda *_: "42")

    nodes = WorkNodes(recipe, say=said.append, log=None, runs_code=False)
    nodes.start()
    try:
        wait_for(lambda: len(nodes.others) == 1, "a node")
        (node,) = nodes.others
        with episode_runner(recipe, CHAT, policy.submit, nodes.environment) as runner:

            def play(prompt: Prompt) -> Group:
                return runner.submit(prompt, group_size=8, purpose="train").result(PATIENCE_S)

            assert len(play(task("broken", "bad")).dropped) == 8
            assert nodes.others == [node] and len(said) == 2 and "source broken" in said[1]
            node.not_before.clear()
            assert len(play(task("broken")).trajectories) == 8
            assert "broken" in node.opened and len(said) == 2
            assert len(play(task("adder")).trajectories) == 8
    finally:
        nodes.close()


def test_work_ends_on_the_driver_after_several_losses(
    unreal: WorkNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Node, "call", lambda *_, **__: failed(EngineError("its node is gone")))
    assert unreal.submit(PROMPT.reward, ["3"]).result(PATIENCE_S)[0].score == 1.0
    assert len(unreal.others) == 6 and unreal._here.load["jobs"] == 0


def test_group_is_scored_where_it_was_sampled_if_a_worker_is_free(
    unreal: WorkNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = unreal.others
    calls, unreal._nodes = list[str](), {node.id: node for node in (first, second)}
    monkeypatch.setattr(_Node, "call", lambda node, *_: calls.append(node.id) or Future())
    first.workers = 2
    for _ in range(4):
        unreal.submit(PROMPT.reward, ["3"], node=first.id)
    assert calls == [first.id, first.id, second.id, second.id]
    second.workers, second.load["episodes"] = 999, 2 * 64
    assert unreal._acquire("episodes") is first, "the other may not have more open files"
    first.not_before["adder"] = math.inf
    assert unreal.count() == 2, "its episodes may all be opened on the driver"
    unreal._nodes.clear()


def test_last_try_of_an_episode_is_on_the_driver(
    unreal: WorkNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()

    def broken(_: _Node, method: str, *arguments: Any, **named: Any) -> Future[Any]:
        calls.append(method)
        result: Future[Any] = Future()
        result.set_result(EnvironmentLost("open", "no answer") if method == "open" else "")
        return result

    monkeypatch.setattr(_Node, "call", broken)
    policy = Policy(lambda *_: "42")
    with episode_runner(unreal._config, CHAT, policy.submit, unreal.environment) as runner:
        group = runner.submit(task(), group_size=1, purpose="train").result(PATIENCE_S)
    assert len(group.trajectories) == 1 and calls.count("open") == 2, group.dropped
    assert not any(node.load["episodes"] for node in (unreal._here, *unreal.others))


def test_one_node_has_no_actor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = WorkNodes(config(folder, cpu_nodes=1), say=lambda _: None, log=None, runs_code=False)
    nodes.start()
    try:
        assert nodes._thread is None
        assert nodes.environment("adder", lambda: "local") == "local"  # type: ignore[arg-type]
        assert nodes.submit(PROMPT.reward, ["3", "4"]).result(PATIENCE_S)[0].score == 1.0
    finally:
        nodes.close()


def test_unusable_node_says_why(folder: Path) -> None:
    settings = (config(folder), 1, "/nowhere", {}, None, False)
    reason = asyncio.run(_NodeWorker().start(*settings))
    assert "no folder /nowhere" in reason and "--working-dir" in reason


def test_lost_environments_are_sent_as_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    task = Prompt(prompt_id="a0", domain="adder", messages=({"role": "user", "content": "?"},))

    async def play() -> Any:
        node = _NodeWorker()
        assert not await node.start(config(folder), 1, str(folder), {}, None, False)
        (folder / "adder.py").write_text(
            "import os\nclass Adder:\n    def add(self): os._exit(3)\n"
        )
        opening = await node.open(7, "adder", task, 1)
        assert [tool.name for tool in opening.tools] == ["add"]
        call = ToolCall(call_id="c", name="add", arguments={})
        error = await node.act(7, "call", call, timeout_s=PATIENCE_S)
        await node.close(7)
        await node.close(7)
        await node.end()
        return error

    error = asyncio.run(play())
    assert isinstance(error, EnvironmentLost)
    for sent in (error, NodeLost("call", "its node was lost")):
        received = pickle.loads(pickle.dumps(sent))
        assert (type(received), str(received), received.during) == (
            type(sent),
            str(sent),
            sent.during,
        )
