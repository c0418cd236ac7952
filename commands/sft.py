"""`keel sft` and `keel pretrain`: supervised training on conversations or text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from keel.commands.train import run_task
from keel.trainer.launch import SftRuntime, launch_sft
from keel.trainer.placement.elastic import RetryOnOom
from keel.trainer.placement.step_time import token_flops
from keel.trainer.prepare import SftTask, prepare_pretraining, prepare_sft
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import CostRates
from keel.trainer.run.progress import waiting
from keel.trainer.run.session import open_journal, save_checkpoint
from keel.trainer.run.signals import Interrupt
from keel.trainer.run.view import View
from keel.trainer.sft import SftParts, fit

_PREEMPTED = "{signal}: stopping after this step, with a checkpoint"


def sft(recipe: str, overrides: Sequence[str]) -> None:
    """Train on the recipe's conversations, or resume the run."""
    with waiting("checking the recipe and its data"):
        task = prepare_sft(recipe, overrides)
    _run(["sft", recipe, *overrides], task)


def pretrain(recipe: str, overrides: Sequence[str]) -> None:
    """Train on the recipe's text, or resume the run."""
    with waiting("checking the recipe and its data"):
        task = prepare_pretraining(recipe, overrides)
    _run(["pretrain", recipe, *overrides], task)


def _run(command: Sequence[str], task: SftTask) -> None:
    run_task(
        command, task, lambda _, layouts: launch_sft(task, print, layouts=layouts), _run_sft_loop
    )


def _run_sft_loop(runtime: SftRuntime, folder: RunFolder, view: View, start: int) -> int:
    task, learner = runtime.task, runtime.learner
    with ExitStack() as stack:
        journal = open_journal(
            stack,
            folder,
            view,
            task.config,
            start=start,
            tokenizer=task.tokenizer_digest,
            costs=CostRates(runtime.gpus, *token_flops(task.config, task.facts)).metrics,
        )
        if runtime.watchdog is not None:
            runtime.watchdog.say = partial(journal.say, "frozen")
        interrupt = stack.enter_context(
            Interrupt(view.say, preempted_first=_PREEMPTED, grace_s=task.config.run.grace_s)
        )
        attempt = None
        if (recovery := runtime.oom_recovery) is not None:
            say = partial(journal.say, "out of memory")
            attempt = RetryOnOom(learner=learner, lowering=recovery, say=say).attempt
        save = partial(save_checkpoint, folder, task.config, learner, stop=interrupt, say=view.say)
        parts = SftParts(
            batches=task.batches,
            learner=learner,
            journal=journal,
            heldout=task.lessons.heldout if task.config.run.eval_every >= 0 else {},
            save=save,
            should_stop=interrupt,
            say=view.say,
            should_abort=interrupt.should_abort,
            attempt=attempt,
        )
        return fit(parts, task.config, start=start)
