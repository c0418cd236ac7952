"""`keel check`: validate a recipe and print its plan without starting anything."""

import sys
from collections.abc import Sequence
from functools import partial

from keel.configs.load import load_config
from keel.configs.paths import unwritable
from keel.configs.schema import ConfigError
from keel.trainer.placement.nodes import planned_hardware
from keel.trainer.prepare import Task, prepare
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.progress import waiting
from keel.trainer.session import restore_data


def check(recipe: str, overrides: Sequence[str]) -> int:
    """Validate a recipe for RL or supervised training and print the plan without starting
    anything. Returns exit status 1 if a reward function fails on a sample completion."""
    config = load_config(recipe, overrides)
    check_task = partial(prepare, recipe, overrides, hardware=planned_hardware)
    tasks: list[Task] = []
    with waiting("checking the recipe and its prompts"):
        if config.sft.sources:
            tasks.append(check_task(supervised=True))
        if config.data.sources:
            tasks.append(check_task())
    for i, task in enumerate(tasks):
        if len(tasks) > 1:
            print(f"{chr(10) if i else ''}keel {task.command}")
        print(task.text(placed=True))
    warnings = _check_writable(tasks[0])
    folder = _run_folder(tasks)
    if status := folder.status():
        print(f"{folder.path} {status}")
    for line in (*warnings, *folder.warnings()):
        print(f"{'warning':<12} {line}")
    failed = [line for task in tasks for line in task.failed]
    for line in failed:
        print(f"keel check: {line}", file=sys.stderr)
    return 1 if failed else 0


def _check_writable(task: Task) -> list[str]:
    path = task.config.run.folder
    if not (why := unwritable(path)):
        return []
    if task.hardware.found:
        raise ConfigError(f"run.dir = {path}: cannot be written ({why}); choose another folder")
    return [f"run.dir = {path}: cannot be written here ({why}); the run needs it on its machine"]


def _run_folder(tasks: Sequence[Task]) -> RunFolder:
    """Return the run folder of the first task in `tasks` that can resume it. If none can, raise the
    ConfigError from the first task."""
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
