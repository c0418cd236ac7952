"""`ConfigError`, bounds for knobs, and checks that several sections share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

T = TypeVar("T")


class ConfigError(ValueError):
    """An invalid configuration. The message names the knob or file and says how to fix it."""

    exit_status = 2

    def __init__(self, message: str) -> None:
        # The message may quote a file that contains terminal escape sequences.
        if not message.isprintable():
            message = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in message)
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a numeric knob. The names are those that pydantic and typer use."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: float) -> bool:
        # Negated comparisons would accept NaN.
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        low = self.ge if self.ge is not None else self.gt
        high = self.le if self.le is not None else self.lt
        if low is not None and high is not None:
            opening, closing = "[("[self.ge is None], "])"[self.le is None]
            return f"in {opening}{_plain(low)}, {_plain(high)}{closing}"
        if low is not None:
            return f"{'>' if self.ge is None else '>='} {_plain(low)}"
        return f"{'<' if self.le is None else '<='} {_plain(cast(float, high))}"


def knob(
    default: T,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> T:
    """Declare a dataclass field with bounds. `check_bounds` enforces them and the knobs page lists
    them."""
    return field(default=default, metadata={"bounds": Bounds(ge, gt, le, lt)})


def bounds_of(declared: Field[Any]) -> Bounds | None:
    return declared.metadata.get("bounds")


def check_bounds(section: Any, path: str) -> None:
    """Raise a `ConfigError` if a number in `section` is outside its declared bounds. `path` is the
    dotted path of the section in a recipe."""
    for declared in fields(section):
        bounds, value = bounds_of(declared), getattr(section, declared.name)
        if bounds is not None and isinstance(value, int | float) and value not in bounds:
            name = f"{path}.{declared.name}".lstrip(".")
            raise ConfigError(f"{name} = {value!r}: must be {bounds}")


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise a `ConfigError` about the knob `name` if `ok` is false."""
    if not ok:
        raise ConfigError(f"{name} = {value!r}: {rule}")


def require_unique(name: str, values: list[str]) -> None:
    repeated = sorted({value for value in values if values.count(value) > 1})
    require(not repeated, name, repeated, "must be unique")


def require_pass_rates(section: str, least: float, most: float) -> None:
    """Check that a section's `least_pass_rate` and `most_pass_rate` form a valid interval."""
    require(
        least <= most and most > 0,
        f"{section}.most_pass_rate",
        most,
        f"must be above 0 and not below least_pass_rate = {least:g}",
    )


def require_gradient(section: str, rewards: Mapping[str, float], *others: float) -> None:
    """Check that `rewards`, or another weight in the section, can produce a nonzero advantage."""
    require(
        any(rewards.values()) or any(others),
        f"{section}.rewards",
        dict(rewards),
        "every weight is 0, so every advantage would be 0. Give a part a weight, or set holdout: "
        "all for a source that is only evaluated",
    )


def require_endpoint(section: str, base_url: str, api_key_env: str) -> None:
    """Check the URL and the API key variable of an endpoint. Messages do not quote a possible
    secret."""
    try:
        url = urlsplit(base_url)
    except ValueError as error:
        raise ConfigError(f"{section}.base_url = {base_url!r}: {error}") from error
    if url.username or url.password:
        raise ConfigError(
            f"{section}.base_url: contains a password. Put the key into an environment variable "
            f"and its name into {section}.api_key_env"
        )
    require(
        url.scheme in ("http", "https") and bool(url.hostname),
        f"{section}.base_url",
        base_url,
        "must be a URL like http://localhost:8000/v1",
    )
    require_variable(f"{section}.api_key_env", api_key_env)


def require_variable(name: str, variable: str) -> None:
    """Check that a knob holds the name of an environment variable rather than a key."""
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)?", variable):
        raise ConfigError(f"{name}: must be the name of an environment variable, never a key")


def _plain(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) and bound < 2**40 else f"{bound:g}"
