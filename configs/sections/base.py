"""The error of a wrong recipe, and the check that raises it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit


class ConfigError(ValueError):
    """A recipe that cannot be run. The message names the knob or the file, and the cure."""

    exit_status = 2

    def __init__(self, message: str) -> None:
        # It quotes what a file holds, which may be orders to a terminal.
        if not message.isprintable():
            message = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in message)
        super().__init__(message)


def require(ok: bool, knob: str, value: object, rule: str) -> None:
    """Raise a `ConfigError` naming `knob` unless `ok`."""
    if not ok:
        raise ConfigError(f"{knob} = {value!r}: {rule}")


def require_pass_rates(section: str, least: float, most: float) -> None:
    """`least_pass_rate` and `most_pass_rate` of a section are bounds that a pass rate can meet."""
    require(0 <= least <= 1, f"{section}.least_pass_rate", least, "must be in [0, 1]")
    require(
        least <= most <= 1 and most > 0,
        f"{section}.most_pass_rate",
        most,
        f"must be above 0, at most 1, and not below least_pass_rate = {least:g}",
    )


def require_gradient(section: str, rewards: Mapping[str, float], *others: float) -> None:
    """`rewards` of a section, or one of the other weights, tell completions of a group apart."""
    require(
        any(rewards.values()) or any(others),
        f"{section}.rewards",
        dict(rewards),
        "nothing of it counts, so every advantage would be 0; give a part a weight other than 0. A "
        "source for evaluation alone has holdout: all",
    )


def require_endpoint(section: str, base_url: str, api_key_env: str) -> None:
    """`base_url` of a section is an endpoint's, and `api_key_env` a variable's name or empty. What
    may be a secret is in no message."""
    try:
        url = urlsplit(base_url)
    except ValueError as error:
        raise ConfigError(f"{section}.base_url = {base_url!r}: {error}") from error
    if url.username or url.password:
        raise ConfigError(
            f"{section}.base_url: holds a password; put the key into an environment variable and "
            f"its name into {section}.api_key_env"
        )
    require(
        url.scheme in ("http", "https") and bool(url.hostname),
        f"{section}.base_url",
        base_url,
        "must be a URL like http://localhost:8000/v1",
    )
    require_variable(f"{section}.api_key_env", api_key_env)


def require_variable(knob: str, name: str) -> None:
    """It is the name of an environment variable, or empty, and not the key itself."""
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)?", name):
        raise ConfigError(f"{knob}: must be the name of an environment variable, never a key")
