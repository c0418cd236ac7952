"""The error of a wrong recipe, and the check that raises it."""

from __future__ import annotations


class ConfigError(ValueError):
    """A recipe that cannot be run. The message names the knob or the file, and the cure."""

    exit_status = 2


def require(ok: bool, knob: str, value: object, rule: str) -> None:
    """Raise a `ConfigError` naming `knob` unless `ok`."""
    if not ok:
        raise ConfigError(f"{knob} = {value!r}: {rule}")
