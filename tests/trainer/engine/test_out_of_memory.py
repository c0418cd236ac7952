"""A step that does not fit is repeated with smaller micro-batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
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
from keel.trainer.placement.oom_recovery import (
    OomRecovery,
    RetryOnOom,
)
from keel.trainer.placement.step_deadlines import StepDeadlines
from keel.trainer.run.restarts import UpdateOutOfMemory
from keel.trainer.worker import TrainerWorker
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.ranks import make_config

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


def runs_out(monkeypatch: pytest.MonkeyPatch, method: str, calls: set[int]) -> list[int]:
    """Make `TrainerEngine.method` raise after these of its calls."""
    original, made = getattr(TrainerEngine, method), list[int]()

    def tight(self: TrainerEngine, *arguments: Any, **options: Any) -> Any:
        made.append(len(made))
        result = original(self, *arguments, **options)
        if made[-1] in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    monkeypatch.setattr(TrainerEngine, method, tight)
    return made


@pytest.mark.e2e
def test_step_is_repeated_in_smaller_micro_batches(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = short(make_config(1, 0, tokens=96, kl_coef=0.1))
    assert roomy.max_context == 24
    groups = [Rollouts(step).groups(4, 3) for step in range(STEPS)]
    half = replace(roomy, trainer=replace(roomy.trainer, micro_batch_tokens=48))
    straight = Local(model, half)
    expected = [straight.step(each) for each in groups]

    (tmp_path / CACHE_FILE).write_text(
        json.dumps({"values": {"trainer.micro_batch_tokens": 96}, "hardware": {}})
    )
    output: list[str] = []
    lowering = OomRecovery(config=roomy, folder=tmp_path)
    learner = Local(model, roomy)
    repeating = RetryOnOom(learner=learner, lowering=lowering, say=output.append)
    made = runs_out(monkeypatch, "_accumulate", {1})  # in the second micro-batch of the first step
    results = [repeating.step(each) for each in groups]

    assert len(made) > 4 and repeating.version == STEPS
    values_, reference = learner.weights(), straight.weights()
    assert all(torch.equal(values_[name], tensor) for name, tensor in reference.items())
    for result, other, times in zip(results, expected, (1, None, None), strict=True):
        metrics = values(result.metrics)
        assert metrics.pop("train/out_of_memory", None) == times
        assert metrics == values(other.metrics)
    (line,) = output
    assert line.startswith("warning: an optimizer step did not fit: CUDA out of memory.")
    assert line.endswith(
        "Out of memory: trainer.micro_batch_tokens is now 48, not 96, for the rest of the run"
    )
    # A resumed run uses it, too.
    saved = json.loads((tmp_path / CACHE_FILE).read_text())
    assert saved["values"] == {"trainer.micro_batch_tokens": 48}


@pytest.mark.e2e
@pytest.mark.parametrize("stage", [0, 1])
def test_out_of_memory_update_is_not_retried(
    stage: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(make_config(1, stage, tokens=96))
    learner, output = Local(model, config), list[str]()
    lowering = OomRecovery(config=config, folder=tmp_path)
    repeating = RetryOnOom(learner=learner, lowering=lowering, say=output.append)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.50 GiB.")

    monkeypatch.setattr(learner.worker.engine._engine, "step", full)
    with pytest.raises(UpdateOutOfMemory, match=r"30\.50 GiB.*offload_optimizer: true"):
        repeating.step(Rollouts(0).groups(4, 3))
    assert not output and lowering.config is config
