"""Finds the files and folders that a recipe refers to."""

from __future__ import annotations

import os
from pathlib import Path

from keel.configs.sections.base import ConfigError

PACKAGE = Path(__file__).parent
_JINJA = ("{{", "{%")


def data_path(text: str) -> Path:
    """Return the path of a data file in a recipe. The file need not exist.

    Relative paths start in the current folder, and `configs/…` also finds the files that come with
    Keel. Raises ConfigError if the path contains the home folder of an unknown user.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text}: {error}") from error
    shipped = PACKAGE.parent / path
    ours = not path.is_absolute() and path.parts[:1] == (PACKAGE.name,)
    return shipped if ours and not path.exists() and shipped.is_file() else path


def read_template(value: str, knob: str) -> str:
    """Return the Jinja template given by a knob. The knob contains either the template's text or
    the path of a file. Raises ConfigError if the file cannot be read."""
    if not value or any(mark in value for mark in _JINJA):
        return value
    try:
        text = data_path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error
        raise ConfigError(
            f"{knob} = {value!r}: {reason}. Name a file with a Jinja template, or give its text"
        ) from error
    if not any(mark in text for mark in _JINJA):
        raise ConfigError(f"{knob} = {value!r}: contains no Jinja template")
    return text


def unwritable(folder: Path) -> str:
    """Return the reason a run could not write to its folder, or "" if it could. The check does not
    create anything."""
    path = folder.absolute()
    try:
        parent = next(one for one in (path, *path.parents) if one.is_symlink() or one.exists())
        if not parent.is_dir():
            return f"{parent} is not a folder"
    except OSError as error:  # for example, a name that is too long
        return str(error.strerror)
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"no permission to write in {parent}"
