"""Run commands of Keel in this process, to save start-up time.

The trainer's engine is in this process, and vLLM actors are reused: each command begins by loading
its own weights into them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import torch

from keel.configs.schema import Config, SamplingConfig
from keel.data.dataset import Dataset
from keel.rewards.judge.service import JudgeService
from keel.rl.metrics import Metric, merge
from keel.rl.packing import TrainBatch
from keel.rl.sft import SftExample
from keel.rl.types import ScoredGroup, StepResult, TokenNumbers
from keel.rollout.pool.pool import RolloutPool
from keel.rollout.pool.ray_engines import ray_pool
from keel.rollout.spec import EngineSpec
from keel.trainer import build_agents as agents
from keel.trainer.batch_stream import never
from keel.trainer.engine.engine import TrainerEngine
from keel.trainer.launch import (
    Runtime,
    SftRuntime,
    build_scorer,
    initial_model,
    run_episodes,
    sft_model_folder,
)
from keel.trainer.nonfinite import describe_findings
from keel.trainer.placement.nodes import start_ray, stop_ray
from keel.trainer.prepare import SftTask, Task
from keel.trainer.run.manifest import Entry
from keel.trainer.worker import pack_shares
from keel.weights.sync import WeightSync


class LocalLearner:
    """`keel.trainer.learner.Learner` without Ray: one rank in this process."""

    def __init__(self, model: str, config: Config) -> None:
        if not torch.cuda.is_available():
            torch.set_num_threads(config.trainer.threads)
        self.engine = TrainerEngine(model, config)
        self._config = config
        self.tokens: Mapping[int, TokenNumbers] = {}

    @property
    def version(self) -> int:
        return self.engine.version

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult:
        return self.train(pack_shares(groups, self._config), groups)

    def train(
        self,
        shares: Sequence[Sequence[TrainBatch]],
        groups: Sequence[ScoredGroup | SftExample] = (),
    ) -> StepResult:
        metrics = self.engine.step(shares[0])
        self.tokens = self.engine.tokens
        return StepResult(
            version=self.version,
            metrics=metrics,
            findings=describe_findings(self.engine.findings, groups),
            gave_up=self.engine.gave_up,
        )

    def score(
        self, shares: Sequence[Mapping[str, TrainBatch]], hurry: Callable[[], bool] = never
    ) -> dict[str, Metric]:
        if hurry():
            return {}
        return merge(
            {f"{name}/{metric}": value for metric, value in self.engine.score(batch).items()}
            for name, batch in (shares[0] if shares else {}).items()
        )

    direct = False

    def make_room(self) -> None: ...

    def put_weights(self) -> list[ray.ObjectRef[Any]]:
        return [ray.put(bucket) for bucket in self.engine.publish()]

    def load(self, folder: Path) -> None:
        self.engine.load(folder)

    def save(self, folder: Path) -> dict[str, Entry]:
        return self.engine.save(folder)

    def export(self, folder: Path) -> dict[str, Entry]:
        return self.engine.export(folder)


SHARE = 0.1
"""Share of a GPU that Ray reserves for an engine."""


class Engines:
    """Cache of vLLM actors by kind."""

    def __init__(self) -> None:
        self._pools: dict[EngineSpec, RolloutPool] = {}

    def ready(self, task: Task, model: str, learner: LocalLearner) -> RolloutPool:
        """Return an engine for `task` with the learner's weights."""
        spec = EngineSpec.of(task.config, model)
        kind = kind_of(spec)
        if kind not in self._pools:
            for other in [*self._pools][: -3 if task.gpu else -1]:
                self._pools.pop(other).shutdown()
            self._pools[kind] = ray_pool(
                spec,
                gpu=task.gpu,
                startup_timeout_s=task.config.run.startup_timeout_s,
                options=(lambda _: {"num_gpus": SHARE}) if task.gpu else None,
            )
            self._pools[kind].start()
        pool = self._pools[kind]
        WeightSync(learner, pool, direct=False).push(learner.version).result()
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()


def kind_of(spec: EngineSpec) -> EngineSpec:
    """Reduce a spec to the fixed properties of an engine: no weights, seed or sampling parameters.
    Sampling seeds are therefore the same in all runs."""
    sampling = SamplingConfig(top_k=spec.config.sampling.top_k)
    config = replace(spec.config, sampling=sampling)
    return replace(spec, model_path="", tokenizer="", seed=0, config=config)


@contextmanager
def in_this_process() -> Iterator[None]:
    """Let `keel.commands.cli.main` run `train`, `sft` and `eval` in this process, on a CPU.
    Environments are checked once, not by each command."""
    engines, tried = Engines(), dict[str, dict[str, str]]()

    def check_environments(config: Config, chat: Any, dataset: Dataset) -> dict[str, str]:
        which = repr([source for source in config.data.sources if source.environment.enabled])
        if which not in tried:
            tried[which] = agents.check_environments(config, chat, dataset)
        return tried[which]

    @contextmanager
    def running(
        task: Task, say: Callable[[str], None], log: Path | None = None, **_: Any
    ) -> Iterator[Runtime]:
        if not ray.is_initialized():
            start_ray()
        config = task.config
        model = initial_model(config, task.dataset, gpu=task.gpu)
        ranks = LocalLearner(model, config)
        with ExitStack() as stack:
            pool = engines.ready(task, model, ranks)
            asks = config.rewards.judge
            judge = stack.enter_context(JudgeService(asks)) if asks.base_url else None
            scorer = stack.enter_context(build_scorer(config, judge, say, log))
            runner = stack.enter_context(run_episodes(task, pool))
            yield Runtime(task=task, pool=pool, ranks=ranks, scorer=scorer, agents=runner)  # type: ignore[arg-type]

    @contextmanager
    def teaching(task: SftTask, say: Callable[[str], None], **_: Any) -> Iterator[SftRuntime]:
        learner = LocalLearner(sft_model_folder(task), task.config)
        yield SftRuntime(task=task, learner=learner)  # type: ignore[arg-type]

    threads = torch.get_num_threads()
    with (
        patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu"),
        patch("keel.trainer.prepare.check_environments", check_environments),
        patch("keel.commands.train.launch", running),
        patch("keel.commands.sft.launch_sft", teaching),
        patch("keel.commands.sampling.launch", running),
    ):
        try:
            yield
        finally:
            engines.close()
            if ray.is_initialized():
                stop_ray()
            torch.set_num_threads(threads)
