"""Run reward workers and environments on all nodes of the cluster that have free CPU cores.

Each of these nodes has an actor, `_NodeWorker`, with a `WorkerPool` and the environments of its
episodes. The driver's node takes part without an actor, and does all the work if there are no other
nodes. If a node is lost, its work is repeated elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.agents.runner import PURPOSES, raise_file_limit
from keel.agents.types import (
    Environment,
    EnvironmentLost,
    NodeLost,
    Opening,
    ToolResult,
)
from keel.configs.schema import Config
from keel.model import ray_timeouts
from keel.rewards import custom
from keel.rewards.compose import check_weights
from keel.rewards.pool import VerifierScore, WorkerPool
from keel.rewards.sandbox.sandbox import open_sandbox
from keel.rl.futures import failed, on_thread, settle
from keel.rl.turns import Message, ToolCall
from keel.rl.types import Prompt, Verdict
from keel.rollout.engine.worker import as_future
from keel.rollout.spec import EngineError
from keel.trainer.placement.ray_internals import own_processes

_ACTOR = "reward node"
_POLL_S = 2.0
_SILENT_S = 30.0
"""Seconds without an answer after which a node is no longer used. Ray itself waits for 65 s."""
_AGAIN_S = 60.0
"""Seconds to wait after losing a node before restarting its actor."""
_DYING_S = 2.0
"""Seconds in which the processes of a dying node end."""
_MAX_LOSSES = 3
"""Number of lost nodes after which completions are verified on the driver's node."""
_Load = Literal["jobs", "episodes"]


class _NodeWorker:
    """Ray actor that verifies completions and runs environments on its node."""

    def __init__(self) -> None:
        ray_timeouts.exit_with_raylet()
        self._pool: WorkerPool | None = None
        self._factories: dict[str, Callable[[], Environment]] = {}
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._open: dict[int, Environment] = {}
        self._closed: set[int] = set()
        """Numbers of closed episodes. An episode may be closed before it is opened."""

    async def start(self, *settings: Any) -> str:
        """Start the workers. Returns the reason why this node can't run them, or "" if it can."""
        try:
            await asyncio.to_thread(self._start, *settings)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _start(
        self,
        config: Config,
        workers: int,
        folder: str,
        functions: Mapping[str, bytes],
        log: Path | None,
        runs_code: bool,
    ) -> None:
        if not Path(folder).is_dir():
            raise ValueError(
                f"it has no folder {folder}, from which the run was started. Start the run "
                "in a shared folder, or with `ray job submit --working-dir`"
            )
        os.chdir(folder)
        sys.path.append(folder)
        custom.store_functions(functions)
        data = config.data
        check_weights(data.rewards_by_domain, data.domains_with_environments)
        if runs_code:
            open_sandbox(config.rewards.code.isolation)
        sources = [source for source in data.sources if source.environment.enabled]
        if sources:
            # Loads torch and transformers, which reward workers do without.
            from keel.trainer.build_agents import (  # noqa: PLC0415
                MAX_STARTING,
                environment_factory,
            )

            raise_file_limit(len(PURPOSES) * config.max_episodes())
            starting = asyncio.Semaphore(MAX_STARTING)
            for source in sources:
                self._factories[source.name] = environment_factory(
                    config, source, starting, self._closing
                )
        if config.rewards.workers:
            self._pool = WorkerPool(workers, **_pool_settings(config, log))

    async def answer(self) -> str:
        return ""

    async def verify(
        self, spec: Mapping[str, Any], completions: Sequence[str]
    ) -> list[VerifierScore]:
        assert self._pool is not None
        scores = await asyncio.wrap_future(self._pool.submit(spec, completions))
        if any("SIGKILL" in score.error for score in scores):
            # On a dying node, its workers may be killed first. Work without an answer is repeated
            # on another node.
            await asyncio.sleep(_DYING_S)
        # Its files or libraries may be the reason. `at` stays the same on all nodes, because errors
        # are reported once per location.
        where = f" on node {socket.gethostname()}"
        return [
            replace(score, error=score.error + where) if score.at else score for score in scores
        ]

    async def open(self, number: int, source: str, task: Prompt, seed: int) -> Any:
        """Open an episode's environment. `EnvironmentLost` errors are returned rather than
        raised."""
        if number in self._closed:  # the episode was cancelled in the meantime
            return None
        self._open[number] = self._factories[source]()
        return await self.act(number, "open", task, seed=seed)

    async def act(self, number: int, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method on an environment. `EnvironmentLost` errors are returned rather than
        raised."""
        try:
            return await getattr(self._open[number], method)(*arguments, **named)
        except EnvironmentLost as error:
            return error

    async def close(self, number: int) -> None:
        self._closed.add(number)
        if environment := self._open.pop(number, None):
            await environment.close()

    async def end(self) -> None:
        await asyncio.gather(*map(self.close, list(self._open)), return_exceptions=True)
        await asyncio.gather(*(close() for close in self._closing), return_exceptions=True)
        if self._pool is not None:
            self._pool.close()


@dataclass(slots=True, eq=False, kw_only=True)
class _Node:
    """The driver's view of a node."""

    id: str = ""
    host: str = ""
    workers: int
    """Number of reward workers. Work is distributed in proportion to it."""
    actor: Any = None
    """The node's `_NodeWorker`, or None on the driver's node."""
    ready: bool = False
    opened: set[str] = field(default_factory=set[str])
    """Sources whose environments the node has opened at least once."""
    refusals: Counter[str] = field(default_factory=Counter[str])
    """Number of times that the node failed to open an environment, for each source."""
    not_before: dict[str, float] = field(default_factory=dict[str, float])
    """The time from which each of these sources may be tried again."""
    silent_s: float = 0.0
    request: Future[str] = field(default_factory=Future[str])
    """The call of `start` or `answer` that has not been answered yet."""
    load: Counter[_Load] = field(default_factory=Counter[_Load])

    def call(self, method: str, *arguments: Any, **named: Any) -> Future[Any]:
        """Call a method on the actor. The future raises EngineError if the node is lost. Cancelling
        the future cancels the call."""
        try:
            ref = ray_timeouts.call(getattr(self.actor, method), *arguments, **named)
            return as_future(ref)
        except Exception as error:  # the callers' futures must resolve
            return failed(error)


def _pool_settings(config: Config, log: Path | None) -> dict[str, Any]:
    rewards = config.rewards
    return {"timeout_s": rewards.timeout_s, "code": rewards.code, "log": log}


class WorkNodes(WorkerPool):
    """Distributes episodes and the verification of completions across the nodes."""

    def __init__(
        self, config: Config, *, say: Callable[[str], Any], log: Path | None, runs_code: bool
    ) -> None:
        """Start the workers on this node. Other nodes are used once `start` is called. Set
        `runs_code` if nodes must be able to run programs in sandboxes. `say` is called with each
        message."""
        super().__init__(config.rewards.workers, **_pool_settings(config, log))
        self.say = say
        self._config, self._log, self._runs_code = config, log, runs_code
        self._here = _Node(workers=max(1, config.rewards.workers))
        self._nodes: dict[str, _Node] = {}
        self._not_before: dict[str, float] = {}
        """The time from which each lost node can be used again."""
        self._reported = 0
        self._missing = ""
        """The names in `run.cpu_node_names` that no node has."""
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._numbers = count()

    def start(self) -> None:
        """Start using the cluster's other nodes, without waiting for them. Call this after engines
        and ranks have reserved their CPU cores."""
        if self._config.run.cpu_nodes != 1 and not own_processes():
            self._here.id = ray.get_runtime_context().get_node_id()
            self._thread = threading.Thread(target=self._watch, name="keel-nodes", daemon=True)
            self._thread.start()

    @property
    def others(self) -> list[_Node]:
        """All nodes in use except the driver's."""
        return [node for node in list(self._nodes.values()) if node.ready]

    def count(self) -> int:
        """Return the number of nodes that open environments of all sources, with the driver's. The
        others don't count, since their episodes may run on the driver's node."""
        now = time.monotonic()
        return 1 + sum(all(now >= at for at in [*node.not_before.values()]) for node in self.others)

    def submit(
        self, spec: Mapping[str, Any], completions: Sequence[str], *, node: str = ""
    ) -> Future[list[VerifierScore]]:
        """Start verifying completions on `node`, where they were sampled, if it has a free worker,
        or else on the node with the fewest unfinished batches per worker (see
        `WorkerPool.submit`)."""
        if self._thread is None or not self._config.rewards.workers:
            return super().submit(spec, completions)
        result: Future[list[VerifierScore]] = Future()
        self._share_out(result, spec, completions, node, 0)
        return result

    def environment(
        self, source: str, create: Callable[[], Environment], on_driver: bool = False
    ) -> Environment:
        """Create a source's environment for one episode, on the node with the fewest open episodes
        per worker, or on the driver's node if `on_driver` is set. `create` creates it there."""
        if self._thread is None:
            return create()
        node = self._acquire("episodes", source, on_driver=on_driver)
        inner = _RemoteEnvironment(self, node, next(self._numbers), source)
        return _CountedEnvironment(create() if node is self._here else inner, node.load, self._lock)

    def close(self) -> None:
        self._stopping.set()
        super().close()
        if self._thread is not None:
            self._thread.join(ray_timeouts.CALL_S)  # or a node that it adds would stay
        with self._lock:
            nodes = list(self._nodes.values())
            self._nodes.clear()
        ray_timeouts.stop([node.actor for node in nodes])

    def lose(self, node: _Node, reason: str, pause_s: float = _AGAIN_S) -> None:
        """Stop using a node for `pause_s` seconds. Its unfinished work is rerun on other nodes."""
        with self._lock:
            if self._nodes.get(node.id) is not node:
                return
            del self._nodes[node.id]
            self._not_before[node.id] = time.monotonic() + pause_s
        ray_timeouts.kill(node.actor)
        if not self._stopping.is_set():
            self.say(f"node {node.host} does not run rewards and environments: {reason}")

    def refuse(self, node: _Node, source: str, reason: str) -> None:
        """Open no environments of a source on a node that failed to open its first one, for a pause
        that doubles each time. Without it, such a node would be idle and attract all episodes."""
        now = time.monotonic()
        with self._lock:
            if now < node.not_before.get(source, 0.0):  # another episode of the same time
                return
            node.not_before[source] = now + _AGAIN_S * 2 ** node.refusals[source]
            node.refusals[source] += 1
            first = node.refusals[source] == 1
        if first and not self._stopping.is_set():
            self.say(f"node {node.host} does not open environments of source {source}: {reason}")

    def _acquire(
        self, kind: _Load, source: str = "", *, sampled_on: str = "", on_driver: bool = False
    ) -> _Node:
        now, most = time.monotonic(), len(PURPOSES) * self._config.max_episodes()
        with self._lock:
            others = [node for node in self.others if node.not_before.get(source, 0.0) <= now]
            # An idle driver would do everything.
            nodes = [self._here] if on_driver else [*others, self._here]
            if kind == "episodes":
                nodes = [node for node in nodes if node.load[kind] < most] or nodes
            elif sampled_on:
                free = [node for node in nodes if node.load[kind] < node.workers]
                nodes = [node for node in free if node.id == sampled_on] or nodes
            node = min(nodes, key=lambda node: (node.load[kind] + 1) / node.workers)
            node.load[kind] += 1
            return node

    def _share_out(
        self,
        result: Future[list[VerifierScore]],
        spec: Mapping[str, Any],
        completions: Sequence[str],
        sampled_on: str,
        losses: int,
    ) -> None:
        node = self._acquire("jobs", sampled_on=sampled_on, on_driver=losses >= _MAX_LOSSES)
        try:
            if node is self._here:
                job = super().submit(spec, completions)
            else:
                job = node.call("verify", spec, completions)
        except RuntimeError as error:  # closed
            job = failed(error)

        def done(job: Future[list[VerifierScore]]) -> None:
            with self._lock:
                node.load["jobs"] -= 1
            error = None if job.cancelled() or node is self._here else job.exception()
            if not isinstance(error, RuntimeError) or self._stopping.is_set():
                settle(result, job.result)
            else:  # on another thread than Ray's, which must not wait
                on_thread(lambda: again(error), "keel-verify-again")

        def again(error: RuntimeError) -> None:
            # Without an EngineError, a library that reward workers need is missing there.
            self.lose(node, str(error), _AGAIN_S if isinstance(error, EngineError) else math.inf)
            self._share_out(result, spec, completions, sampled_on, losses + 1)

        job.add_done_callback(done)

    # The methods below run on the thread.

    def _watch(self) -> None:
        clock, complained = ray_timeouts.PollClock(_POLL_S), False
        while True:
            try:
                self._poll_nodes(clock.elapsed())
            except ray_timeouts.RayLost:  # found and reported by another thread
                return
            except Exception as error:  # the next look may succeed
                if not complained:
                    self.say(f"looking for nodes failed ({error}). It will be retried")
                complained = True
            if self._stopping.wait(_POLL_S):
                return

    def _poll_nodes(self, elapsed_s: float) -> None:
        """Start actors on new nodes, and check that the other nodes respond."""
        from keel.trainer.placement.nodes import cluster_nodes  # noqa: PLC0415  (loads torch)

        found, names = cluster_nodes(gpus=False), self._config.run.cpu_node_names
        missing = ", ".join(sorted({*names} - {node.name for node in found}))
        if missing and missing != self._missing:
            self.say(f"run.cpu_node_names: the cluster has no node {missing}")
        self._missing = missing
        alive = {
            node.id: node
            for node in found
            if node.id != self._here.id and (not names or node.name in names)
        }
        for node in list(self._nodes.values()):
            if node.id not in alive:
                self.lose(node, "Ray has lost it")
            else:
                self._check(node, elapsed_s)
        most = self._config.run.cpu_nodes or len(alive) + 1
        for name, node in alive.items():
            workers = int(node.free_cpus) // 2
            new = name not in self._nodes and time.monotonic() >= self._not_before.get(name, 0.0)
            if new and workers and len(self._nodes) + 1 < most and not self._stopping.is_set():
                self._start(name, node.name, workers)
        nodes = list(self._nodes.values())
        if len(nodes) != self._reported and all(node.ready for node in nodes):
            self._reported = len(nodes)
            workers = sum(node.workers for node in nodes)
            self.say(
                f"rewards and environments run on {len(nodes)} other node(s), with {workers} "
                "reward workers"
            )

    def _start(self, name: str, host: str, workers: int) -> None:
        strategy = NodeAffinitySchedulingStrategy(node_id=name, soft=False)
        variables = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
        options = {
            "num_cpus": workers,
            "scheduling_strategy": strategy,
            "max_concurrency": 10_000,
            "runtime_env": {"env_vars": variables},
        }
        actor = ray_timeouts.create(_NodeWorker, _ACTOR, options)
        node = _Node(id=name, host=host, workers=workers, actor=actor)
        log = self._log and self._log.absolute() / host
        settings = (workers, os.getcwd(), custom.pickled_functions(), log, self._runs_code)
        node.request = node.call("start", self._config, *settings)
        with self._lock:
            self._nodes[name] = node

    def _check(self, node: _Node, elapsed_s: float) -> None:
        if not node.request.done():
            node.silent_s += elapsed_s
            limit_s = _SILENT_S if node.ready else self._config.run.startup_timeout_s
            if node.silent_s >= limit_s:
                self.lose(node, f"no answer for {node.silent_s:.0f} s")
            return
        node.silent_s = 0.0
        try:
            refusal = node.request.result()
        except Exception as error:  # one node's error must not keep the others from being checked
            pause_s = _AGAIN_S if isinstance(error, EngineError) else math.inf
            self.lose(node, f"{type(error).__name__}: {error}", pause_s)
            return
        if refusal:
            self.lose(node, refusal, math.inf)
            return
        node.ready = True
        node.request = node.call("answer")


class _RemoteEnvironment:
    """An episode's environment on another node."""

    def __init__(self, nodes: WorkNodes, node: _Node, number: int, source: str) -> None:
        self._nodes, self._node, self._number, self._source = nodes, node, number, source

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        try:
            opening = await self._call("open", self._source, task, seed)
        except NodeLost:
            raise
        except EnvironmentLost as error:
            if self._source in self._node.opened:
                raise
            self._nodes.refuse(self._node, self._source, str(error))
            raise NodeLost("open", error.detail, error.output) from error
        self._node.opened.add(self._source)
        return opening

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        return await self._call("act", "call", call, timeout_s=timeout_s)

    async def reply(self, turn: Message) -> Message | None:
        return await self._call("act", "reply", turn)

    async def verdict(self, messages: Sequence[Message], finish_reason: str) -> Verdict | str:
        return await self._call("act", "verdict", messages, finish_reason)

    async def close(self) -> None:
        with suppress(NodeLost):
            await self._call("close")

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        node = self._node
        during = str(arguments[0]) if method == "act" else method
        call = asyncio.to_thread(node.call, method, self._number, *arguments, **named)
        try:
            result = await asyncio.wrap_future(await call)
        except EngineError as error:
            await asyncio.to_thread(self._nodes.lose, node, str(error))
            message = f"node {node.host} was lost: {error}"
            raise NodeLost(during, message) from error
        if isinstance(result, EnvironmentLost):
            raise result
        return result


class _CountedEnvironment:
    """Wraps an environment so that it counts as an open episode on its node until it is closed."""

    def __init__(
        self, environment: Environment, load: Counter[_Load], lock: threading.Lock
    ) -> None:
        self._environment, self._load, self._lock = environment, load, lock
        self._closed = False
        self.open, self.call, self.reply = environment.open, environment.call, environment.reply
        self.verdict = environment.verdict

    async def close(self) -> None:
        try:
            await self._environment.close()
        finally:
            with self._lock:
                self._load["episodes"] -= not self._closed
                self._closed = True
