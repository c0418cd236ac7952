"""`keel knobs NAME`: describe knobs and metrics. `keel recipes`: list recipes."""

import ast
import inspect
import re
import shutil
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from keel.configs.diff import is_resumable
from keel.configs.distillation import DistillConfig
from keel.configs.paths import HARDWARE, RECIPES, shipped_recipes, suggest_recipe
from keel.configs.schema import AUTO, AUTO_KNOBS, Config
from keel.configs.sections.base import (
    ConfigError,
    Section,
    format_bounds,
    knob_types,
    section_type,
    suggest,
)
from keel.configs.synthesis import SynthesisConfig, affects_tasks

_Recipe = Literal["train", "distill", "synthesize"]
_RECIPES: Mapping[_Recipe, tuple[type, str]] = {
    "train": (Config, "Recipes of keel train, sft, pretrain, eval, filter and check"),
    "distill": (DistillConfig, "Recipes of keel distill"),
    "synthesize": (SynthesisConfig, "Recipes of keel synthesize"),
}
_PAGES = {
    "run": "checkpoints",
    "model": "from-base-to-rl",
    "model.tiny": "learning",
    "data": "data",
    "data.sources[].rewards": "rewards",
    "data.sources[].environment": "environments",
    "data.sources[].length": "rewards",
    "rewards": "rewards",
    "rewards.judge": "rubrics",
    "rollout": "rollouts",
    "rollout.sampling": "stability",
    "agents": "agents",
    "algorithm": "stability",
    "trainer": "performance",
    "trainer.hpz_partition_size": "scaling",
    "alarms": "alarms",
    "eval": "evaluation",
    "filter": "rollouts",
    "sft": "sft",
    "endpoint": "evaluation",
    "distill": "distillation",
    "synthesize": "synthesis",
}
"""Maps the prefix of a knob to the page in docs/ that explains it. The longest matching prefix
applies, unless the knob names a page."""
_WHOLE = 3
"""Maximum number of matches to describe in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Knob:
    name: str
    """Dotted path of the knob. In recipes for `distill` and `synthesize`, it starts with that
    word."""
    kind: str
    allowed: str
    """Bounds of a number, if any."""
    default: str
    """Default value in YAML, or empty if the knob is required."""
    text: str
    resume: str
    """Tells if a resumed run may change the value: yes, no, or a condition."""

    @property
    def head(self) -> str:
        return f"{self.name}: {self.default}"

    def describe(self) -> str:
        resume = {"yes": "may change", "no": "fixed; another value needs another folder"}
        rows = {
            "type": self.kind,
            "allowed": self.allowed,
            "default": self.default or "none: required",
            "on resume": resume.get(self.resume, "may change for stages that have not run"),
            "more": _page_file(_page_of(self.name, self.text)),
        }
        return _entry(self.name, self.text, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    name: str
    path: str
    recipe: _Recipe
    text: str
    knobs: tuple[_Knob, ...]

    def describe(self) -> str:
        rows = {
            knob.head.removeprefix(f"{self.name}."): _first_sentence(knob.text)
            for knob in self.knobs
        }
        return _entry(self.name, self.text, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metric:
    """A metric, or a family of metrics with a placeholder `<…>` in its name."""

    name: str
    text: str
    unit: str = ""
    healthy: str = ""
    otherwise: str = ""
    page: str = ""

    @property
    def head(self) -> str:
        return self.name

    def describe(self) -> str:
        rows = {
            "unit": self.unit,
            "healthy": self.healthy,
            "if not": self.otherwise,
            "knobs": ", ".join(knob.name for knob in _all_knobs() if f"`{self.name}`" in knob.text),
            "more": _page_file(self.page),
        }
        return _entry(f"{self.name} (metric)", self.text, rows)


@cache
def _metric_groups() -> Mapping[str, tuple[_Metric, ...]]:
    tables = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
    return {
        title: tuple(_Metric(name=name, **entry) for name, entry in table.items())
        for title, table in tables.items()
    }


def _metrics() -> list[_Metric]:
    return [metric for group in _metric_groups().values() for metric in group]


def _find_metric(name: str) -> _Metric | None:
    """Look up the metric `name`. If it matches several families, return the most specific one."""
    matches = [
        metric
        for metric in _metrics()
        if re.fullmatch(".+".join(map(re.escape, re.split(r"<\w+>", metric.name))), name)
    ]
    return min(matches, key=lambda metric: metric.name.count("<"), default=None)


@cache
def sections() -> tuple[_Section, ...]:
    """List all sections in schema order, each followed by its nested sections."""
    return tuple(s for recipe, (root, _) in _RECIPES.items() for s in _sections(recipe, root, ""))


@cache
def _all_knobs() -> tuple[_Knob, ...]:
    return tuple(knob for section in sections() for knob in section.knobs)


def _sections(recipe: _Recipe, cls: type, path: str, about: str = "") -> Iterator[_Section]:
    prefix = "" if recipe == "train" else f"{recipe}."
    hints, (title, texts) = knob_types(cls), _docstrings(cls)
    nested: list[Iterator[_Section]] = []
    knobs: list[_Knob] = []
    for field in fields(cls):
        hint, here = hints[field.name], f"{path}.{field.name}".lstrip(".")
        origin, text, inner = get_origin(hint), texts.get(field.name, ""), section_type(hint)
        if inner is not None and origin not in (Union, UnionType):
            nested.append(_sections(recipe, inner, here + "[]" * (origin is tuple), text))
            continue
        auto = recipe == "train" and here in AUTO_KNOBS
        bounds = format_bounds(field.metadata.get("bounds", {}))
        default = "" if field.default is MISSING else _yaml(field.default)
        if field.default_factory is not MISSING:
            default = _yaml(field.default_factory())
        resume = "yes" if is_resumable(here) else "no"
        if recipe == "synthesize":
            resume = "no" if affects_tasks(here) else "yes"
        if recipe == "distill":
            resume = "no" if here == "dir" else "for later stages"
        knobs.append(
            _Knob(
                name=prefix + here,
                kind=_kind(hint) + f" | {AUTO}" * auto,
                allowed=bounds.replace(">=", "≥").replace("<=", "≤"),
                default=AUTO if auto else default,
                text=text,
                resume=resume,
            )
        )
    if knobs:
        yield _Section(
            name=f"{prefix}{path}".rstrip("."),
            path=path,
            recipe=recipe,
            text=f"{about} {title}".strip(),
            knobs=tuple(knobs),
        )
    for each in nested:
        yield from each


def _docstrings(cls: type) -> tuple[str, dict[str, str]]:
    node = cast(ast.ClassDef, ast.parse(inspect.getsource(cls)).body[0])
    texts: dict[str, str] = {}
    for field, after in pairwise(node.body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
            case _:
                pass
    return " ".join((ast.get_docstring(node) or "").split()), texts


def _kind(hint: Any) -> str:
    origin = get_origin(hint)
    inner: tuple[Any, ...] = get_args(hint)
    if origin in (Union, UnionType):
        return " | ".join(map(_kind, inner))
    if origin is Literal:
        return " | ".join(map(_yaml, inner))
    if origin is tuple:
        return f"list[{_kind(inner[0])}]"
    if origin is not None:
        return f"dict[str, {_kind(inner[1])}]"
    if is_dataclass(hint):
        return cast(type[Section], hint).PATH
    return "null" if hint is NoneType else hint.__name__


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{k}: {_yaml(v)}" for k, v in cast(Mapping[str, Any], value).items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, cast(tuple[Any, ...], value)))}]"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    if isinstance(value, str):
        return value or '""'
    return "null" if value is None else str(value).lower()


def _page_of(knob: str, text: str) -> str:
    if page := re.search(r"docs/([\w-]+)\.md", text):
        return page[1]
    prefixes = [prefix for prefix in _PAGES if re.match(rf"{re.escape(prefix)}(?![\w])", knob)]
    return _PAGES[max(prefixes, key=len)] if prefixes else ""


def _normalize_name(name: str) -> str:
    """Replace list entries in a knob's name with `[]`: `data.sources[sums].size` and
    `data.sources.0.size` become `data.sources[].size`."""
    name = re.sub(r"\[[^]]*\]", "[]", name)
    return re.sub(r"\.\d+(?=\.|$)", "[]", name).strip(".")


def describe(name: str = "") -> str:
    """Describe a section, knob or metric, or everything with `name` in its name. Raises ConfigError
    with a suggestion if nothing matches."""
    query = _normalize_name(name)
    if not query:
        return _overview()
    inside = [
        section.describe()
        for section in sections()
        if f"{section.name}.".replace("[]", "").startswith(f"{query}.".replace("[]", ""))
    ]
    if inside:
        return "\n\n".join(inside)
    found = [knob for knob in _all_knobs() if f".{knob.name}".endswith(f".{query}")]
    entries = [*found, *filter(None, [_find_metric(name)])]
    if not entries:
        words = re.split(r"[\s_.-]+", query.lower())
        known = [*_all_knobs(), *_metrics()]
        entries = [each for each in known if all(word in each.name.lower() for word in words)]
    if not entries:
        raise ConfigError(f"{name}: no such knob or metric; {suggest(query, Config)}")
    if len(entries) <= _WHOLE:
        return "\n\n".join(entry.describe() for entry in entries)
    return _rows({entry.head: _first_sentence(entry.text) for entry in entries})


def _overview() -> str:
    parts: list[str] = []
    for recipe, (_, title) in _RECIPES.items():
        some = [section for section in sections() if section.recipe == recipe]
        rows = {section.name: _first_sentence(section.text) for section in some}
        parts.append(f"{title}\n{_rows(rows)}")
    groups = {title: ", ".join(m.name for m in of) for title, of in _metric_groups().items()}
    return "\n\n".join([*parts, f"Metrics\n{_rows(groups)}", "keel knobs NAME describes one."])


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[a-z)`]\.)(?<!Eq\.) (?=[A-Zβ`0-9])", text)[0]


def _page_file(page: str) -> str:
    return f"docs/{page}.md" if page else ""


def _entry(title: str, text: str, rows: Mapping[str, str]) -> str:
    folded = textwrap.fill(text, _width(), initial_indent="  ", subsequent_indent="  ")
    return f"{title}\n{folded}\n{_rows({name: row for name, row in rows.items() if row})}"


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns)


def _rows(rows: Mapping[str, str]) -> str:
    wide = max(map(len, rows), default=0) + 2
    wrapper = textwrap.TextWrapper(
        max(_width(), wide + 30),
        subsequent_indent=" " * (wide + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapper.fill(f"  {name:<{wide}}{text}") for name, text in rows.items())


_FOLDERS = {
    "": "Recipes for keel train, eval and filter (sft-…: keel sft; pretrain-…: keel pretrain)",
    HARDWARE: "Recipes for common models and machines, on GSM8K unless you set data.sources",
    "distill/": "Recipes for keel distill",
}
"""Maps each folder of recipes to its heading."""
_FOOTER = (
    "keel recipes NAME prints one. Base your own on it with `defaults: NAME`. Estimates are for "
    "H200s, by keel check."
)


def list_recipes(name: str = "") -> str:
    """List all recipes with their descriptions, or return the text of the recipe `name`. Raises
    ConfigError if there is no such recipe."""
    if name:
        for folder in _FOLDERS:
            if file := shipped_recipes(folder).get(name):
                return f"# {file}\n{file.read_text(encoding='utf-8').rstrip()}"
        raise ConfigError(f"{name}: no such recipe{suggest_recipe(Path(name), '')}")
    parts: list[str] = []
    for folder, title in _FOLDERS.items():
        files = sorted(RECIPES.glob(f"{folder}*.yaml"))
        rows: dict[str, str] = {}
        for file in files:
            first_line, *_ = file.read_text(encoding="utf-8").splitlines()
            rows[file.stem] = first_line.removeprefix("# ").rstrip(".")
        parts += [title, _rows(rows), ""]
    return "\n".join([*parts, textwrap.fill(_FOOTER, _width())])
