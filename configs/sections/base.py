"""The error of a wrong recipe, and the check that raises it."""

from __future__ import annotations


class ConfigError(ValueError):
    """A recipe that cannot be run. The message names the knob or the file, and the cure."""

    exit_status = 2


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
