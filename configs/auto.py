"""Knobs that the hardware and the model decide, unless a recipe does.

A recipe leaves such a knob out, or says `auto`. `Config` never holds that word: it has the schema's
defaults until `keel.trainer.placement.choose` (the layout on GPUs) and
`keel.trainer.placement.cpus.with_dtype` (the precision on a CPU) have put other values in their
place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

AUTO = "auto"
DTYPE = "model.dtype"
KNOBS = frozenset(
    {
        "rollout.colocated",
        "rollout.engines",
        "rollout.gpu_memory_utilization",
        "rollout.max_num_seqs",
        "rollout.time_share",
        "trainer.activation_checkpointing",
        "trainer.compile",
        "trainer.keep_attention",
        "trainer.micro_batch_tokens",
        "trainer.offload_optimizer",
        "trainer.offload_while_sampling",
        "trainer.ranks",
        "trainer.share_prompts",
        "trainer.zero_stage",
    }
)
"""Knobs that lay a run out on GPUs."""
OPEN = KNOBS | {DTYPE}
"""Every knob that may be `auto`."""


def spelled_out(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe that says `auto` wherever it leaves such a knob out. What should be a section and is
    none stays as it is: the schema names it."""
    whole = dict(tree)
    for knob in OPEN:
        section, _, name = knob.partition(".")
        inner = whole.get(section, {})
        if isinstance(inner, Mapping):
            whole[section] = {name: AUTO, **cast(Mapping[str, Any], inner)}
    return whole


def taken_out(tree: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The recipe without the `auto`s that `spelled_out` put there, or its writer, and their knobs.

    Where a value of the recipe asks for another than the schema's default, which rules between
    knobs would then refuse, that is filled in for them until the choice is made.
    """
    rest, left = dict(tree), set[str]()
    for knob in OPEN:
        section, _, name = knob.partition(".")
        inner = rest.get(section)
        if isinstance(inner, Mapping) and cast(Mapping[str, Any], inner).get(name) == AUTO:
            rest[section] = {k: v for k, v in cast(dict[str, Any], inner).items() if k != name}
            left.add(knob)
    for knob, value in _implied(rest).items():
        section, _, name = knob.partition(".")
        if knob in left:
            rest[section] = {**rest[section], name: value}
    return rest, frozenset(left)


def _implied(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Knob → the least that the others of a recipe need it to be."""
    rollout, trainer = (_section(tree, name) for name in ("rollout", "trainer"))
    spread = [trainer.get(name) for name in ("expert_parallel", "sequence_parallel")]
    ranks = math.lcm(*(n for n in spread if type(n) is int and n > 0))
    least = trainer.get("min_ranks")
    if type(least) is int:
        ranks *= max(1, math.ceil(least / ranks))
    if rollout.get("colocated") is True:
        engines = rollout.get("engines", trainer.get("ranks", ranks))
        return {"rollout.engines": engines, "trainer.ranks": engines, **_stage(trainer)}
    return {"trainer.ranks": ranks, **_stage(trainer)}


def _stage(trainer: Mapping[str, Any]) -> dict[str, Any]:
    return {"trainer.zero_stage": 1} if trainer.get("offload_optimizer") is True else {}


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return cast(Mapping[str, Any], section) if isinstance(section, Mapping) else {}
