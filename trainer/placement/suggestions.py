"""What to change in a recipe that does not fit its GPUs: only what was tried, in the same model of
the machine, and made it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import combinations, islice, product
from typing import Any

from keel.configs.schema import Config, ConfigError
from keel.model.load import ModelFacts

NAMED, TRIED = 3, 20_000
"""Ways out that are named, and changes that are tried for them (a second or so)."""
MOST = 4
"""Knobs to change at once."""
RANKS = (*range(2, 9), 12, 16, 24, 32, 48, 64)
Change = Mapping[str, Any]
"""Knob → value."""


def nothing() -> str:
    """What `cures` says where there is none."""
    return f"It needs more or larger GPUs: no change of up to {MOST} knobs makes it fit"


def cures(
    config: Config,
    facts: ModelFacts,
    planned: Callable[[Config], object],
    *,
    decided: Set[str] = frozenset(),
    tried: int | None = None,
) -> str:
    """A sentence with the smallest sets of changes after which `planned` raises no ConfigError, in
    the order of `changes`, each with the first of its values that does. `decided`: knobs that
    `planned` sets by itself; `tried`: changes at most, else `TRIED`."""

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

    left = iter(range(TRIED if tried is None else tried))
    for size in range(1, MOST + 1):
        ways: list[str] = []
        open_ones = [
            [change for change in group if not decided >= change.keys()]
            for group in changes(config, facts, fine=size == 1)
        ]
        for choices in combinations(filter(None, open_ones), size):
            group = next((g for g, _ in zip(product(*choices), left, strict=False) if fits(g)), ())
            ways += [" ".join(override(each) for each in group)] if group else []
        if ways:
            return f"To make it fit: {'; or '.join(islice(ways, NAMED))}"
    return nothing()


def changes(config: Config, facts: ModelFacts, *, fine: bool) -> Iterator[list[Change]]:
    """What may be changed, what costs least first; of each the values to try, the least of a change
    first. `fine`: shares of memory in steps of 0.01."""
    rollout, trainer, longest = config.rollout, config.trainer, config.max_context
    step = 1 if fine else 5
    shares = [round(0.01 * share, 2) for share in range(95, 0, -step)]
    yield [
        {"rollout.gpu_memory_utilization": share}
        for share in shares
        if share < rollout.gpu_memory_utilization
    ]
    yield [
        {"rollout.gpu_memory_utilization": s}
        for s in reversed(shares)
        if s > rollout.gpu_memory_utilization
    ]
    yield [{"trainer.zero_stage": stage} for stage in (1, 2, 3) if stage > trainer.zero_stage]
    yield [{"trainer.keep_attention": False}] if trainer.keeps_attention else []
    yield [] if trainer.activation_checkpointing else [{"trainer.activation_checkpointing": True}]
    tokens = [trainer.micro_batch_tokens >> halved for halved in range(1, 8)]
    yield [{"trainer.micro_batch_tokens": n} for n in tokens if n >= longest]
    yield [{"trainer.offload_while_sampling": not trainer.offload_while_sampling}]
    yield [] if rollout.time_share else [{"rollout.time_share": True}]
    yield [{"trainer.expert_parallel": n} for n in (2, 4, 8) if n > trainer.expert_parallel]
    yield [{"rollout.engines": n} for n in range(rollout.engines - 1, 0, -1)]
    beside = ["rollout.engines"] * rollout.colocated
    yield [dict.fromkeys(["trainer.ranks", *beside], n) for n in RANKS if n > trainer.ranks]
    heads = facts.attention_heads
    yield [
        {"rollout.tensor_parallel": n}
        for n in (2, 4, 8)
        if n > rollout.tensor_parallel and heads % n == 0
    ]
    # What leaves the GPU costs time, and memory of its machine.
    least = 2 if trainer.ranks == 1 and config.model.dtype != "float32" else 1  # see `copied_bytes`
    stage = {"trainer.zero_stage": least} if trainer.zero_stage < least else {}
    away = trainer.offload_optimizer
    yield [
        {"trainer.offload_optimizer": False}
        if away
        else {**stage, "trainer.offload_optimizer": True}
    ]
    yield [{"model.dtype": "bfloat16"}] if config.model.dtype == "float32" else []
    shorter = [rollout.sampling.max_tokens >> halved for halved in range(1, 6)]
    yield [{"rollout.sampling.max_tokens": n} for n in shorter if n >= 64]


def with_knob(section: Any, path: list[str], value: Any) -> Any:
    """`section` with the knob at `path` changed. Raises ConfigError where that breaks a rule."""
    name, *rest = path
    inner = with_knob(getattr(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})


def override(change: Change) -> str:
    """As it is written on the command line."""
    return " ".join(f"{knob}={str(v).lower()}" for knob, v in change.items())
