"""Warns about values that are legal but unusual. They may be typos or deliberate experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import fields

from keel.configs.load import split_overrides
from keel.configs.schema import Config
from keel.model.load import ModelFacts

_OLD_STEPS = 16
"""A completion counts as old if the policy has since taken this many optimizer steps. A lag of 0 is
harmless and a lag of 28 is harmful (docs/stability.md)."""
_SMALL_MODEL = 50_000_000
"""Models with fewer parameters than this tolerate higher learning rates."""
_SFT_SECTIONS = ("run", "model", "trainer", "alarms", "sft")
_SHOWN = 3


def lint_recipe(config: Config, facts: ModelFacts) -> list[str]:
    """Return one warning for each unusual value or combination of values in the recipe."""
    trainer, algorithm, sampling = config.trainer, config.algorithm, config.rollout.sampling
    rates: tuple[float, float, str] = (1e-9, 1e-3, "1e-6 to 3e-4 for supervised training")
    if facts.parameters < _SMALL_MODEL or trainer.attention == "warm-up":
        rates = (1e-7, 1e-2, "1e-5 to 1e-3 for a small model or indexers")
    elif config.data.sources:
        rates: tuple[float, float, str] = (1e-9, 1e-4, "1e-7 to 1e-5 for a model of this size")
    ranges: list[tuple[str, float, float, float, str]] = [
        ("trainer.lr", trainer.lr, rates[0], rates[1], rates[2]),
        ("trainer.weight_decay", trainer.weight_decay, 0, 0.3, "0 to 0.1"),
        ("trainer.grad_clip", trainer.grad_clip, 0, 10, "0.1 to 1"),
        ("trainer.eps", trainer.eps, 0, 1e-4, "1e-8"),
        ("algorithm.clip_low", algorithm.clip_low, 0, 1, "0.1 to 0.4"),
        ("algorithm.clip_high", algorithm.clip_high, 0, 1, "0.1 to 0.4"),
        ("algorithm.kept_mass_coef", algorithm.kept_mass_coef, 0, 10, "0 or 1"),
        ("rollout.sampling.temperature", sampling.temperature, 0.3, 1.7, "0.6 to 1.2"),
        ("run.hang_timeout_s", config.run.hang_timeout_s or 60, 60, 3600, "120 to 600, or 0"),
    ]
    ranges += [
        (f"data.sources[{source.name}].kl_coef", source.kl_coef, 0, 0.5, "0 to 0.05")
        for source in config.data.sources
        if not source.teacher
    ]
    lines = [
        f"{knob} = {value:g} is unusual (typical: {typical}): a typing error?"
        for knob, value, low, high, typical in ranges
        if not low <= value <= high
    ]
    oldest = algorithm.publish_every - 1 + algorithm.max_lag
    oldest *= algorithm.updates_per_batch
    masked = sampling.top_p < 1 and algorithm.keep_sampling_mask and not algorithm.kept_mass_coef
    if config.data.sources and masked and oldest >= _OLD_STEPS:
        lines.append(
            f"algorithm.kept_mass_coef = 0: completions are up to {oldest} optimizer steps old "
            "(publish_every, max_lag, updates_per_batch), and no ratio sees the probability that "
            f"the policy moves out of their sampling masks (top_p = {sampling.top_p:g}). Set it to "
            "1, or watch sampling/kept_mass"
        )
    lines += [
        f"the rewards of domain {domain!r} have correct: {weights['correct']:g}, which trains the "
        "policy to be wrong"
        for domain, weights in config.data.rewards_by_domain.items()
        if weights.get("correct", 0.0) < 0
    ]
    return lines


def ignored_knobs(config: Config, chosen: Set[str], overrides: Sequence[str] = ()) -> Iterator[str]:
    """Yield warnings about knobs that are set but have no effect.

    If a recipe is only for supervised training, these are the knobs that only `keel train` uses. An
    override of run.steps also has no effect if sft.epochs is set. `chosen` contains the knobs that
    Keel chooses.
    """
    if config.sft.epochs and any(
        each.partition("=")[0].strip() == "run.steps" for each in split_overrides(overrides)
    ):
        yield (
            f"run.steps = {config.run.steps} is ignored because sft.epochs = "
            f"{config.sft.epochs:g} is set; sft.epochs=0 uses run.steps"
        )
    if config.data.sources:  # the recipe is also for RL
        return
    knobs: list[str] = []
    for name in {each.name for each in fields(config)} - {*_SFT_SECTIONS, "data"}:
        section = getattr(config, name)
        default, names = type(section)(), [field.name for field in fields(section)]
        changed = [n for n in names if getattr(section, n) != getattr(default, n)]
        knobs += [f"{name}.{knob}" for knob in changed if f"{name}.{knob}" not in chosen]
    if knobs:
        shown = ", ".join(sorted(knobs)[:_SHOWN])
        more = f" and {len(knobs) - _SHOWN} more" if len(knobs) > _SHOWN else ""
        yield (
            f"{shown}{more}: ignored by `keel sft` and `keel pretrain`, which use "
            f"{', '.join(_SFT_SECTIONS)}"
        )
