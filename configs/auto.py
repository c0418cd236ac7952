"""Knobs that default to `auto`: Keel chooses their values for the hardware and the model.

A `Config` never contains `auto`. It has the schema's defaults for these knobs until
`keel.trainer.placement.layouts` (the layout on GPUs, and the precision on a CPU) replaces them.
"""

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
"""Knobs that define the layout on GPUs."""
AUTO_KNOBS = KNOBS | {DTYPE}
"""All knobs that can be `auto`."""


def with_auto(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Set every knob in `AUTO_KNOBS` to `auto` unless the recipe sets it."""
    complete = dict(tree)
    for knob in AUTO_KNOBS:
        section, _, name = knob.partition(".")
        inner = complete.get(section, {})
        if isinstance(inner, Mapping):
            complete[section] = {name: AUTO, **cast(Mapping[str, Any], inner)}
    return complete


def without_auto(tree: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return a recipe without its `auto` knobs, along with their names. The schema's defaults apply
    to these knobs until Keel chooses values for them.

    If the recipe's other knobs rule out a default, the smallest valid value is used instead, so
    that the config is valid.
    """
    rest, auto = dict(tree), set[str]()
    for knob in AUTO_KNOBS:
        section, _, name = knob.partition(".")
        if _section(rest, section).get(name) == AUTO:
            rest[section] = {k: v for k, v in rest[section].items() if k != name}
            auto.add(knob)
    for knob, value in _smallest_valid(rest).items():
        section, _, name = knob.partition(".")
        if knob in auto:
            rest[section] = {**rest[section], name: value}
    return rest, frozenset(auto)


def _smallest_valid(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the smallest value that the other knobs allow for each `auto` knob."""
    rollout, trainer = (_section(tree, name) for name in ("rollout", "trainer"))
    widths = [trainer.get(name) for name in ("expert_parallel", "sequence_parallel")]
    ranks = math.lcm(*(n for n in widths if type(n) is int and n > 0))
    least = trainer.get("min_ranks")
    if type(least) is int:
        ranks *= max(1, math.ceil(least / ranks))
    implied: dict[str, Any] = {"trainer.ranks": ranks}
    if rollout.get("colocated") is True:
        engines = rollout.get("engines", trainer.get("ranks", ranks))
        implied = {"rollout.engines": engines, "trainer.ranks": engines}
    if trainer.get("offload_optimizer") is True:
        implied["trainer.zero_stage"] = 1
    return implied


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return cast(Mapping[str, Any], section) if isinstance(section, Mapping) else {}
