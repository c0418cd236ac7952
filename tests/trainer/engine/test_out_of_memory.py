"""A step that does not fit is repeated with smaller micro-batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.configs.schema import Config
from keel.rl.futures import done
from keel.rl.metrics import values
from keel.trainer.engine.engine import TrainerEngine
from keel.trainer.learner import Learner
from keel.trainer.placement.choose import CACHE_FILE
from keel.trainer.placement.elastic import (
    OomRecovery,
    RetryOnOom,
)
from keel.trainer.placement.step_deadlines import StepDeadlines
from keel.trainer.run.restarts import UpdateOutOfMemory
from keel.trainer.worker import TrainerWorker
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.ranks import make_config

pytestmark = pytest.mark.e2e
STEPS = 3


class Local(Learner):
    """A learner with one rank in this process."""

    def __init__(self, model: Path, config: Config) -> None:
        self._config, self._put_to_sleep, self._direct = config, done, False
        self._deadlines = StepDeadlines(config.trainer.timeout_s, 0.0)
        self.worker = TrainerWorker(0, 1, gpu=False)
        self.worker._engine = TrainerEngine(str(model), config)

    def _call_with_shares(
        self, method: str, shares: Sequence[Any], what: str, times: int = 1
    ) -> list[Any]:
        return [getattr(self.worker, method)(shares[0])]

    def _call_all(self, method: str, *arguments: object, deadline: object) -> list[Any]:
        return [getattr(self.worker, method)(*arguments)]

    def weights(self) -> dict[str, torch.Tensor]:
        module = self.worker.engine._network
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def short(config: Config) -> Config:
    """Limit contexts to 24 tokens."""
    sampling = replace(config.rollout.sampling, max_tokens=12)
    return replace(
        config,
        data=replace(config.data, max_prompt_tokens=12),
        rollout=replace(config.rollout, sampling=sampling),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


def test_step_is_repeated_in_smaller_micro_batches(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the second micro-batch of the first step ran out of memory."""
    roomy = short(make_config(1, 0, tokens=96, kl_coef=0.1))
    groups = [Rollouts(step).groups(4, 3) for step in range(STEPS)]
    half = replace(roomy, trainer=replace(roomy.trainer, micro_batch_tokens=48))
    straight = Local(model, half)
    expected = [straight.step(each) for each in groups]
    calls, accumulate = count(), TrainerEngine._accumulate

    def tight(self: TrainerEngine, *arguments: Any, **options: Any) -> Any:
        result = accumulate(self, *arguments, **options)
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    monkeypatch.setattr(TrainerEngine, "_accumulate", tight)
    saved, output = tmp_path / CACHE_FILE, list[str]()
    saved.write_text('{"values": {"trainer.micro_batch_tokens": 96}, "hardware": {}}')
    learner, lowering = Local(model, roomy), OomRecovery(config=roomy, folder=tmp_path)
    repeating = RetryOnOom(learner=learner, lowering=lowering, say=output.append)
    for number, (each, other) in enumerate(zip(groups, expected, strict=True)):
        metrics = values(repeating.step(each).metrics)
        assert metrics.pop("train/out_of_memory", None) == (None if number else 1)
        assert metrics == values(other.metrics)
    assert repeating.version == STEPS and len(output) == 1
    weights, reference = learner.weights(), straight.weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.items())
    # A resumed run uses it, too.
    assert json.loads(saved.read_text())["values"] == {"trainer.micro_batch_tokens": 48}


def test_out_of_memory_update_is_not_retried(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(make_config(1, 1, tokens=96))
    learner, output = Local(model, config), list[str]()
    lowering = OomRecovery(config=config, folder=tmp_path)
    repeating = RetryOnOom(learner=learner, lowering=lowering, say=output.append)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.50 GiB.")

    monkeypatch.setattr(learner.worker.engine._engine, "step", full)
    with pytest.raises(UpdateOutOfMemory, match=r"30\.50 GiB.*offload_optimizer: true"):
        repeating.step(Rollouts(0).groups(4, 3))
    assert not output and lowering.config is config
