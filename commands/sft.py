"""`keel sft` and `keel pretrain`: train on conversations or on texts."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from keel.trainer.launch import SftRuntime, launch_sft
from keel.trainer.prepare import prepare
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.progress import waiting
from keel.trainer.run.signals import Interrupt
from keel.trainer.run.view import View
from keel.trainer.session import open_journal, run_with_restarts, save_checkpoint
from keel.trainer.sft import fit

_PREEMPTED = "{signal}: stopping after this step, with a checkpoint"


def train_supervised(command: str, recipe: str, overrides: Sequence[str]) -> None:
    """Train on the recipe's conversations (`keel sft`) or on its texts only (`keel pretrain`), or
    resume the run."""
    with waiting("checking the recipe and its data"):
        task = prepare(recipe, overrides, supervised=True)
    run_with_restarts(
        [command, recipe, *overrides],
        task,
        lambda _, layouts: launch_sft(task, layouts=layouts),
        _run_sft_loop,
    )


def _run_sft_loop(runtime: SftRuntime, folder: RunFolder, view: View, start: int) -> int:
    task, learner, batches = runtime.task, runtime.learner, runtime.task.batches
    assert batches is not None, "not a supervised task"
    with ExitStack() as stack:
        journal = open_journal(stack, folder, view, runtime, start=start)
        interrupt = stack.enter_context(
            Interrupt(view.say, preempted_first=_PREEMPTED, grace_s=task.config.run.grace_s)
        )
        save = partial(save_checkpoint, folder, task.config, learner, stop=interrupt, say=view.say)
        return fit(
            task.config,
            batches=batches,
            learner=learner,
            journal=journal,
            save=save,
            should_stop=interrupt,
            say=view.say,
            should_abort=interrupt.should_abort,
            start=start,
        )
