"""A pool of processes that run verifiers. A hang or crash affects only one completion."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import keel
from keel.configs.sections.rewards import CodeConfig
from keel.rewards.failures import dump_location
from keel.rewards.rules.verifiers import verifier_for
from keel.rewards.worker import reply_to
from keel.rl.strict_json import allow_long_integers
from keel.rl.supervisor import (
    EXIT_S,
    KILL_S,
    MARGIN_S,
    PREEMPTION,
    STOPPED_POLLS,
    is_stopped,
    kill_tree,
)

_START_TIMEOUT_S = 120.0  # time limit in seconds for a worker to start and import its libraries
_FIRST_CALL_S = 30.0
"""Minimum time limit for the first call of a function in a worker, because that call may load a
model."""
_POLL_S = 1.0  # seconds between two checks of a worker that has not answered
_MAX_REASSIGNMENTS = 3
"""Maximum number of retries of a batch that did not cause the failure of its worker."""


@dataclass(frozen=True, slots=True)
class VerifierScore:
    """A verifier's result for one completion: a score from 0 to 1, which is 0 if there is an
    `error`."""

    score: float
    error: str = ""
    at: str = field(default="", compare=False)
    """Location of the error, such as `my_rewards.py:12 in brief`, or "" if it is unknown."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Additional reward parts that the verifier returned."""


class WorkerPool:
    """Verifies completions in `workers` processes, or in this process if `workers` is 0. All
    completions in a batch belong to the same prompt."""

    def __init__(
        self,
        workers: int,
        *,
        timeout_s: float,
        code: CodeConfig | None = None,
        log: Path | None = None,
    ) -> None:
        """Start the workers, which import their libraries in the background.

        `timeout_s` is the time limit per completion, enforced only if there are workers. For
        programs, it is `code.completion_s`. Each worker prints to a file in the `log` folder, or to
        standard error if `log` is None.
        """
        allow_long_integers()  # in tests of programs, which travel as JSON
        self._code = code or CodeConfig()
        self._timeout_s = timeout_s
        if log is not None:
            log.mkdir(parents=True, exist_ok=True)
        self._workers = [
            _Worker(self._code, log and log / f"worker_{number}.log") for number in range(workers)
        ]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            worker.start()
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max_workers=workers or 1, thread_name_prefix="rewards")

    def submit(
        self, spec: Mapping[str, Any], completions: Sequence[str], *, node: str = ""
    ) -> Future[list[VerifierScore]]:
        """Start verifying completions. The future returns one result per completion, or raises
        ValueError if the spec is malformed. `node` is `Group.node`, which a pool on several nodes
        prefers."""
        return self._threads.submit(self._verify, spec, completions)

    def close(self) -> None:
        """Stop the workers and discard any queued batches."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _verify(self, spec: Mapping[str, Any], completions: Sequence[str]) -> list[VerifierScore]:
        # Siblings often agree, and a completion that hangs should be waited for once.
        distinct = list(dict.fromkeys(completions))
        if self._workers:
            is_code = spec.get("kind") == "code"
            limit_s = self._code.completion_s + MARGIN_S if is_code else self._timeout_s
            worker = self._idle.get()  # never blocks: there are as many threads as workers
            try:
                scores = worker.verify(spec, distinct, limit_s)
            finally:
                self._idle.put(worker)
        else:
            verifier = verifier_for(spec, self._code)
            scores = [_score(reply_to(verifier, completion)) for completion in distinct]
        by_completion = dict(zip(distinct, scores, strict=True))
        return [by_completion[completion] for completion in completions]


class _WorkerLost(Exception):
    """Raised if a worker dies or stops responding. `blameless` is True if the failure wasn't caused
    by a completion."""

    def __init__(self, message: str, *, blameless: bool = False) -> None:
        super().__init__(message)
        self.blameless = blameless


class _Worker:
    """A worker process that is restarted after failures. Only one thread may use it at a time."""

    def __init__(self, code: CodeConfig, log: Path | None) -> None:
        self._code, self._log = asdict(code), log
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115
        """The file for the stack trace of a process that crashes or exceeds its deadline."""
        self._timeout_s = 0.0
        self._called: set[str] = set()  # the functions that the current process has already called
        self._returned: set[str] = set()  # the functions that have returned in any process
        self._slow: set[str] = set()
        """The functions that timed out before they ever returned. They do not get `_FIRST_CALL_S`
        again."""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = socket.socket()
        self._buffer = b""
        self._closed = False

    def start(self) -> None:
        if self._closed:
            raise RuntimeError("the reward workers are closed")
        self._socket, child_socket = socket.socketpair()
        self._buffer = b""
        self._called.clear()
        # A fresh interpreter: nothing of this process (CUDA, Ray, open files, `__main__`) reaches
        # the one that handles the policy's text.
        root = str(Path(keel.__file__).resolve().parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with child_socket, open(self._log or os.devnull, "ab") as log:
            output = log if self._log else 2
            fds = (child_socket.fileno(), self._dump.fileno())
            # The worker starts with these signals blocked, until its handlers are installed.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "keel.rewards.worker", *map(str, fds)],
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        self._closed = True
        self._stop()

    def verify(
        self, spec: Mapping[str, Any], completions: Sequence[str], timeout_s: float
    ) -> list[VerifierScore]:
        """Verify completions one after the other. A completion that ends the process scores 0, and
        a new process continues with the next one."""
        name, scores = str(spec.get("name")), list[VerifierScore]()
        attempts = 0
        while len(scores) < len(completions):
            ready = False
            try:
                self._begin(spec, completions[len(scores) :], timeout_s)
                ready = True
                while len(scores) < len(completions):
                    scores.append(_score(self._receive(self._timeout_s + MARGIN_S)))
                    self._called.add(name)
                    self._returned.add(name)
                    self._timeout_s = timeout_s
            except _WorkerLost as lost:
                where = self._stop()
                if ready and name not in self._returned and "deadline" in str(lost):
                    self._slow.add(name)
                attempts += lost.blameless
                if lost.blameless and attempts <= _MAX_REASSIGNMENTS:
                    continue
                if not ready:  # caused by the libraries or the machine
                    raise RuntimeError(
                        f"a reward worker {lost}{where and f' ({where})'} while preparing for "
                        f"{spec.get('kind')!r}; see {self._log or 'standard error'}"
                    ) from lost
                scores.append(VerifierScore(0.0, f"verifier {lost}", where))
        return scores

    def _begin(self, spec: Mapping[str, Any], completions: Sequence[str], timeout_s: float) -> None:
        """Send a batch to the worker and wait until it has built the verifier. Raises ValueError if
        the worker rejects the spec."""
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self.start()
        self._timeout_s = timeout_s
        if spec.get("kind") == "function" and spec["name"] not in self._called | self._slow:
            self._timeout_s = max(timeout_s, _FIRST_CALL_S)
        request = {"spec": dict(spec), "completions": list(completions), "code": self._code}
        limits = {"first_s": self._timeout_s, "timeout_s": timeout_s}
        self._socket.settimeout(_START_TIMEOUT_S)
        try:
            self._socket.sendall(json.dumps({**request, **limits}).encode() + b"\n")
            reply = self._receive(_START_TIMEOUT_S)
        except OSError as error:
            raise _WorkerLost(self._exit_message()) from error
        except _WorkerLost as lost:
            killed = self._process is not None and self._process.poll() == -signal.SIGKILL
            raise _WorkerLost(str(lost), blameless=lost.blameless or killed) from lost
        if "refused" in reply:
            raise ValueError(reply["refused"])

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        end, stopped_polls = time.monotonic() + timeout_s, 0
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.001, min(_POLL_S, end - time.monotonic())))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError as error:
                # Not its descendants: a program of the policy may stop itself.
                stopped = self._process is not None and is_stopped(self._process.pid)
                stopped_polls = stopped_polls + 1 if stopped else 0
                if stopped_polls >= STOPPED_POLLS:
                    message = f"was stopped (SIGSTOP) in {stopped_polls} consecutive checks"
                    raise _WorkerLost(message, blameless=True) from error
                if time.monotonic() >= end:
                    raise _WorkerLost(f"did not answer within {timeout_s:g} s") from error
                continue
            except OSError as error:
                raise _WorkerLost(self._exit_message()) from error
            if not data:
                raise _WorkerLost(self._exit_message())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _exit_message(self) -> str:
        if self._process is None:
            return "was closed"
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code == -signal.SIGALRM:
            return f"ran past its deadline of {self._timeout_s:g} s"
        return f"ended with {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"

    def _stop(self) -> str:
        """Kill the process and its descendants. Returns the location in the code that it was
        executing, or "" if it left no stack trace."""
        process, self._process = self._process, None
        if process is None:
            return ""
        kill_tree(process)
        process.wait(KILL_S)
        self._socket.close()
        self._dump.seek(0)
        dump = self._dump.read(1 << 16)
        self._dump.seek(0)
        self._dump.truncate()
        if self._log and dump:
            with self._log.open("ab") as log:
                log.write(dump)
        _, mark, frames = dump.decode(errors="replace").rpartition("most recent call first")
        return dump_location(frames) if mark else ""


def _score(reply: Mapping[str, Any]) -> VerifierScore:
    if "error" in reply:
        return VerifierScore(0.0, str(reply["error"]), str(reply.get("at", "")))
    return VerifierScore(float(reply["score"]), parts=reply.get("parts", {}))
