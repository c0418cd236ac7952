"""Wiring: from a recipe to a running system. Only it, `prepare` and `agents` see every package.

The order is by cost: what can be refused is refused before Ray starts, and the engines and the
trainer start side by side.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import ray
import torch
from ray.exceptions import RayError
from rich.console import Console

from keel.agents.runner import EpisodeRunner
from keel.configs.load import load_config
from keel.configs.schema import ConfigError, JudgeConfig
from keel.data.dataset import Dataset
from keel.data.filtered import FilterFolder
from keel.model.embedded.cache import ensure_embedded
from keel.rewards.judge.file import judge_answers, read_answers
from keel.rewards.judge.service import JudgeService
from keel.rewards.scorer import Scorer
from keel.rl.types import Group, Prompt, Purpose
from keel.rollout.judge.server import JudgeServer
from keel.rollout.pool.pool import RolloutPool
from keel.rollout.pool.ray_engines import ray_pool
from keel.rollout.spec import EngineSpec
from keel.trainer import loop
from keel.trainer.agents import demonstrate, episode_runner
from keel.trainer.cluster.nodes import hardware_said, seating, start_ray
from keel.trainer.cluster.reservation import reserved
from keel.trainer.filter import POLICY, STOPPING, sample_prompts
from keel.trainer.learner import Learner
from keel.trainer.planning.placement import ENGINE, JUDGE, RANK
from keel.trainer.prepare import EMBEDDED, Task, length_rules, prepare
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.interrupt import Interrupt
from keel.trainer.run.journal import Journal
from keel.trainer.run.view import View, open_view
from keel.trainer.run.words import closing_words

FAILED, INTERRUPTED = 1, 130


def train(recipe: str, overrides: Sequence[str]) -> None:
    """`keel train`: run the recipe, or go on with it."""
    task = prepare(recipe, overrides)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(task.config))
        if folder.set_aside:
            print(
                f"{folder.path} holds a run that left no checkpoint to resume from. What it wrote "
                f"is kept in {folder.set_aside}; this run starts over. run.checkpoint_every=N "
                "saves a checkpoint every N steps"
            )
        for line in folder.words():
            print(f"warning: {line}")
        state, steps = folder.state(), task.config.run.steps
        start = state.step if state else 0
        if start >= steps and folder.model.exists():
            folder.check_model()
            print(f"{folder.path} has done its {start} steps. Raise run.steps to go on.")
            return
        if state:
            task.dataset.train.restore(state.cursor)
        print(task.text(), flush=True)
        system = stack.enter_context(running(task, print, folder.rewards))
        if state and folder.latest:
            system.learner.load(folder.latest)
        reached = start
        if start < steps:
            folder.begin(start)
            with open_view(str(folder.path), steps) as view:
                reached = run_loop(system, folder, view, start=start)
        if reached >= steps:
            folder.export(system.learner.export)
        print(closing_words(folder, task.config, reached, recipe, overrides))


def check(recipe: str, overrides: Sequence[str]) -> None:
    """`keel check`: validate everything that can be without starting anything."""
    task = prepare(recipe, overrides, hardware=hardware_said)
    folder = RunFolder(task.config)
    folder.check()
    print(task.text(seats=seating(task.config, task.hardware) if task.gpu else ()))
    for line in folder.words():
        print(f"{'warning':<12} {line}")


def evaluate(recipe: str, overrides: Sequence[str]) -> None:
    """`keel eval`: held-out pass@1 of the last checkpoint, or of the base model without one."""
    task = prepare(recipe, overrides)
    if not task.dataset.heldout:
        raise ConfigError(
            "data.sources: no source has a holdout, so there is nothing to evaluate on"
        )
    folder = RunFolder(task.config)
    folder.check()
    for line in folder.words():
        print(f"warning: {line}")
    with running(task, print) as system:
        latest = folder.latest  # once: a run in progress goes on writing them
        if latest:
            system.learner.load(latest)
            system.wake()
        metrics = loop.evaluate(system, system.scorer, task.dataset.heldout)
    whose = latest.name if latest else "the base model"
    for name, metric in metrics.items():
        print(f"{name} of {whose}: {metric.value:.3f}")


def filter_prompts(recipe: str, overrides: Sequence[str]) -> None:
    """`keel filter`: pass rates of the prompts to train on, by the last checkpoint or the base
    model, and those that are worth it."""
    task = prepare(recipe, overrides)
    folder = RunFolder(task.config)
    folder.check(POLICY)
    for line in folder.words():
        print(f"warning: {line}")
    latest = folder.latest
    policy = f"{folder.path.resolve()}, {latest.name}" if latest else "the base model"
    with FilterFolder(task.config, task.dataset.train.sources, policy) as out:
        if waiting := out.waiting:
            print(task.text(), flush=True)
            print(f"{len(waiting):,} prompts to sample, with {policy}", flush=True)
            with running(task, print) as system, Interrupt(print, STOPPING) as stop:
                if latest:
                    system.learner.load(latest)
                    system.wake()
                sample_prompts(
                    waiting,
                    task.config,
                    sample=lambda prompt, size: system.submit(prompt, "eval", size),
                    score=partial(system.scorer.submit, purpose="eval"),
                    record=out.record,
                    said=out.said,
                    stop=stop,
                    say=partial(print, flush=True),
                )
        print(out.finish())


def judge(options: argparse.Namespace) -> None:
    """`keel judge`: score a file of answers, so that a rubric can be tried before a run."""
    settings = load_config(options.recipe).rewards.judge if options.recipe else JudgeConfig()
    given = ("base_url", "model", "api_key_env", "samples", "serve")
    changes = {name: getattr(options, name) for name in given}
    settings = replace(settings, **{k: v for k, v in changes.items() if v is not None})
    if not settings.model:
        raise ConfigError(
            "no judge: give --base-url or --serve, and --model, or a --recipe that has "
            "rewards.judge"
        )
    path = Path(options.file)
    out = Path(options.out) if options.out else path.with_name(f"{path.name}.judged.jsonl")
    try:
        items = read_answers(path, Path(options.rubric) if options.rubric else None)
        if out.resolve() == path.resolve():
            raise ValueError(f"--out {out}: would overwrite the answers")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with ExitStack() as stack:
        server = None
        if settings.serve:
            gpu = torch.cuda.is_available()
            settings.check_used(judged=True, gpu=gpu)
            start_ray()
            stack.callback(ray.shutdown)
            server = JudgeServer(settings, gpu=gpu)
            stack.callback(server.stop)
            print(f"starting the judge {settings.model}", flush=True)
        failed = judge_answers(items, settings, out, Console(), server=server)
    if failed:
        raise RuntimeError(f"{failed} of {len(items)} answers could not be judged")


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "check": check,
    "eval": evaluate,
    "filter": filter_prompts,
    "judge": judge,
}


def run(command: str, *arguments: Any) -> int:
    """Run a command; errors that a user can act on end in one message, not in a traceback."""
    try:
        COMMANDS[command](*arguments)
    except ConfigError as error:
        print(f"keel {command}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"keel {command}: stopped at once; what was saved before is there", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError, RayError) as error:
        if os.environ.get("KEEL_TRACEBACK"):
            raise
        print(f"keel {command}: {error}\n(KEEL_TRACEBACK=1 shows where)", file=sys.stderr)
        return FAILED
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Engines, trainer and scorer, started. Serves as the loop's `Rollouts`."""

    task: Task
    pool: RolloutPool
    learner: Learner
    scorer: Scorer
    agents: EpisodeRunner | None = None

    def submit(self, prompt: Prompt, purpose: Purpose, size: int = 0) -> Future[Group]:
        """size: completions (0: what the recipe says of the purpose)."""
        config = self.task.config
        size = size or (config.algorithm.group_size if purpose == "train" else config.eval.samples)
        if prompt.environment:
            assert self.agents is not None
            return self.agents.submit(prompt, group_size=size, purpose=purpose)
        how = config.sampling(purpose)
        return self.pool.submit(prompt, group_size=size, sampling=how, purpose=purpose)

    def update(self, version: int, weights: Any) -> Future[None]:
        if self.agents is not None:
            self.agents.updating(version)
        return self.pool.update(version, weights)

    def wake(self) -> None:
        """Have engines that sleep (`rollout.sleep`) sample again, from the current weights."""
        self.update(self.learner.version, self.learner.publish()).result()


@contextmanager
def running(task: Task, say: Callable[[str], None], log: Path | None = None) -> Iterator[System]:
    """Start everything `task` needs, and end it all at exit, whatever happened. log: folder for
    what reward functions print."""
    config, deadline = task.config, task.config.run.startup_deadline_s
    with ExitStack() as stack:
        judge = None
        if task.judged and not config.rewards.judge.serve:
            judge = stack.enter_context(JudgeService(config.rewards.judge))
            judge.check_reachable()
        start_ray()
        stack.callback(ray.shutdown)
        seats = None
        if task.gpu:
            seats = stack.enter_context(reserved(config, deadline_s=deadline))
            for line in seats.placement.lines():
                say(line)
        if config.rewards.judge.serve:
            where = seats.options(JUDGE, 0) if seats else {}
            server = JudgeServer(config.rewards.judge, gpu=task.gpu, options=where)
            stack.callback(server.stop)
            judge = stack.enter_context(JudgeService(config.rewards.judge, server=server))
        model = model_folder(task, say)
        scorer = stack.enter_context(
            Scorer(
                config.data.rewards_by_domain,
                scale=config.algorithm.scale_advantages,
                workers=config.rewards.workers,
                deadline_s=config.rewards.deadline_s,
                code=asdict(config.rewards.code),
                lengths=length_rules(config),
                judge=judge,
                max_failure_fraction=config.rewards.max_failure_fraction,
                environments=config.data.domains_with_environments,
                log=log,
                say=say,
            )
        )
        spec = EngineSpec.of(config, model)
        pool = ray_pool(
            spec,
            gpu=task.gpu,
            startup_deadline_s=deadline,
            # An engine that was started again may have to wait for a step to end.
            update_deadline_s=config.sending_deadline_s + config.trainer.deadline_s,
            options=partial(seats.options, ENGINE) if seats else None,
        )
        stack.callback(pool.shutdown)
        rank_options = partial(seats.options, RANK) if seats else None
        sleep = config.rollout.sleep
        learner = Learner(
            model,
            config,
            gpu=task.gpu,
            actor_options=rank_options,
            **({"make_room": pool.sleep} if sleep else {}),
        )
        stack.callback(learner.shutdown)
        say(f"starting {config.rollout.engines} engine(s), {config.trainer.ranks} trainer rank(s)")
        both = ThreadPoolExecutor(2)
        # Not waited for: after Ctrl-C the actors' end, which comes next, ends the waiting for them.
        stack.callback(both.shutdown, wait=False, cancel_futures=True)
        engines = both.submit(pool.start)
        learner.prepared()
        if seats and seats.placement.shared:
            # vLLM takes all that the GPU has lost while it started for its own use, and makes its
            # KV cache smaller by it: the trainer must not take memory in the meantime.
            engines.result()
        trainer = both.submit(learner.start)
        for line in (*engines.result(), *trainer.result()):
            say(f"warning: {line}")
        if judge and config.rewards.judge.serve:
            judge.check_reachable()
        agents = None
        if task.chat is not None:
            how = {purpose: config.sampling(purpose) for purpose in get_args(Purpose)}
            agents = episode_runner(
                config,
                task.chat,
                lambda request, purpose: pool.turn(request, sampling=how[purpose], purpose=purpose),
            )
            stack.callback(agents.close)
        system = System(task=task, pool=pool, learner=learner, scorer=scorer, agents=agents)
        if sleep:
            system.wake()
        yield system


def model_folder(task: Task, say: Callable[[str], None]) -> str:
    """Where the weights are: the recipe's model, or the embedded one, taught if it is new."""
    config = task.config
    if config.model.path != EMBEDDED:
        return config.model.path
    steps = config.model.embedded.cold_start.steps

    def progress(step: int, loss: float, seconds: float) -> None:
        if step % max(1, steps // 5) == 0:
            say(f"cold start {step}/{steps}: loss {loss:.3f}, {seconds:.0f} s")

    folder = ensure_embedded(
        config.model.embedded,
        seed=config.run.seed,
        sources=config.data.sources,
        heldout_questions=heldout_questions(task.dataset),
        demonstrate=partial(demonstrate, config),
        device="cuda" if task.gpu and torch.cuda.is_available() else "cpu",
        progress=progress,
    )
    return str(folder)


def heldout_questions(dataset: Dataset) -> set[str]:
    return {
        str(prompt.messages[-1]["content"]) for held in dataset.heldout.values() for prompt in held
    }


def run_loop(system: System, folder: RunFolder, view: View, *, start: int) -> int:
    """The loop of `keel.trainer.loop` on the real parts; returns the last step done."""
    config, dataset, learner = system.task.config, system.task.dataset, system.learner

    def save(step: int, cursor: Mapping[str, Any]) -> None:
        state = State(
            step=step,
            version=learner.version,
            cursor=cursor,
            config=config_digest(config),
        )
        folder.save(state, learner.save)
        if config.rollout.sleep:
            system.wake()

    with ExitStack() as stack:
        journal = Journal(
            folder.path, view, trajectories=config.run.save_trajectories, resumed_at=start
        )
        stack.callback(journal.close)
        system.pool.say = view.say
        if system.agents is not None:
            system.agents.say = view.say
        system.scorer.tell(view.say)
        parts = loop.Parts(
            prompts=dataset.train,
            rollouts=system,
            rewards=system.scorer,
            learner=learner,
            journal=journal,
            heldout=dataset.heldout,
            save=save,
            stop=stack.enter_context(Interrupt(view.say)),
        )
        return loop.train(parts, config, start=start)
