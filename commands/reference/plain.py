"""Words for what knobs do, of which none is a knob's name: how somebody asks who knows none yet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_LONGEST = (
    *("data.max_prompt_tokens", "rollout.sampling.max_tokens"),
    *("agents.window", "sft.max_context_tokens"),
)
_GPUS = ("run.gpus_per_node", "run.nodes", "trainer.ranks", "rollout.engines")
_GROUP = ("algorithm.group_size", "eval.samples")
_PRECISION = ("model.dtype", "rollout.dtype")
_SAVED = ("run.checkpoint_minutes", "run.checkpoint_every", "run.keep_checkpoints")
_VALIDATED = ("data.sources[].holdout", "run.eval_every")
_WAITS = ("run.startup_timeout_s", "rollout.timeout_s", "rewards.timeout_s")

PLAIN: Mapping[str, Sequence[str]] = {
    "context length": _LONGEST,
    "context window": _LONGEST,
    "dataset": ("data.sources[].source", "data.sources[].path", "data.sources[].columns"),
    "early stopping": ("alarms.stop_below", "run.steps"),
    "fp16": _PRECISION,
    "generations": _GROUP,
    "length penalty": ("data.sources[].length.target",),
    "logging": ("run.trackers", "run.save_trajectories"),
    "max length": _LONGEST,
    "mixed precision": _PRECISION,
    "num gpus": _GPUS,
    "number of generations": _GROUP,
    "number of gpus": _GPUS,
    "output dir": ("run.dir",),
    "output directory": ("run.dir",),
    "precision": _PRECISION,
    "reference model": ("data.sources[].kl_coef",),
    "save steps": _SAVED,
    "saving": _SAVED,
    "sequence length": _LONGEST,
    "shuffle": ("run.seed",),
    "timeout": (*_WAITS, "trainer.timeout_s"),
    "validation": _VALIDATED,
    "validation set": _VALIDATED,
}
"""Words → knobs, the likeliest first."""


def plain(asked: str) -> Sequence[str]:
    """The knobs that such words are about; none where they are other words."""
    return PLAIN.get(" ".join(re.split(r"[\s_-]+", asked.strip().lower())), ())
