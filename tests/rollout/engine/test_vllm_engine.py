"""Cuts of jobs after their deadlines, and calls to workers that have died, with a stub of vLLM."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from keel.rollout.spec import EngineError, GroupRequest
from tests.rl.rollouts import prompt
from tests.rollout.remote_engine import DEADLINE_S, vllm_process

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that has vLLM loaded."""
    with vllm_process() as process:
        yield lambda call, *args: process.submit(call, *args).result(timeout=DEADLINE_S)


def _engine(llm: SimpleNamespace) -> Any:
    from keel.rollout.engine.vllm_engine import VllmEngine  # noqa: PLC0415  (not in pytest)

    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._llm = llm
    return engine


def _cut_twice() -> tuple[list[Any], int, list[Any], list[str]]:
    """Cut a job with one completion of three tokens and one without tokens. Returns the results of
    the first cut, the limit that it set, the results of the second cut, and the aborted names."""
    from keel.rollout.engine.vllm_engine import Job  # noqa: PLC0415  (not in pytest)

    requests = {
        name: SimpleNamespace(num_output_placeholders=0, num_output_tokens=tokens, max_tokens=100)
        for name, tokens in (("begun", 3), ("waiting", 0))
    }
    core = SimpleNamespace(scheduler=SimpleNamespace(requests=requests))
    aborted: list[str] = []
    engine = _engine(
        SimpleNamespace(
            engine_core=SimpleNamespace(engine_core=core),
            abort_request=lambda names, **_: aborted.extend(names),
        )
    )
    job = Job(
        request=GroupRequest(prompt(), 2),
        context=[1],
        max_tokens=100,
        requests={"begun": 0, "waiting": 1},
    )
    engine._jobs, engine._owners = {5: job}, dict.fromkeys(job.requests, 5)
    engine._recorder = SimpleNamespace(forget=lambda name: None)
    engine._requests = SimpleNamespace(store_hashes=lambda name: None)
    first = engine.cut(5)
    limit = requests["begun"].max_tokens
    second = [(number, job.result()) for number, job in engine.cut(5)]
    assert not engine._jobs and not engine._owners
    return first, limit, second, aborted


def test_a_second_cut_drops_what_is_unfinished(run: Callable[..., Any]) -> None:
    first, limit, second, aborted = run(_cut_twice)
    assert first == [] and limit == 4
    ((number, group),) = second
    assert number == 5 and not group.trajectories
    assert [reason.partition(" when")[0] for reason in group.dropped] == [
        "late: had no token",
        "late: had no further token after the time of its group was up (rollout.timeout_s)",
    ]
    assert aborted == ["waiting", "begun"]


def _begin_update(dead: bool) -> None:
    def sleep(**_: Any) -> None:
        raise RuntimeError("cancelled")

    executor = SimpleNamespace(is_failed=dead)
    engine = _engine(SimpleNamespace(sleep=sleep, model_executor=executor))
    engine.updating = engine._asleep = False
    engine.begin_update()


def test_updates_find_workers_that_died_while_idle(run: Callable[..., Any]) -> None:
    with pytest.raises(EngineError, match="one of its worker processes died"):
        run(_begin_update, True)
    with pytest.raises(RuntimeError, match="cancelled"):
        run(_begin_update, False)
