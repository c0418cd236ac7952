"""Errors of a channel, from an engine's workers to the engine."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from keel.weights.channel import attempt, call_workers


class Worker:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.loaded = error, list[str]()

    def keel_load_bucket(self, bucket: str) -> None:
        if self.error is not None:
            raise self.error
        self.loaded.append(bucket)

    def keel_attempt(self, method: str, args: tuple[Any, ...]) -> tuple[str, str] | None:
        return attempt(self, method, args)


class InProcess:
    """Imitates vLLM's `UniProcExecutor`."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]


class InProcesses(InProcess):
    """Imitates vLLM's `MultiprocExecutor`, which pickles results and errors as text."""

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        answers = [self._answer(worker, method, args) for worker in self.workers]
        for answer in answers:
            if isinstance(answer, Exception):
                raise RuntimeError(f"Worker failed with error '{answer}', please check the stack")
        return answers

    @staticmethod
    def _answer(worker: Worker, method: str, args: tuple[Any, ...]) -> Any:
        try:
            return pickle.loads(pickle.dumps(getattr(worker, method)(*args)))
        except Exception as error:
            return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("8 MiB of weights did not get through"), TimeoutError),
        (ConnectionError("the weight channel broke"), ConnectionError),
        (ConnectionResetError("reset"), ConnectionError),
        (ValueError("no such tensor"), RuntimeError),
    ],
)
def test_channel_errors_keep_their_type(error: Exception, kind: type[Exception]) -> None:
    llm = InProcesses(Worker(), Worker(error))
    with pytest.raises(kind, match=str(error)) as raised:
        call_workers(llm, "keel_load_bucket", "a", several=True)
    assert type(raised.value) is kind


@pytest.mark.parametrize("several", [True, False])
def test_every_worker_is_called(several: bool) -> None:
    workers = [Worker() for _ in range(1 + several)]
    llm = (InProcesses if several else InProcess)(*workers)
    call_workers(llm, "keel_load_bucket", "a", several=several)
    assert [worker.loaded for worker in workers] == [["a"]] * len(workers)
