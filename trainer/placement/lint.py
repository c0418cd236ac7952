"""Values that no rule forbids and nobody uses: a typing error, or an experiment. Warned about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import fields

from keel.configs.load import split_overrides
from keel.configs.schema import Config
from keel.model.load import ModelFacts

OLD = 16
"""Optimizer steps (`staleness/max`) from which on completions are called old. Measured are 0 and
28, and those do harm (docs/stability.md)."""
SMALL = 50_000_000
"""Parameters below which a model is one of the tiny kind, which learns faster."""


READ = ("run", "model", "trainer", "alarms", "sft")
"""Sections that supervised training is told by (`Config.supervised`)."""
NAMED = 3


def lint_recipe(config: Config, facts: ModelFacts) -> list[str]:
    """One line for each knob far outside of what is used, and for knobs that do not go together."""
    return [
        *(
            f"{knob} = {value:g} is far from what is used ({usual}): a typing error?"
            for knob, value, low, high, usual in _ranges(config, facts)
            if not low <= value <= high
        ),
        *_unseen(config),
        *_upside_down(config),
        *_for_nothing(config),
        *_uneven(config),
        *_never_there(config),
    ]


def ignored_knobs(given: Config, left: Set[str], overrides: Sequence[str] = ()) -> Iterator[str]:
    """Knobs of `keel train` in a recipe for supervised training alone, and `run.steps` among the
    overrides of one whose epochs are counted. left: those whose values are chosen."""
    steps = any(
        each.partition("=")[0].strip() == "run.steps" for each in split_overrides(overrides)
    )
    if steps and given.sft.epochs:
        yield (
            f"run.steps = {given.run.steps}: does not count, since sft.epochs = "
            f"{given.sft.epochs:g} says how long this run is; sft.epochs=0 leaves it to run.steps"
        )
    if given.data.sources:  # they are for what comes after it
        return
    others = [each.name for each in fields(given) if each.name not in (*READ, "data")]
    sections = {name: getattr(given, name) for name in others}
    found = [
        f"{name}.{field.name}"
        for name, section in sections.items()
        for field in fields(section)
        if getattr(section, field.name) != getattr(type(section)(), field.name)
    ]
    if found := [knob for knob in found if knob not in left]:
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        yield (
            f"{', '.join(found[:NAMED])}{more}: not read by `keel sft` and `keel pretrain`, which "
            f"have {', '.join(READ)}"
        )


def _for_nothing(config: Config) -> Iterator[str]:
    """Knobs of `keel sft` in a recipe that has nothing for it."""
    if config.sft.epochs and not config.sft.sources:
        yield (
            f"sft.epochs = {config.sft.epochs:g}: counts with sft.sources alone, and there are "
            "none. How long this run is says run.steps"
        )


def _uneven(config: Config) -> Iterator[str]:
    """Batches that optimizer steps or ranks cannot share evenly."""
    algorithm, ranks = config.algorithm, config.trainer.groups
    prompts, updates = algorithm.prompts_per_step, algorithm.updates_per_batch
    if not config.data.sources:
        return
    if prompts % updates:
        yield (
            f"algorithm.prompts_per_step = {prompts}: its {updates} optimizer steps "
            f"(algorithm.updates_per_batch) have {-(-prompts // updates)} or {prompts // updates} "
            f"prompts each; make it a multiple of {updates}"
        )
    sequences = prompts // updates * algorithm.group_size
    if sequences % ranks:
        yield (
            f"algorithm.prompts_per_step × group_size = {sequences} sequences per optimizer step "
            f"on {ranks} trainer ranks: some ranks wait for others; make it a multiple of {ranks}"
        )


def _never_there(config: Config) -> Iterator[str]:
    """A learning rate that a supervised run does not reach, whose steps its data may say."""
    trainer, steps = config.trainer, config.run.steps
    if not config.data.sources and trainer.warmup_steps >= steps:
        yield (
            f"trainer.warmup_steps = {trainer.warmup_steps}: the run ends after {steps} step(s), "
            f"before its learning rate is trainer.lr = {trainer.lr:g}"
        )


def _upside_down(config: Config) -> Iterator[str]:
    """Rewards for what is wrong."""
    for domain, weights in config.data.rewards_by_domain.items():
        if weights.get("correct", 0.0) < 0:
            yield (
                f"the rewards of domain {domain!r} have correct: {weights['correct']:g}: the "
                "policy learns to be wrong"
            )


def _unseen(config: Config) -> Iterator[str]:
    """Old completions under masks that let their mass go."""
    algorithm, top_p = config.algorithm, config.rollout.sampling.top_p
    oldest = (algorithm.publish_every - 1 + algorithm.max_lag) * algorithm.updates_per_batch
    masked = top_p < 1 and algorithm.keep_sampling_mask
    if masked and config.data.sources and oldest >= OLD and not algorithm.kept_mass_coef:
        yield (
            f"algorithm.kept_mass_coef = 0: completions are up to {oldest} optimizer steps old "
            "(publish_every, max_lag, updates_per_batch), and what the policy moves out of their "
            f"sampling masks meanwhile (top_p = {top_p:g}) is seen by no ratio. Set it to 1, or "
            "watch sampling/kept_mass"
        )


def _rates(config: Config, facts: ModelFacts) -> tuple[float, float, str]:
    """Lowest and highest of `trainer.lr` that pass, and what is usual."""
    if facts.parameters < SMALL:
        return 1e-7, 1e-2, "1e-5 to 1e-3 for a model so small"
    if config.data.sources:
        return 1e-9, 1e-4, "1e-7 to 1e-5 for a model of this size"
    if config.trainer.attention == "warm-up":  # of indexers, whose weights are random
        return 1e-7, 1e-2, "1e-4 to 1e-3 for indexers"
    return 1e-9, 1e-3, "1e-6 to 3e-4 for supervised training of a model of this size"


def _ranges(config: Config, facts: ModelFacts) -> Iterator[tuple[str, float, float, float, str]]:
    """Knob, value, lowest and highest that pass without a word, and what is usual."""
    trainer, algorithm, sampling = config.trainer, config.algorithm, config.rollout.sampling
    yield "trainer.lr", trainer.lr, *_rates(config, facts)
    yield "trainer.weight_decay", trainer.weight_decay, 0, 0.3, "0 to 0.1"
    yield "trainer.grad_clip", trainer.grad_clip, 0, 10, "0.1 to 1"
    yield "trainer.eps", trainer.eps, 0, 1e-4, "1e-8"
    for name in ("clip_low", "clip_high"):
        yield f"algorithm.{name}", getattr(algorithm, name), 0.0, 1.0, "0.1 to 0.4"
    yield "algorithm.kept_mass_coef", algorithm.kept_mass_coef, 0, 10, "0 or 1"
    yield "rollout.sampling.temperature", sampling.temperature, 0.3, 1.7, "0.6 to 1.2"
    if frozen := config.run.hang_timeout_s:
        yield "run.hang_timeout_s", frozen, 60, 3600, "120 to 600 seconds, or 0: never"
    for source in config.data.sources:
        yield f"data.sources[{source.name}].kl_coef", source.kl_coef, 0, 0.5, "0 to 0.05"
