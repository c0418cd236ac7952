"""Compare two configs, and decide which differences are allowed when a run resumes."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from keel.configs.schema import Config, ConfigError, ConversationsConfig, SourceConfig
from keel.configs.sections.base import marked_knobs

_STEPPING = tuple(
    f"trainer.{name}"
    for name in ("lr", "min_lr", "schedule", "indexer_lr", "indexer_schedule", "warmup_steps")
)
"""Knobs of the learning rates and their schedule."""
_RESUMABLE_SECTIONS = ("alarms.", "endpoint.", "eval.", "filter.")
RESUMABLE_KNOBS = frozenset(marked_knobs(Config, "resumable"))
"""Knobs outside `_RESUMABLE_SECTIONS` that can change when a run resumes, because they do not
change the objective. A new learning rate or schedule applies from the resumed step on. A new
`run.steps` stretches a `linear` or `cosine` schedule."""
_NAMED = (SourceConfig, ConversationsConfig)
_ABSENT = "(absent)"


def is_resumable(knob: str) -> bool:
    """Return whether this knob may be changed when a run resumes."""
    return knob in RESUMABLE_KNOBS or knob.startswith(_RESUMABLE_SECTIONS)


def flatten_config(config: Config) -> dict[str, Any]:
    """Map knob paths to values. Paths contain the names of sources:
    `data.sources[chain_sum].size`."""
    flat: dict[str, Any] = {}
    _flatten(config, "", flat)
    return flat


def _flatten(value: Any, path: str, flat: dict[str, Any]) -> None:
    if is_dataclass(value):
        for field in fields(value):
            _flatten(getattr(value, field.name), f"{path}.{field.name}".lstrip("."), flat)
    elif isinstance(value, Mapping):
        for key, item in cast(Mapping[str, Any], value).items():
            _flatten(item, f"{path}.{key}", flat)
    elif isinstance(value, tuple) and value and isinstance(value[0], _NAMED):
        for source in cast(tuple[SourceConfig | ConversationsConfig, ...], value):
            _flatten(source, f"{path}[{source.name}]", flat)
    else:
        flat[path] = value


def diff_configs(a: Config, b: Config) -> list[str]:
    """Return the paths of all knobs whose values differ, in schema order."""
    left, right = flatten_config(a), flatten_config(b)
    return [k for k in left | right if left.get(k, _ABSENT) != right.get(k, _ABSENT)]


def learning_rate_changes(saved: Config, new: Config) -> list[str]:
    """Describe any changes to the learning rate, one per line, such as `trainer.lr 1e-06 →
    5e-07`."""
    old, now = flatten_config(saved), flatten_config(new)
    return [f"{knob} {old[knob]} → {now[knob]}" for knob in _STEPPING if old[knob] != now[knob]]


def check_resumable(
    saved: Config, new: Config, folder: str, *, of: tuple[str, ...] = ("",)
) -> None:
    """Check that the run in `folder` would still optimize the same objective with the new config.
    Only knobs that start with one of the prefixes in `of` are compared. Raises ConfigError with the
    old and new values of each knob that must not change."""
    old, now = flatten_config(saved), flatten_config(new)
    # Sources that neither config trains on, such as the one from `eval.file`, may change.
    sources = [(config, source) for config in (saved, new) for source in config.data.sources]
    trained = {source.name for config, source in sources if config.data.weight_of(source) > 0}
    unused = {source.name for _, source in sources} - trained
    ignored = tuple(f"data.sources[{name}]." for name in unused)
    if not (saved.model.lora.enabled or new.model.lora.enabled):
        ignored += ("model.lora.",)
    lines = [
        _change(knob, old, now)
        for knob in diff_configs(saved, new)
        # The knob `sources` differs if one list is empty; its entries are listed anyway.
        if not (is_resumable(knob) or knob.startswith(ignored) or knob.endswith(".sources"))
        and knob.startswith(of)
    ]
    if lines:
        listed = "\n".join(dict.fromkeys(lines))
        raise ConfigError(
            f"{folder} holds a run with another config:\n{listed}\n"
            "Choose another run.dir, or restore these knobs to resume it. A new run can start from "
            "this one's exported model (model.path: docs/checkpoints.md)"
        )


def _change(knob: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if source := re.match(r".*?\[[^]]+\](?=\.)", knob):
        for knobs, verb in ((old, "was added"), (new, "was removed")):
            if not any(other.startswith(f"{source[0]}.") for other in knobs):
                return f"  {source[0]} {verb}"
    return f"  {knob}: {old.get(knob, _ABSENT)!r} → {new.get(knob, _ABSENT)!r}"
