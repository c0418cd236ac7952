"""`ConfigError`, `knob`, and the base class of all sections with their types and paths."""

import difflib
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

T = TypeVar("T")


class ConfigError(ValueError):
    """An invalid configuration. The message names the knob or file and explains how to fix it."""

    def __init__(self, message: str) -> None:
        # The message may quote a file that contains terminal escape sequences.
        super().__init__("".join(c if c.isprintable() or c in "\n\t" else "�" for c in message))


_BOUNDS = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
}
"""Sign and comparison of each bound of a number, named as in pydantic and typer."""


def knob(
    default: T,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    kinds: Sequence[str] = (),
    resumable: bool = False,
    auto: bool = False,
) -> T:
    """Declare a knob.

    The section enforces the bounds. With `kinds`, only sources of these kinds may set the knob
    (`require_kinds`). A `resumable` knob may change when a run resumes, because it doesn't change
    the objective. An `auto` knob has the value `auto` in a recipe by default.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    given = {name: limit for name, limit in bounds.items() if limit is not None}
    metadata = {"bounds": given, "kinds": kinds, "resumable": resumable, "auto": auto}
    if isinstance(default, dict):
        factory = cast(dict[str, Any], default).copy
        return cast(T, field(default_factory=factory, metadata=metadata))
    return field(default=default, metadata=metadata)


def format_bounds(bounds: Mapping[str, float]) -> str:
    return " and ".join(f"{_BOUNDS[name][0]} {limit:,}" for name, limit in bounds.items())


@cache
def _bounded_knobs(section: type[Any]) -> Mapping[str, Mapping[str, float]]:
    """Map each bounded knob of a section to its bounds. Cached because the layout search creates
    thousands of sections."""
    bounds = {one.name: one.metadata.get("bounds") for one in fields(section)}
    return {name: limits for name, limits in bounds.items() if limits}


@dataclass(frozen=True)
class Section:
    """Base class for a recipe's sections, which validate themselves when created."""

    __slots__ = ()
    PATH = ""
    """Dotted path of the section in a recipe, given as `class TrainerConfig(Section, path=…)`. That
    of a list entry includes its name: `data.sources[{self.name}]`."""
    RECIPES = ""
    """Subfolder of the bundled recipes that define this section as a whole."""

    def __init_subclass__(cls, path: str | None = None) -> None:
        if path is not None:  # `dataclass(slots=True)` makes the class again, without arguments
            cls.PATH = path  # pyright: ignore[reportConstantRedefinition]

    def full_path(self) -> str:
        return self.PATH.format(self=self)

    def __post_init__(self) -> None:
        for name, bounds in _bounded_knobs(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, int | float) and not all(
                _BOUNDS[bound][1](value, limit) for bound, limit in bounds.items()
            ):
                self.require(False, name, f"must be {format_bounds(bounds)}")
        self.check()

    def check(self) -> None:
        """Check the rules that involve more than one knob. The bounds of each knob have already
        been checked."""

    def require(self, ok: bool, name: str, rule: str) -> None:
        if not ok:
            value: Any = operator.attrgetter(name)(self)
            if isinstance(value, tuple):  # as in YAML
                value = [*cast(tuple[Any, ...], value)]
            require(False, f"{self.full_path()}.{name}".lstrip("."), value, rule)

    def require_kinds(self, kind: str) -> None:
        """Check that knobs for other kinds of sources than `kind` are left at their defaults."""
        for one in fields(self):
            kinds: Sequence[str] = one.metadata.get("kinds", ())
            default: object = {} if one.default is MISSING else one.default
            ok = not kinds or kind in kinds or getattr(self, one.name) == default
            self.require(ok, one.name, f"belongs to source: {', '.join(kinds)}")


def marked_knobs(section: type[Any], mark: str, prefix: str = "") -> Iterator[str]:
    """Yield the paths of the knobs that are declared as `resumable` or `auto`. Knobs of list
    entries are left out."""
    for one in fields(section):
        nested: Any = one.default_factory
        if isinstance(nested, type) and issubclass(nested, Section):
            yield from marked_knobs(nested, mark, f"{prefix}{one.name}.")
        elif one.metadata.get(mark):
            yield prefix + one.name


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
    "rollout.cascade_attention": (True, "it was removed; leave it out"),
}
"""Maps the path of a removed knob to its default and what to use instead. The default is ignored,
because the recipes in older run folders list all knobs."""
_INDEX = re.compile(r"\[[^]]*\]")


def is_removed_default(path: str, value: object) -> bool:
    """Return whether `path` is a removed knob that has its former default."""
    removed = _REMOVED.get(_INDEX.sub("[]", path))
    return removed is not None and value == removed[0]


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
    begun = [name for name in names if name.startswith(plain)]
    if not matches and len(begun) == 1:
        matches = begun
    if matches := matches or difflib.get_close_matches(plain, names, n=1, cutoff=0.75):
        return f"did you mean {' or '.join(matches)}?"
    return (
        f"`keel knobs{' ' * bool(section)}{section}` lists all knobs, and docs/coming-from.md "
        "those of TRL, verl and others"
    )


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise a ConfigError about the knob `name` if `ok` is false."""
    if not ok:
        raise ConfigError(f"{name} = {value!r}: {rule}")


def require_unique(name: str, values: Sequence[str]) -> None:
    repeated = sorted({value for value in values if values.count(value) > 1})
    require(not repeated, name, repeated, "must be unique")


def require_endpoints(section: str, base_urls: str, api_key_env: str) -> None:
    """Check URLs that are separated by spaces as `require_endpoint` does."""
    urls, name = base_urls.replace(",", " ").split(), f"{section}.base_url"
    for url in urls or [""]:
        require_endpoint(section, url, api_key_env)
    require("," not in base_urls, name, base_urls, "separate URLs by spaces")
    require_unique(name, urls)


def require_endpoint(section: str, base_url: str, api_key_env: str) -> None:
    """Check an endpoint's URL and the name of its API key variable. Error messages never quote
    values that may be secret."""
    try:
        url = urlsplit(base_url)
    except ValueError as error:
        raise ConfigError(f"{section}.base_url = {base_url!r}: {error}") from error
    if url.username or url.password:
        raise ConfigError(
            f"{section}.base_url: contains a password. Put the key into an environment variable "
            f"and its name into {section}.api_key_env"
        )
    rule = "must be a URL like http://localhost:8000/v1"
    ok = url.scheme in ("http", "https") and bool(url.hostname)
    require(ok, f"{section}.base_url", base_url, rule)
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)?", api_key_env):
        raise ConfigError(
            f"{section}.api_key_env: must be the name of an environment variable, never a key"
        )
