"""Files that recipes name."""

from __future__ import annotations

from pathlib import Path

from keel.configs.sections.base import ConfigError

PACKAGE = Path(__file__).parent


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
