"""Episodes that a program drives: the record of each end, and the report of a trial."""

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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from keel.agents.endpoint.driven import ProgramTrial, try_program
from keel.agents.endpoint.program import AgentProgram, command_of
from keel.agents.endpoint.requests import ApiError, read_request
from keel.agents.runner import EpisodeLimits, EpisodeRunner
from keel.agents.types import NoEnvironment
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import ENVIRONMENT, Prompt, Purpose, Trajectory, Verdict
from keel.trainer.build_agents import spoken_ids
from tests.agents.endpoint import kit
from tests.agents.episodes import held, more, run
from tests.agents.scripted import BUDGET, END, NO_CONTEXT, Policy, Sums, chat, says
from tests.rollout.chat.families import NAMES, chat_of
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
        assert not os.listdir(folder)
    assert not any(t.name == "keel-agents" for t in threading.enumerate())
    wait_for(lambda: not more(held(), before), "the end of all processes")


def test_each_end_gives_a_trajectory_or_reason() -> None:
    policy = Policy(lambda turn, _: f"word {turn}" + END, seconds=0.0)
    with running(policy, ENDS) as runner:
        futures = {
            name: runner.submit(
                task(name, ENVIRONMENT if "judge" in name else "answer"),
                group_size=1,
                purpose="train",
            )
            for name in ENDS
        }
        futures["no verdict"] = runner.submit(
            task("asks", ENVIRONMENT), group_size=1, purpose="eval"
        )
        groups = {name: future.result(PATIENCE_S) for name, future in futures.items()}
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
    assert [message["content"] for message in done["asks"].messages] == [
        *("Sum.", "word 0", "Go on.", "word 1")
    ]
    assert done["answers"].messages[-1]["content"] == "forty-two"
    assert done["judges"].verdict == Verdict(parts={"correct": 0.5}, facts={"n": 1})
    assert done["continues, judged"].verdict == Verdict(parts={"correct": 0.0})
    assert done["asks"].verdict == Verdict(parts={})
    verdict = done["crashes"].verdict
    assert verdict is not None and verdict.parts == {"correct": 0.0}
    assert "no such city" in verdict.facts["crash"]
    assert done["asks"].usage is not None
    assert (done["asks"].usage.contexts_rendered, done["asks"].usage.contexts_extended) == (1, 1)
    usage = done["is refused"].usage
    assert usage is not None and usage.contexts_refused == 1
    assert done["asks"].dialogues[0].messages == done["asks"].messages
    reasons = {name: group.dropped[0] for name, group in groups.items() if group.dropped}
    assert reasons.keys() == {"never asks", "no verdict", "is missing"}
    assert "nothing to do" in reasons["never asks"] and "no-such-agent" in reasons["is missing"]


def test_drop_failures_drops_a_crash() -> None:
    with running(says("word"), {"p": ENDS["crashes"]}, drop_failures=True) as runner:
        group = runner.submit(task("p"), group_size=1, purpose="train").result(PATIENCE_S)
    assert not group.trajectories and "no such city" in group.dropped[0]


@pytest.mark.parametrize("error", [OSError("no memory"), ApiError(429, "no memory")])
def test_endpoint_failure_drops_the_trajectory(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: Any, **options: Any) -> Any:
        if len(policy.requests) == 1:
            raise error
        return read_request(*arguments, **options)

    monkeypatch.setattr("keel.agents.endpoint.server.read_request", read)
    policy = Policy(lambda turn, _: "word" + END)
    with running(policy, {"p": "ask(); ask()"}) as runner:
        group = runner.submit(task("p"), group_size=1, purpose="train").result(PATIENCE_S)
    assert not group.trajectories and "no memory" in group.dropped[0]


def test_hanging_programs_meet_their_deadlines() -> None:
    with running(says("word"), {"p": "ask(); time.sleep(1000)"}, seconds=1.5) as runner:
        group = runner.submit(task("p"), group_size=1, purpose="train").result(PATIENCE_S)
    (trajectory,) = group.trajectories
    assert (trajectory.finish_reason, trajectory.sampled_tokens > 0) == ("deadline", True)
    with running(says(), {"p": "time.sleep(1000)"}, open_s=0.3) as runner:
        group = runner.submit(task("p"), group_size=1, purpose="train").result(PATIENCE_S)
    assert "0.3 s" in group.dropped[0]


def test_siblings_share_a_seed_and_are_recorded_exactly() -> None:
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


def test_environment_opens_the_task_and_grades() -> None:
    environments: list[Sums] = []

    def make() -> Sums:
        environments.append(Sums())
        return environments[-1]

    programs = {
        "answers": "assert task['tools'][0]['function']['name'] == 'add'; ask(); "
        "print(json.dumps({'answer': '42', 'parts': {'correct': 0}}))",
        "asks": "ask()",
    }
    with running(says("41"), programs, make, judges=False) as runner:
        futures = [
            runner.submit(task(name, ENVIRONMENT), group_size=1, purpose="train")
            for name in programs
        ]
        verdicts = [future.result(PATIENCE_S).trajectories[0].verdict for future in futures]
    assert verdicts == [Verdict(parts={"correct": 1.0}), Verdict(parts={"correct": 0.0})]
    assert all(environment.log[-2:] == ["verdict stop", "close"] for environment in environments)


def test_lost_environment_drops_the_trajectory() -> None:
    for phase in ("open", "verdict"):
        with running(says("42"), {"p": "ask()"}, lambda: Sums(fails=phase)) as runner:  # noqa: B023
            future = runner.submit(task("p", ENVIRONMENT), group_size=1, purpose="train")
            assert future.result(PATIENCE_S).dropped == (
                f"environment, at {phase}: ended with SIGSEGV",
            )


@pytest.mark.parametrize("error", [ValueError("too long"), RuntimeError("no engine is left")])
def test_engine_error_fails_the_group(error: Exception) -> None:
    def fails(turn: int, _: str) -> str:
        raise error

    code = "try: ask()\nexcept SystemExit: time.sleep(1000)"
    with (
        running(Policy(fails), {"p": code}) as runner,
        pytest.raises(type(error), match=str(error)),
    ):
        runner.submit(task("p"), group_size=2, purpose="train").result(PATIENCE_S)


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


def test_all_start_beyond_the_starting_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.agents.runner._STARTING", 2)
    policy = Policy(lambda turn, _: "word" + END)
    with running(policy, {"p": "ask()", "dead": "sys.exit(1)"}) as runner:
        dead = runner.submit(task("dead"), group_size=3, purpose="train")
        group = runner.submit(task("p"), group_size=3, purpose="train").result(PATIENCE_S)
        assert len(dead.result(PATIENCE_S).dropped) == 3
    assert all(isinstance(t, Trajectory) for t in group.trajectories)
    assert len(group.trajectories) == 3


def test_slow_close_removes_the_folder() -> None:
    async def hangs(runner: EpisodeRunner) -> None:
        await asyncio.Event().wait()

    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        runner = EpisodeRunner(
            {"asks": NoEnvironment},
            programs={"asks": AgentProgram(command=["no-such-agent"])},
            chat=chat(),
            turns=Policy(lambda *_: "").turns(),
            limits={"asks": EpisodeLimits(BUDGET, NO_CONTEXT)},
            seed=1,
            most_open=1,
        )
        assert os.listdir(folder)
        with patch("keel.agents.runner._CLOSE_S", 0.2), patch.object(EpisodeRunner, "_end", hangs):
            runner.close()
        assert not os.listdir(folder)


def trial(code: str, folder: Path, **settings: Any) -> ProgramTrial:
    (folder / "agent.py").write_text(ASK + code)
    budget = {name: settings.pop(name) for name in ("window", "turns") if name in settings}
    kind = settings.pop("kind", "answer")
    command = [sys.executable, "agent.py"]
    program = AgentProgram(
        **{"command": command, "folder": folder, "open_s": PATIENCE_S, **settings}
    )
    return run(
        try_program(
            program,
            NoEnvironment(),
            task=task("p", kind),
            seed=3,
            chat=kit.CHAT,
            speak=lambda text: spoken_ids(kit.CHAT, text, thinking=False),
            budget=replace(kit.BUDGET, **budget),
        )
    )


@pytest.mark.parametrize(
    ("code", "turns", "outcome"),
    [
        ("assert ask() == '\\\\boxed{0}'", 1, "ended well"),
        ("while True: ask()", 3, "(turns)"),
        ("int(ask())", 1, "ValueError: invalid lit"),
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
        ("import a_package.part", {}, f"{sys.executable} -m pip install a_package"),
        ("ask()\nimport late", {}, "-m pip install late"),
        ("raise KeyError('mine')", {}, "KeyError: 'mine'"),
        ("raise OSError('Connection refused')", {}, "OPENAI_BASE_URL"),
        (
            "post(os.environ['OPENAI_BASE_URL'] + '/responses', {}); sys.exit(1)",
            {},
            "POST responses",
        ),
        ("pass", {}, "OPENAI_BASE_URL"),
        ("time.sleep(1000)", {"open_s": 0.3}, "open_s"),
        ("ask()", {"window": 8}, "agents.window"),
        ("ask()", {"kind": ENVIRONMENT}, "KEEL_VERDICT"),
        ("messages.append({'role': 'tool'}); ask()", {}, "messages[1].tool_call_id"),
    ],
)
def test_trial_error_names_the_cure(
    tmp_path: Path, code: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError) as caught:
        trial(code, tmp_path, **settings)
    assert "p/1" in str(caught.value) and reason in str(caught.value)
    assert ("OPENAI_BASE_URL" in str(caught.value)) is ("OPENAI" in reason)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("agent/my_agent.py:solve", "my_agent.py in folder"),
        ("my_agent.py:slve", "solve"),
        ("my_agnt:solve", "my_agnt"),
        ("my_agent:more", "`problem` and `x`"),
    ],
)
def test_trial_of_a_missing_function(tmp_path: Path, target: str, reason: str) -> None:
    (tmp_path / "my_agent.py").write_text("def solve(task): ...\ndef more(problem, x): ...\n")
    command = command_of(target, python=sys.executable, folder=tmp_path)
    with pytest.raises(ValueError) as caught:
        trial("", tmp_path, command=command)
    assert reason in str(caught.value) and "OPENAI_BASE_URL" not in str(caught.value)


def test_trial_finds_a_scripts_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python"  # a first line has no room for a space in a path
    python.symlink_to(sys.executable)
    (tmp_path / "tool").write_text(f"#!{python}\nimport an_unknown_package\n")
    (tmp_path / "tool").chmod(0o755)
    command = command_of("./tool", python=sys.executable, folder=tmp_path)
    with pytest.raises(ValueError, match=f"{python} -m pip install an_unknown_package"):
        trial("", tmp_path, command=command)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("thinking", [False, True])
def test_scripted_text_parses_in_every_format(family: str, thinking: bool) -> None:
    text, family_chat = "\\boxed{0}", chat_of(family)
    ids = spoken_ids(family_chat, text, thinking=thinking)
    parsed = family_chat.parse(ids, (), thinking=thinking, turn=0)
    assert parsed.closed and parsed.content.strip() == text and not parsed.calls
