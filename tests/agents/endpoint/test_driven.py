"""Episodes that a program drives: the record of each end, and the report of a trial."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from keel.agents.endpoint.driven import ProgramTrial, try_program
from keel.agents.endpoint.program import AgentProgram
from keel.agents.endpoint.requests import read_request
from keel.agents.runner import EpisodeKind, EpisodeRunner
from keel.agents.types import NoEnvironment
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import ENVIRONMENT, Group, Prompt, Purpose, Verdict
from keel.trainer.build_agents import spoken_ids
from tests.agents.endpoint import kit
from tests.agents.endpoint.kit import check_law
from tests.agents.episodes import held, more, run
from tests.agents.scripted import BUDGET, CHAT, NO_CONTEXT, Policy, Sums
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.e2e

# Plain sockets: importing an HTTP library would take longer than the rest of a program's life.
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
        while until:  # leave without the answer once that file exists
            if os.path.exists(until):
                return None, None
            time.sleep(0.01)
        head, _, text = reply.read().partition(b"\\r\\n\\r\\n")
    return head.split()[1] == b"200", json.loads(text)
def ask(answer="Go on.", **fields):
    body = {"messages": messages, **fields}
    fine, reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    if not fine:
        raise SystemExit(reply["error"]["message"])
    message = reply["choices"][0]["message"]
    messages.extend([message, {"role": "user", "content": answer}])
    return message["content"]
"""
ENDS = {
    "asks": "ask(); ask(); print('done')",
    "answers": "ask(); print(json.dumps({'answer': 'forty-' + 'two'}))",
    "judges": "ask(); print(json.dumps({'parts': {'correct': 0.5}, 'facts': {'n': 1}}))",
    "continues": "while True: ask()",
    "continues, judged": "print(json.dumps({'parts': {'correct': 0}}))\nwhile True: ask()",
    "crashes": "ask(); raise KeyError('no such city')",
    "is refused": "ask(); ask(guided_json={})",
    "never asks": "print('nothing to do')",
    "is missing": "",
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


def played(
    runner: EpisodeRunner,
    name: str,
    kind: str = "answer",
    *,
    size: int = 1,
    purpose: Purpose = "train",
) -> Group:
    return runner.submit(task(name, kind), group_size=size, purpose=purpose).result(PATIENCE_S)


@contextmanager
def running(
    policy: Any,
    programs: dict[str, str],
    environment: Callable[[], Any] = NoEnvironment,
    *,
    seconds: float = PATIENCE_S,
    **settings: Any,
) -> Iterator[EpisodeRunner]:
    """Run programs, and assert that no process, thread or file is left."""
    before = held()
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        with EpisodeRunner(
            {
                name: EpisodeKind(
                    environment=environment,
                    chat=CHAT,
                    budget=replace(BUDGET, turns=4, timeout_s=seconds),
                    context=NO_CONTEXT,
                    program=AgentProgram(
                        command=[sys.executable, "-S", "-c", ASK + code] if code else ["no-agent"],
                        **{"open_s": PATIENCE_S, **settings},
                    ),
                )
                for name, code in programs.items()
            },
            turns=policy if callable(policy) else policy.submit,
            seed=1,
            most_open=64,
        ) as runner:
            yield runner
        assert not os.listdir(folder)
    assert not any(t.name == "keel-agents" for t in threading.enumerate())
    wait_for(lambda: not more(held(), before), "the end of all processes")


def test_each_end_gives_a_trajectory_or_reason() -> None:
    policy = Policy(lambda _, turn: f"word {turn}", seconds=0.0)
    with running(policy, ENDS) as runner:
        groups = {
            name: played(runner, name, ENVIRONMENT if "judge" in name else "answer")
            for name in ENDS
        }
        groups["no verdict"] = played(runner, "asks", ENVIRONMENT, purpose="eval")
    done = {name: group.trajectories[0] for name, group in groups.items() if group.trajectories}
    assert {name: (t.finish_reason, t.usage and t.usage.turns) for name, t in done.items()} == {
        "asks": ("stop", 2),
        "answers": ("stop", 1),
        "judges": ("stop", 1),
        "continues": ("turns", 4),
        "continues, judged": ("turns", 4),
        "crashes": ("crash", 1),
        "is refused": ("crash", 1),
    }
    contents = [message["content"] for message in done["asks"].messages]
    assert contents == ["Sum.", "word 0", "Go on.", "word 1"]
    assert done["answers"].messages[-1]["content"] == "forty-two"
    assert done["judges"].verdict == Verdict(parts={"correct": 0.5}, facts={"n": 1})
    assert done["continues, judged"].verdict == Verdict(parts={"correct": 0.0})
    assert done["asks"].verdict == Verdict(parts={})
    verdict = done["crashes"].verdict
    assert verdict is not None and verdict.parts == {"correct": 0.0}
    assert "no such city" in verdict.facts["crash"]
    usage = done["asks"].usage
    assert usage is not None and (usage.contexts_rendered, usage.contexts_extended) == (1, 1)
    assert done["asks"].dialogues[0].messages == done["asks"].messages
    reasons = {name: group.dropped[0] for name, group in groups.items() if group.dropped}
    assert reasons.keys() == {"never asks", "no verdict", "is missing"}
    assert "nothing to do" in reasons["never asks"] and "no-agent" in reasons["is missing"]


def test_endpoint_failure_drops_the_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Policy(["word"]), {"p": ENDS["crashes"]}, drop_failures=True) as runner:
        assert "no such city" in played(runner, "p").dropped[0]
    policy = Policy(["word"])

    def read(body: Any) -> Any:
        if len(policy.requests) == 1:
            raise OSError("no memory")
        return read_request(body)

    monkeypatch.setattr("keel.agents.endpoint.server.read_request", read)
    with running(policy, {"p": "ask(); ask()"}) as runner:
        group = played(runner, "p")
    assert not group.trajectories and "no memory" in group.dropped[0]


def test_hanging_programs_meet_their_deadlines() -> None:
    with running(Policy(["word"]), {"p": "ask(); time.sleep(1000)"}, seconds=1.5) as runner:
        (trajectory,) = played(runner, "p").trajectories
    assert (trajectory.finish_reason, trajectory.sampled_tokens > 0) == ("deadline", True)
    with running(Policy([]), {"p": "time.sleep(1000)"}, open_s=0.3) as runner:
        assert "0.3 s" in played(runner, "p").dropped[0]


def test_siblings_share_a_seed_and_are_recorded_exactly() -> None:
    policy = Policy(lambda _, turn: f"word {turn}")
    code = "ask(); ask(); print(json.dumps({'parts': {}, 'facts': {'s': os.environ['KEEL_SEED']}}))"
    with running(policy, {"p": code}) as runner:
        group = played(runner, "p", size=3, purpose="eval")
    assert [t.sibling for t in group.trajectories] == [0, 1, 2]
    assert len({t.verdict.facts["s"] for t in group.trajectories if t.verdict}) == 1
    assert len({request.seed for request in policy.requests}) == 6
    check_law(policy, [segment for t in group.trajectories for segment in t.segments])
    assert all(len(trajectory.segments) == 1 for trajectory in group.trajectories)


def test_environment_opens_the_task_and_grades() -> None:
    environments: list[Sums] = []

    def make() -> Sums:
        environments.append(Sums(fails="verdict" if len(environments) == 2 else ""))
        return environments[-1]

    code = (
        "assert task['tools'][0]['function']['name'] == 'add'; ask(); "
        "print(json.dumps({'answer': ANSWER, 'parts': {'correct': 0}}))"
    )
    programs = {str(n): code.replace("ANSWER", f"'{n}'") for n in (42, 41, 40)}
    with running(Policy(["41"]), programs, make, judges=False) as runner:
        right, wrong, lost = (played(runner, name, ENVIRONMENT) for name in programs)
    verdicts = [group.trajectories[0].verdict for group in (right, wrong)]
    assert verdicts == [Verdict(parts={"correct": 1.0}), Verdict(parts={"correct": 0.0})]
    assert lost.dropped == ("environment, at verdict: ended with SIGSEGV",)
    assert all(environment.log[-2:] == ["verdict stop", "close"] for environment in environments)


def test_engine_error_fails_the_group() -> None:
    policy = Policy([])
    policy.fail = ValueError("too long")
    code = "try: ask()\nexcept SystemExit: time.sleep(1000)"
    with running(policy, {"p": code}) as runner, pytest.raises(ValueError, match="too long"):
        played(runner, "p", size=2)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancelled_group_leaves_nothing(how: str) -> None:
    futures: list[Future[TurnResult]] = []
    begun = threading.Event()

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        futures.append(Future())
        begun.set()
        return futures[-1]

    with running(turns, {"p": "ask()"}) as runner:
        group = runner.submit(task("p"), group_size=2, purpose="train")
        assert begun.wait(PATIENCE_S)
        if how == "cancel":
            assert group.cancel()
    with pytest.raises(CancelledError):
        group.result(PATIENCE_S)
    assert all(future.cancelled() for future in futures)


def trial(code: str, folder: Path, kind: str = "answer", **settings: Any) -> ProgramTrial:
    (folder / "agent.py").write_text(ASK + code)
    return run(
        try_program(
            AgentProgram(
                command=[sys.executable, "agent.py"],
                folder=folder,
                open_s=settings.pop("open_s", PATIENCE_S),
            ),
            NoEnvironment(),
            task=task("p", kind),
            seed=3,
            chat=kit.CHAT,
            speak=lambda text: spoken_ids(kit.CHAT, text, thinking=False),
            budget=replace(kit.BUDGET, **settings),
        )
    )


@pytest.mark.parametrize(
    ("code", "turns", "outcome"),
    [
        ("assert ask() == '\\\\boxed{0}'", 1, "ended well"),
        ("while True: ask()", 3, "(turns)"),
        ("ask(); ask(response_format={'type': 'json_object'})", 1, "response_format"),
    ],
)
def test_trial_reports_the_outcome(tmp_path: Path, code: str, turns: int, outcome: str) -> None:
    result = trial(code, tmp_path)
    opening = kit.CHAT.opening(task("p").messages, (), thinking=False)
    assert (result.turns, result.opening_tokens) == (turns, len(opening))
    assert outcome in result.ended


@pytest.mark.parametrize(
    ("code", "settings", "reason"),
    [
        ("import a_package.part", {}, "No module named 'a_package'"),
        ("ask()", {"window": 8}, "agents.window"),
        ("ask()", {"kind": ENVIRONMENT}, "KEEL_VERDICT"),
    ],
)
def test_trial_error_names_the_cause(
    tmp_path: Path, code: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError) as caught:
        trial(code, tmp_path, **settings)
    assert "p/1" in str(caught.value) and reason in str(caught.value)
