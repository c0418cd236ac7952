"""Warns about values that are legal but unusual: they may be typing errors or experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import fields

from keel.configs.load import split_overrides
from keel.configs.schema import Config
from keel.model.load import ModelFacts

_OLD_STEPS = 16
"""Completions are old after this many optimizer steps: 0 is harmless, 28 is harmful
(docs/stability.md)."""
_SMALL_MODEL = 50_000_000
"""Models with fewer parameters than this learn with higher rates."""
_SFT_SECTIONS = ("run", "model", "trainer", "alarms", "sft")
_SHOWN = 3


def lint_recipe(config: Config, facts: ModelFacts) -> list[str]:
    """Return one warning for each unusual value or combination in the recipe."""
    lines = [
        f"{knob} = {value:g} is unusual (typical: {typical}): a typing error?"
        for knob, value, low, high, typical in _ranges(config, facts)
        if not low <= value <= high
    ]
    return [*lines, *_combinations(config)]


def ignored_knobs(config: Config, chosen: Set[str], overrides: Sequence[str] = ()) -> Iterator[str]:
    """Warn about knobs that have no effect.

    These are knobs of `keel train` in a recipe that only does supervised training, and an override
    of run.steps that sft.epochs replaces. `chosen` has the knobs that Keel chooses.
    """
    steps = any(
        each.partition("=")[0].strip() == "run.steps" for each in split_overrides(overrides)
    )
    if steps and config.sft.epochs:
        yield (
            f"run.steps = {config.run.steps} is ignored because sft.epochs = "
            f"{config.sft.epochs:g} is set; sft.epochs=0 uses run.steps"
        )
    if config.data.sources:  # the recipe is also for RL
        return
    others = [each.name for each in fields(config) if each.name not in (*_SFT_SECTIONS, "data")]
    sections = {name: getattr(config, name) for name in others}
    knobs = [
        f"{name}.{field.name}"
        for name, section in sections.items()
        for field in fields(section)
        if getattr(section, field.name) != getattr(type(section)(), field.name)
    ]
    if knobs := [knob for knob in knobs if knob not in chosen]:
        more = f" and {len(knobs) - _SHOWN} more" if len(knobs) > _SHOWN else ""
        yield (
            f"{', '.join(knobs[:_SHOWN])}{more}: ignored by `keel sft` and `keel pretrain`, which "
            f"use {', '.join(_SFT_SECTIONS)}"
        )


def _combinations(config: Config) -> Iterator[str]:
    algorithm, trainer, top_p = config.algorithm, config.trainer, config.rollout.sampling.top_p
    samples = bool(config.data.sources)
    updates = algorithm.updates_per_batch
    oldest = (algorithm.publish_every - 1 + algorithm.max_lag) * updates
    masked = top_p < 1 and algorithm.keep_sampling_mask and not algorithm.kept_mass_coef
    if samples and masked and oldest >= _OLD_STEPS:
        yield (
            f"algorithm.kept_mass_coef = 0: completions are up to {oldest} optimizer steps old "
            "(publish_every, max_lag, updates_per_batch), and no ratio sees the probability that "
            f"the policy moves out of their sampling masks (top_p = {top_p:g}). Set it to 1, or "
            "watch sampling/kept_mass"
        )
    for domain, weights in config.data.rewards_by_domain.items():
        if weights.get("correct", 0.0) < 0:
            yield (
                f"the rewards of domain {domain!r} have correct: {weights['correct']:g}, which "
                "trains the policy to be wrong"
            )
    if config.sft.epochs and not config.sft.sources:
        yield (
            f"sft.epochs = {config.sft.epochs:g} is ignored without sft.sources; run.steps sets "
            "the length of the run"
        )
    prompts = algorithm.prompts_per_step
    if samples and prompts % updates:
        yield (
            f"algorithm.prompts_per_step = {prompts}: its {updates} optimizer steps "
            f"(algorithm.updates_per_batch) have {-(-prompts // updates)} or {prompts // updates} "
            f"prompts each; make it a multiple of {updates}"
        )
    sequences, ranks = prompts // updates * algorithm.group_size, trainer.groups
    if samples and sequences % ranks:
        yield (
            f"algorithm.prompts_per_step × group_size = {sequences} sequences per optimizer step "
            f"on {ranks} trainer ranks: some ranks wait for others; make it a multiple of {ranks}"
        )
    if not samples and trainer.warmup_steps >= config.run.steps:
        yield (
            f"trainer.warmup_steps = {trainer.warmup_steps}: the run ends after "
            f"{config.run.steps} step(s), before it reaches trainer.lr = {trainer.lr:g}"
        )


def _learning_rates(config: Config, facts: ModelFacts) -> tuple[float, float, str]:
    """Return the lowest and highest `trainer.lr` that cause no warning, and the typical range."""
    if facts.parameters < _SMALL_MODEL:
        return 1e-7, 1e-2, "1e-5 to 1e-3 for so small a model"
    if config.data.sources:
        return 1e-9, 1e-4, "1e-7 to 1e-5 for a model of this size"
    if config.trainer.attention == "warm-up":  # indexers start with random weights
        return 1e-7, 1e-2, "1e-4 to 1e-3 for indexers"
    return 1e-9, 1e-3, "1e-6 to 3e-4 for supervised training of a model of this size"


def _ranges(config: Config, facts: ModelFacts) -> Iterator[tuple[str, float, float, float, str]]:
    """Yield each knob with its value, the lowest and highest value that cause no warning, and the
    typical range."""
    trainer, algorithm, sampling = config.trainer, config.algorithm, config.rollout.sampling
    yield "trainer.lr", trainer.lr, *_learning_rates(config, facts)
    yield "trainer.weight_decay", trainer.weight_decay, 0, 0.3, "0 to 0.1"
    yield "trainer.grad_clip", trainer.grad_clip, 0, 10, "0.1 to 1"
    yield "trainer.eps", trainer.eps, 0, 1e-4, "1e-8"
    for name in ("clip_low", "clip_high"):
        yield f"algorithm.{name}", getattr(algorithm, name), 0.0, 1.0, "0.1 to 0.4"
    yield "algorithm.kept_mass_coef", algorithm.kept_mass_coef, 0, 10, "0 or 1"
    yield "rollout.sampling.temperature", sampling.temperature, 0.3, 1.7, "0.6 to 1.2"
    if timeout_s := config.run.hang_timeout_s:
        yield "run.hang_timeout_s", timeout_s, 60, 3600, "120 to 600 seconds, or 0: never"
    for source in config.data.sources:
        yield f"data.sources[{source.name}].kl_coef", source.kl_coef, 0, 0.5, "0 to 0.05"
