"""A run whose step ran out of memory: what is tried instead, and where that is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from keel.configs.schema import Config
from keel.rl.metrics import Sum
from keel.rl.types import ScoredGroup, StepResult
from keel.trainer.placement.cached_choice import update_choice
from keel.trainer.run.restarts import OutOfMemory

LOWERED = ("micro_batch_tokens", "activation_checkpointing", "keep_attention")
"""Of `trainer`: what is lowered."""
MOST = 3
"""Times that a run is lowered: what still does not fit is no error of a few per cent."""


class Learner(Protocol):
    @property
    def version(self) -> int: ...
    def step(self, groups: Sequence[ScoredGroup]) -> StepResult: ...
    def lowered(self, config: Config) -> None: ...


@dataclass(kw_only=True)
class OomRecovery:
    """The recipe of a run, and how often it had to be lowered."""

    config: Config
    folder: Path
    times: int = 0
    fewer: bool = False
    """Whether it has less than all of its ranks and engines (`keel.trainer.placement.elastic`)."""

    def after(self, error: OutOfMemory) -> str:
        """Lower it, here and in the run's folder, and say so. Raises `error` where that is in
        vain."""
        smaller = lowered(self.config) if self.times < MOST else None
        if smaller is None:
            raise error
        before, self.config, self.times = self.config, smaller, self.times + 1
        trainer = smaller.trainer
        update_choice(self.folder, {f"trainer.{name}": getattr(trainer, name) for name in LOWERED})
        if trainer.micro_batch_tokens < before.trainer.micro_batch_tokens:
            was = before.trainer.micro_batch_tokens
            change = (
                f"trainer.micro_batch_tokens is now {trainer.micro_batch_tokens:,}, not {was:,}"
            )
        elif trainer.activation_checkpointing > before.trainer.activation_checkpointing:
            change = "trainer.activation_checkpointing is now on"
        else:
            change = "trainer.keep_attention is now off"
        return f"{error}\nOut of memory: {change}, for the rest of the run"


@dataclass(frozen=True, kw_only=True)
class RetryOnOom:
    """Trains like a `keel.trainer.learner.Learner`, and a step that did not fit once more, in
    smaller micro-batches."""

    learner: Learner
    lowering: OomRecovery
    say: Callable[[str], object]

    @property
    def version(self) -> int:
        return self.learner.version

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult:
        return self.attempt(lambda _: self.learner.step(groups))

    def attempt(self, act: Callable[[Config], StepResult]) -> StepResult:
        """`act`, which is given the recipe as it is by now."""
        times = 0
        while True:
            try:
                result = act(self.lowering.config)
            except OutOfMemory as error:
                if not error.dropped:
                    raise
                self.say(f"warning: {self.lowering.after(error)}")
                self.learner.lowered(self.lowering.config)
                times += 1
            else:
                counted = {"train/out_of_memory": Sum(float(times))} if times else {}
                if self.lowering.fewer:
                    counted["train/ranks"] = Sum(float(self.lowering.config.trainer.ranks))
                return replace(result, metrics={**result.metrics, **counted})


def lowered(config: Config) -> Config | None:
    """With micro-batches half as large, or of one trajectory; then with activation checkpointing,
    and with nothing of attention kept. None where all is done."""
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
