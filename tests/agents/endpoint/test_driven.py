"""Episodes that a program drives, by the runner and a pool by script: what becomes of each end."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from keel.agents.endpoint.errors import ApiError
from keel.agents.endpoint.program import AgentProgram
from keel.agents.endpoint.requests import read_request
from keel.agents.runner import EpisodeLimits, EpisodeRunner
from keel.agents.types import NoEnvironment
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import ENVIRONMENT, Group, Prompt, Purpose, Trajectory, Verdict
from tests.agents.episodes import held, more
from tests.agents.scripted import BUDGET, END, NO_CONTEXT, Policy, Sums, chat, says
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.e2e

# Without a library for HTTP, which takes longer to import than all the rest of a program's life.
ASK = """
import json, os, socket, sys, time
task = json.loads(os.environ["KEEL_TASK"])
messages = list(task["messages"])
def post(url, body, until=None):
    host, _, path = url.removeprefix("http://").partition("/")
    body = json.dumps(body).encode()
    head = f"POST /{path} HTTP/1.0\\r\\nContent-Length: {len(body)}\\r\\n"
    head += f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n\\r\\n"
    with socket.create_connection(host.split(":")) as link, link.makefile("rb") as reply:
        link.sendall(head.encode() + body)
        while until:  # that file is there: then it goes without its answer
            if os.path.exists(until):
                return None, None
            time.sleep(0.01)
        head, _, said = reply.read().partition(b"\\r\\n\\r\\n")
    return head.split()[1] == b"200", json.loads(said)
def ask(answer="Go on.", **more):
    body = {"messages": messages, **more}
    fine, said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    if not fine:
        raise SystemExit(said["error"]["message"])
    said = said["choices"][0]["message"]
    messages.extend([said, {"role": "user", "content": answer}])
    return said["content"]
"""
ENDS = {
    "asks": "ask(); ask(); print('done')",
    "answers": "ask(); print(json.dumps({'answer': 'forty-' + 'two'}))",
    "judges": "ask(); print(json.dumps({'parts': {'correct': 0.5}, 'facts': {'n': 1}}))",
    "goes on": "while True: ask()",
    "goes on, judged": "print(json.dumps({'parts': {'correct': 0}}))\nwhile True: ask()",
    "hangs": "ask(); time.sleep(1000)",
    "crashes": "ask(); raise KeyError('no such city')",
    "is refused": "ask(); ask(guided_json={})",
    "never asks": "print('nothing to do')",
    "hangs at once": "time.sleep(1000)",
    "is not there": "",
}


def task(name: str, kind: str = "answer") -> Prompt:
    return Prompt(
        prompt_id=f"{name}/1",
        domain="d",
        messages=({"role": "user", "content": "Sum."},),
        environment=name,
        thinking=False,
        reward={"kind": kind},
    )


@contextmanager
def opened(
    policy: Any,
    programs: dict[str, str],
    environment: Callable[[], Any] = NoEnvironment,
    *,
    seconds: float = PATIENCE_S,
    **settings: Any,
) -> Iterator[EpisodeRunner]:
    """Nothing is left of it: no process, thread or file."""
    before = held()
    with EpisodeRunner(
        dict.fromkeys(programs, environment),
        programs={
            name: AgentProgram(
                command=[sys.executable, "-S", "-c", ASK + code] if code else ["no-such-agent"],
                **{"open_s": PATIENCE_S, **settings},
            )
            for name, code in programs.items()
        },
        chat=chat(),
        turns=policy if callable(policy) else policy.turns(),
        limits=dict.fromkeys(
            programs, EpisodeLimits(replace(BUDGET, turns=4, timeout_s=seconds), NO_CONTEXT)
        ),
        seed=1,
        most_open=64,
    ) as runner:
        yield runner
    assert not any(t.name == "keel-agents" for t in threading.enumerate())
    # The system forgets a thread a moment after it has ended.
    wait_for(lambda: not more(held(), before), "the end of what it has started")


@contextmanager
def running(policy: Any, programs: dict[str, str], *more: Any, **settings: Any) -> Iterator[Any]:
    """The same, in a folder for temporary ones, where nothing is left either."""
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        with opened(policy, programs, *more, **settings) as runner:
            yield runner
        assert not os.listdir(folder)


def test_each_end_becomes_a_trajectory_or_a_reason() -> None:
    policy = Policy(lambda turn, _: f"word {turn}" + END, seconds=0.0)
    code = {name: code for name, code in ENDS.items() if "hangs" not in name}
    with running(policy, code) as runner:
        groups = {
            name: runner.submit(
                task(name, ENVIRONMENT if "judge" in name else "answer"),
                group_size=1,
                purpose="train",
            )
            for name in code
        }
        groups["no verdict"] = runner.submit(
            task("asks", ENVIRONMENT), group_size=1, purpose="eval"
        )
        found = {name: future.result(PATIENCE_S) for name, future in groups.items()}
    done = {name: group.trajectories[0] for name, group in found.items() if group.trajectories}
    assert {name: (t.finish_reason, t.usage and t.usage.turns) for name, t in done.items()} == {
        "asks": ("stop", 2),
        "answers": ("stop", 1),
        "judges": ("stop", 1),
        "goes on": ("turns", 4),
        "goes on, judged": ("turns", 4),
        "crashes": ("crash", 1),
        "is refused": ("crash", 1),
    }
    assert [message["content"] for message in done["asks"].messages] == [
        *("Sum.", "word 0", "Go on.", "word 1")
    ]
    assert done["answers"].messages[-1]["content"] == "forty-two"
    assert done["judges"].verdict == Verdict(parts={"correct": 0.5}, facts={"n": 1})
    assert done["goes on, judged"].verdict == Verdict(parts={"correct": 0.0})
    assert done["asks"].verdict == Verdict(parts={})
    reasons = {name: group.dropped[0] for name, group in found.items() if group.dropped}
    gone = reasons.pop("is not there")
    verdict = done["crashes"].verdict
    assert verdict is not None and verdict.parts == {"correct": 0.0}
    assert "exited with status 1" in verdict.facts["crash"]
    assert "no such city" in verdict.facts["crash"]
    assert done["asks"].usage is not None
    assert (done["asks"].usage.contexts_rendered, done["asks"].usage.contexts_extended) == (1, 1)
    refused = done["is refused"]
    assert refused.usage is not None and refused.usage.contexts_refused == 1
    assert done["asks"].dialogues[0].messages == done["asks"].messages
    assert {name: said.partition(f"{sys.executable} ")[2] for name, said in reasons.items()} == {
        "never asks": "ended; its last words: nothing to do; without a turn of the policy",
        "no verdict": "ended; its last words: done; it gave no verdict with a part `correct` and "
        "nothing else grades the task",
    }
    assert "no-such-agent could not be run: cannot run no-such-agent" in gone


def test_a_failing_program_is_left_out_where_asked() -> None:
    with running(says("word"), {"p": ENDS["crashes"]}, drop_failures=True) as runner:
        group = runner.submit(task("p"), group_size=1, purpose="train").result(PATIENCE_S)
    assert not group.trajectories and "no such city" in group.dropped[0]


@pytest.mark.parametrize(
    "error", [OSError("no memory"), *(ApiError(status, "no memory") for status in (408, 429))]
)
def test_a_failure_of_the_endpoint_is_not_the_policys(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        if len(policy.requests) == 1:
            raise error

    monkeypatch.setattr("keel.agents.endpoint.server.read_request", broken(fails))
    policy = Policy(lambda turn, _: "word" + END)
    with running(policy, {"p": "ask(); ask()"}) as runner:
        group = runner.submit(task("p"), group_size=1, purpose="train").result(PATIENCE_S)
    assert not group.trajectories and "no memory" in group.dropped[0]


def broken(fails: Callable[..., None]) -> Callable[..., Any]:
    """`read_request`, after `fails`."""

    def asked(*given: Any, **more: Any) -> Any:
        fails()
        return read_request(*given, **more)

    return asked


def test_a_program_that_hangs_has_the_time_of_its_trajectory() -> None:
    with running(says("word"), {"p": ENDS["hangs"]}, seconds=1.5) as runner:
        group = runner.submit(task("p"), group_size=1, purpose="train").result(PATIENCE_S)
    (trajectory,) = group.trajectories
    assert (trajectory.finish_reason, trajectory.sampled_tokens > 0) == ("deadline", True)


def test_a_program_that_never_asks_has_its_time_to_do_so() -> None:
    with running(says(), {"p": ENDS["hangs at once"]}, open_s=0.3) as runner:
        (reason,) = (
            runner.submit(task("p"), group_size=1, purpose="train").result(PATIENCE_S).dropped
        )
    assert "did not ask for a turn within 0.3 s" in reason


def test_siblings_are_recorded_exactly_and_told_the_same() -> None:
    policy = Policy(lambda turn, _: f"word {turn}" + END)
    purposes: list[str] = []
    answer = policy.turns()

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        purposes.append(purpose)
        return answer(request, purpose)

    code = "ask(); ask(); print(json.dumps({'parts': {}, 'facts': {'s': os.environ['KEEL_SEED']}}))"
    with running(turns, {"p": code}) as runner:
        group = runner.submit(task("p"), group_size=3, purpose="eval").result(PATIENCE_S)
    assert [t.sibling for t in group.trajectories] == [0, 1, 2] and set(purposes) == {"eval"}
    assert len({t.verdict.facts["s"] for t in group.trajectories if t.verdict}) == 1
    assert len({request.conversation for request in policy.requests}) == 3
    assert len({request.seed for request in policy.requests}) == 6
    for trajectory in group.trajectories:
        (segment,) = trajectory.segments
        name = f"p/1/eval/0/0/{trajectory.sibling}"
        second = [r for r in policy.requests if r.conversation == name][1]
        ids = segment.token_ids_T.tolist()
        assert ids[: len(second.token_ids_T)] == second.token_ids_T.tolist()
        assert trajectory.sampled_tokens == segment.trainable_T.sum()
        assert trajectory.usage is not None and trajectory.usage.sampling_s == 2.0


def test_an_environment_beside_it_opens_the_task_and_has_the_verdict() -> None:
    made: list[Sums] = []

    def make() -> Sums:
        made.append(Sums())
        return made[-1]

    code = {
        "says": "assert task['tools'][0]['function']['name'] == 'add'; ask(); "
        "print(json.dumps({'answer': '42', 'parts': {'correct': 0}}))",
        "asks": "ask()",
    }
    with running(says("41"), code, make, judges=False) as runner:
        groups = [
            runner.submit(task(name, ENVIRONMENT), group_size=1, purpose="train") for name in code
        ]
        right, wrong = (group.result(PATIENCE_S).trajectories[0] for group in groups)
    assert [t.verdict for t in (right, wrong)] == [
        Verdict(parts={"correct": 1.0}),
        Verdict(parts={"correct": 0.0}),
    ]
    assert all(environment.log[-2:] == ["verdict stop", "close"] for environment in made)


def lost(fails: str) -> Group:
    with running(says("42"), {"p": "ask()"}, lambda: Sums(fails=fails)) as runner:
        return runner.submit(task("p", ENVIRONMENT), group_size=1, purpose="train").result(
            PATIENCE_S
        )


def test_an_environment_that_is_lost_drops_the_sample() -> None:
    assert lost("open").dropped == ("environment, at open: ended with SIGSEGV",)
    assert lost("verdict").dropped == ("environment, at verdict: ended with SIGSEGV",)


@pytest.mark.parametrize("error", [ValueError("too long"), RuntimeError("no engine is left")])
def test_what_an_engine_says_is_what_the_group_fails_with(error: Exception) -> None:
    """And not the program's to try again."""

    def script(turn: int, _: str) -> str:
        raise error

    code = "try: ask()\nexcept SystemExit: time.sleep(1000)"
    with (
        running(Policy(script), {"p": code}) as runner,
        pytest.raises(type(error), match=str(error)),
    ):
        runner.submit(task("p"), group_size=2, purpose="train").result(PATIENCE_S)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_what_is_given_up_leaves_nothing(how: str) -> None:
    asked: list[Future[TurnResult]] = []
    begun = threading.Event()

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        asked.append(Future())
        begun.set()
        return asked[-1]

    with running(turns, {"p": "ask()"}) as runner:
        group = runner.submit(task("p"), group_size=2, purpose="train")
        assert begun.wait(PATIENCE_S)
        if how == "cancel":
            assert group.cancel()
    with pytest.raises(CancelledError):
        group.result(PATIENCE_S)
    assert all(future.cancelled() for future in asked)


def test_more_than_start_at_once_all_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.agents.runner.STARTING", 2)
    policy = Policy(lambda turn, _: "word" + END)
    with running(policy, {"p": "ask()", "dead": "sys.exit(1)"}) as runner:
        dead = runner.submit(task("dead"), group_size=3, purpose="train")
        group = runner.submit(task("p"), group_size=3, purpose="train").result(PATIENCE_S)
        assert len(dead.result(PATIENCE_S).dropped) == 3
    assert all(isinstance(t, Trajectory) for t in group.trajectories)
    assert len(group.trajectories) == 3


def test_a_close_that_takes_too_long_leaves_no_folder() -> None:
    async def hangs(runner: EpisodeRunner) -> None:
        await asyncio.Event().wait()

    program = AgentProgram(command=["no-such-agent"])
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        runner = EpisodeRunner(
            {"asks": NoEnvironment},
            programs={"asks": program},
            chat=chat(),
            turns=Policy(lambda *_: "").turns(),
            limits={"asks": EpisodeLimits(BUDGET, NO_CONTEXT)},
            seed=1,
            most_open=1,
        )
        assert os.listdir(folder)
        with patch("keel.agents.runner.CLOSING_S", 0.2), patch.object(EpisodeRunner, "_end", hangs):
            runner.close()
        assert not os.listdir(folder)
