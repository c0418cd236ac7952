"""Knobs: those of a section, those that an override names, and which one the writer of an unknown
key most likely meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from keel.configs.other_frameworks.words import Word, ending, meant, words

COMMON = {
    "batch_size": "prompts_per_step",
    "clip_ratio": "clip_low",
    "max_length": "max_context_tokens",
    "max_new_tokens": "max_tokens",
    "max_seq_length": "max_context_tokens",
    "n": "group_size",
    "num_samples": "group_size",
    "num_train_epochs": "epochs",
}
"""What trainers in general call our knobs, too far apart for a spelling distance to find; what one
of them has is in `keel.configs.other_frameworks.words`."""

_BATCH = "did you mean sft.conversations_per_step, or sft.tokens_per_step?"
_LEARNED = (
    "what the assistant says is learned, and nothing else; `weight: 0` in a message leaves it out"
)
SUPERVISED = {
    "sft.assistant_only_loss": _LEARNED,
    "sft.batch_size": _BATCH,
    "sft.completion_only_loss": _LEARNED,
    "sft.gradient_accumulation_steps": "follows from the batch and trainer.micro_batch_tokens",
    "sft.lr": "did you mean trainer.lr?",
    "sft.packing": "conversations are always packed, and see none but themselves",
    "sft.per_device_train_batch_size": _BATCH,
    "sft.sources[].epochs": "did you mean repeat, of this source, or sft.epochs, of all?",
    "sft.sources[].weight": "did you mean repeat?",
    "sft.train_batch_size": _BATCH,
}
"""What other trainers have for `keel sft`: there it is other knobs than those of `keel train`."""
CONTEXT = "follows from data.max_prompt_tokens + rollout.sampling.max_tokens"
OF_OTHER_COMMANDS = {
    "epochs": "did you mean run.steps (in steps)? sft.epochs is for `keel sft` and `keel pretrain`",
    "max_context_tokens": f"{CONTEXT}; that of `keel sft` is sft.max_context_tokens",
    "specialists": "this is a chain of stages: `keel distill` runs it",
    "max_model_len": f"{CONTEXT}; that of a judge's server is rewards.judge.server.max_model_len",
}
"""Knobs whose name is looked for where it does nothing, and what to say to who looks there."""

RENAMED = {
    "agents.max_open": "max_concurrent_episodes",
    "author.deadline_s": "timeout_s",
    "data.sources[].length.right": "correct_threshold",
    "endpoint.deadline_s": "timeout_s",
    "model.embedded": "tiny",
    "model.tiny.cold_start.batch": "batch_size",
    "model.tiny.cold_start.worked": "worked_fraction",
    "rewards.code.answer_s": "completion_s",
    "rewards.deadline_s": "timeout_s",
    "rewards.failure_share": "max_failure_fraction",
    "rewards.judge.deadline_s": "timeout_s",
    "rewards.judge.failure_share": "max_failure_fraction",
    "rewards.judge.server.gpu_memory": "gpu_memory_utilization",
    "rewards.judge.server.startup_deadline_s": "startup_timeout_s",
    "rollout.deadline_s": "timeout_s",
    "rollout.gpu_memory": "gpu_memory_utilization",
    "rollout.max_batched_tokens": "max_num_batched_tokens",
    "rollout.max_concurrent": "max_num_seqs",
    "rollout.prefix_caching": "enable_prefix_caching",
    "rollout.sleep": "time_share",
    "rollout.update_deadline_s": "update_timeout_s",
    "run.fewer_after_s": "elastic_wait_s",
    "run.frozen_after_s": "hang_timeout_s",
    "run.startup_deadline_s": "startup_timeout_s",
    "trainer.deadline_s": "timeout_s",
    "trainer.park": "offload_while_sampling",
}
"""What a knob was called once (its path, as in `knobs`), and its name in the same section now."""


UNSUPPORTED = {
    r"q?lora(_.*)?|peft(_.*)?|use_peft": "LoRA is not supported; all weights train, with less "
    "memory by trainer.offload_optimizer and trainer.zero_stage: 3 (keel check plans it)",
    r"(load_in|quantiz|bnb|bits_and_bytes|bitsandbytes).*": "quantised training is not supported; "
    "use a bfloat16 model, and trainer.offload_optimizer for less GPU memory",
    r"push_to_hub|hub_.*": "pushing to the hub is not supported; upload the exported folder: hf "
    "upload OWNER/NAME RUN_DIR/model",
}
"""Patterns of keys for what Keel does not do, and the alternative."""
MANY = 10
"""Names of a section that a message still lists."""


@cache
def knob_types(section: type) -> Mapping[str, Any]:
    """Field → type. Each look evaluates the annotations anew, a third of what a recipe takes."""
    return get_type_hints(section)


def section_type(hint: Any) -> type | None:
    """The dataclass behind `X` or `tuple[X, ...]`; None for a plain value."""
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def knobs(section: type, prefix: str = "") -> Iterator[str]:
    """Every knob of `section` by its full path; entries of a list are written `sources[]`."""
    hints = knob_types(section)
    for field in fields(section):
        hint = hints[field.name]
        path = prefix + field.name
        nested = section_type(hint)
        if nested is None:
            yield path
        else:
            yield from knobs(nested, path + ("[]." if get_origin(hint) is tuple else "."))


def knobs_in(root: type, steps: list[str], value: Any) -> Iterator[tuple[list[str], Any]]:
    """Of a section, the knobs that `value` names; of anything else, itself."""
    return _knobs(_hint(root, steps), steps, value)


def _knobs(hint: Any, steps: list[str], value: Any) -> Iterator[tuple[list[str], Any]]:
    section = None if get_origin(hint) is tuple else section_type(hint)
    if section is None or not isinstance(value, dict):
        yield steps, value
        return
    hints, inner = knob_types(section), cast(dict[Any, Any], value)
    for key in sorted(inner, key=lambda key: key == "name"):  # last: others find it by its old one
        yield from _knobs(_plain(hints.get(key)), [*steps, str(key)], inner[key])


def _hint(root: type, steps: Sequence[str]) -> Any:
    """The type of what is there; None where the schema has nothing."""
    hint: Any = root
    for step in steps:
        if get_origin(hint) is tuple:
            hint = get_args(hint)[0]
        else:
            hint = knob_types(hint).get(step) if section_type(hint) else None
        hint = _plain(hint)
    return hint


def _plain(hint: Any) -> Any:
    """X of `X | None`."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    return next(arg for arg in get_args(hint) if arg is not NoneType)


def suggest(key: str, section: type, prefix: str, root: type) -> str:
    """A sentence for the unknown `key` of `section`, whose path with its final dot is `prefix`.

    A right name in a wrong section wins over a similar name in the right one: moving a line is
    the more common mistake, and `rollout.max_tokens` should not become `rollout.max_num_seqs`.
    """
    if renamed := RENAMED.get(re.sub(r"\[[^]]*\]", "[]", prefix) + key):
        return f"renamed to {prefix}{renamed}"
    if said := SUPERVISED.get(re.sub(r"\[[^]]*\]", "[]", prefix) + key):
        return said
    everywhere = sorted(knobs(root), key=lambda path: path.count("."))  # the likeliest first
    here = [field.name for field in fields(section)]
    path = re.sub(r"\[[^]]*\]", "[]", prefix) + key
    if "." in key and path in everywhere:
        *inner, last = key.split(".")
        return f"write {''.join(f'{one}: {{' for one in inner)}{last}: …{'}' * len(inner)}"
    known = COMMON.get(key, key)
    if known in here:
        return f"did you mean {prefix}{known}?"
    if said := _theirs(meant(f"{prefix}{key}"), everywhere):
        return said
    for pattern, instead in UNSUPPORTED.items():
        if re.fullmatch(pattern, key):
            return instead
    below = any(path.startswith(prefix) and path.endswith(f".{known}") for path in everywhere)
    if "run.steps" in everywhere and not (prefix and below) and known in OF_OTHER_COMMANDS:
        return OF_OTHER_COMMANDS[known]
    sections = {path.rpartition(".")[0]: None for path in everywhere}
    if others := [path for path in (*everywhere, *sections) if path.rpartition(".")[2] == known]:
        return f"did you mean {' or '.join(others)}?"
    if said := _theirs(ending(key), everywhere):
        return said
    if close := difflib.get_close_matches(key, here, n=1):
        return f"did you mean {prefix}{close[0]}?"
    if prefix == "rewards.":
        scored_by = "what scores completions is data.sources[].rewards"
        return f"{scored_by}; this section has {', '.join(here)}"
    names = {path.rpartition(".")[2] for path in everywhere}
    if close := difflib.get_close_matches(key, names, n=1, cutoff=0.75):
        paths = [path for path in everywhere if path.rpartition(".")[2] == close[0]]
        return f"did you mean {' or '.join(paths)}?"
    close = difflib.get_close_matches(key, {word.name for word in words()}, n=1, cutoff=0.85)
    if close and (said := _theirs(meant(close[0]), everywhere)):
        return said
    if len(here) > MANY and prefix:
        close = difflib.get_close_matches(key, here, n=1, cutoff=0.4)
        nearest = f"the nearest is {prefix}{close[0]}; " if close else ""
        return f"{nearest}keel knobs {prefix[:-1]} lists those of this section"
    return f"{'this section' if prefix else 'a recipe'} has {', '.join(here)}"


def elsewhere(path: str, root: type) -> str:
    """A sentence for `path`, whose section is another framework's."""
    words = tuple(word for word in meant(path) if word.name == path)
    said = _theirs(words or ending(path.rpartition(".")[2]), sorted(knobs(root)))
    return said or "docs/coming-from.md has what that framework's knobs are here"


def _theirs(words: Sequence[Word], everywhere: Sequence[str]) -> str:
    """What these words of other frameworks are, of knobs that there are; once where several say
    the same."""
    said: dict[tuple[str, ...], str] = {}
    for word in words:
        if all(any(path.startswith(knob) for path in everywhere) for knob in word.here):
            said.setdefault(word.here, word.said())
    return "; ".join(said.values())
