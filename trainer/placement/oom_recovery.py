"""Repeats a training step that ran out of memory, using settings that need less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from keel.configs.schema import Config
from keel.rl.metrics import Sum
from keel.rl.types import ScoredGroup, StepResult
from keel.trainer.placement.choose import update_choice, yaml_value
from keel.trainer.run.restarts import OutOfMemory

REDUCED_KNOBS = ("micro_batch_tokens", "activation_checkpointing", "keep_attention")
"""The `trainer` knobs that are changed to save memory."""
_MAX_REDUCTIONS = 3  # if more are needed, the memory model is wrong by more than a few per cent


class _RetryableLearner(Protocol):
    @property
    def version(self) -> int: ...
    def step(self, groups: Sequence[ScoredGroup]) -> StepResult: ...
    def lowered(self, config: Config) -> None: ...


@dataclass(kw_only=True)
class OomRecovery:
    """Holds a run's current config and changes it when a step runs out of memory."""

    config: Config
    folder: Path
    times: int = 0
    fewer: bool = False
    """True if the run has fewer ranks or engines than its recipe asks for (`elastic`)."""

    def after(self, error: OutOfMemory) -> str:
        """Change the config to use less memory, save the change in the run folder, and return a
        message. Raises `error` if no further reduction is possible."""
        reduced = _with_less_memory(self.config) if self.times < _MAX_REDUCTIONS else None
        if reduced is None:
            raise error
        before, now = self.config.trainer, reduced.trainer
        self.config, self.times = reduced, self.times + 1
        values = {name: getattr(now, name) for name in REDUCED_KNOBS}
        update_choice(self.folder, {f"trainer.{name}": value for name, value in values.items()})
        changes = ", ".join(
            f"trainer.{name} is now {yaml_value(value)}, not {yaml_value(getattr(before, name))}"
            for name, value in values.items()
            if value != getattr(before, name)
        )
        return f"{error}\nOut of memory: {changes}, for the rest of the run"


@dataclass(frozen=True, kw_only=True)
class RetryOnOom:
    """A learner that retries a step that ran out of memory."""

    learner: _RetryableLearner
    lowering: OomRecovery
    say: Callable[[str], object]

    @property
    def version(self) -> int:
        return self.learner.version

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult:
        return self.attempt(lambda _: self.learner.step(groups))

    def attempt(self, act: Callable[[Config], StepResult]) -> StepResult:
        """Call `act` with the current config until the step fits, reducing memory use after each
        failure."""
        times = 0
        while True:
            try:
                result = act(self.lowering.config)
                break
            except OutOfMemory as error:
                if not error.dropped:
                    raise
                self.say(f"warning: {self.lowering.after(error)}")
                self.learner.lowered(self.lowering.config)
                times += 1
        metrics = dict(result.metrics)
        if times:
            metrics["train/out_of_memory"] = Sum(float(times))
        if self.lowering.fewer:
            metrics["train/ranks"] = Sum(float(self.lowering.config.trainer.ranks))
        return replace(result, metrics=metrics)


def _with_less_memory(config: Config) -> Config | None:
    """Return a config with half the micro-batch, then with activation checkpointing, then without
    kept attention outputs, or None if nothing is left to change."""
    trainer, least = config.trainer, config.max_context
    if trainer.micro_batch_tokens > least:
        trainer = replace(trainer, micro_batch_tokens=max(least, trainer.micro_batch_tokens // 2))
    elif not trainer.activation_checkpointing:
        trainer = replace(trainer, activation_checkpointing=True)
    elif trainer.keeps_attention:
        trainer = replace(trainer, keep_attention=False)
    else:
        return None
    return replace(config, trainer=trainer)
