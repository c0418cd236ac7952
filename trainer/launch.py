"""Start a task's engines, trainer ranks and scorer on Ray in parallel, and stop them at exit."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import get_args

import torch

from keel.agents.runner import EpisodeRunner
from keel.configs.schema import Config
from keel.configs.sections.model import TINY_MODEL
from keel.data.dataset import Dataset
from keel.model.hub import download, from_anywhere
from keel.model.ray_timeouts import CALL_S, Unanswered, await_future
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum, demonstrate
from keel.rewards.judge.service import JudgeService
from keel.rewards.pool import WorkerPool
from keel.rewards.scorer import Scorer
from keel.rl.futures import wait_for
from keel.rl.types import Group, Prompt, Purpose
from keel.rollout.endpoint import EndpointCompletions, EndpointTurns
from keel.rollout.engine.worker import RayEngine
from keel.rollout.judge.server import JudgeServer
from keel.rollout.pool import RolloutPool
from keel.rollout.spec import EngineError, EngineSpec
from keel.trainer.build_agents import episode_runner
from keel.trainer.learner import Learner
from keel.trainer.placement.elastic import ElasticLayouts
from keel.trainer.placement.hardware import ENGINE, JUDGE, RANK
from keel.trainer.placement.memory import (
    can_start_together,
    engine_memory,
    guaranteed_cache_bytes,
    needs_fixed_cache,
)
from keel.trainer.placement.nodes import (
    Reservation,
    download_on_nodes,
    reserve_gpus,
    start_ray,
    stop_ray,
)
from keel.trainer.placement.watchdog import Watchdog, start_watchdog
from keel.trainer.prepare import Task, length_rules
from keel.trainer.run.errors import WorkerLost
from keel.trainer.run.progress import waiting
from keel.trainer.work_nodes import WorkNodes
from keel.weights.sync import WeightSync

_say = partial(print, flush=True)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The running engines, trainer ranks and scorer of a task. The training loop samples through it
    (see `Rollouts`)."""

    task: Task
    pool: RolloutPool
    ranks: Learner | None
    """The trainer ranks, or None if the trainer was not started."""
    scorer: Scorer
    nodes: WorkNodes
    agents: EpisodeRunner | None
    """Runs episodes, or None if there are no environments."""
    watchdog: Watchdog
    gpus: int
    """Number of GPUs that the actors occupy."""

    @property
    def learner(self) -> Learner:
        assert self.ranks is not None, "started without trainer ranks"
        return self.ranks

    @cached_property
    def weights(self) -> WeightSync:
        if self.agents is None:
            return WeightSync(self.learner, self.pool)
        return WeightSync(self.learner, self.pool, set_version=self.agents.set_version)

    def submit(self, prompt: Prompt, purpose: Purpose, size: int | None = None) -> Future[Group]:
        """Sample a group of `size` completions, by default as many as the recipe says."""
        config = self.task.config
        if size is None:
            size = config.algorithm.group_size if purpose == "train" else config.eval.samples
        if prompt.environment:
            assert self.agents is not None
            return self.agents.submit(prompt, group_size=size, purpose=purpose)
        sampling = config.sampling_for(purpose, prompt.domain)
        return self.pool.submit(prompt, group_size=size, sampling=sampling, purpose=purpose)

    def wake(self) -> None:
        """Wake the sleeping engines (`rollout.time_share`) and send them the current weights."""
        await_future(self.weights.push(self.learner.version))

    def with_watchdog(self, should_abort: Callable[[], bool]) -> Callable[[], bool]:
        """Return a version of `should_abort` that first checks that none of the run's processes has
        died or hung."""

        def check() -> bool:
            self.watchdog.check()
            return should_abort()

        return check


@dataclass(frozen=True, kw_only=True)
class RemoteRuntime:
    """A stand-in for `Runtime` that samples from a model behind an API endpoint and has its own
    scorer."""

    config: Config
    completions: EndpointCompletions
    scorer: Scorer
    turns: EndpointTurns | None = None
    agents: EpisodeRunner | None = None
    _open: Counter[str] = field(default_factory=Counter[str], init=False)
    """The number of groups being sampled for each prompt."""
    _lock: Lock = field(default_factory=Lock, init=False)

    def submit(self, prompt: Prompt, purpose: Purpose, size: int) -> Future[Group]:
        if prompt.environment and self.agents and self.turns:
            with self._lock:
                self._open[prompt.prompt_id] += 1
            group = self.agents.submit(prompt, group_size=size, purpose=purpose)
            group.add_done_callback(partial(self._ended, prompt, self.turns))
            return group
        sampling = self.config.sampling_for(purpose, prompt.domain)
        return self.completions.submit(prompt, group_size=size, sampling=sampling)

    def _ended(self, prompt: Prompt, turns: EndpointTurns, _: object) -> None:
        with self._lock:
            self._open[prompt.prompt_id] -= 1
            last = not self._open[prompt.prompt_id]
        if last:
            turns.forget(prompt)

    def with_watchdog(self, should_abort: Callable[[], bool]) -> Callable[[], bool]:
        return should_abort


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRuntime:
    """The running trainer ranks of a supervised training task."""

    task: Task
    learner: Learner
    watchdog: Watchdog
    gpus: int


@contextmanager
def launch(
    task: Task,
    log: Path | None = None,
    *,
    learner: bool = True,
    layouts: ElasticLayouts | None = None,
) -> Iterator[Runtime]:
    """Start the engines and the scorer and yield them as a `Runtime`. The trainer ranks are also
    started if `learner` is set or if they take turns with engines on a GPU. `log` is the folder
    for anything reward functions print. `layouts` chooses the recipe's layout each time the run
    starts."""
    config, timeout_s = task.config, task.config.run.startup_timeout_s
    serves_judge = task.judged and config.rewards.judge.serve
    models = [(config.model.path, (RANK, ENGINE))]
    models += [(config.rewards.judge.model, (JUDGE,))] if serves_judge else []
    for path, _ in models:
        download(path)
    with ExitStack() as stack:
        judge = None
        if task.judged and not serves_judge:
            judge = stack.enter_context(JudgeService(config.rewards.judge))
            judge.check_reachable()
        config, seats = _start_cluster(stack, config, models, gpu=task.gpu, layouts=layouts)
        task = replace(task, config=config)
        nodes = seats.placement.required_nodes if seats else set[str]()
        watchdog = stack.enter_context(start_watchdog(_say, config.run.hang_timeout_s, nodes))
        if config.rewards.judge.serve:
            servers: list[JudgeServer] = []
            for number in range(config.rewards.judge.server.replicas):
                options = seats.options(JUDGE, number) if seats else {}
                servers.append(JudgeServer(config.rewards.judge, gpu=task.gpu, options=options))
                stack.callback(servers[-1].stop)
            judge = stack.enter_context(JudgeService(config.rewards.judge, servers=servers))
        model = initial_model(config, task.dataset, gpu=task.gpu)
        parts = (*task.dataset.train.sources.values(), *task.dataset.heldout.values())
        kinds = {prompt.reward.get("kind") for prompt in chain.from_iterable(parts)}
        work_nodes = WorkNodes(config, say=_say, log=log, runs_code="code" in kinds)
        scorer = stack.enter_context(build_scorer(config, judge, log, work_nodes))
        shared = bool(seats and seats.placement.shared)
        together = shared and can_start_together(config, task.facts, task.hardware.gpu_gib)
        cache = _fixed_cache_bytes(task, together=together)
        options = partial(seats.options, ENGINE) if seats else None
        spec = EngineSpec.of(config, model, cache_bytes=cache)
        pool = RolloutPool(
            config.rollout,
            partial(RayEngine, spec, gpu=task.gpu, options=options),
            startup_timeout_s=timeout_s,
            # A restarted engine may have to wait for steps to end. A rank that stops sending must
            # be found first, or one engine after the other would be replaced for it.
            update_timeout_s=config.sending_timeout_s
            + config.algorithm.updates_per_batch * config.trainer.timeout_s
            + CALL_S,
        )
        stack.callback(pool.shutdown)
        time_share = config.rollout.time_share
        ranks, actors = None, f"starting {config.rollout.engines} engine(s)"
        if learner or time_share:
            ranks = Learner(
                model,
                config,
                gpu=task.gpu,
                actor_options=partial(seats.options, RANK) if seats else None,
                oom_recovery=layouts.oom_recovery if layouts else None,
                **({"put_to_sleep": pool.sleep} if time_share else {}),
            )
            stack.callback(ranks.shutdown)
            actors += f" and {config.trainer.ranks} trainer rank(s)"
        threads = ThreadPoolExecutor(2)
        # Not waited for: after Ctrl-C the end of the actors, which comes next, ends the threads.
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        with waiting(actors):
            engines, warnings = threads.submit(pool.start), list[str]()
            if ranks is not None:
                # A wrong library is reported before the engines have loaded.
                prepared = threads.submit(ranks.wait_until_prepared)
                wait_for(prepared, watchdog.should_stop_waiting)
                if shared and not together:  # ranks take memory when the engines have theirs
                    _await_engines(engines, watchdog)
                started = threads.submit(ranks.start)
                warnings = wait_for(started, watchdog.should_stop_waiting)
            warnings = [*_await_engines(engines, watchdog), *warnings]
        for line in warnings:
            _say(f"warning: {line}")
        if judge and config.rewards.judge.serve:
            judge.check_reachable()
        runtime = Runtime(
            task=task,
            pool=pool,
            ranks=ranks,
            scorer=scorer,
            nodes=work_nodes,
            agents=stack.enter_context(run_episodes(task, pool, work_nodes)),
            watchdog=watchdog,
            gpus=seats.placement.gpus if seats else 0,
        )
        if time_share:
            runtime.wake()
        work_nodes.start()
        yield runtime


@contextmanager
def launch_sft(task: Task, *, layouts: ElasticLayouts) -> Iterator[SftRuntime]:
    config = task.config
    download(config.model.path)
    with ExitStack() as stack:
        models = [(config.model.path, (RANK,))]
        config, seats = _start_cluster(stack, config, models, gpu=task.gpu, layouts=layouts)
        task = replace(task, config=config)
        watchdog = stack.enter_context(start_watchdog(_say, config.run.hang_timeout_s))
        learner = Learner(
            initial_model(task.recipe, task.dataset, gpu=task.gpu),
            config,
            gpu=task.gpu,
            actor_options=partial(seats.options, RANK) if seats else None,
            oom_recovery=layouts.oom_recovery,
        )
        stack.callback(learner.shutdown)
        with waiting(f"starting {config.trainer.ranks} trainer rank(s)"):
            warnings = learner.start()
        for line in warnings:
            _say(f"warning: {line}")
        yield SftRuntime(
            task=task,
            learner=learner,
            watchdog=watchdog,
            gpus=seats.placement.gpus if seats else 0,
        )


def _start_cluster(
    stack: ExitStack,
    config: Config,
    models: Sequence[tuple[str, tuple[str, ...]]],
    *,
    gpu: bool,
    layouts: ElasticLayouts | None,
) -> tuple[Config, Reservation | None]:
    """Start Ray, reserve GPUs and download the models to the other nodes. `models` lists each
    model's hub name or folder, along with the kinds of actors that read it. Returns the config
    adapted to the available nodes, along with the reserved GPUs (None without GPUs)."""
    timeout_s = config.run.startup_timeout_s
    with waiting("starting Ray"):
        start_ray()
    stack.callback(stop_ray)
    if layouts is not None:
        config = layouts.next()
    seats = None
    if gpu:
        seats = stack.enter_context(reserve_gpus(config, timeout_s=timeout_s))
        for line in seats.placement.lines():
            _say(line)
    for path, kinds in models:
        if path != TINY_MODEL:
            occupied = seats.placement.seats if seats else ()
            nodes = {seat.node.id for seat in occupied if seat.kind in kinds}
            download_on_nodes(path, nodes=nodes)
    return config, seats


def _fixed_cache_bytes(task: Task, *, together: bool) -> int:
    """Return the size of an engine's KV cache, or 0 if vLLM measures the free memory for it, which
    it can't do if ranks start `together` with it."""
    config, facts = task.config, task.facts
    if together or (task.gpu and needs_fixed_cache(config, engine_memory(config, facts, gpu=True))):
        return guaranteed_cache_bytes(config, facts, task.hardware.gpu_gib)
    return 0


def _await_engines(engines: Future[tuple[str, ...]], watchdog: Watchdog) -> tuple[str, ...]:
    try:
        return wait_for(engines, watchdog.should_stop_waiting)
    except Unanswered:  # a fault of Ray
        raise
    except (EngineError, TimeoutError) as error:
        raise WorkerLost(str(error)) from error


def build_scorer(
    config: Config,
    judge: JudgeService | None,
    log: Path | None = None,
    pool: WorkerPool | None = None,
) -> Scorer:
    rewards = config.rewards
    if pool is None:
        pool = WorkerPool(rewards.workers, timeout_s=rewards.timeout_s, code=rewards.code, log=log)
    return Scorer(
        config.data.rewards_by_domain,
        pool=pool,
        scale=config.algorithm.scale_advantages,
        lengths=length_rules(config),
        judge=judge,
        max_failure_fraction=rewards.max_failure_fraction,
        environments=config.data.domains_with_environments,
        say=_say,
    )


@contextmanager
def run_episodes(
    task: Task,
    pool: RolloutPool,
    nodes: WorkNodes | None = None,
) -> Iterator[EpisodeRunner | None]:
    """Return a context that yields a runner for episodes that sample from the engines, or None if
    there are no environments. Without `nodes`, all environments run on this node."""
    if task.chat is None:
        yield None
        return
    sampling = {purpose: task.config.sampling_for(purpose) for purpose in get_args(Purpose)}
    with episode_runner(
        task.config,
        task.chat,
        lambda request, purpose: pool.turn(request, sampling=sampling[purpose], purpose=purpose),
        nodes.environment if nodes else None,
        nodes.count if nodes else lambda: 1,
    ) as runner:
        yield runner


@contextmanager
def run_remote_episodes(remote: RemoteRuntime) -> Iterator[RemoteRuntime]:
    """Return a context that yields `remote` with a runner for episodes that sample from the
    endpoint. Raises ConfigError if an environment can't run there."""
    config = remote.config
    turns = EndpointTurns(
        remote.completions, {purpose: config.sampling_for(purpose) for purpose in get_args(Purpose)}
    )
    with episode_runner(config, turns, turns.turn) as agents:
        yield replace(remote, turns=turns, agents=agents)


# Model files.


def initial_model(config: Config, dataset: Dataset, *, gpu: bool) -> str:
    """Return the folder of the recipe's model, building the tiny model if it isn't cached yet. It
    has random weights if the recipe has no prompts or no cold start."""
    if config.model.path != TINY_MODEL:
        return from_anywhere(config.model.path)
    tiny = config.model.tiny
    if not config.data.sources:
        tiny = replace(tiny, cold_start=replace(tiny.cold_start, steps=0))
    steps = tiny.cold_start.steps
    what = "cold start of" if steps else "building"
    with waiting(f"{what} the tiny model", total=steps, unit="steps") as wait:

        def show(step: int, loss: float, seconds: float) -> None:
            wait.done, wait.note = step, f"loss {loss:.3f}"

        heldout = chain.from_iterable(dataset.heldout.values())
        curriculum = Curriculum(
            seed=config.run.seed,
            sources=config.data.sources,
            heldout_questions={str(each.messages[-1]["content"]) for each in heldout},
            demonstrate=partial(demonstrate, config),
            tools_in_thinking=[s.name for s in config.data.sources if config.calls_in_thinking(s)],
        )
        device = "cuda" if gpu and torch.cuda.is_available() else "cpu"
        folder = ensure_tiny_model(tiny, curriculum, device=device, progress=show)
    if steps:
        how = "cold start done; cached in" if wait.done else "cold start loaded from"
        print(f"tiny model: {how} {folder}", flush=True)
    return str(folder)
