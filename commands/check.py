"""`keel check`: validate a recipe without starting a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from keel.configs.load import load_config
from keel.configs.paths import unwritable
from keel.configs.schema import ConfigError
from keel.trainer.placement.nodes import planned_hardware, seat_lines
from keel.trainer.prepare import SftTask, Task, prepare, prepare_sft
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.progress import waiting
from keel.trainer.run.session import restore_data


def check(recipe: str, overrides: Sequence[str]) -> int:
    """Validate a recipe for RL or supervised training and print its plan, without starting
    anything. Returns exit status 1 if a reward function fails on a sample completion."""
    config = load_config(recipe, overrides)
    tasks: list[Task | SftTask] = []
    with waiting("checking the recipe and its prompts"):
        if config.sft.sources:
            tasks.append(prepare_sft(recipe, overrides, hardware=planned_hardware))
        if config.data.sources:
            tasks.append(prepare(recipe, overrides, hardware=planned_hardware))
    for i, task in enumerate(tasks):
        if len(tasks) > 1:
            command = task.command if isinstance(task, SftTask) else "train"
            print(f"{chr(10) if i else ''}keel {command}")
        print(task.text(seats=seat_lines(task.config, task.hardware) if task.gpu else ()))
    warnings = _check_writable(tasks[0])
    folder = _run_folder(tasks)
    if status := folder.status():
        print(f"{folder.path} {status}")
    for line in (*warnings, *folder.warnings()):
        print(f"{'warning':<12} {line}")
    failed = [line for task in tasks if isinstance(task, Task) for line in task.failed]
    for line in failed:
        print(f"keel check: {line}", file=sys.stderr)
    return 1 if failed else 0


def _check_writable(task: Task | SftTask) -> list[str]:
    """Raise ConfigError if the run folder cannot be written. If the run is planned for another
    machine, only print a warning."""
    path = Path(task.config.run.dir).expanduser()
    if not (why := unwritable(path)):
        return []
    if task.hardware.found:
        raise ConfigError(f"run.dir = {path}: cannot be written ({why}); choose another folder")
    return [f"run.dir = {path}: cannot be written here ({why}); the run needs it on its machine"]


def _run_folder(tasks: Sequence[Task | SftTask]) -> RunFolder:
    """Return the run folder of the first task in `tasks` that can resume it. If none of them can,
    raises the ConfigError of the first one."""
    errors: list[ConfigError] = []
    for task in tasks:
        folder = RunFolder(task.config, task.tokenizer_digest)
        try:
            folder.check()
            restore_data(folder, task.restore)
            return folder
        except ConfigError as error:
            errors.append(error)
    raise errors[0]
