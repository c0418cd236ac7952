"""Files and folders that recipes name."""

from __future__ import annotations

import os
from pathlib import Path

from keel.configs.sections.base import ConfigError

PACKAGE = Path(__file__).parent
JINJA = ("{{", "{%")
GOES_ON = (".lock", "metrics.jsonl", "trajectories", "checkpoints")
"""Of a run folder: what a resumed run writes into."""


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


def unwritable(folder: Path) -> str:
    """Why a run could not write into its folder, which need not be there yet; "" where it could.
    Makes nothing."""
    path = folder.absolute()
    try:
        there = next(one for one in (path, *path.parents) if one.is_symlink() or one.exists())
        if not there.exists():
            return f"{there} is a link to {os.readlink(there)}, which does not exist"
        if not there.is_dir():
            return f"{there} is a file"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"no permission to write in {there}"
        closed = [path / name for name in GOES_ON if (path / name).exists()]
        closed = [one for one in closed if not os.access(one, os.W_OK)]
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        return str(error.strerror)
    return f"no permission to write {closed[0]}" if closed else ""
