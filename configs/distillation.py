"""Every knob of `keel distill`: specialists, what they teach, and the stages after. A recipe of its
own, which names the recipes of its links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from keel.configs.sections.base import require


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialistConfig:
    """Trained by `recipe` on some of its sources alone."""

    name: str
    """Of its folder: letters, digits and any of _ + -"""
    sources: tuple[str, ...]
    """Names of the recipe's sources, and so the domains and modes that it teaches."""
    overrides: tuple[str, ...] = ()
    """Knobs of the recipe that it has otherwise: `[run.steps=200]`."""

    def __post_init__(self) -> None:
        knob = f"specialists[{self.name}]"
        require(
            bool(re.fullmatch(r"[\w+-]+", self.name)),
            f"{knob}.name",
            self.name,
            "must be letters, digits and any of _ + -",
        )
        require(bool(self.sources), f"{knob}.sources", [], "name at least one of the recipe's")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectConfig:
    """Which completions of the specialists are learned."""

    least: float = 1.0
    """Of `correct`: what rules, tests, environments and judges give."""
    least_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of other parts of the reward, where a completion has them: `{format: 1, language: 0.8}`."""
    most_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The same from above: `{refusal: 0.4}`."""
    most_per_prompt: int = 1
    """The shortest of those that differ; 0: all."""
    balance: float = 4.0
    """No domain and mode has more than so many times as many as the smallest; 0: as they are."""

    def __post_init__(self) -> None:
        require(0 < self.least <= 1, "select.least", self.least, "must be in (0, 1]")
        for name in ("most_per_prompt", "balance"):
            value = getattr(self, name)
            require(value >= 0, f"select.{name}", value, "must not be negative")
        require(
            not 0 < self.balance < 1, "select.balance", self.balance, "must be 0, or at least 1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """A whole recipe of `keel distill`: specialists → their completions, selected → supervised
    distillation → mixed RL, and an evaluation of each by domain (DeepSeek-V3.2, section 3)."""

    dir: str
    """Everything goes here, a folder for each link; called again, it goes on."""
    recipe: str
    """Of `keel train`: the mixed stage, with the sources of all domains."""
    overrides: tuple[str, ...] = ()
    """Knobs of it, for specialists and all later links alike."""
    specialists: tuple[SpecialistConfig, ...]
    samples: int = 4
    """Completions that a specialist gives to each prompt to train on."""
    prompts: int = 0
    """To the first so many of each source; 0: all."""
    select: SelectConfig = field(default_factory=SelectConfig)
    sft: str = "sft-distilled"
    """Recipe of `keel sft`; its sources are replaced by what was selected."""
    sft_overrides: tuple[str, ...] = ()
    """Knobs of the recipe `sft` that are otherwise: `[trainer.lr=1e-5]`."""
    mixed_overrides: tuple[str, ...] = ()
    """Knobs of the recipe for the mixed stage alone."""
    eval_samples: int = 4
    """Completions to each held-out prompt, of specialists, the distilled and the mixed model."""

    def __post_init__(self) -> None:
        for name in ("dir", "recipe", "sft"):
            require(bool(getattr(self, name)), name, "", "must not be empty")
        names = [specialist.name for specialist in self.specialists]
        require(bool(names), "specialists", names, "there must be at least one")
        require(len(set(names)) == len(names), "specialists", names, "names must differ")
        taught = [source for each in self.specialists for source in each.sources]
        twice = sorted({source for source in taught if taught.count(source) > 1})
        require(
            not twice, "specialists", twice, "a source belongs to one specialist; keep it in one"
        )
        for name in ("samples", "eval_samples"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        require(self.prompts >= 0, "prompts", self.prompts, "must not be negative")
