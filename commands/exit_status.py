"""Turn the errors of the commands that use torch and Ray into exit statuses."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable

from ray.exceptions import RayError

from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.model.ray_timeouts import RayLost, lost_reason
from keel.trainer.placement.ray_internals import exit_now
from keel.trainer.run import checkpoint
from keel.trainer.run.errors import WorkerLost
from keel.trainer.run.signals import (
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    REFUSED,
    preemption_signal,
    print_line,
)
from keel.trainer.run.trackers import has_abandoned_threads

_RESUMES = "rerun the same command to resume"


def exit_status(arguments: Namespace, run: Callable[[], int | None]) -> int:
    """Run a command and return its exit status. Errors are printed without a traceback unless
    KEEL_TRACEBACK is set."""

    def end(status: int, message: str = "") -> int:
        if message:
            print_line(f"keel {arguments.command}: {message}", sys.stderr)
        if lost_reason() or has_abandoned_threads():  # their threads would block exit
            exit_now(status)
        return status

    try:
        status = run() or 0
    except ConfigError as error:
        return end(REFUSED, str(error))
    except KeyboardInterrupt:
        if not preemption_signal():
            return end(INTERRUPTED, f"stopped at once; {_saved(arguments)}")
        status = 0
    except (ValueError, RuntimeError, OSError, RayError) as error:
        if os.environ.get("KEEL_TRACEBACK"):
            raise
        notes = getattr(error, "__notes__", [])
        text = "\n".join([str(error), *notes, "(KEEL_TRACEBACK=1 shows where)"])
        # A preempted machine loses other processes of the run before this one.
        if preemption_signal() and isinstance(
            error, WorkerLost | RayLost | RayError | TimeoutError
        ):
            return end(
                PREEMPTED, f"stopped by {preemption_signal()}; {_RESUMES}. Also lost: {text}"
            )
        return end(FAILED, text)
    if signal := preemption_signal():
        return end(PREEMPTED, f"stopped by {signal}; {_RESUMES}")
    return end(status)


def _saved(arguments: Namespace) -> str:
    if arguments.command not in ("train", "sft", "pretrain"):
        return "finished results are saved"
    folder = load_config(arguments.recipe, arguments.override).run.folder
    if newest := checkpoint.latest(folder / "checkpoints"):
        return f"{_RESUMES} from {newest.name}"
    return "nothing was saved yet, so the same command starts over"
