"""The recipe for `keel distill`: specialists, the selection of their completions, and the later
stages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from keel.configs.sections.base import Section, knob, require, require_unique

_FIXED = re.compile(r"^data\.sources\[.*\]\.(kl_coef|length|rewards|teacher)\b")
"""Knobs that on-policy distillation sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialistConfig(Section, path="specialists[{self.name}]"):
    """Settings for a model trained with `recipe` on some of the recipe's sources."""

    name: str
    """Name of the specialist's folder. It may contain letters, digits, `_`, `+` and `-`."""
    sources: tuple[str, ...]
    """Names of the recipe's sources to train on. They determine the domains and modes that the
    specialist teaches."""
    overrides: tuple[str, ...] = ()
    """Overrides for this specialist's recipe, such as `[run.steps=200]`."""

    def check(self) -> None:
        ok = bool(re.fullmatch(r"[\w+-]+", self.name))
        self.require(ok, "name", "must be letters, digits and any of _ + -")
        self.require(bool(self.sources), "sources", "must name at least one source")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectConfig(Section, path="select"):
    """Settings for selecting which of the specialists' completions to use for supervised
    distillation."""

    least: float = knob(1.0, gt=0, le=1)
    """Minimum value of the reward part `correct`, as given by rules, tests, environments and
    judges."""
    least_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Minimum values of other reward parts, where present: `{format: 1, language: 0.8}`."""
    most_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Maximum values of reward parts, where present: `{refusal: 0.4}`."""
    most_per_prompt: int = knob(1, ge=0)
    """Maximum number of distinct completions per prompt, in the order in which they were
    sampled, so that no length is preferred. 0: all."""
    balance: float = knob(4.0, ge=0)
    """Maximum number of completions in a domain and mode, as a multiple of the smallest. 0: do not
    balance."""

    def check(self) -> None:
        self.require(not 0 < self.balance < 1, "balance", "must be 0 or at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(Section):
    """The recipe for `keel distill`, which trains specialists, selects their completions, distills
    them into one model, runs mixed RL, and evaluates each model by domain (DeepSeek-V3.2, section
    3)."""

    RECIPES = "distill/"

    dir: str
    """Output folder, with a subfolder for each stage. Run the command again to resume."""
    recipe: str
    """Recipe of `keel train` for the mixed stage. It lists the sources of all domains."""
    overrides: tuple[str, ...] = ()
    """Overrides of the recipe that apply to the specialists and all later stages."""
    specialists: tuple[SpecialistConfig, ...]
    method: Literal["sft", "on_policy"] = "sft"
    """How the specialists teach. sft: the model is fine-tuned on their selected completions.
    on_policy: the model samples, and the KL term compares each source with its specialist."""
    on_policy_overrides: tuple[str, ...] = ()
    """Overrides of the recipe for the on_policy stage, such as `[run.steps=100]`."""
    samples: int = knob(4, ge=1)
    """Number of completions that a specialist samples per training prompt."""
    prompts: int = knob(0, ge=0)
    """Number of training prompts per source, from the first. 0: all."""
    select: SelectConfig = field(default_factory=SelectConfig)
    sft: str = "sft-distilled"
    """Recipe of `keel sft`. Its sources are replaced by the selected completions."""
    sft_overrides: tuple[str, ...] = ()
    """Overrides for the recipe named in `sft`, such as `[trainer.lr=1e-5]`."""
    mixed_overrides: tuple[str, ...] = ()
    """Overrides of the recipe that apply to the mixed stage only."""
    eval_samples: int = knob(4, ge=1)
    """Number of completions per held-out prompt when the specialists, the distilled model and the
    mixed model are evaluated."""

    def check(self) -> None:
        for name in ("dir", "recipe", "sft"):
            self.require(bool(getattr(self, name)), name, "must not be empty")
        names = [specialist.name for specialist in self.specialists]
        require(bool(names), "specialists", names, "must have at least one entry")
        require_unique("specialists", names)
        require_unique("specialists", [name for each in self.specialists for name in each.sources])
        rule = (
            "is fixed by method: on_policy. To mix rewards with a teacher, name the teacher in the "
            "source of a `keel train` recipe"
        )
        for override in self.on_policy_overrides:
            fixed = _FIXED.search(override.partition("=")[0])
            require(not fixed, "on_policy_overrides", override, rule)
