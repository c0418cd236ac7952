"""Worker processes: a completion whose verifier hangs or crashes costs itself and nothing else."""

from __future__ import annotations

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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import keel
from keel.rewards.code.verifier import CodeSettings
from keel.rewards.failure_budget import place_in
from keel.rewards.rules.verifiers import verifier_for
from keel.rewards.sandbox.processes import end_below
from keel.rewards.workers.worker import PREEMPTION, reply_to

START_DEADLINE_S = 120.0
"""Longest wait for a worker to start and import its libraries."""
CODE_GRACE_S = 30.0
"""Beyond the time that a program's tests may take together, for starting and ending sandboxes."""
GRACE_S = 30.0
"""Beyond a completion's own deadline, for the worker's timer to go off, and for one that is killed
to be gone."""
FIRST_S = 30.0
"""Deadline of a function's first call in a worker, where its own is shorter: it may load a model
then, and keep it. Not again in this worker's place where that was too short and no call had ever
come to an end."""
LOOK_S = 1.0
"""How often a worker that does not answer is looked at."""
STOPPED = 5
"""Looks in a row that find it stopped, after which it is ended."""
SPARED = 3
"""Times that a batch is given to another worker, where the one before has been ended through no
fault of the batch's."""
STANDARD_ERROR = 2
ROOT = Path(keel.__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Verdict:
    """How correct a completion is, 0 … 1; with `error`, why nobody could say (score 0)."""

    score: float
    error: str = ""
    at: str = field(default="", compare=False)
    """Where it failed, if that is known: `my_rewards.py:12 in brief`."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the verifier says besides."""


class WorkerPool:
    """Verifies batches of completions in `workers` processes; 0: in this one, without deadlines.

    A batch is one reward spec with completions of its prompt, so that a worker builds
    its verifier once.
    """

    def __init__(
        self,
        workers: int,
        *,
        timeout_s: float,
        code: Mapping[str, Any] | None = None,
        log: Path | None = None,
    ) -> None:
        """timeout_s: longest look at one completion; code: how programs are run, the fields of
        `keel.configs.schema.CodeConfig`, whose `completion_s` is the deadline for them; log:
        folder for what the workers print, a file each; without one it goes to standard error (not
        the stack of one that is ended: its place is in the verdict)."""
        if workers < 0 or not timeout_s > 0:
            raise ValueError(
                f"worker pool: workers = {workers} must not be negative, timeout_s = {timeout_s} "
                "must be positive"
            )
        self._code = dict(code or {})
        settings = CodeSettings.from_knobs(self._code)
        self._deadlines = {"code": settings.completion_s + CODE_GRACE_S}
        self._timeout_s = timeout_s
        if log is not None:
            log.mkdir(parents=True, exist_ok=True)
        logs = [log and log / f"worker_{number}.log" for number in range(workers)]
        self._workers = [_Worker(self._code, path) for path in logs]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            worker.start()  # they import while the first rollouts are under way
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max_workers=workers or 1, thread_name_prefix="rewards")

    def submit(self, spec: Mapping[str, Any], completions: Sequence[str]) -> Future[list[Verdict]]:
        """One verdict per completion. The future raises ValueError if no rule reads `spec`."""
        return self._threads.submit(self._verify, spec, completions)

    def printed(self) -> bool:
        """Whether a worker has written to its log."""
        return any(worker.written() for worker in self._workers)

    def close(self) -> None:
        """Stop the workers. Batches that have not started are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _verify(self, spec: Mapping[str, Any], completions: Sequence[str]) -> list[Verdict]:
        # Siblings often agree, and one completion that hangs is enough to wait for.
        distinct = list(dict.fromkeys(completions))
        timeout_s = self._deadlines.get(str(spec.get("kind")), self._timeout_s)
        if self._workers:
            worker = self._idle.get()  # never waits: as many threads as workers
            try:
                verdicts = worker.verify(spec, distinct, timeout_s)
            finally:
                self._idle.put(worker)
        else:
            verifier = verifier_for(spec, CodeSettings.from_knobs(self._code))
            verdicts = [_verdict(reply_to(verifier, completion)) for completion in distinct]
        by_completion = dict(zip(distinct, verdicts, strict=True))
        return [by_completion[completion] for completion in completions]


class _WorkerLost(Exception):
    """The worker ended or went silent; says how."""

    def __init__(self, how: str, *, blameless: bool = False) -> None:
        """blameless: through nothing that it was given to do."""
        super().__init__(how)
        self.blameless = blameless


class _Worker:
    """One worker process, replaced whenever it is lost. Used by one thread at a time."""

    def __init__(self, code: Mapping[str, Any], log: Path | None) -> None:
        self._code = code
        self._log = log
        self._stacks = None if log else tempfile.TemporaryFile()  # noqa: SIM115
        """Where it was when it ended, for there is no log: no stack belongs on a terminal."""
        self._began = self._read = self._size()
        self._timeout_s = 0.0
        self._called: set[str] = set()
        """Functions that this process has called."""
        self._loads: set[str] = set()
        """Those that have come to an end in a process here."""
        self._slow: set[str] = set()
        """Those whose first call came to no end in time, and none before it had."""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._closed = False

    def start(self) -> None:
        if self._closed:
            raise RuntimeError("the reward workers have been closed")
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self._called.clear()
        # A fresh interpreter: nothing of the parent's (CUDA, Ray, open files, the caller's
        # `__main__`) reaches the process that meets the policy's text.
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs, open(self._log or os.devnull, "ab") as log:
            output = log if self._log else STANDARD_ERROR
            passed = [theirs.fileno(), *([self._stacks.fileno()] if self._stacks else [])]
            # The worker inherits what is blocked here, until it heeds none of them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "keel.rewards.workers.worker", *map(str, passed)],
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """Stop for good, also while another thread waits in `verify`."""
        self._closed = True
        self.stop()
        if self._stacks is not None:
            self._stacks.close()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # A sandbox that is killed while it starts may leave a process that waits for good; its
            # parent has to live for that to be found.
            process.send_signal(signal.SIGSTOP)
            end_below(process.pid, GRACE_S)
            process.kill()
            process.wait(GRACE_S)
        if self._socket is not None:
            self._socket.close()

    def verify(
        self, spec: Mapping[str, Any], completions: Sequence[str], timeout_s: float
    ) -> list[Verdict]:
        name = str(spec["name"]) if spec.get("kind") == "function" else ""
        verdicts: list[Verdict] = []
        spared = 0
        while len(verdicts) < len(completions):
            rest = completions[len(verdicts) :]
            self._read = self._size()
            try:
                first_s = self._begin(spec, rest, name, timeout_s)
            except _WorkerLost as lost:
                # Not a completion's fault: the libraries or the machine.
                self.stop()
                spared += 1
                if lost.blameless and spared <= SPARED:
                    continue
                at = f" ({place})" if (place := place_in(self._last_words())) else ""
                message = f"in {self._log}" if self._log else "on standard error, if it has any"
                raise RuntimeError(
                    f"a reward worker {lost}{at} while preparing for {spec.get('kind')!r}; its own "
                    f"message is {message}"
                ) from lost
            try:
                for number in range(len(rest)):
                    self._timeout_s = timeout_s if number else first_s
                    verdicts.append(_verdict(self._receive(self._timeout_s + GRACE_S)))
                    self._called.add(name)
                    self._loads.add(name)
            except _WorkerLost as lost:
                self.stop()
                if name not in self._loads and "deadline" in str(lost):
                    self._slow.add(name)
                spared += lost.blameless
                if lost.blameless and spared <= SPARED:
                    continue
                verdicts.append(Verdict(0.0, f"verifier {lost}", place_in(self._last_words())))
        return verdicts

    def _begin(
        self, spec: Mapping[str, Any], completions: Sequence[str], name: str, timeout_s: float
    ) -> float:
        """name: of a function, else "". Returns the deadline of the first completion."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self.start()
        loads = name and name not in self._called and name not in self._slow
        first_s = max(timeout_s, FIRST_S) if loads else timeout_s
        request = {
            "spec": dict(spec),
            "completions": list(completions),
            "first_s": first_s,
            "timeout_s": timeout_s,
            "code": self._code,
        }
        self._send(json.dumps(request).encode() + b"\n")
        try:
            reply = self._receive(START_DEADLINE_S)
        except _WorkerLost as lost:
            code = self._process.poll() if self._process is not None else None
            raise _WorkerLost(
                str(lost), blameless=lost.blameless or code == -signal.SIGKILL
            ) from lost
        if "refused" in reply:
            raise ValueError(reply["refused"])
        return first_s

    def _send(self, line: bytes) -> None:
        assert self._socket is not None
        self._socket.settimeout(START_DEADLINE_S)
        try:
            self._socket.sendall(line)
        except OSError as error:
            raise _WorkerLost(self._how_it_ended()) from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._socket is not None
        end, looks = time.monotonic() + timeout_s, 0
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.001, min(LOOK_S, end - time.monotonic())))
            try:
                received = self._socket.recv(1 << 16)
            except TimeoutError as error:
                looks = looks + 1 if self._stopped() else 0
                if looks >= STOPPED:
                    how = f"was found stopped (SIGSTOP) {looks} times in a row"
                    raise _WorkerLost(how, blameless=True) from error
                if time.monotonic() >= end:
                    raise _WorkerLost(f"did not answer within {timeout_s:g} s") from error
                continue
            except OSError as error:
                raise _WorkerLost(self._how_it_ended()) from error
            if not received:
                raise _WorkerLost(self._how_it_ended())
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _stopped(self) -> bool:
        """Whether it stands still, rather than works."""
        if self._process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        return False

    def written(self) -> bool:
        """Whether this run's processes have written to the log."""
        return self._log is not None and self._size() > self._began

    def _size(self) -> int:
        if self._stacks is not None:
            with suppress(OSError, ValueError):  # closed
                return os.fstat(self._stacks.fileno()).st_size
        return self._log.stat().st_size if self._log and self._log.exists() else 0

    def _last_words(self) -> str:
        """Where it was when it ended, if its log says so. Only an end writes that there, and the
        worker is ahead of this process: it may have ended before it is asked for its reply."""
        said = b""
        if self._log is not None:
            with self._log.open("rb") as file:
                file.seek(self._read)
                said = file.read(1 << 16)
        elif self._stacks is not None:
            with suppress(OSError, ValueError):  # closed
                said = os.pread(self._stacks.fileno(), 1 << 16, self._read)
        _, dumped, frames = said.decode(errors="replace").rpartition("most recent call first")
        return frames if dumped else ""

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "was closed"
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code == -signal.SIGALRM:
            return f"ran past its deadline of {self._timeout_s:g} s"
        return f"ended with {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"


def _verdict(reply: Mapping[str, Any]) -> Verdict:
    if "error" in reply:
        return Verdict(0.0, str(reply["error"]), str(reply.get("at", "")))
    return Verdict(float(reply["score"]), parts=reply.get("parts", {}))
