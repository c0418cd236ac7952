"""`keel train`: run a recipe's reinforcement learning."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from keel.commands.evaluate import extract_answer
from keel.model.ray_timeouts import RayLost, Unanswered, lost_reason
from keel.rl.types import ScoredGroup
from keel.trainer import loop
from keel.trainer.launch import Runtime, launch
from keel.trainer.nonfinite import SHOWN_FINDINGS
from keel.trainer.prepare import prepare
from keel.trainer.run.bad_batches import save_batch
from keel.trainer.run.errors import CollectiveTimeout, WorkerLost
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.progress import waiting
from keel.trainer.run.signals import FIRST, NOTHING_YET, Interrupt
from keel.trainer.run.trajectory_files import TokenFile, TokenTexts
from keel.trainer.run.view import View
from keel.trainer.session import open_journal, run_with_restarts, save_checkpoint

_LOST = (WorkerLost, CollectiveTimeout, RayLost, RayError, Unanswered)
"""Errors after which the learner can no longer save a checkpoint."""

_AfterStep = Callable[[int, Mapping[str, float]], bool]
"""Called with each recorded step and its metrics. If it returns True, the run saves a checkpoint
and ends."""


def train(
    recipe: str,
    overrides: Sequence[str],
    *,
    after_step: _AfterStep = lambda step, numbers: False,
    resume_command: str = "",
) -> None:
    """Run the training that the recipe describes, or resume it. Messages say to resume it with
    `resume_command`, or with the same command by default."""
    with waiting("checking the recipe and its prompts"):
        task = prepare(recipe, overrides)
    run_with_restarts(
        ["train", recipe, *overrides],
        task,
        lambda folder, layouts: launch(task, folder.rewards, layouts=layouts),
        partial(run_loop, after_step=after_step),
        resume_command=resume_command,
    )


def run_loop(
    runtime: Runtime,
    folder: RunFolder,
    view: View,
    start: int,
    *,
    after_step: _AfterStep = lambda step, numbers: False,
) -> int:
    """Run `keel.trainer.loop.train` on the started actors and return the last completed step."""
    config, dataset, learner = runtime.task.config, runtime.task.dataset, runtime.learner
    failures: list[Exception] = []
    ended = False

    def should_stop() -> bool:
        return interrupt() or bool(journal.ends) or ended or bool(failures)

    def end_after(step: int, numbers: Mapping[str, float]) -> None:
        nonlocal ended
        ended = after_step(step, numbers) or ended

    def handle_failure(error: Exception) -> bool:
        """Record the error and end the run with a checkpoint. Returns False, without recording it,
        if the learner was lost and can no longer save one."""
        if isinstance(error, _LOST) or lost_reason():
            return False
        failures.append(error)
        journal.note("end", str(error))
        return True

    def save(step: int, position: Mapping[str, Any]) -> bool:
        written = save_checkpoint(
            folder, config, learner, step, position, stop=should_stop, say=view.say
        )
        continues = step < config.run.steps and (not written or not should_stop())
        if config.rollout.time_share and continues:
            runtime.wake()
        return written

    with ExitStack() as stack:
        texts = TokenTexts(runtime.task.tokenizer)
        tokens = TokenFile(config.run, texts, lambda: learner.token_numbers, extract_answer)
        journal = open_journal(stack, folder, view, runtime, start=start, tokens=tokens)
        journal.on_record = end_after
        runtime.pool.say = partial(journal.say, "engine")
        runtime.nodes.say = partial(journal.say, "node")
        runtime.scorer.report_to(view.say)
        heldout = dataset.heldout if config.run.eval_every >= 0 else {}

        def first_message() -> str:
            return FIRST if start > 0 or journal.evaluated(0) or not heldout else NOTHING_YET

        interrupt = stack.enter_context(
            Interrupt(view.say, first_message, grace_s=config.run.grace_s)
        )
        parts = loop.Parts(
            prompts=dataset.train,
            rollouts=runtime,
            rewards=runtime.scorer,
            learner=learner,
            push=runtime.weights.push,
            journal=journal,
            heldout=heldout,
            save=save,
            should_stop=should_stop,
            dump_bad_batch=partial(_dump_bad_batch, folder.path, view.say),
            should_abort=runtime.with_watchdog(interrupt.should_abort),
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


def _dump_bad_batch(
    folder: Path,
    say: Callable[[str], None],
    step: int,
    groups: Sequence[ScoredGroup],
    findings: Sequence[str],
) -> None:
    """Save the batch of a step with a non-finite gradient, so that `keel replay` can repeat the
    step. A full disk or a lost node does not end the run."""
    for line in findings[:SHOWN_FINDINGS]:
        say(f"step {step}: no finite gradient: {line}")
    try:
        path = save_batch(folder, step, groups, findings)
    except (OSError, LookupError) as error:
        say(f"warning: step {step}: its batch could not be saved in {folder} ({error})")
        return
    replay = shlex.join(["keel", "replay", str(folder), str(step)])
    say(f"step {step}: its batch is saved as {path}; {replay} trains on it again")
