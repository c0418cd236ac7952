"""`ConfigError`, bounds for knobs, and the base class of all sections."""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar, cast
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
) -> T:
    """Declare a knob with bounds, which are enforced by the section and listed in docs/knobs.md."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    given = {name: limit for name, limit in bounds.items() if limit is not None}
    return field(default=default, metadata=given)


def format_bounds(bounds: Mapping[str, float]) -> str:
    return " and ".join(f"{_BOUNDS[name][0]} {limit:,}" for name, limit in bounds.items())


@cache
def _bounded_knobs(section: type[Any]) -> Mapping[str, Mapping[str, float]]:
    """Map each bounded knob of a section to its bounds. Cached because the layout search creates
    thousands of sections."""
    return {one.name: one.metadata for one in fields(section) if one.metadata}


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

    def require_kind(self, kind: str, rules: Sequence[tuple[str, object, Sequence[str]]]) -> None:
        """Check that knobs for other kinds of sources are left at their defaults. Each rule
        consists of a knob's name, its default and the kinds that use it."""
        for name, default, kinds in rules:
            ok = kind in kinds or getattr(self, name) == default
            self.require(ok, name, f"belongs to source: {', '.join(kinds)}")


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
