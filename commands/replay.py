"""`keel replay`: repeat a training step with a non-finite gradient, starting from the nearest
checkpoint.

The run folder may come from someone else, so the reward functions and environments in its
config.yaml are neither imported nor started.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from keel.configs.load import load_recipe
from keel.configs.schema import Config, ConfigError
from keel.configs.sections.model import TINY_MODEL
from keel.model.hub import from_anywhere
from keel.rl.metrics import values
from keel.trainer.launch import initial_model
from keel.trainer.learner import Learner
from keel.trainer.placement.hardware import RANK
from keel.trainer.placement.nodes import detect_hardware, reserve_gpus, start_ray, stop_ray
from keel.trainer.placement.watchdog import start_watchdog
from keel.trainer.prepare import PlannedModel, load_prompts, plan_model
from keel.trainer.run import checkpoint
from keel.trainer.run.bad_batches import BATCHES, list_batches, read_batch, step_of


def replay(run: str, words: Sequence[str]) -> None:
    """Rerun the training step on a saved batch and print the findings. `words` holds the step (by
    default the newest), then overrides. Doesn't write anything to disk."""
    folder = Path(run).expanduser()
    step = int(words[0]) if words and words[0].isdecimal() else None
    overrides = words if step is None else words[1:]
    path = _find_batch(folder, step)
    groups, findings = read_batch(path)
    disable_progress_bar()
    recipe = folder / "config.yaml"
    model = plan_model(
        *load_recipe(str(recipe), [f"run.dir={folder}", *overrides]), detect_hardware, chats=False
    )
    config, gpu = model.config, model.hardware.gpu
    deadline = config.run.startup_timeout_s
    base = _base_model(model, config, recipe)
    start, words = _nearest_checkpoint(folder / "checkpoints", step_of(path))
    completions = sum(len(group.group.trajectories) for group in groups)
    print(f"{path}: {len(groups)} groups, {completions} completions, {words}")
    for line in findings:
        print(f"saved with the batch: {line}")
    with ExitStack() as stack:
        start_ray()
        stack.callback(stop_ray)
        seats = None
        if gpu:  # no engines
            seats = stack.enter_context(reserve_gpus(config, timeout_s=deadline, only=RANK))
        stack.enter_context(start_watchdog(print, config.run.hang_timeout_s))
        learner = Learner(
            base, config, gpu=gpu, actor_options=partial(seats.options, RANK) if seats else None
        )
        stack.callback(learner.shutdown)
        for line in learner.start():
            print(f"warning: {line}")
        if start:
            learner.load(start)
        result = learner.step(groups)
    numbers = values(result.metrics)
    for name, value in sorted(numbers.items()):
        print(f"{name:<32} {value:.6g}")
    for line in result.findings:
        print(f"replayed: {line}")
    if not numbers["train/skipped_steps"]:
        print("replayed: the gradient is finite")
    elif not result.findings:
        print("replayed: the gradient is not finite, and no cause was found")


def _base_model(model: PlannedModel, config: Config, recipe: Path) -> str:
    if config.model.path != TINY_MODEL:
        return from_anywhere(config.model.path)
    for source in config.data.sources:
        if (code := source.environment.demonstrations) and not code.startswith("keel."):
            raise ConfigError(
                f"{recipe}: the tiny model of this run learned from {code!r}, and `keel replay` "
                "runs no code that a run folder names. Set model.path to the folder of that model"
            )
    return initial_model(config, load_prompts(config, model.count_tokens), gpu=model.gpu)


def _find_batch(folder: Path, step: int | None) -> Path:
    """Find the batch saved at `step`, or the newest batch if no step is given. Raises ConfigError
    if there isn't one."""
    batches = {step_of(path): path for path in list_batches(folder)}
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: is not a run folder (no config.yaml)")
    if not batches:
        raise ConfigError(
            f"{folder}: no saved batch. A run saves batches without a finite gradient in {BATCHES}/"
        )
    step = max(batches) if step is None else step
    if step not in batches:
        known = ", ".join(map(str, batches))
        raise ConfigError(f"{folder}: no saved batch of step {step}. There are: {known}")
    return batches[step]


def _nearest_checkpoint(checkpoints: Path, step: int) -> tuple[Path | None, str]:
    """Return the newest intact checkpoint before `step`, or None if training has to start from the
    base model. Also returns a description of the starting point."""
    paths = [
        path for path in checkpoint.list_finished(checkpoints) if checkpoint.step_of(path) < step
    ]
    newest = next((path for path in reversed(paths) if not checkpoint.find_problems(path)), None)
    words = f"from {newest.name if newest else 'the base model'}"
    if between := step - 1 - (checkpoint.step_of(newest) if newest else 0):
        return newest, f"{words}; {between} steps earlier, so the numbers may differ"
    return newest, f"{words}, the weights of that step"
