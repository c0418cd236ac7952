"""Convert plain data into the dataclasses of a recipe, with strict types.

All unknown keys and wrong types are reported together, each with its file and line.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from keel.configs.auto import AUTO, OPEN
from keel.configs.other_frameworks import foreign_hint, is_foreign_section
from keel.configs.schema import Config, ConfigError, EvalConfig, RolloutConfig, SamplingConfig

T = TypeVar("T")

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
"""Maps the former path of a knob or section to its present name in the same section."""

_SFT_BATCH = "did you mean sft.conversations_per_step or sft.tokens_per_step?"
_SFT_LOSS = "only assistant messages are trained on; `weight: 0` excludes a message"
_CONTEXT = "follows from data.max_prompt_tokens + rollout.sampling.max_tokens; "
_LENGTH = "did you mean rollout.sampling.max_tokens, or for `keel sft` sft.max_context_tokens?"
HINTS = {
    "batch_size": "did you mean algorithm.prompts_per_step?",
    "clip_ratio": "did you mean algorithm.clip_low?",
    "epochs": "did you mean run.steps (in steps)? sft.epochs is for `keel sft` and `keel pretrain`",
    "max_context_tokens": f"{_CONTEXT}for `keel sft` use sft.max_context_tokens",
    "max_length": _LENGTH,
    "max_model_len": f"{_CONTEXT}for a judge use rewards.judge.server.max_model_len",
    "max_new_tokens": "did you mean rollout.sampling.max_tokens?",
    "max_seq_length": _LENGTH,
    "n": "did you mean algorithm.group_size?",
    "num_samples": "did you mean algorithm.group_size?",
    "sft.assistant_only_loss": _SFT_LOSS,
    "sft.batch_size": _SFT_BATCH,
    "sft.completion_only_loss": _SFT_LOSS,
    "sft.gradient_accumulation_steps": "follows from the batch and trainer.micro_batch_tokens",
    "sft.max_length": "did you mean sft.max_context_tokens?",
    "sft.max_seq_length": "did you mean sft.max_context_tokens?",
    "sft.num_train_epochs": "did you mean sft.epochs?",
    "sft.packing": "conversations are always packed and attend to themselves only",
    "sft.per_device_train_batch_size": _SFT_BATCH,
    "sft.sources[].epochs": "did you mean repeat (of this source) or sft.epochs (of all)?",
    "sft.sources[].weight": "did you mean repeat?",
    "sft.train_batch_size": _SFT_BATCH,
    "specialists": "this is a recipe of `keel distill`",
}
"""Advice for keys that a spelling suggestion would not lead to, by path or bare name."""

UNSUPPORTED = {
    r"q?lora(_.*)?|peft(_.*)?|use_peft": "LoRA is not supported; all weights train, with less "
    "memory by trainer.offload_optimizer and trainer.zero_stage: 3 (keel check plans it)",
    r"(load_in|quantiz|bnb|bits_and_bytes|bitsandbytes).*": "quantised training is not supported; "
    "use a bfloat16 model, and trainer.offload_optimizer for less GPU memory",
    r"push_to_hub|hub_.*": "pushing to the hub is not supported; upload the exported folder: hf "
    "upload OWNER/NAME RUN_DIR/model",
}
"""Maps patterns of keys to the alternative for a feature that Keel does not support."""

_UNRECORDED = (
    "allowed_token_ids bad_words beam_width best_of epsilon_cutoff eta_cutoff forced_decoder_ids "
    "frequency_penalty guided_decoding guided_json guided_regex length_penalty logit_bias "
    "logits_processor logits_processors min_new_tokens min_p min_tokens mirostat "
    "no_repeat_ngram_size num_beams penalty_alpha presence_penalty repetition_penalty "
    "structured_outputs suppress_tokens tfs thinking_token_budget top_a typical_p use_beam_search"
)
UNRECORDED_SAMPLING = frozenset(_UNRECORDED.split())
"""Sampling options that change the distribution in a way the trainer cannot replay."""

STEPS = ("eval.checkpoint", "filter.checkpoint")
"""Knobs with text values that may hold a step number, which YAML reads as an integer."""
MOST_INT = 2**63 - 1
MANY = 10
"""Maximum number of knobs in a section for an error message to list them all."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
_INVALID: Any = object()
"""Placeholder for a value whose error has already been recorded."""


@cache
def knob_types(section: type) -> Mapping[str, Any]:
    """Return the type of each field, cached because evaluating annotations is slow."""
    return get_type_hints(section)


def section_type(hint: Any) -> type | None:
    """Return the dataclass in `X` or `tuple[X, ...]`, or None for the type of a plain value."""
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def knobs(section: type, prefix: str = "") -> Iterator[str]:
    """Yield the full path of every knob. List entries are written `sources[]`."""
    for name, hint in knob_types(section).items():
        nested = section_type(hint)
        if nested is None:
            yield prefix + name
        else:
            yield from knobs(nested, f"{prefix}{name}{'[]' * (get_origin(hint) is tuple)}.")


def knobs_in(root: type, steps: list[str], value: Any) -> Iterator[tuple[list[str], Any]]:
    """Split the value for a section into its knobs. Any other value is yielded unchanged."""
    hint: Any = root
    for step in steps:
        if get_origin(hint) is tuple:
            hint = get_args(hint)[0]
        else:
            hint = knob_types(hint).get(step) if section_type(hint) else None
        hint = _without_none(hint)
    yield from _split(hint, steps, value)


def _split(hint: Any, steps: list[str], value: Any) -> Iterator[tuple[list[str], Any]]:
    section = None if get_origin(hint) is tuple else section_type(hint)
    if section is None or not isinstance(value, dict):
        yield steps, value
        return
    hints, inner = knob_types(section), cast(dict[Any, Any], value)
    for key in sorted(inner, key=lambda key: key == "name"):  # last: it addresses the entry
        yield from _split(_without_none(hints.get(key)), [*steps, str(key)], inner[key])


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    return next(arg for arg in get_args(hint) if arg is not NoneType)


def suggest(key: str, section: type, prefix: str, root: type) -> str:
    """Return advice on the unknown `key` in `section`. `prefix` is the path of the section with a
    trailing dot.

    A known name from another section is suggested before a similar name from this one, because a
    misplaced line is the more common mistake.
    """
    path = re.sub(r"\[[^]]*\]", "[]", prefix) + key
    everywhere = sorted(knobs(root), key=lambda knob: knob.count("."))
    here = [field.name for field in fields(section)]
    if path in RENAMED:
        return f"renamed to {prefix}{RENAMED[path]}"
    if path in HINTS:
        return HINTS[path]
    if "." in key and path in everywhere:
        *sections, last = key.split(".")
        return f"write {''.join(f'{name}: {{' for name in sections)}{last}: …{'}' * len(sections)}"
    if root is Config and (hint := foreign_hint(path, suffix=False)):
        return hint
    for pattern, alternative in UNSUPPORTED.items():
        if re.fullmatch(pattern, key):
            return alternative
    if key in HINTS and root is Config:
        return HINTS[key]
    sections = dict.fromkeys(knob.rpartition(".")[0] for knob in everywhere)
    if same := [knob for knob in (*everywhere, *sections) if knob.rpartition(".")[2] == key]:
        return f"did you mean {' or '.join(same)}?"
    if root is Config and (hint := foreign_hint(path)):
        return hint
    if near := difflib.get_close_matches(key, here, n=1):
        return f"did you mean {prefix}{near[0]}?"
    names = {knob.rpartition(".")[2] for knob in everywhere}
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.75):
        same = [knob for knob in everywhere if knob.rpartition(".")[2] == near[0]]
        return f"did you mean {' or '.join(same)}?"
    if len(here) > MANY and prefix:
        return f"`keel knobs {prefix[:-1]}` lists those of this section"
    return f"{'this section' if prefix else 'a recipe'} has {', '.join(here)}"


@dataclass(frozen=True, slots=True)
class _At:
    """A place in the recipe: `knob` is its name in messages and `key` finds its origin."""

    knob: str = ""
    key: str = ""

    def child(self, name: str) -> _At:
        return _At(f"{self.knob}.{name}".lstrip("."), f"{self.key}.{name}".lstrip("."))

    def item(self, index: int, value: Any) -> _At:
        label: Any = index
        if isinstance(value, Mapping):
            label = cast(Mapping[str, Any], value).get("name") or index
        return _At(f"{self.knob}[{label}]", f"{self.key}.{index}")


def build(root: type[T], tree: Mapping[str, Any], where: Mapping[str, str], recipe: str) -> T:
    """Build a `root` object from `tree`.

    `where` maps each dotted key to the "file:line" or the override that set it, and `recipe` stands
    for all other keys. Raises ConfigError with one line per wrong key or type, or, if there are
    none, with the first broken rule.
    """
    builder = _Builder(root, where, recipe)
    built = builder.section(root, tree, _At())
    if builder.problems:
        raise ConfigError("\n".join(builder.problems))
    return cast(T, built)


class _Builder:
    def __init__(self, root: type, where: Mapping[str, str], recipe: str) -> None:
        self.root, self.where, self.recipe = root, where, recipe
        self.problems: list[str] = []

    def problem(self, at: _At, message: str) -> Any:
        key = at.key
        below = (origin for known, origin in self.where.items() if known.startswith(f"{key}."))
        origin = self.where.get(key) or next(below, "")  # an override of a knob in the section
        while key and not origin:
            key = key.rpartition(".")[0]
            origin = self.where.get(key, "")
        self.problems.append(f"{origin or self.recipe}: {at.knob}{message}")
        return _INVALID

    def section(self, cls: type, tree: Any, at: _At) -> Any:
        hints = knob_types(cls)
        if not isinstance(tree, Mapping):
            hint = f"; did you mean {at.knob}.path?" if "path" in hints else ""
            return self.problem(at, f" = {tree!r}: must be a section (`key: value` lines){hint}")
        tree, before = cast(Mapping[Any, Any], tree), len(self.problems)
        for key in tree:
            if key not in hints:
                self.unknown(cls, str(key), at, tree[key])
        values: dict[str, Any] = {}
        for field in fields(cls):
            here = at.child(field.name)
            if field.name in tree:
                values[field.name] = self.value(hints[field.name], tree[field.name], here)
            elif field.default is MISSING and field.default_factory is MISSING:
                self.problem(here, ": missing, and it has no default")
        if len(self.problems) > before:
            return _INVALID
        try:
            return cls(**values)
        except ConfigError as error:  # a broken rule; the message begins with its knob
            knob = str(error).split(" ", 1)[0].rstrip(":")
            inside = knob.startswith(at.knob)
            return self.problem(_At("", at.key + knob[len(at.knob) :] * inside), str(error))

    def unknown(self, cls: type, key: str, at: _At, value: Any) -> None:
        here = at.child(key)
        if key in UNRECORDED_SAMPLING and cls in (RolloutConfig, SamplingConfig, EvalConfig):
            self.problem(
                here,
                ": changes the distribution without being recorded, so probability ratios would be "
                "wrong. Remove it",
            )
        elif isinstance(value, Mapping) and is_foreign_section(here.knob):
            self.foreign(cast(Mapping[Any, Any], value), here)
        else:
            prefix = f"{at.knob}." if at.knob else ""
            self.problem(here, f": no such knob; {suggest(key, cls, prefix, self.root)}")

    def foreign(self, tree: Mapping[Any, Any], at: _At) -> None:
        """Report each knob in a section of another framework."""
        for key, value in tree.items():
            here = at.child(str(key))
            if isinstance(value, Mapping) and is_foreign_section(here.knob):
                self.foreign(cast(Mapping[Any, Any], value), here)
            else:
                hint = foreign_hint(here.knob) or "see docs/coming-from.md"
                self.problem(here, f": no such knob; {hint}")

    def value(self, hint: Any, value: Any, at: _At) -> Any:
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            if value is None and NoneType in args:
                return None
            choices = [arg for arg in args if get_origin(arg) is Literal]
            words = [word for choice in choices for word in get_args(choice)]  # such as `all`
            if isinstance(value, str) and value in words:
                return value
            (hint,) = (arg for arg in args if arg is not NoneType and arg not in choices)
            return self.scalar(hint, value, at, words) if words else self.value(hint, value, at)
        if origin is Literal:
            # Compare types too, because True == 1.
            if any(value == arg and type(value) is type(arg) for arg in args):
                return value
            choices = [*map(str, args), *self.or_auto(at)]
            return self.problem(at, f" = {value!r}: must be one of {', '.join(choices)}")
        if origin is tuple:
            if not isinstance(value, list):
                plain = isinstance(value, str | int | float) and section_type(hint) is None
                return self.problem(
                    at, f" = {value!r}: must be a list" + f"; write [{value}]" * plain
                )
            items = cast(list[Any], value)
            return tuple(self.value(args[0], v, at.item(i, v)) for i, v in enumerate(items))
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(value, Mapping):
                return self.problem(at, f" = {value!r}: must be a section (`key: value` lines)")
            pairs = cast(Mapping[Any, Any], value)
            for key in pairs:
                if not isinstance(key, str):
                    self.problem(at, f": its key {key!r} must be text; put it in quotes")
            return {key: self.value(args[1], v, at.child(str(key))) for key, v in pairs.items()}
        if section_type(hint) is not None:
            return self.section(hint, value, at)
        return value if hint is Any else self.scalar(hint, value, at)

    def scalar(self, hint: type, value: Any, at: _At, words: Sequence[str] = ()) -> Any:
        """Convert a value to the type `hint`. `words` are other allowed values to name in the
        message."""
        kind = ", or ".join([_TYPE_NAMES[hint], *words, *self.or_auto(at)])
        if hint is float:
            number = _as_float(value)
            if number is not None and math.isfinite(number):
                return number
        elif type(value) is hint:
            if hint is int and not -MOST_INT <= value <= MOST_INT:
                return self.problem(at, f": has {len(str(value))} digits; at most 2**63 - 1")
            if hint is str and _CONTROL.search(value):
                return self.problem(at, f" = {value!r}: contains a control character; remove it")
            return value
        cure = ""
        if hint is str:
            if type(value) is int and at.key in STEPS:
                return str(value)
            cure = '; write "" for empty text' if value is None else "; put it in quotes"
        elif hint is int and isinstance(value, float) and value.is_integer():
            cure = f"; write {int(value)}"
        shown = "null" if value is None else repr(value)
        return self.problem(at, f" = {shown}: must be {kind}{cure}")

    def or_auto(self, at: _At) -> list[str]:
        return [AUTO] * (self.root is Config and at.key in OPEN)


def _as_float(value: Any) -> float | None:
    """Convert a number, or a number that YAML reads as text (such as `1e-6`, which has no dot)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
