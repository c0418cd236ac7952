"""Files that recipes name."""

from __future__ import annotations

from pathlib import Path

from keel.configs.sections.base import ConfigError

PACKAGE = Path(__file__).parent
JINJA = ("{{", "{%")


def data_path(text: str) -> Path:
    """The file that a recipe calls `text`, whether it exists or not.

    `~` is the home folder; what is relative is looked for in the current one. What comes with
    Keel's own recipes, `configs/…`, is found from everywhere, in a checkout and after installation.
    Raises ConfigError for the home folder of nobody.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text}: {error}") from error
    shipped = PACKAGE.parent / path
    ours = not path.is_absolute() and path.parts[:1] == (PACKAGE.name,)
    return shipped if ours and not path.exists() and shipped.is_file() else path


def template_of(given: str, knob: str) -> str:
    """A Jinja template that a recipe gives as text, or as the file that it is in. Raises
    ConfigError naming `knob`."""
    if not given or any(mark in given for mark in JINJA):
        return given
    try:
        text = data_path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error
        raise ConfigError(
            f"{knob} = {given!r}: {why}; name a file with a Jinja template, or give its text"
        ) from error
    if not any(mark in text for mark in JINJA):
        raise ConfigError(f"{knob} = {given!r}: holds no Jinja template ({{{{ … }}}} or {{% … %}})")
    return text
