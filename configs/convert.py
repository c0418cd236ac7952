"""Convert plain data to the dataclasses of a recipe, with strict types.

All unknown keys and wrong types are reported together, each with its file and line. Suggestions for
an unknown key include the names of other frameworks (`other_frameworks.toml`).
"""

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from keel.configs.auto import AUTO, AUTO_KNOBS
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
"""Maps the old path of a knob or section to its current name in the same section."""

_NAMES = (
    "allowed_token_ids bad_words beam_width best_of frequency_penalty guided_decoding guided_json "
    "guided_regex length_penalty logit_bias logits_processor logits_processors min_new_tokens "
    "min_p min_tokens no_repeat_ngram_size num_beams presence_penalty repetition_penalty "
    "structured_outputs thinking_token_budget typical_p use_beam_search"
)
_UNRECORDED = frozenset(_NAMES.split())
"""Sampling options that change the distribution in a way the trainer cannot replay."""
_STEPS = ("eval.checkpoint", "filter.checkpoint")
"""Text knobs that may hold a step number, which YAML reads as an integer."""
_MANY = 10
"""Maximum number of knobs in a section for an error message to list them all."""
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


def suggest(key: str, section: type, prefix: str, root: type) -> str:
    """Suggest a replacement for the unknown `key` in `section`. `prefix` is the section's path with
    a trailing dot.

    Knobs with the same name in other sections come before similar names in this section, because
    misplaced lines are the more common mistake.
    """
    path = re.sub(r"\[[^]]*\]", "[]", prefix) + key
    if path in RENAMED:
        return f"renamed to {prefix}{RENAMED[path]}"
    everywhere = sorted(_knob_paths(root), key=lambda knob: knob.count("."))
    sections = dict.fromkeys(knob.rpartition(".")[0] for knob in everywhere)
    if same := [knob for knob in (*everywhere, *sections) if f".{knob}".endswith(f".{key}")]:
        return f"did you mean {' or '.join(same)}?"
    if root is Config and (hint := foreign_hint(path)):
        return hint
    here = [field.name for field in fields(section)]
    if near := difflib.get_close_matches(key, here, n=1):
        return f"did you mean {prefix}{near[0]}?"
    names = {knob.rpartition(".")[2] for knob in everywhere}
    if near := difflib.get_close_matches(key, names, n=1, cutoff=0.75):
        return f"did you mean {' or '.join(k for k in everywhere if k.endswith(near[0]))}?"
    if len(here) > _MANY and prefix:
        return f"`keel knobs {prefix[:-1]}` lists the knobs of this section"
    return f"{'this section' if prefix else 'a recipe'} has {', '.join(here)}"


def build_config(
    root: type[T], tree: Mapping[str, Any], where: Mapping[str, str], recipe: str
) -> T:
    """Build a config of type `root` from plain data.

    `where` maps each dotted key to the "file:line" or override that set it. Errors about any other
    key refer to `recipe`. Raises ConfigError with one line per wrong key or type. If all keys and
    types are correct, the error reports the first rule that is broken.
    """
    builder = _Builder(root, where, recipe)
    built = builder.section(root, tree, "", "")
    if builder.problems:
        raise ConfigError("\n".join(builder.problems))
    return cast(T, built)


class _Builder:
    """Builds a recipe's dataclasses and collects errors.

    Methods take two names for each position: `at` for error messages, and `key` for looking up
    where it was set. The two differ for list entries: `sources[sums]` and `sources.0`.
    """

    def __init__(self, root: type, where: Mapping[str, str], recipe: str) -> None:
        self.root, self.where, self.recipe = root, where, recipe
        self.problems: list[str] = []

    def problem(self, key: str, message: str) -> Any:
        below = (origin for known, origin in self.where.items() if known.startswith(f"{key}."))
        origin = self.where.get(key) or next(below, "")  # an override of a knob in the section
        while key and not origin:
            key = key.rpartition(".")[0]
            origin = self.where.get(key, "")
        self.problems.append(f"{origin or self.recipe}: {message}")
        return _INVALID

    def section(self, cls: type, tree: Any, at: str, key: str) -> Any:
        hints = knob_types(cls)
        if not isinstance(tree, Mapping):
            return self.problem(key, f"{at} = {tree!r}: must be a section (`key: value` lines)")
        tree, before = cast(Mapping[Any, Any], tree), len(self.problems)
        for name in map(str, tree):
            inner, inner_key = _joined(at, name), _joined(key, name)
            if name in _UNRECORDED and cls in (RolloutConfig, SamplingConfig, EvalConfig):
                self.problem(
                    inner_key,
                    f"{inner}: changes the distribution without being recorded, so probability "
                    "ratios would be wrong. Remove it",
                )
            elif name not in hints:
                hint = suggest(name, cls, f"{at}." if at else "", self.root)
                self.problem(inner_key, f"{inner}: no such knob; {hint}")
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = field.name
            inner, inner_key = _joined(at, name), _joined(key, name)
            if name in tree:
                values[name] = self.value(hints[name], tree[name], inner, inner_key)
            elif field.default is MISSING and field.default_factory is MISSING:
                self.problem(inner_key, f"{inner}: missing, and it has no default")
        if len(self.problems) > before:
            return _INVALID
        try:
            return cls(**values)
        except ConfigError as error:  # a broken rule; the message begins with its knob
            knob = str(error).split(" ", 1)[0].rstrip(":")
            return self.problem(
                key + knob[len(at) :] * knob.startswith(at) if at else knob, str(error)
            )

    def value(self, hint: Any, value: Any, at: str, key: str) -> Any:
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            if value is None and NoneType in args:
                return None
            words = [w for arg in args if get_origin(arg) is Literal for w in get_args(arg)]
            if isinstance(value, str) and value in words:  # such as `all`
                return value
            (hint,) = (a for a in args if a is not NoneType and get_origin(a) is not Literal)
            if not words:
                return self.value(hint, value, at, key)
            return self.scalar(hint, value, at, key, words)
        if origin is Literal:
            # Compare types too, because True == 1.
            if any(value == arg and type(value) is type(arg) for arg in args):
                return value
            choices = ", ".join([*map(str, args), *self.or_auto(key)])
            return self.problem(key, f"{at} = {value!r}: must be one of {choices}")
        if origin is tuple:
            if not isinstance(value, list):
                plain = isinstance(value, str | int | float) and section_type(hint) is None
                hint = f"; write [{value}]" * plain
                return self.problem(key, f"{at} = {value!r}: must be a list{hint}")
            items: list[Any] = []
            for index, item in enumerate(cast(list[Any], value)):
                label: Any = index
                if isinstance(item, Mapping):
                    label = cast(Mapping[str, Any], item).get("name") or index
                items.append(self.value(args[0], item, f"{at}[{label}]", f"{key}.{index}"))
            return tuple(items)
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(value, Mapping):
                return self.problem(
                    key, f"{at} = {value!r}: must be a section (`key: value` lines)"
                )
            pairs = cast(Mapping[Any, Any], value)
            for name in pairs:
                if not isinstance(name, str):
                    self.problem(key, f"{at}: its key {name!r} must be text; put it in quotes")
            return {
                name: self.value(args[1], one, f"{at}.{name}", f"{key}.{name}")
                for name, one in pairs.items()
            }
        if section_type(hint) is not None:
            return self.section(hint, value, at, key)
        return value if hint is Any else self.scalar(hint, value, at, key)

    def scalar(self, hint: type, value: Any, at: str, key: str, words: Sequence[str] = ()) -> Any:
        if hint is float:
            number = _as_float(value)
            if number is not None and math.isfinite(number):
                return number
        elif type(value) is hint:
            if hint is int and abs(value) >= 2**63:
                return self.problem(key, f"{at}: has {len(str(value))} digits; at most 2**63 - 1")
            if hint is str and _CONTROL.search(value):
                return self.problem(
                    key, f"{at} = {value!r}: contains a control character; remove it"
                )
            return value
        elif hint is str and type(value) is int and key in _STEPS:
            return str(value)
        cure = ""
        if hint is str:
            cure = '; write "" for empty text' if value is None else "; put it in quotes"
        shown = "null" if value is None else repr(value)
        kind = ", or ".join([_TYPE_NAMES[hint], *words, *self.or_auto(key)])
        return self.problem(key, f"{at} = {shown}: must be {kind}{cure}")

    def or_auto(self, key: str) -> list[str]:
        return [AUTO] * (self.root is Config and key in AUTO_KNOBS)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _as_float(value: Any) -> float | None:
    """Convert a value to a float. YAML reads numbers such as `1e-6` as text, because they have no
    dot."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForeignName:
    framework: str
    name: str
    """Dotted path in the other framework, without the leading dashes of an option."""
    here: tuple[str, ...]
    """Corresponding knobs or metrics in Keel, or empty if there are none."""
    note: str
    """A remark in Markdown."""

    @property
    def hint(self) -> str:
        note = re.sub(r"\[[^]]*\]\(([\w-]+\.md)\)", r"docs/\1", self.note).replace("`", "")
        origin = f"{self.framework}'s {self.name}"
        if not self.here:
            return f"{origin} has no counterpart: {note}"
        return f"did you mean {' and '.join(self.here)}? ({origin}{'; ' * bool(note)}{note})"


@cache
def other_frameworks() -> dict[str, dict[str, Any]]:
    """Load `other_frameworks.toml`, which lists each framework's names for knobs (`words`) and
    `metrics`, and where the framework is configured (`config`)."""
    path = Path(__file__).with_name("other_frameworks.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def foreign_names(kind: Literal["words", "metrics"]) -> tuple[_ForeignName, ...]:
    """Return all names that other frameworks use for knobs (`words`) or `metrics`."""
    names: list[_ForeignName] = []
    for framework, table in other_frameworks().items():
        for name, value in table.get(kind, {}).items():
            entry = {"here": value} if isinstance(value, str) else value
            here = tuple(filter(None, entry.get("here", "").split(", ")))
            note = entry.get("note", "")
            names.append(_ForeignName(framework=framework, name=name, here=here, note=note))
    return tuple(names)


def foreign_hint(path: str) -> str:
    """Return Keel's equivalent of another framework's knob, given its dotted `path`. Returns "" if
    the knob is unknown."""
    names, key = foreign_names("words"), path.rpartition(".")[2]
    matches = [name for name in names if name.name in (path, key)]
    matches = matches or [name for name in names if name.name.endswith(f".{key}")]
    return "; ".join({name.here: name.hint for name in reversed(matches)}.values())
