"""Generate small tasks in the format of real ones: `python -m keel.examples.small FOLDER`.

    general/prices          an environment in the format of `keel synthesize`
    search/corpus           documents; search/tasks.jsonl has the questions
    code/tasks.jsonl        changes of a generated repository, passed through every gate
    programs/tasks.jsonl    programs with hidden tests
    lessons                 conversations about all of these for `keel sft`

Code-interpreter tasks come from reasoning_gym and need no files. Neither network nor model is used.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from keel.commands.synthesize import synthesize
from keel.configs.schema import ConfigError
from keel.configs.synthesis import AuthorConfig, SynthesisConfig
from keel.examples.small import demonstrations as small

_MAX_TASKS = {
    "general": (240, 1000, "tasks with prices"),
    "search": (400, 4000, "tasks with towers"),
    "code": (8, 1000, "changes to a repository"),
    "programs": (240, 270, "programs"),
    "lessons": (1200, 100_000, "conversations of each family in each mode"),
}
"""The default number of tasks, the maximum number and a description, for each family."""


def make(
    folder: Path,
    *,
    general: int,
    search: int,
    code: int,
    programs: int = 240,
    lessons: int = 1200,
    seed: int,
) -> int:
    _create_folder(
        folder / "general", lambda new: small.write_prices(new / "prices", general, seed)
    )
    _create_folder(folder / "search", lambda new: small.write_towers(new, search, seed))
    _create_folder(folder / "programs", lambda new: small.write_programs(new, programs, seed))
    _create_folder(folder / "lessons", lambda new: small.write_lessons(new, lessons, seed))
    _create_folder(folder / "repository", lambda new: small.write_repository(new, code, seed))
    config = SynthesisConfig(
        family="code",
        dir=str(folder / "code"),
        at_once=max(2, (os.cpu_count() or 2) // 2),
        author=AuthorConfig(base_url="http://127.0.0.1:9/v1", model="none"),  # never called
        code=small.pace_synthesis(folder / "repository"),
    )
    return synthesize(config)


def _create_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Create a folder along with all its contents. If writing fails, no folder is left behind."""
    if folder.exists():
        print(f"{folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as new:
        write(Path(new, folder.name))
        Path(new, folder.name).rename(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keel.examples.small")
    parser.add_argument("folder", type=Path, help="tasks are written to it")
    for name, (default, _, text) in _MAX_TASKS.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    counts = {name: getattr(options, name) for name in _MAX_TASKS}
    for name, (_, most, _) in _MAX_TASKS.items():
        if not 1 <= counts[name] <= most:
            parser.error(f"--{name} {counts[name]}: must be from 1 to {most}")
    if find_spec("pytest") is None:
        parser.error("the code tasks' tests run with pytest: pip install pytest")
    try:
        return make(options.folder.expanduser().absolute(), **counts, seed=options.seed)
    except subprocess.CalledProcessError as error:
        parser.error(f"git: {error.stderr.decode(errors='replace').strip()}")
    except (ConfigError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
