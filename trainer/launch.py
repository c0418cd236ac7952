"""Wiring: engines, trainer, scorer and episodes of a recipe, started side by side, ended together.

The order is by cost: what can be refused is refused before Ray starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, get_args

import torch

from keel.agents.runner import EpisodeRunner
from keel.configs.schema import Config
from keel.configs.sections.model import TINY_MODEL
from keel.data.dataset import Dataset
from keel.model.download import download_of
from keel.model.hub import from_anywhere
from keel.model.ray_timeouts import CALL_S, Unanswered, awaited
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum
from keel.model.tiny.demonstrations import demonstrate
from keel.rewards.judge.service import JudgeService
from keel.rewards.scorer import Scorer
from keel.rl.types import Group, Prompt, Purpose
from keel.rollout.endpoint import EndpointCompletions
from keel.rollout.endpoint_turns import EndpointTurns
from keel.rollout.judge.server import JudgeServer
from keel.rollout.pool.pool import RolloutPool
from keel.rollout.pool.ray_engines import ray_pool
from keel.rollout.spec import EngineError, EngineSpec
from keel.trainer.batch_stream import wait_for
from keel.trainer.build_agents import episode_runner
from keel.trainer.learner import Learner
from keel.trainer.placement.downloads import download_on_nodes
from keel.trainer.placement.elastic import ElasticLayouts
from keel.trainer.placement.hardware import ENGINE, JUDGE, RANK
from keel.trainer.placement.nodes import start_ray, stop_ray
from keel.trainer.placement.oom_recovery import OomRecovery
from keel.trainer.placement.reservation import Reservation, reserve_gpus
from keel.trainer.placement.time_sharing import can_start_together, guaranteed_cache_bytes
from keel.trainer.placement.watchdog import Watchdog, start_watchdog
from keel.trainer.prepare import Task, length_rules
from keel.trainer.run.progress import Wait, waiting
from keel.trainer.run.restarts import WorkerLost
from keel.weights.sync import WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Engines, trainer and scorer, started. Serves as the loop's `Rollouts`."""

    task: Task
    pool: RolloutPool
    ranks: Learner | None
    """None where nothing is trained and the engines have their weights from files."""
    scorer: Scorer
    agents: EpisodeRunner | None = None
    watch: Watchdog | None = None
    lowering: OomRecovery | None = None
    """What to do about steps that do not fit; None: they end the run."""

    def attended(self, hurry: Callable[[], bool]) -> Callable[[], bool]:
        """The same, raising what makes it idle to wait any longer (`Watch.check`)."""

        def looked() -> bool:
            if self.watch is not None:
                self.watch.check()
            return hurry()

        return looked

    @property
    def learner(self) -> Learner:
        assert self.ranks is not None, "started without"
        return self.ranks

    def submit(self, prompt: Prompt, purpose: Purpose, size: int = 0) -> Future[Group]:
        """size: completions (0: what the recipe says of the purpose)."""
        config = self.task.config
        size = size or (config.algorithm.group_size if purpose == "train" else config.eval.samples)
        if prompt.environment:
            assert self.agents is not None
            return self.agents.submit(prompt, group_size=size, purpose=purpose)
        how = config.sampling(purpose, prompt.domain)
        return self.pool.submit(prompt, group_size=size, sampling=how, purpose=purpose)

    @property
    def weights(self) -> WeightSync:
        return WeightSync(
            self.learner,
            self.pool,
            direct=self.learner.direct,
            before=self.agents.updating if self.agents is not None else lambda _: None,
        )

    def wake(self) -> None:
        """Have engines that sleep (`rollout.time_share`) sample again, from the current weights."""
        awaited(self.weights.push(self.learner.version))


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A model behind an endpoint, and a scorer. Serves as `System` does."""

    config: Config
    completions: EndpointCompletions
    scorer: Scorer
    turns: EndpointTurns | None = None
    agents: EpisodeRunner | None = None
    """Of prompts with environments."""
    _open: Counter[str] = field(default_factory=Counter[str], init=False)
    """Groups at work, by prompt."""
    _lock: Lock = field(default_factory=Lock, init=False)

    def submit(self, prompt: Prompt, purpose: Purpose, size: int) -> Future[Group]:
        if prompt.environment and self.agents and self.turns:
            with self._lock:
                self._open[prompt.prompt_id] += 1
            group = self.agents.submit(prompt, group_size=size, purpose=purpose)
            group.add_done_callback(lambda _: self._over(prompt))
            return group
        how = self.config.sampling(purpose, prompt.domain)
        return self.completions.submit(prompt, group_size=size, sampling=how)

    def _over(self, prompt: Prompt) -> None:
        """A group of it is; another one about the same prompt may still be at work."""
        with self._lock:
            self._open[prompt.prompt_id] -= 1
            last = not self._open[prompt.prompt_id]
        if last and self.turns:
            self.turns.forget(prompt)

    def attended(self, hurry: Callable[[], bool]) -> Callable[[], bool]:
        """As of `System`; an endpoint is looked at by nobody."""
        return hurry


@contextmanager
def running(
    task: Task,
    say: Callable[[str], None],
    log: Path | None = None,
    *,
    learner: bool = True,
    layouts: ElasticLayouts | None = None,
) -> Iterator[System]:
    """Start everything `task` needs, and end it all at exit, whatever happened. log: folder for
    what reward functions print. learner: whether trainer ranks are wanted; engines that sleep have
    their weights from these, and so get them always. layouts: has the recipe as it is by now."""
    config, deadline = task.config, task.config.run.startup_timeout_s
    fetch(config.model.path)
    if task.judged and config.rewards.judge.serve:
        fetch(config.rewards.judge.model)
    with ExitStack() as stack:
        judge = None
        if task.judged and not config.rewards.judge.serve:
            judge = stack.enter_context(JudgeService(config.rewards.judge))
            judge.check_reachable()
        with waiting("starting Ray", "Ray"):
            start_ray()
        stack.callback(stop_ray)
        if layouts is not None:
            config = layouts.next()
            task = replace(task, config=config)
        seats = None
        if task.gpu:
            seats = stack.enter_context(reserve_gpus(config, timeout_s=deadline))
            for line in seats.placement.lines():
                say(line)
        fetch_elsewhere(config.model.path, seats, (RANK, ENGINE), deadline)
        if task.judged and config.rewards.judge.serve:
            fetch_elsewhere(config.rewards.judge.model, seats, (JUDGE,), deadline)
        nodes = {seat.node.id for seat in seats.placement.seats} if seats else set[str]()
        watch = stack.enter_context(start_watchdog(say, config.run.hang_timeout_s, nodes))
        if config.rewards.judge.serve:
            where = seats.options(JUDGE, 0) if seats else {}
            server = JudgeServer(config.rewards.judge, gpu=task.gpu, options=where)
            stack.callback(server.stop)
            judge = stack.enter_context(JudgeService(config.rewards.judge, server=server))
        model = model_folder(task)
        scorer = stack.enter_context(scorer_of(config, judge, say, log))
        shared = bool(seats and seats.placement.shared)
        of, taken = (config, task.facts, task.hardware.gpu_gib), task.hardware.taken_gib
        together = shared and can_start_together(*of, taken)
        roomy = not shared or can_start_together(*of, taken, stepping=True)
        cache = guaranteed_cache_bytes(*of) if together else 0
        spec = EngineSpec.of(config, model, cache_bytes=cache)
        pool = ray_pool(
            spec,
            gpu=task.gpu,
            startup_timeout_s=deadline,
            # An engine that was started again may have to wait for steps to end; and a rank that
            # does not send is found first, or one engine after the other would be replaced for it.
            update_timeout_s=config.sending_timeout_s
            + config.algorithm.updates_per_batch * config.trainer.timeout_s
            + CALL_S,
            options=partial(seats.options, ENGINE) if seats else None,
        )
        stack.callback(pool.shutdown)
        rank_options = partial(seats.options, RANK) if seats else None
        sleep = config.rollout.time_share
        ranks, who = None, f"starting {counted(config.rollout.engines, 'engine')}"
        if learner or sleep:
            ranks = Learner(
                model,
                config,
                gpu=task.gpu,
                actor_options=rank_options,
                **({"make_room": pool.sleep} if sleep else {}),
            )
            stack.callback(ranks.shutdown)
            who += f" and {counted(config.trainer.ranks, 'trainer rank')}"
        both = ThreadPoolExecutor(2)
        # Not waited for: after Ctrl-C the actors' end, which comes next, ends the waiting for them.
        stack.callback(both.shutdown, wait=False, cancel_futures=True)
        with waiting(who, f"{who} of {config.model.path}, GPUs: {task.gpu}") as wait:
            how = {"engines_first": shared and not together, "warm": not sleep, "roomy": roomy}
            warnings = start_both(pool, ranks, both, watch, wait, **how)
        phases = pool.start_seconds.items()
        if phases:
            say("engine start " + ", ".join(f"{phase} {taken:.0f} s" for phase, taken in phases))
        for line in warnings:
            say(f"warning: {line}")
        if judge and config.rewards.judge.serve:
            judge.check_reachable()
        agents = stack.enter_context(episodes(task, pool))
        system = System(
            task=task,
            pool=pool,
            ranks=ranks,
            scorer=scorer,
            agents=agents,
            watch=watch,
            lowering=layouts.lowering if layouts else None,
        )
        if sleep:
            system.wake()
        yield system


def start_both(
    pool: RolloutPool,
    ranks: Learner | None,
    both: ThreadPoolExecutor,
    watch: Watchdog,
    wait: Wait,
    *,
    engines_first: bool,
    warm: bool,
    roomy: bool = False,
) -> list[str]:
    """Engines and ranks, until all are there; returns what they warn of. engines_first: ranks take
    no memory of a GPU before. warm: ranks then compile what steps need (`Learner.warm_up`), and for
    whole micro-batches once engines have their memory (if `roomy` at once); neither is awaited."""
    engines, trainer = both.submit(pool.start), None
    wait.measure = Standing(engines, lambda: trainer)
    if ranks is None:
        return [*_up(engines, watch)]
    ranks.prepared()
    if engines_first:
        _up(engines, watch)
    trainer = both.submit(ranks.start)
    trained = wait_for(trainer, watch.well)
    if warm:
        ranks.warm_up()
        if not roomy:
            _up(engines, watch)
        ranks.warm_up(whole=True)
    return [*_up(engines, watch), *trained]


def _up(engines: Future[tuple[str, ...]], watch: Watchdog) -> tuple[str, ...]:
    """What they warn of. One that does not come up, where all have before, is a loss as any."""
    try:
        return wait_for(engines, watch.well)
    except Unanswered:  # Ray's own trouble
        raise
    except (EngineError, TimeoutError) as error:
        raise WorkerLost(str(error)) from error


def scorer_of(
    config: Config, judge: JudgeService | None, say: Callable[[str], None], log: Path | None = None
) -> Scorer:
    """Of the recipe's rewards."""
    return Scorer(
        config.data.rewards_by_domain,
        scale=config.algorithm.scale_advantages,
        workers=config.rewards.workers,
        timeout_s=config.rewards.timeout_s,
        code=asdict(config.rewards.code),
        lengths=length_rules(config),
        judge=judge,
        max_failure_fraction=config.rewards.max_failure_fraction,
        environments=config.data.domains_with_environments,
        log=log,
        say=say,
    )


@contextmanager
def episodes(task: Task, pool: RolloutPool) -> Iterator[EpisodeRunner | None]:
    """What runs episodes on the engines as the recipe has it; None where no source has any."""
    if task.chat is None:
        yield None
        return
    how = {purpose: task.config.sampling(purpose) for purpose in get_args(Purpose)}
    runner = episode_runner(
        task.config,
        task.chat,
        lambda request, purpose: pool.turn(request, sampling=how[purpose], purpose=purpose),
    )
    try:
        yield runner
    finally:
        runner.close()


@contextmanager
def with_episodes(remote: Remote) -> Iterator[Remote]:
    """And what runs them. Raises ConfigError for an environment that cannot be one."""
    config = remote.config
    turns = EndpointTurns(
        remote.completions, {purpose: config.sampling(purpose) for purpose in get_args(Purpose)}
    )
    with episode_runner(config, turns, turns.turn) as agents:
        yield replace(remote, turns=turns, agents=agents)


def fetch(path: str) -> None:
    """A model of the hub into this machine's cache, where it is not yet: before engines and ranks
    start, whose deadline it would take."""
    if path == TINY_MODEL or (download := download_of(path)) is None:
        return
    with waiting(f"downloading {path}", total=download.total, unit="bytes") as wait:
        wait.before = download.present()
        wait.measure = lambda shown: setattr(shown, "done", download.present())
        download.fetch()


def fetch_elsewhere(
    path: str, seats: Reservation | None, kinds: Sequence[str], timeout_s: float
) -> None:
    """The same on the further nodes of a cluster: those on which actors of these kinds have seats,
    or all where nobody has one."""
    if path == TINY_MODEL:
        return
    seated = seats.placement.seats if seats else ()
    nodes = {seat.node.id for seat in seated if seat.kind in kinds}
    download_on_nodes(path, timeout_s=timeout_s, nodes=nodes)


def model_folder(task: Task) -> str:
    """Where the weights are: the recipe's model, or the tiny one, taught if it is new."""
    return start_of(task.config, task.dataset, gpu=task.gpu)


def start_of(config: Config, dataset: Dataset, *, gpu: bool) -> str:
    """As `model_folder`. dataset: the recipe's."""
    if config.model.path != TINY_MODEL:
        return from_anywhere(config.model.path)
    steps = config.model.tiny.cold_start.steps
    with waiting("cold start of the tiny model", total=steps, unit="steps") as wait:

        def show(step: int, loss: float, seconds: float) -> None:
            wait.done, wait.note = step, f"loss {loss:.3f}"

        heldout = chain.from_iterable(dataset.heldout.values())
        curriculum = Curriculum(
            seed=config.run.seed,
            sources=config.data.sources,
            heldout_questions={str(each.messages[-1]["content"]) for each in heldout},
            demonstrate=partial(demonstrate, config),
            tools_in_thinking=config.agents.tools_in_thinking,
        )
        device = "cuda" if gpu and torch.cuda.is_available() else "cpu"
        folder = ensure_tiny_model(config.model.tiny, curriculum, device=device, progress=show)
    if steps:
        how = "cold start done; cached in" if wait.done else "cold start loaded from"
        print(f"tiny model: {how} {folder}", flush=True)
    return str(folder)


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


@dataclass(frozen=True, slots=True)
class Standing:
    """What there is to say of a start that is under way."""

    engines: Future[Any]
    trainer: Callable[[], Future[Any] | None]

    def __call__(self, wait: Wait) -> None:
        ready = ["engines are ready"] * self.engines.done()
        if (trainer := self.trainer()) is not None and trainer.done():
            ready.append("trainer is ready")
        wait.note = ", ".join(ready)
