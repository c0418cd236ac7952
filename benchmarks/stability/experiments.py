"""Which runs are compared: experiments, and the arms of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMALL, LARGE = "quickstart", "embedded-100m"
COMMON: Mapping[str, Sequence[str]] = {
    SMALL: ("rollout.engines=1", "rewards.workers=1", "run.device=cpu", "run.eval_every=8"),
    LARGE: (
        "run.eval_every=12",
        "rollout.sleep=false",
        "rollout.gpu_memory_utilization=0.1",
        "trainer.compile=false",
        "model.embedded.cold_start.steps=400",
    ),
}
"""Of all runs of a recipe."""
WHOLE_VOCABULARY = ("rollout.sampling.top_p=1", "rollout.sampling.top_k=0")
HOT = ("rollout.sampling.top_p=0.8", "rollout.sampling.temperature=1.5")
UNSOUND = "algorithm.allow_unsound=true"
NO_MASK = ("algorithm.mask_delta=null",)
NO_ROUTES = ("algorithm.keep_routing=false", UNSOUND)
NO_SETS = ("algorithm.keep_sampling_mask=false", UNSOUND)


@dataclass(frozen=True)
class Experiment:
    """Arms that differ in one thing, and what they have in common."""

    steps: int
    overrides: Sequence[str]
    arms: Mapping[str, Sequence[str]]
    probe: str = ""
    """Arm in whose course the gradient of the KL term is measured."""
    recipe: str = SMALL


def beta(value: float, *names: str) -> tuple[str, ...]:
    """The KL coefficient of these sources."""
    return tuple(f"data.sources[{name}].kl_coef={value:g}" for name in names)


def strong(value: float) -> tuple[str, ...]:
    return beta(value, "spelling", "spiral")


def lagging(batches: int, updates: int, lr: float) -> tuple[str, ...]:
    """New weights for the engines after so many batches of so many optimizer steps."""
    return (
        f"trainer.lr={lr:g}",
        f"algorithm.updates_per_batch={updates}",
        f"algorithm.publish_every={batches}",
    )


TRUNCATION_ARMS: Mapping[str, Sequence[str]] = {
    "sampling mask": (),
    "no sampling mask": NO_SETS,
}
FRESH = ("algorithm.publish_every=1",)
HELD_MASS = ("algorithm.kept_mass_coef=1",)
MASS_ARMS: Mapping[str, Sequence[str]] = {
    "sampling mask": (),
    "sampling mask, its mass held": HELD_MASS,
    "no sampling mask": NO_SETS,
}
WITHOUT_ONE: Mapping[str, Sequence[str]] = {
    "all four": (),
    "no sequence mask": NO_MASK,
    "no routing replay": NO_ROUTES,
    "no sampling mask": NO_SETS,
}
EXPERIMENTS: Mapping[str, Experiment] = {
    "staleness": Experiment(
        steps=48,
        overrides=("trainer.lr=5e-4", "algorithm.updates_per_batch=4"),
        arms={
            "fresh weights, mask": (),
            **{
                f"stale, δ = {delta:g}": (
                    "algorithm.publish_every=8",
                    f"algorithm.mask_delta={delta:g}",
                )
                for delta in (0.1, 0.2, 0.5, 2.0)
            },
            "stale, no mask": ("algorithm.publish_every=8", *NO_MASK),
        },
    ),
    "kept_mass": Experiment(
        steps=32,
        overrides=lagging(8, 4, 5e-4),
        arms={
            **MASS_ARMS,
            "fresh weights": FRESH,
            "fresh weights, mass held": (*FRESH, *HELD_MASS),
        },
    ),
    "kept_mass_ahead": Experiment(
        steps=32, overrides=(*lagging(1, 4, 5e-4), "algorithm.max_lag=7"), arms=MASS_ARMS
    ),
    "kl": Experiment(
        steps=32,
        overrides=WHOLE_VOCABULARY,
        arms={
            "no KL term": strong(0),
            "unbiased_k3": ("algorithm.kl=unbiased_k3", *strong(0.3)),
            "k3": ("algorithm.kl=k3", *strong(0.3)),
            "k3, half of β": ("algorithm.kl=k3", *strong(0.15)),
        },
        probe="no KL term",
    ),
    "kl_stale": Experiment(
        steps=32,
        overrides=(*WHOLE_VOCABULARY, *strong(0.3), "algorithm.publish_every=4"),
        arms={
            "unbiased_k3": ("algorithm.kl=unbiased_k3",),
            "k3": ("algorithm.kl=k3",),
        },
    ),
    "routing": Experiment(
        steps=32,
        overrides=(),
        arms={
            "same precision, replay": (),
            "bfloat16 engine, replay": ("rollout.dtype=bfloat16",),
            "bfloat16 engine, no replay": ("rollout.dtype=bfloat16", *NO_ROUTES),
        },
    ),
    "truncation": Experiment(
        steps=32, overrides=("rollout.sampling.top_p=0.8",), arms=TRUNCATION_ARMS
    ),
    "truncation_hot": Experiment(steps=32, overrides=HOT, arms=TRUNCATION_ARMS),
    "stale_100m": Experiment(
        steps=40, overrides=lagging(8, 4, 8e-5), arms=WITHOUT_ONE, recipe=LARGE
    ),
    "stale_fast_100m": Experiment(
        steps=40, overrides=lagging(8, 4, 2e-4), arms=WITHOUT_ONE, recipe=LARGE
    ),
    "kept_mass_100m": Experiment(
        steps=40, overrides=lagging(8, 4, 8e-5), arms=MASS_ARMS, recipe=LARGE
    ),
    "kept_mass_fast_100m": Experiment(
        steps=40, overrides=lagging(8, 4, 2e-4), arms=MASS_ARMS, recipe=LARGE
    ),
    "kl_100m": Experiment(
        steps=40,
        overrides=beta(0.3, "spelling", "spiral", "sums", "gcd"),
        arms={"unbiased_k3": (), "k3": ("algorithm.kl=k3",)},
        recipe=LARGE,
    ),
}
