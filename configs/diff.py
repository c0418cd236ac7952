"""How two configs differ, and which differences a resumed run may have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from keel.configs.schema import Config, ConfigError, ConversationsConfig, SourceConfig

STEPPING = ("trainer.lr", "trainer.min_lr", "trainer.schedule", "trainer.warmup_steps")
"""Knobs of the learning rate, which is a function of the step."""
RESUMABLE_KNOBS = frozenset(
    {
        # where, how long, how often
        "run.dir",
        "run.steps",
        "run.resume",
        "run.eval_every",
        "run.checkpoint_every",
        "run.checkpoint_minutes",
        "run.grace_s",
        "run.hang_timeout_s",
        "run.max_restarts",
        "run.elastic_wait_s",
        "run.max_skipped_steps",
        "run.keep_checkpoints",
        "run.save_trajectories",
        "run.save_all_trajectories",
        "run.save_tokens",
        "run.trackers",
        "run.startup_timeout_s",
        # how the same arithmetic is laid out on the machine
        "run.device",
        "run.gpu_gib",
        "run.gpus_per_node",
        "run.nodes",
        "model.tiny.cache_dir",
        "model.tiny.cold_start.max_seconds",
        "rewards.workers",
        "rewards.timeout_s",
        "rewards.max_failure_fraction",
        # … the judge is who its model is, wherever it runs …
        "rewards.judge.base_url",
        "rewards.judge.serve",
        "rewards.judge.server.tensor_parallel",
        "rewards.judge.server.gpu_memory_utilization",
        "rewards.judge.server.kv_cache_gib",
        "rewards.judge.server.threads",
        "rewards.judge.server.startup_timeout_s",
        "rewards.judge.api_key_env",
        "rewards.judge.max_concurrent",
        "rewards.judge.timeout_s",
        "rewards.judge.retries",
        "rewards.judge.max_calls",
        "rewards.judge.max_failure_fraction",
        "rewards.judge.cache_dir",
        "rewards.judge.chats",
        "rollout.engines",
        "rollout.tensor_parallel",
        "rollout.colocated",
        "rollout.time_share",
        "rollout.recorder",
        "rollout.weight_transfer",
        "rollout.copy_weights",
        "rollout.max_num_seqs",
        "rollout.max_num_batched_tokens",
        "rollout.enable_prefix_caching",
        "rollout.cascade_attention",
        "rollout.enforce_eager",
        "rollout.gpu_memory_utilization",
        "rollout.kv_cache_gib",
        "rollout.threads",
        "rollout.timeout_s",
        "rollout.update_timeout_s",
        *STEPPING,
        "trainer.ranks",
        "trainer.min_ranks",
        "trainer.zero_stage",
        "trainer.expert_parallel",
        "trainer.sequence_parallel",
        "trainer.offload_optimizer",
        "trainer.micro_batch_tokens",
        "trainer.activation_checkpointing",
        "trainer.attention_kernels",
        "trainer.keep_attention",
        "trainer.share_prompts",
        "trainer.compile",
        "trainer.offload_while_sampling",
        "trainer.threads",
        "trainer.publish_bucket_mib",
        "trainer.timeout_s",
        # measured, never trained on
        "eval.prompts",
        "eval.size",
        "eval.samples",
        "eval.submissions",
        "eval.file",
        "eval.temperature",
        "eval.top_p",
        "eval.top_k",
        "eval.pass_at",
        "eval.variants",
        "eval.checkpoint",
        "eval.dir",
        "eval.against",
        "filter.dir",
        "filter.checkpoint",
        "filter.samples",
        "filter.least_pass_rate",
        "filter.most_pass_rate",
        "sft.epochs",
    }
)
"""Knobs that may change when a run continues from its checkpoint: none of them changes what the run
optimises. (The learning rate is a function of the step: `trainer.lr` and its schedule apply from
the resumed step on, and `run.steps` stretches a `linear` or `cosine` schedule.)"""

ELSEWHERE = ("alarms.", "endpoint.")
"""Sections on which no run depends: how their knobs begin."""

NAMED = (SourceConfig, ConversationsConfig)
ABSENT = "(absent)"


def resumable(knob: str) -> bool:
    """Whether a run folder may be continued with another value of this knob."""
    return knob in RESUMABLE_KNOBS or knob.startswith(ELSEWHERE)


def flatten_config(config: Config) -> dict[str, Any]:
    """Knob path → value. Sources are keyed by name: `data.sources[chain_sum].size`."""
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
    elif isinstance(value, tuple) and value and isinstance(value[0], NAMED):
        for source in cast(tuple[SourceConfig | ConversationsConfig, ...], value):
            _flatten(source, f"{path}[{source.name}]", flat)
    else:
        flat[path] = value


def diff_configs(a: Config, b: Config) -> list[str]:
    """Paths of the knobs that differ, in the schema's order."""
    left, right = flatten_config(a), flatten_config(b)
    return [k for k in left | right if left.get(k, ABSENT) != right.get(k, ABSENT)]


def stepping(saved: Config, wanted: Config) -> list[str]:
    """Changes of the learning rate, such as `trainer.lr 1e-06 → 5e-07`."""
    old, new = flatten_config(saved), flatten_config(wanted)
    return [f"{knob} {old[knob]} → {new[knob]}" for knob in STEPPING if old[knob] != new[knob]]


def check_resumable(
    saved: Config, wanted: Config, folder: str, *, of: tuple[str, ...] = ("",)
) -> None:
    """Refuse to continue the run in `folder` with a config that optimises something else.

    of: how the knobs begin that matter. Raises ConfigError naming each knob with both values, and
    the ways out.
    """
    old, new = flatten_config(saved), flatten_config(wanted)
    differing = diff_configs(saved, wanted)
    measured = _only_measured(saved, wanted)
    changed = [
        knob
        for knob in differing
        if not resumable(knob) and knob.startswith(of) and not knob.startswith(measured)
    ]
    if changed:
        # `sources` itself, where there were none, says no more than the new ones do.
        said = [_change(knob, old, new) for knob in changed if not knob.endswith(".sources")]
        listed = "\n".join(dict.fromkeys(said))
        raise ConfigError(
            f"{folder} holds a run with another config:\n{listed}\n"
            "Choose another run.dir, or set these knobs back to continue it (another run may begin "
            "with this one's exported model, model.path: docs/checkpoints.md)"
        )


def _only_measured(saved: Config, wanted: Config) -> tuple[str, ...]:
    """Beginnings of the knobs of sources that train in neither config, such as `eval.file`'s."""
    trained = {
        source.name
        for config in (saved, wanted)
        for source in config.data.sources
        if config.data.weight_of(source) > 0
    }
    names = {source.name for config in (saved, wanted) for source in config.data.sources}
    return tuple(f"data.sources[{name}]." for name in names - trained)


def _change(knob: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A line for it; of a source that only one of the two has, the same for all its knobs."""
    if source := re.match(r".*?\[[^]]+\](?=\.)", knob):
        for has, lacks, words in ((new, old, "is new"), (old, new, "is gone")):
            if knob in has and not any(other.startswith(f"{source[0]}.") for other in lacks):
                return f"  {source[0]} {words}"
    return f"  {knob}: {old.get(knob, ABSENT)!r} → {new.get(knob, ABSENT)!r}"
