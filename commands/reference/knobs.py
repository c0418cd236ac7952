"""Every knob, from the dataclasses that hold them: their types, defaults, docstrings and checks."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from keel.commands.reference.pages import page_of
from keel.configs.auto import AUTO, OPEN
from keel.configs.diff import resumable
from keel.configs.distillation import DistillConfig, SpecialistConfig
from keel.configs.schema import (
    Config,
    ConfigError,
    ConversationsConfig,
    EndpointConfig,
    EvalVariant,
    SourceConfig,
)
from keel.configs.sections.tasks.code import CodeSourceConfig
from keel.configs.suggest import knob_types, section_type
from keel.configs.synthesis import AuthorConfig, SynthesisConfig, decides_tasks

Recipe = Literal["train", "distill", "synthesize"]
RECIPES: Mapping[Recipe, type] = {
    "train": Config,
    "distill": DistillConfig,
    "synthesize": SynthesisConfig,
}
"""Kinds of recipes: that of `keel train` is `keel sft`'s, `keel eval`'s and the others', too."""

MISSING_VALUES: Mapping[type, Mapping[str, Any]] = {
    SourceConfig: {"name": "a", "source": "jsonl", "path": "a"},
    ConversationsConfig: {"name": "a", "source": "jsonl", "path": "a"},
    EvalVariant: {"name": "a"},
    EndpointConfig: {"base_url": "http://localhost", "model": "a"},
    AuthorConfig: {"base_url": "http://localhost", "model": "a"},
    SpecialistConfig: {"name": "a", "sources": ("a",)},
    CodeSourceConfig: {"name": "a", "git": "a"},
    DistillConfig: {
        "dir": "a",
        "recipe": "a",
        "specialists": (SpecialistConfig(name="a", sources=("a",)),),
    },
    SynthesisConfig: {
        "dir": "a",
        "family": "general",
        "author": AuthorConfig(base_url="http://localhost", model="a"),
    },
}
"""What a section needs before it can be built, and its checks asked."""
PROBES = (-2, 0, 10**12)
"""Numbers that a check has something to say about, if there is a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One line of a recipe."""

    recipe: Recipe
    path: str
    """In its recipe; entries of a list are written `sources[]`."""
    kind: str
    """Type, in plain words."""
    allowed: str
    """Choices or bounds; empty: any of its kind."""
    default: str
    """As YAML has it; empty: it has to be given."""
    text: str
    resume: str
    """Whether a folder can be continued with another value."""
    page: str
    """Of docs/; empty: none speaks of it."""

    @property
    def name(self) -> str:
        """Among all recipes."""
        return named(self.recipe, self.path)

    @property
    def choices(self) -> bool:
        """Whether it is one of a few values, and those are `allowed`."""
        return self.kind == CHOICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Some knobs under one heading."""

    recipe: Recipe
    path: str
    cls: type
    text: str
    knobs: tuple[Knob, ...]

    @property
    def name(self) -> str:
        return named(self.recipe, self.path)


def named(recipe: Recipe, path: str) -> str:
    return path if recipe == "train" else f"{recipe}.{path}".rstrip(".")


@cache
def sections() -> tuple[Section, ...]:
    """All of them, in the schema's order; a section within another comes after it."""
    return tuple(found for recipe, root in RECIPES.items() for found in _sections(recipe, root, ""))


def _sections(recipe: Recipe, cls: type, path: str, about: str = "") -> Iterator[Section]:
    hints, (whole, texts) = knob_types(cls), _docstrings(cls.__module__)[cls.__name__]
    inner: list[Iterator[Section]] = []
    own: list[Knob] = []
    for field in fields(cls):
        hint, here = hints[field.name], f"{path}.{field.name}".lstrip(".")
        text, nested = texts.get(field.name, ""), section_type(hint)
        if nested is None:
            own.append(
                Knob(
                    recipe=recipe,
                    path=here,
                    kind=kind(hint) + f", or {AUTO}" * _decided(recipe, here, hint),
                    allowed=_allowed(cls, field.name, hint)
                    + f" · {AUTO}" * (_decided(recipe, here) and get_origin(hint) is Literal),
                    default=AUTO if _decided(recipe, here) else _default(field),
                    text=text,
                    resume=resume(recipe, here),
                    page=page_of(named(recipe, here), text),
                )
            )
        else:
            listed = "[]" * (get_origin(hint) is tuple)
            inner.append(_sections(recipe, nested, here + listed, text))
    if own:
        said = f"{about} {whole}".strip()
        yield Section(recipe=recipe, path=path, cls=cls, text=said, knobs=tuple(own))
    for each in inner:
        yield from each


def _decided(recipe: Recipe, path: str, hint: Any = None) -> bool:
    """Whether a recipe may leave it to the hardware and the model (and its values are no list of
    choices, of which `auto` is then one)."""
    return recipe == "train" and path in OPEN and get_origin(hint) is not Literal


@cache
def _docstrings(module: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Class → its docstring and those below its fields, each as one paragraph."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for cls in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(cls, ast.ClassDef):
            texts: dict[str, str] = {}
            for field, after in zip(cls.body, cls.body[1:], strict=False):
                match field, after:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        texts[name] = " ".join(text.split())
                    case _:
                        pass
            found[cls.name] = (" ".join((ast.get_docstring(cls) or "").split()), texts)
    return found


PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}
CHOICE = "one of a few"
MANY = {int: "whole numbers", float: "numbers", str: "texts", Any: "anything"}


def kind(hint: Any) -> str:
    """A type in plain words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        one = " or ".join(kind(each) for each in inner if each is not NoneType)
        return f"{one}, or null" if NoneType in inner else one
    if is_dataclass(hint):
        return f"section like `{cast(type, hint).__name__.removesuffix('Config').lower()}`"
    if origin is Literal:
        return CHOICE
    if origin is tuple:
        return f"list of {MANY.get(inner[0], 'values')}"
    if origin is not None and issubclass(origin, Mapping):
        return f"mapping of names to {MANY.get(inner[1], 'values')}"
    return PLAIN[hint]


def _default(field: Any) -> str:
    if field.default is not MISSING:
        return yaml(field.default)
    return "" if field.default_factory is MISSING else yaml(field.default_factory())


def yaml(value: Any) -> str:
    """A default on one line."""
    if isinstance(value, Mapping):
        inner = (f"{k}: {yaml(v)}" for k, v in cast(Mapping[str, Any], value).items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml, cast(tuple[Any, ...], value)))}]"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    if isinstance(value, str):
        return value or '""'
    return "null" if value is None else str(value).lower()


def _allowed(cls: type, name: str, hint: Any) -> str:
    """Choices of a type; of a number the bounds, as the checks of its section say them."""
    choices = get_args(hint)[0] if get_origin(hint) is tuple else hint
    if get_origin(choices) is Literal:
        return " · ".join(yaml(each) or '""' for each in get_args(choices))
    optional = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    if not {hint, *optional} & {int, float}:
        return ""
    rules: dict[str, None] = {}
    for probe in PROBES:
        try:
            cls(**{**MISSING_VALUES.get(cls, {}), name: probe})
        except ConfigError as error:
            knob, _, rule = str(error).partition(f" = {probe}: ")
            if knob.rpartition(".")[2] == name and rule.startswith("must"):
                rules[_bound(rule)] = None
    if any(rule.startswith("≥ ") for rule in [*rules][1:]):
        rules.pop("≥ 0", None)
    return ", ".join(rules)


BOUNDS = (
    (r"not be negative", "≥ 0"),
    (r"be (?:positive|> 0)", "> 0"),
    (r"be (?:>=|at least) (\S+)", r"≥ \1"),
    (r"(?:be at most|not exceed) (\S+)", r"≤ \1"),
    (r"be from (\S+) to (\S+)", r"\1 to \2"),
    (r"divide (\S+)", r"a divisor of \1"),
    (r"be (.*)", r"\1"),
)


def _bound(rule: str) -> str:
    """What a check says must be, in short: without reasons, and without what other knobs are."""
    said = re.split(r"[:;]| \((?=[a-zA-Z]|0:)|, the |, or null", rule.removeprefix("must "))[0]
    said = re.sub(r"(?<=[a-z]) = \S+", "", said)
    for pattern, short in BOUNDS:
        if match := re.fullmatch(pattern, said):
            return match.expand(short)
    return said


def resume(recipe: Recipe, path: str) -> str:
    """Whether a folder can be continued with another value of a knob."""
    if recipe == "train":
        whole = path.partition("[]")[0]  # a list that is compared as one
        return "yes" if resumable(path) or resumable(whole) else "no"
    if recipe == "synthesize":
        return "no" if decides_tasks(path) else "yes"
    return "no" if path == "dir" else "for links to come"


def flat() -> tuple[Knob, ...]:
    """Every knob of every recipe."""
    return tuple(knob for section in sections() for knob in section.knobs)


def normal(name: str) -> str:
    """`data.sources[sums].size` and `data.sources.0.size` as `data.sources[].size`."""
    name = re.sub(r"\[[^]]*\]", "[]", name)
    return re.sub(r"\.\d+(?=\.|$)", "[]", name).strip(".")
