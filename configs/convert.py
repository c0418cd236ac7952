"""Plain nested data into the frozen dataclasses of `keel.configs.schema`, with strict types.

Every wrong key and every wrong type of a recipe is found before the first range is checked, so
one run of `keel check` names all of them.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from keel.configs.auto import AUTO, OPEN
from keel.configs.other_frameworks.words import inside
from keel.configs.schema import Config, ConfigError, EvalConfig, RolloutConfig, SamplingConfig
from keel.configs.suggest import elsewhere, knob_types, section_type, suggest

T = TypeVar("T")

UNRECORDED_SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "beam_width",
        "best_of",
        "epsilon_cutoff",
        "eta_cutoff",
        "forced_decoder_ids",
        "frequency_penalty",
        "guided_decoding",
        "guided_json",
        "guided_regex",
        "length_penalty",
        "logit_bias",
        "logits_processor",
        "logits_processors",
        "min_new_tokens",
        "min_p",
        "min_tokens",
        "mirostat",
        "no_repeat_ngram_size",
        "num_beams",
        "penalty_alpha",
        "presence_penalty",
        "repetition_penalty",
        "structured_outputs",
        "suppress_tokens",
        "tfs",
        "thinking_token_budget",
        "top_a",
        "typical_p",
        "use_beam_search",
    }
)
"""Sampling options that reshape the distribution in ways the trainer cannot replay."""

MOST_INT = 2**63 - 1
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

_INVALID: Any = object()
"""Stands for a value whose problem has been noted."""


@dataclass(frozen=True, slots=True)
class _At:
    """A place in the recipe: as the reader sees it, and as `where` is keyed."""

    knob: str = ""
    key: str = ""

    def child(self, name: str) -> _At:
        return _At(f"{self.knob}.{name}".lstrip("."), f"{self.key}.{name}".lstrip("."))

    def item(self, index: int, value: Any) -> _At:
        """Entry `index` of a list, called by its `name` where it has one."""
        label: Any = index
        if isinstance(value, Mapping):
            label = cast(Mapping[str, Any], value).get("name") or index
        return _At(f"{self.knob}[{label}]", f"{self.key}.{index}")


def build(root: type[T], tree: Mapping[str, Any], where: Mapping[str, str], recipe: str) -> T:
    """`tree` as a `root`.

    where: dotted key → "file:line" or the override that set it; `recipe` names the rest.
    Raises ConfigError with one line for each wrong key or type, or with the first broken rule.
    """
    builder = _Builder(root, where, recipe)
    built = builder.section(root, tree, _At())
    if builder.problems:
        raise ConfigError("\n".join(builder.problems))
    return cast(T, built)


class _Builder:
    def __init__(self, root: type, where: Mapping[str, str], recipe: str) -> None:
        self.root = root
        self.where = where
        self.recipe = recipe
        self.problems: list[str] = []

    def problem(self, at: _At, message: str) -> Any:
        """Note what is wrong with the knob at `at`, and where it was written."""
        key = at.key
        below = (origin for known, origin in self.where.items() if known.startswith(f"{key}."))
        found = self.where.get(key) or next(below, "")  # an override of a knob in the section
        while key and not found:
            key = key.rpartition(".")[0]
            found = self.where.get(key, "")
        self.problems.append(f"{found or self.recipe}: {at.knob}{message}")
        return _INVALID

    def section(self, cls: type, tree: Any, at: _At) -> Any:
        if not isinstance(tree, Mapping):
            hint = f"; did you mean {at.knob}.path?" if "path" in knob_types(cls) else ""
            return self.problem(at, f" = {tree!r}: must be a section (`key: value` lines){hint}")
        tree = cast(Mapping[Any, Any], tree)
        before = len(self.problems)
        hints = knob_types(cls)
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
        except ConfigError as error:  # a range or a rule between sections: it names its own knob
            knob = str(error).split(" ", 1)[0].rstrip(":")
            inside = knob.startswith(at.knob)
            return self.problem(_At("", at.key + knob[len(at.knob) :] * inside), str(error))

    def unknown(self, cls: type, key: str, at: _At, value: Any) -> None:
        here = at.child(key)
        if key in UNRECORDED_SAMPLING and cls in (RolloutConfig, SamplingConfig, EvalConfig):
            self.problem(
                here,
                ": changes the distribution without being recorded: the probability ratios would "
                "be wrong; remove it",
            )
        elif isinstance(value, Mapping) and inside(here.knob):
            self.foreign(cast(Mapping[Any, Any], value), here)
        else:
            prefix = f"{at.knob}." if at.knob else ""
            self.problem(here, f": no such knob; {suggest(key, cls, prefix, self.root)}")

    def foreign(self, tree: Mapping[Any, Any], at: _At) -> None:
        """A section of another framework's: what each of its words is here."""
        for key, value in tree.items():
            here = at.child(str(key))
            if isinstance(value, Mapping) and inside(here.knob):
                self.foreign(cast(Mapping[Any, Any], value), here)
            else:
                self.problem(here, f": no such knob; {elsewhere(here.knob, self.root)}")

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
            # `True == 1`, so equality alone would let a bool pass for an int.
            if any(value == arg and type(value) is type(arg) for arg in args):
                return value
            choices = [*map(str, args), *self.or_auto(at)]
            return self.problem(at, f" = {value!r}: must be one of {', '.join(choices)}")
        if origin is tuple:
            if not isinstance(value, list):
                plain = isinstance(value, str | int | float) and section_type(hint) is None
                cure = f"; write [{value}]" if plain else ""
                return self.problem(at, f" = {value!r}: must be a list{cure}")
            items = cast(list[Any], value)
            return tuple(self.value(args[0], v, at.item(i, v)) for i, v in enumerate(items))
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(value, Mapping):
                return self.problem(at, f" = {value!r}: must be a section (`key: value` lines)")
            pairs = cast(Mapping[Any, Any], value).items()
            return {self.key(k, at): self.value(args[1], v, at.child(str(k))) for k, v in pairs}
        if section_type(hint) is not None:
            return self.section(hint, value, at)
        if hint is Any:
            return value
        return self.scalar(hint, value, at)

    def key(self, key: Any, at: _At) -> Any:
        if isinstance(key, str):
            return key
        return self.problem(at, f": its key {key!r} must be text; put it in quotes")

    def scalar(self, hint: type, value: Any, at: _At, words: Sequence[str] = ()) -> Any:
        """Return a value of the type `hint`. words: what else the knob may be, for the error."""
        kind = ", or ".join([_TYPE_NAMES[hint], *words, *self.or_auto(at)])
        if value is None:
            empty = f'; an empty one is "" (in a shell: {at.knob}=\'""\'), and # begins a comment'
            cure = empty if hint is str else ""
            return self.problem(at, f" = null: must be {kind}{cure}")
        if hint is float:
            number = _as_float(value)
            if number is not None and math.isfinite(number):
                return number
        elif type(value) is hint:
            if hint is int and not -MOST_INT <= value <= MOST_INT:
                return self.problem(at, f": has {len(str(value))} digits; at most 2**63 - 1")
            if hint is str and _CONTROL.search(value):
                return self.problem(at, f" = {value!r}: holds a control character; remove it")
            return value
        if hint is str and type(value) is int and at.key in STEPS:
            return str(value)
        cure = ""
        if hint is int and isinstance(value, float) and value.is_integer():
            cure = f"; write {int(value)}"
        elif hint is str:
            cure = "; put it in quotes"
        elif hint in (int, bool) and isinstance(value, str):
            plain = unicodedata.normalize("NFKC", value).strip()
            if plain.lstrip("-").isdigit():
                cure = " without quotes" if value.isascii() else f"; write {plain} in plain digits"
        return self.problem(at, f" = {value!r}: must be {kind}{cure}")

    def or_auto(self, at: _At) -> list[str]:
        """What else the knob may be."""
        return [AUTO] * (self.root is Config and at.key in OPEN)


STEPS = ("eval.checkpoint", "filter.checkpoint")
"""Texts that may be a step, which YAML reads as a number."""
_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
}


def _as_float(value: Any) -> float | None:
    """Numbers, and numbers that YAML reads as text (`1e-6` has no dot); None for the rest."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float, str)):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return None
    return None
