"""Convert plain data to the dataclasses of a recipe, with strict types.

All unknown keys and wrong types are reported together, each with its file and line.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from keel.configs.schema import (
    AUTO,
    AUTO_KNOBS,
    Config,
    ConfigError,
    EvalConfig,
    RolloutConfig,
    SamplingConfig,
)

T = TypeVar("T")

_RENAMED = {
    "answer_s": "completion_s",
    "batch": "batch_size",
    "deadline_s": "timeout_s",
    "embedded": "tiny",
    "failure_share": "max_failure_fraction",
    "fewer_after_s": "elastic_wait_s",
    "frozen_after_s": "hang_timeout_s",
    "gpu_memory": "gpu_memory_utilization",
    "max_batched_tokens": "max_num_batched_tokens",
    "max_concurrent": "max_num_seqs",
    "max_open": "max_concurrent_episodes",
    "park": "offload_while_sampling",
    "prefix_caching": "enable_prefix_caching",
    "right": "correct_threshold",
    "sleep": "time_share",
    "startup_deadline_s": "startup_timeout_s",
    "update_deadline_s": "update_timeout_s",
    "worked": "worked_fraction",
}
"""Maps the old name of a knob or section to its current name in the same section."""
_KEPT = "`keel filter` writes the selected prompts to kept/<source>.jsonl (source: jsonl)"
_REMOVED: Mapping[str, tuple[str | float, str]] = {
    "data.sources[].least_pass_rate": (0.0, _KEPT),
    "data.sources[].most_pass_rate": (1.0, _KEPT),
    "data.sources[].pass_rates": ("", _KEPT),
    "eval.against": ("", "run `keel compare` on the folders of two evaluations"),
}
"""Maps the path of a removed knob to its default and what to use instead. The default is ignored,
because the recipes in older run folders list all knobs."""
_INDEX = re.compile(r"\[[^]]*\]")

_NAMES = (
    "allowed_token_ids bad_words beam_width best_of frequency_penalty guided_decoding guided_json "
    "guided_regex length_penalty logit_bias logits_processor logits_processors min_new_tokens "
    "min_p min_tokens no_repeat_ngram_size num_beams presence_penalty repetition_penalty "
    "structured_outputs thinking_token_budget typical_p use_beam_search"
)
_UNRECORDED = frozenset(_NAMES.split())
"""Sampling options that change the distribution in a way the trainer cannot replay."""
_STEP_KNOBS = ("eval.checkpoint", "filter.checkpoint")
"""Text knobs that may hold a step number, which YAML reads as an integer."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
_INVALID: Any = object()
"""Placeholder for a value whose error has already been reported."""


@cache
def knob_types(section: type) -> Mapping[str, Any]:
    """Map a section's knobs to their types. Cached because evaluating annotations is slow."""
    return get_type_hints(section)


def section_type(hint: Any) -> type | None:
    """Return the dataclass in the type `X`, `X | None` or `tuple[X, ...]`, or None if there isn't
    one."""
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _knob_paths(section: type, prefix: str = "") -> Iterator[str]:
    """Yield the full path of every knob. List entries are written as `[]`, as in
    `sources[].name`."""
    for name, hint in knob_types(section).items():
        nested = section_type(hint)
        if nested is None or get_origin(hint) in (Union, UnionType):
            yield prefix + name
        else:
            yield from _knob_paths(nested, f"{prefix}{name}{'[]' * (get_origin(hint) is tuple)}.")


def split_section(root: type, steps: list[str], value: Any) -> Iterator[tuple[list[str], Any]]:
    """Split a section's value into its knobs. Any other value is yielded unchanged."""
    hint: Any = root
    for step in steps:
        section = section_type(hint)
        is_list = get_origin(hint) is tuple
        hint = section if is_list else knob_types(section).get(step) if section else None
    section = None if get_origin(hint) is tuple else section_type(hint)
    if section is None or not isinstance(value, dict):
        yield steps, value
        return
    inner = cast(dict[Any, Any], value)
    for key in sorted(inner, key=lambda key: key == "name"):  # last: it addresses the entry
        yield from split_section(root, [*steps, str(key)], inner[key])


def suggest(path: str, root: type) -> str:
    """Suggest a replacement for the unknown knob at `path`.

    Knobs with the same name in other sections come before similar names, because misplaced lines
    are the more common mistake.
    """
    section, _, key = path.rpartition(".")
    plain = _INDEX.sub("[]", path)
    if plain in _REMOVED:
        return _REMOVED[plain][1]
    knobs = sorted(_knob_paths(root), key=lambda knob: knob.count("."))
    names = [*knobs, *dict.fromkeys(knob.rpartition(".")[0] for knob in knobs)]
    if key in _RENAMED and plain.removesuffix(key) + _RENAMED[key] in names:
        return f"renamed to {section}.{_RENAMED[key]}"
    matches = [name for name in names if f".{name}".endswith(f".{key}")]
    if matches := matches or difflib.get_close_matches(plain, names, n=1, cutoff=0.75):
        return f"did you mean {' or '.join(matches)}?"
    return f"`keel knobs{' ' * bool(section)}{section}` lists all knobs"


def build_config(
    root: type[T], tree: Mapping[str, Any], where: Mapping[str, str], recipe: str
) -> T:
    """Build a config of type `root` from plain data.

    `where` maps each dotted key to the "file:line" or override that set it. Errors about any other
    key refer to `recipe`. Raises ConfigError with one line per wrong key or type. If all keys and
    types are correct, the error reports the first rule that is broken.
    """
    builder = _Builder(root, tree, where, recipe)
    built = builder.section(root, tree, ())
    if builder.problems:
        raise ConfigError("\n".join(builder.problems))
    return cast(T, built)


_Keys = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""


class _Builder:
    """Builds a recipe's dataclasses and collects errors."""

    def __init__(
        self, root: type, tree: Mapping[str, Any], where: Mapping[str, str], recipe: str
    ) -> None:
        self.root, self.tree, self.where, self.recipe = root, tree, where, recipe
        self.problems: list[str] = []

    def label(self, keys: _Keys) -> str:
        """Format a path for messages. List entries are shown with their names:
        `data.sources[sums].size`."""
        label, node = "", cast(Any, self.tree)
        for step in keys:
            node = node[step] if isinstance(step, int) else node.get(step)
            if isinstance(step, str):
                label = f"{label}.{step}".lstrip(".")
            else:
                named = isinstance(node, Mapping)
                label += f"[{(node.get('name') if named else None) or step}]"
        return label

    def problem(self, keys: _Keys, message: str, inner: str = "") -> Any:
        """Record a problem with the value at `keys`, or with the knob `inner` in it."""
        key = ".".join(map(str, keys)) + inner
        key = key.lstrip(".")
        below = (origin for known, origin in self.where.items() if known.startswith(f"{key}."))
        origin = self.where.get(key) or next(below, "")  # an override of a knob in the section
        while key and not origin:
            key = key.rpartition(".")[0]
            origin = self.where.get(key, "")
        self.problems.append(f"{origin or self.recipe}: {message}")
        return _INVALID

    def wrong(self, keys: _Keys, value: Any, rule: str) -> Any:
        shown = "null" if value is None else repr(value)
        return self.problem(keys, f"{self.label(keys)} = {shown}: must be {rule}")

    def section(self, cls: type, tree: Any, keys: _Keys) -> Any:
        if not isinstance(tree, Mapping):
            return self.wrong(keys, tree, "a section (`key: value` lines)")
        tree, before, hints = cast(Mapping[Any, Any], tree), len(self.problems), knob_types(cls)
        for name in map(str, tree):
            path = f"{self.label(keys)}.{name}".lstrip(".")
            if name in _UNRECORDED and cls in (RolloutConfig, SamplingConfig, EvalConfig):
                why = "changes the distribution without being recorded, so probability ratios "
                self.problem((*keys, name), f"{path}: {why}would be wrong. Remove it")
            elif name not in hints:
                old = _REMOVED.get(_INDEX.sub("[]", path))
                if old is not None and tree[name] == old[0]:
                    continue
                hint = suggest(path, self.root)
                self.problem((*keys, name), f"{path}: no such knob; {hint}")
        values: dict[str, Any] = {}
        for field in fields(cls):
            inner = (*keys, field.name)
            if field.name in tree:
                values[field.name] = self.value(hints[field.name], tree[field.name], inner)
            elif field.default is MISSING and field.default_factory is MISSING:
                self.problem(inner, f"{self.label(inner)}: missing, and it has no default")
        if len(self.problems) > before:
            return _INVALID
        try:
            return cls(**values)
        except ConfigError as error:  # a broken rule; the message begins with its knob
            knob, at = str(error).split(" ", 1)[0].rstrip(":"), self.label(keys)
            if knob.startswith(at):
                return self.problem(keys, str(error), knob[len(at) :])
            return self.problem((), str(error), f".{knob}")

    def value(self, hint: Any, value: Any, keys: _Keys) -> Any:
        origin, args = get_origin(hint), get_args(hint)
        words: list[Any] = []
        if origin in (Union, UnionType):
            if value is None and NoneType in args:
                return None
            words = [w for arg in args if get_origin(arg) is Literal for w in get_args(arg)]
            if isinstance(value, str) and value in words:  # such as `all`
                return value
            (hint,) = (a for a in args if a is not NoneType and get_origin(a) is not Literal)
            origin, args = get_origin(hint), get_args(hint)
        if origin is Literal:
            # Compare types too, because True == 1.
            if any(value == arg and type(value) is type(arg) for arg in args):
                return value
            return self.wrong(
                keys, value, f"one of {', '.join(map(str, [*args, *self.or_auto(keys)]))}"
            )
        if origin is tuple:
            if not isinstance(value, list):
                return self.wrong(keys, value, "a list, such as `[a, b]`")
            items = enumerate(cast(list[Any], value))
            return tuple(self.value(args[0], item, (*keys, index)) for index, item in items)
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(value, Mapping):
                return self.wrong(keys, value, "a section (`key: value` lines)")
            pairs = cast(Mapping[Any, Any], value)
            for name in pairs:
                if not isinstance(name, str):
                    path = self.label(keys)
                    self.problem(keys, f"{path}: its key {name!r} must be text; put it in quotes")
            return {name: self.value(args[1], one, (*keys, name)) for name, one in pairs.items()}
        if section_type(hint) is not None:
            return self.section(hint, value, keys)
        return value if hint is Any else self.scalar(hint, value, keys, words)

    def scalar(self, hint: type, value: Any, keys: _Keys, words: Sequence[str]) -> Any:
        if hint is float:
            number = _as_float(value)
            if number is not None and math.isfinite(number):
                return number
        elif type(value) is hint:
            if hint is int and abs(value) >= 2**63:
                return self.problem(keys, f"{self.label(keys)}: has too many digits")
            if hint is str and _CONTROL.search(value):
                return self.wrong(keys, value, "text without control characters")
            return value
        elif hint is str and type(value) is int and ".".join(map(str, keys)) in _STEP_KNOBS:
            return str(value)
        cure = ""
        if hint is str:
            cure = '; write "" for empty text' if value is None else "; put it in quotes"
        kind = ", or ".join([_TYPE_NAMES[hint], *words, *self.or_auto(keys)])
        return self.wrong(keys, value, f"{kind}{cure}")

    def or_auto(self, keys: _Keys) -> list[str]:
        return [AUTO] * (self.root is Config and ".".join(map(str, keys)) in AUTO_KNOBS)


def _as_float(value: Any) -> float | None:
    """Convert a number, or text such as "1e-6", to a float."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
