"""Locates, counts and reports the failures of reward functions, verifiers and judges."""

import os
import re
import sysconfig
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

_WINDOW = 200  # number of most recent completions over which the failure rate is measured
_MIN_WINDOW = 20  # the failure rate is computed as if there were at least this many completions
_MAX_REPORTS = 5

_PACKAGE = str(Path(__file__).absolute().parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_DUMP_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


class RewardStopped(RuntimeError):
    """Raised if too many completions could not be scored, the judge's call limit is reached, or a
    judge server doesn't start."""


class FailureRate:
    """Tracks the failure rate over the last `_WINDOW` completions. Not thread-safe."""

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._failed: deque[bool] = deque(maxlen=_WINDOW)

    def add(self, failed: bool) -> str:
        """Record a completion. Returns a summary if the failure rate is too high, or ""
        otherwise."""
        self._failed.append(failed)
        failures, total = sum(self._failed), len(self._failed)
        if not failed or failures <= self._max_fraction * max(total, _MIN_WINDOW):
            return ""
        return f"{failures} of the last {total} completions"


class FailureBudget:
    """Counts and reports the reward errors of a run. Thread-safe."""

    def __init__(self, max_fraction: float, report: Callable[[str], None]) -> None:
        self._max_fraction = max_fraction
        self.report = report
        self._rates: dict[str, FailureRate] = {}
        self._reported: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def record(
        self, name: str, prompt_id: str, errors: Sequence[tuple[str, str]], *, counted: bool
    ) -> None:
        """Record the outcome of a reward part for each completion of a prompt. An outcome is
        an error and its location, or two empty strings.

        Raises RewardStopped if `counted` is set and the part has failed too often. Verifiers
        aren't counted, because they usually fail on completions that can't be parsed.
        """
        with self._lock:
            reported = self._reported.setdefault(name, set())
            rate = self._rates.setdefault(name, FailureRate(self._max_fraction))
            for error, location in errors:
                excess = rate.add(bool(error))
                if not error:
                    continue
                # The text may quote a completion with control characters.
                message = f"{error} ({location})" if location else error
                message = "".join(c if c.isprintable() else " " for c in message)
                key = location or error.partition(":")[0]
                if key not in reported and len(reported) < _MAX_REPORTS:
                    reported.add(key)
                    self.report(
                        f"reward {name} failed on prompt {prompt_id}: {message}. Such completions "
                        "score 0 and count in reward/error; further errors here are not printed"
                    )
                if excess and counted:
                    raise RewardStopped(
                        f"reward {name} failed on {excess}, above rewards.max_failure_fraction = "
                        f"{self._max_fraction:g}; last error, on prompt {prompt_id}: {message}"
                    )


def error_location(error: BaseException) -> str:
    """Return the innermost frame of user code in a traceback, such as `my_rewards.py:12 in
    brief`."""
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost([(f.filename, f.lineno or 0, f.name) for f in reversed(frames)])


def dump_location(dump: str) -> str:
    return _innermost([(f, int(line), name) for f, line, name in _DUMP_FRAME.findall(dump)])


def _innermost(frames: list[tuple[str, int, str]]) -> str:
    libraries = (_PACKAGE + os.sep, "<frozen", *_LIBRARIES)
    own = [frame for frame in frames if not frame[0].startswith(libraries)] or frames
    file, line, name = own[0] if own else ("", 0, "")
    return f"{file.removeprefix(os.getcwd() + os.sep)}:{line} in {name}" if own else ""
