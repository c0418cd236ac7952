"""Find the files and folders that a recipe refers to."""

import difflib
import os
from pathlib import Path

from keel.configs.sections.base import ConfigError

_PACKAGE = Path(__file__).parent
_JINJA = ("{{", "{%")


def _expand(path: Path) -> Path:
    """Expand `~` in a path. Raises ConfigError if `~name` refers to an unknown user."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}") from error


def data_path(text: str) -> Path:
    """Resolve the path of a data file in a recipe, whether or not the file exists. Relative paths
    start from the current folder. If `configs/…` doesn't exist there, it can refer to a file that
    comes with Keel."""
    path = _expand(Path(text))
    shipped = _PACKAGE.parent / path
    ours = not path.is_absolute() and path.parts[:1] == (_PACKAGE.name,)
    return shipped if ours and not path.exists() and shipped.is_file() else path


def read_template(value: str, knob: str) -> str:
    """Return the Jinja template set by a knob, which holds either the template's text or the path
    of a file. Raises ConfigError if the file can't be read."""
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
    """Return the reason why a run can't write to its folder, or "" if it can. Doesn't create any
    files or folders."""
    path = folder.absolute()
    try:
        parent = next(one for one in (path, *path.parents) if one.is_symlink() or one.exists())
        if not parent.is_dir():
            return f"{parent} is not a folder"
    except OSError as error:  # for example, a name that is too long
        return str(error.strerror)
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"no permission to write in {parent}"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically, so that nobody can read it half-written."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_bytes(data)
    partial.replace(path)


RECIPES = _PACKAGE.resolve() / "recipes"
"""Folder of the recipes that come with Keel."""
HARDWARE = "hardware/"
"""Subfolder of recipes for common models and machines."""


def shipped_recipes(folder: str = "") -> dict[str, Path]:
    """Return the recipes that come with Keel for a command, as a mapping from bare names to
    files. `folder` is the command's subfolder. Without one, `HARDWARE` is included."""
    folders = (folder,) if folder else (folder, HARDWARE)
    files = sorted(file for each in folders for file in RECIPES.glob(f"{each}*.yaml"))
    return {file.stem: file for file in files}


def find_recipe(path: Path, folder: str = "", otherwise: Path | None = None) -> Path:
    """Resolve a recipe path: a run folder becomes its config.yaml, and a bare name becomes the
    recipe that comes with Keel, unless a file with that name exists. Any other path is returned
    unchanged except for `~`, or replaced by `otherwise` if given."""
    path = _expand(path)
    if path.is_dir() and (path / "config.yaml").is_file():
        return path / "config.yaml"
    known = None if path.exists() else shipped_recipes(folder).get(str(path))
    return known or otherwise or path


def read_recipe(path: Path, folder: str) -> str:
    """Read a recipe file. Raises ConfigError with a suggestion if the file doesn't exist."""
    if not path.is_file():
        problem = "is a folder; name a YAML file" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {problem}{suggest_recipe(path, folder)}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def suggest_recipe(path: Path, folder: str) -> str:
    here = [file.name for file in path.parent.glob("*.y*ml")]
    near = difflib.get_close_matches(path.name, [*here, *shipped_recipes(folder)], n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return "; keel recipes lists those that come with Keel"
