"""Files of recipes: those that come with Keel are found by their bare names, and listed by
`keel recipes`; any is read."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path

from keel.configs.sections.base import ConfigError

HERE = Path(__file__).resolve().parent  # as people know it, not through a link
SHELF = "shelf/"
FOLDERS: Mapping[str, str] = {
    "": "Recipes for keel train, eval and filter (sft-…: keel sft; pretrain-…: keel pretrain)",
    SHELF: "For common models and machines, on GSM8K until data.sources says what else",
    "distill/": "Chains for keel distill",
}
"""Folder of this package → what its recipes are for. Of a command's own folder, and of the one
without a name also those of the shelf, a bare name is enough."""
MORE = (
    "keel recipes NAME prints one. Start from it in a recipe of your own: `defaults: NAME`. "
    "Estimates are for H200s, by keel check."
)


NO_RECIPES = {
    **dict.fromkeys((".jsonl", ".csv", ".tsv", ".parquet", ".arrow"), "a file of data"),
    **dict.fromkeys((".py", ".ipynb"), "Python"),
    ".safetensors": "a model's weights",
}
"""Endings of what people name where a recipe is wanted."""


def shipped(folder: str = "") -> dict[str, Path]:
    """Bare name → file, of the recipes that a command finds."""
    folders = (folder,) if folder else (folder, SHELF)
    files = sorted(file for each in folders for file in HERE.glob(f"{each}*.yaml"))
    return {file.stem: file for file in files}


def find(path: Path, folder: str = "", otherwise: Path | None = None) -> Path:
    """Return the recipe's file: the config.yaml of a run folder, or one of Keel's recipes where
    `path` is the name of one and no file here; else `otherwise`, or `path` itself."""
    if path.is_dir() and (path / "config.yaml").is_file():
        return path / "config.yaml"
    known = None if path.exists() else shipped(folder).get(str(path))
    return known or otherwise or path


def hint_of(path: Path, folder: str) -> str:
    """Which of Keel's recipes a bare name may have meant, of those of its command."""
    if path.name != str(path) or path.is_dir():
        return ""
    names = sorted(shipped(folder))
    name = path.name.removesuffix(path.suffix if path.suffix in (".yaml", ".yml") else "")
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    near = near or [each for each in names if len(name) > 2 and name in each][:4]
    if near:
        come = "which comes" if len(near) == 1 else "which come"
        return f"; did you mean {' or '.join(near)}, {come} with Keel?"
    top = sorted(file.stem for file in HERE.glob(f"{folder}*.yaml"))
    return "" if path.suffix or not top else f"; Keel comes with {', '.join(top)} (keel recipes)"


def placed(path: Path) -> tuple[Path, Path]:
    """A recipe's path without `~`, and what that really is."""
    try:
        path = path.expanduser()
        return path, path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, links in a circle, NUL
        raise ConfigError(f"{path}: is no path of a recipe: {error}") from error


def text_of(path: Path, folder: str) -> str:
    """What stands in a recipe. Raises ConfigError for what is none, with what may be meant."""
    if not path.is_file():
        there = path.parent
        if path.is_dir():
            there, what = path, "is a folder"
        else:
            what = "no such file" if there.is_dir() else f"no such folder as {there}"
        recipes = sorted(p.name for p in there.glob("*.y*ml")) if there.is_dir() else []
        ours = path.name == str(path) and path.stem in shipped(folder)
        if not ours and (near := difflib.get_close_matches(path.name, recipes, n=3, cutoff=0.6)):
            raise ConfigError(f"{path}: {what}; did you mean {' or '.join(near)}?")
        hint = f"; {there} has {', '.join(recipes[:8])}" if recipes and not ours else ""
        if path.is_dir() and not recipes:
            hint = "; name a YAML file, or a bundled recipe (keel recipes)"
        raise ConfigError(f"{path}: {what}{hint}{hint_of(path, folder)}")
    if path.suffix in NO_RECIPES:
        raise ConfigError(
            f"{path}: is {NO_RECIPES[path.suffix]} and no recipe; name a YAML file (`keel new` "
            "writes one)"
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def about(file: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    words: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.startswith("#   "):  # a command
            break
        words += line.lstrip("# ").split()
    return re.split(r"(?<=[\w)`])\. (?=[A-Z])", " ".join(words), maxsplit=1)[0].rstrip(".:")


def listed(name: str = "") -> str:
    """All of them, a line each; or the whole of one. Raises ConfigError for one that is not."""
    if name:
        for folder in FOLDERS:
            if found := shipped(folder).get(name):
                return f"# {found}\n{found.read_text(encoding='utf-8').rstrip()}"
        raise ConfigError(f"{name}: no such recipe{hint_of(Path(name), '')}")
    parts: list[str] = []
    for folder, title in FOLDERS.items():
        files = sorted(HERE.glob(f"{folder}*.yaml"))
        wide = max(len(file.stem) for file in files) + 2
        rows = [_row(file.stem, about(file), wide) for file in files]
        parts.append("\n".join([title, *rows]))
    return "\n\n".join([*parts, textwrap.fill(MORE, _width())])


def _row(name: str, text: str, wide: int) -> str:
    return textwrap.fill(
        text, _width(), initial_indent=f"  {name:<{wide}}", subsequent_indent=" " * (wide + 2)
    )


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns)
