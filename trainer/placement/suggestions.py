"""Suggests knob changes for a recipe that does not fit. The memory model checks each suggestion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import combinations, islice, product
from typing import Any

from keel.configs.schema import Config, ConfigError
from keel.model.load import ModelFacts

_SHOWN = 3
TRIED = 20_000
"""Number of changes to try, which takes about a second."""
_MAX_KNOBS = 4
_RANKS = (*range(2, 9), 12, 16, 24, 32, 48, 64)
Change = Mapping[str, Any]
"""Maps knobs to their new values."""


def no_suggestion() -> str:
    return f"It needs more or larger GPUs: no change of up to {_MAX_KNOBS} knobs makes it fit"


def suggest(
    config: Config,
    facts: ModelFacts,
    planned: Callable[[Config], object],
    *,
    decided: Set[str] = frozenset(),
    tried: int | None = None,
) -> str:
    """Name the smallest sets of changes with which `planned` does not raise ConfigError.

    `decided` has the knobs that `planned` decides itself, and `tried` is the maximum number of
    changes to try.
    """

    def fits(group: Iterable[Change]) -> bool:
        changed = config
        try:
            for change in group:
                for knob, value in change.items():
                    changed = with_knob(changed, knob.split("."), value)
            planned(changed)
        except ConfigError:
            return False
        return True

    budget = iter(range(TRIED if tried is None else tried))
    for size in range(1, _MAX_KNOBS + 1):
        ways: list[str] = []
        groups = [
            [change for change in group if not decided >= change.keys()]
            for group in changes(config, facts, fine=size == 1)
        ]
        for choices in combinations(filter(None, groups), size):
            group = next(
                (g for g, _ in zip(product(*choices), budget, strict=False) if fits(g)), ()
            )
            ways += [" ".join(_override(each) for each in group)] if group else []
        if ways:
            return f"To make it fit: {'; or '.join(islice(ways, _SHOWN))}"
    return no_suggestion()


def changes(config: Config, facts: ModelFacts, *, fine: bool) -> Iterator[list[Change]]:
    """Yield the possible changes for each knob. The cheapest knob comes first, and its smallest
    change.

    With `fine`, shares of memory change in steps of 0.01, and otherwise in steps of 0.05.
    """
    rollout, trainer, longest = config.rollout, config.trainer, config.max_context

    def larger(knob: str, values: Iterable[int], now: int) -> list[Change]:
        return [{knob: value} for value in values if value > now]

    share, now = "rollout.gpu_memory_utilization", rollout.gpu_memory_utilization
    shares = [round(0.01 * percent, 2) for percent in range(95, 0, -1 if fine else -5)]
    yield [{share: value} for value in shares if value < now]
    yield [{share: value} for value in reversed(shares) if value > now]
    yield larger("trainer.zero_stage", (1, 2, 3), trainer.zero_stage)
    yield [{"trainer.keep_attention": False}] if trainer.keeps_attention else []
    yield [] if trainer.activation_checkpointing else [{"trainer.activation_checkpointing": True}]
    tokens = [trainer.micro_batch_tokens >> halved for halved in range(1, 8)]
    yield [{"trainer.micro_batch_tokens": n} for n in tokens if n >= longest]
    yield [{"trainer.offload_while_sampling": not trainer.offload_while_sampling}]
    yield [] if rollout.time_share else [{"rollout.time_share": True}]
    yield larger("trainer.expert_parallel", (2, 4, 8), trainer.expert_parallel)
    yield [{"rollout.engines": n} for n in range(rollout.engines - 1, 0, -1)]
    beside = ["rollout.engines"] * rollout.colocated
    yield [dict.fromkeys(["trainer.ranks", *beside], n) for n in _RANKS if n > trainer.ranks]
    widths = (n for n in (2, 4, 8) if facts.attention_heads % n == 0)
    yield larger("rollout.tensor_parallel", widths, rollout.tensor_parallel)
    # Offloading costs time and host memory. A lone rank needs stage 2: see `update_copy_bytes`.
    least = 2 if trainer.ranks == 1 and config.model.dtype != "float32" else 1
    stage = {"trainer.zero_stage": least} if trainer.zero_stage < least else {}
    offload = "trainer.offload_optimizer"
    yield [{offload: False} if trainer.offload_optimizer else {**stage, offload: True}]
    yield [{"model.dtype": "bfloat16"}] if config.model.dtype == "float32" else []
    shorter = [rollout.sampling.max_tokens >> halved for halved in range(1, 6)]
    yield [{"rollout.sampling.max_tokens": n} for n in shorter if n >= 64]


def with_knob(section: Any, path: list[str], value: Any) -> Any:
    """Return `section` with a new value for the knob at `path`. Raises ConfigError if that breaks a
    rule."""
    name, *rest = path
    inner = with_knob(getattr(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})


def _override(change: Change) -> str:
    return " ".join(f"{knob}={str(v).lower()}" for knob, v in change.items())
