"""`keel train`: run a recipe with reinforcement learning."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from keel.commands.sampling import answer_of
from keel.model.ray_timeouts import RayLost, Unanswered, lost_reason
from keel.rl.types import ScoredGroup
from keel.trainer import loop
from keel.trainer.launch import Runtime, launch
from keel.trainer.nonfinite import SHOWN_FINDINGS
from keel.trainer.placement.choose import save_choice
from keel.trainer.placement.elastic import ElasticLayouts, RetryOnOom, elastic_layouts
from keel.trainer.placement.step_time import token_flops
from keel.trainer.prepare import SftTask, Task, prepare
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import CostRates
from keel.trainer.run.progress import waiting
from keel.trainer.run.restarts import CollectiveTimeout, WorkerLost
from keel.trainer.run.session import open_journal, run_with_restarts, save_checkpoint
from keel.trainer.run.signals import FIRST, NOTHING_YET, Interrupt
from keel.trainer.run.trajectory_files import TokenFile, TokenTexts, save_batch
from keel.trainer.run.view import View

LOST = (WorkerLost, CollectiveTimeout, RayLost, RayError, Unanswered)
"""Errors after which the learner can no longer save a checkpoint."""

_Drive = Callable[[Runtime, RunFolder, View, int], int]


def train(
    recipe: str, overrides: Sequence[str], *, drive: _Drive | None = None, again: str = ""
) -> None:
    """Train on the recipe, or resume its run. `drive` replaces `run_loop`. `again` tells the user
    how to resume if that takes a different command."""
    with waiting("checking the recipe and its prompts"):
        task = prepare(recipe, overrides)
    run_task(
        ["train", recipe, *overrides],
        task,
        lambda folder, layouts: launch(task, print, folder.rewards, layouts=layouts),
        drive or run_loop,
        again=again,
    )


def run_task(
    command: Sequence[str],
    task: Task | SftTask,
    start: Callable[[RunFolder, ElasticLayouts], AbstractContextManager[Any]],
    drive: Callable[[Any, RunFolder, View, int], int],
    *,
    again: str = "",
) -> None:
    """Run a prepared task in its folder. `start` starts its actors, and `drive` runs its loop.
    After a failure, the task is restarted with a layout that fits the cluster's remaining
    resources."""
    layouts = elastic_layouts(
        task.config,
        Path(task.config.run.dir).expanduser(),
        facts=task.facts,
        hardware=task.hardware,
        chosen=task.choice.values,
    )
    run_with_restarts(
        command,
        task.config,
        text=task.text(),
        restore=task.restore,
        position=task.position,
        launch=lambda folder: start(folder, layouts),
        on_out_of_memory=layouts.lowering.after,
        drive=drive,
        resume_command=again,
        tokenizer=task.tokenizer_digest,
        on_open=partial(save_choice, values=task.choice.values, signature=task.hardware.signature),
    )


def run_loop(
    runtime: Runtime,
    folder: RunFolder,
    view: View,
    start: int,
    *,
    should_end: Callable[[], bool] = lambda: False,
) -> int:
    """Run `keel.trainer.loop.train` on the started actors. Returns the number of the last finished
    step. If `should_end` returns true after a step, the run saves a checkpoint and ends."""
    config, dataset, learner = runtime.task.config, runtime.task.dataset, runtime.learner
    failures: list[Exception] = []

    def should_stop() -> bool:
        return interrupt() or bool(journal.ends) or should_end() or bool(failures)

    def handle_failure(error: Exception) -> bool:
        """Record the error, make `should_stop` return True, and return True. If the learner was
        lost, no checkpoint can be saved. In this case nothing is recorded and False is returned."""
        if isinstance(error, LOST) or lost_reason():
            return False
        failures.append(error)
        journal.note("end", str(error))
        return True

    def save(step: int, cursor: Mapping[str, Any]) -> bool:
        written = save_checkpoint(
            folder, config, learner, step, cursor, stop=should_stop, say=view.say
        )
        continues = step < config.run.steps and (not written or not should_stop())
        if config.rollout.time_share and continues:
            runtime.wake()
        return written

    with ExitStack() as stack:
        tokens = TokenFile(
            config.run, TokenTexts(runtime.task.tokenizer), lambda: learner.tokens, answer_of
        )
        journal = open_journal(
            stack,
            folder,
            view,
            config,
            start=start,
            tokenizer=runtime.task.tokenizer_digest,
            costs=CostRates(runtime.gpus, *token_flops(config, runtime.task.facts)).metrics,
            tokens=tokens,
        )
        runtime.pool.say = partial(journal.say, "engine")
        if runtime.watchdog is not None:
            runtime.watchdog.say = partial(journal.say, "frozen")
        runtime.scorer.tell(view.say)
        heldout = dataset.heldout if config.run.eval_every >= 0 else {}

        def first_message() -> str:
            return FIRST if start > 0 or journal.evaluated(0) or not heldout else NOTHING_YET

        interrupt = stack.enter_context(
            Interrupt(view.say, first_message, grace_s=config.run.grace_s)
        )
        trained: loop.PolicyLearner = learner
        if runtime.oom_recovery is not None:
            say = partial(journal.say, "out of memory")
            trained = RetryOnOom(learner=learner, lowering=runtime.oom_recovery, say=say)
        parts = loop.Parts(
            prompts=dataset.train,
            rollouts=runtime,
            rewards=runtime.scorer,
            learner=trained,
            push=runtime.weights.push,
            journal=journal,
            heldout=heldout,
            save=save,
            should_stop=should_stop,
            dump_bad_batch=partial(dump_bad_batch, folder.path, view.say),
            should_abort=runtime.with_watchdog(interrupt.should_abort),
            should_skip_evaluation=interrupt,
            decoding_steps=lambda: runtime.pool.steps,
            handle_failure=handle_failure,
        )
        reached = loop.train(parts, config, start=start)
    if journal.ends:
        raise RuntimeError(
            f"{journal.ends}. The run ended with a checkpoint of step {reached}. Change the "
            "threshold to resume from there; earlier checkpoints are in its folder"
        )
    return reached


def dump_bad_batch(
    folder: Path,
    say: Callable[[str], None],
    step: int,
    groups: Sequence[ScoredGroup],
    findings: Sequence[str],
) -> None:
    """Save the batch of a step whose gradient was not finite, so that `keel replay` can repeat the
    step. A full disk does not end the run."""
    for line in findings[:SHOWN_FINDINGS]:
        say(f"step {step}: no finite gradient: {line}")
    try:
        path = save_batch(folder, step, groups, findings)
    except OSError as error:
        say(f"warning: step {step}: its batch could not be saved in {folder} ({error})")
        return
    replay = shlex.join(["keel", "replay", str(folder), str(step)])
    say(f"step {step}: its batch is saved as {path}; {replay} trains on it again")
