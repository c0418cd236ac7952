"""Concurrent synthesis, authors behind an endpoint, and their replies."""

import asyncio
import json
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.environments.general.workshop import (
    _MAX_MUTATIONS,
    _draw_wrong_answers,
    _mutate_answer,
)
from keel.agents.types import ToolResult
from keel.commands.cli import main
from keel.commands.synthesize import _make_all, _MakeTask, synthesize
from keel.configs.load import load_as
from keel.configs.synthesis import AuthorConfig, CostConfig, SynthesisConfig
from keel.rl.turns import Malformed, Parsed, ToolCall, ToolSpec
from keel.synthesis.author import (
    Author,
    AuthorLost,
    BudgetSpent,
    CallUsage,
    SynthesisBudget,
    ToolLoopResult,
    gather_or_cancel,
    run_tool_loop,
)
from keel.synthesis.general.pipeline import _number_function, _split_sections
from keel.synthesis.ledger import Ledger, Rejected
from tests.rewards.judge.judge_server import Reply, Server, running
from tests.synthesis.authors import ScriptedAuthor, completion, replied
from tests.waiting import PATIENCE_S

KEYS = [f"t{n}" for n in range(8)]


def synthesized(
    folder: Path, make: _MakeTask, *, stop_at: str = "", at_once: int = 2, **more: Any
) -> tuple[str, dict[str, Any], list[str]]:
    async def all_of_them() -> tuple[str, dict[str, Any], list[str]]:
        lines: list[str] = []
        stop = asyncio.Event()

        async def one(key: str) -> None:
            if key == stop_at:
                stop.set()
                await asyncio.sleep(1000)
            await make(key)

        with Ledger(folder, {"family": "f", "seed": 1}) as ledger:
            say = lines.append
            why = await _make_all(KEYS, one, ledger, at_once=at_once, say=say, stop=stop, **more)
            return why, ledger.report(), lines

    return asyncio.run(asyncio.wait_for(all_of_them(), PATIENCE_S))


async def even(key: str) -> None:
    await asyncio.sleep(0)
    if int(key[1:]) % 2:
        raise Rejected("parity", "is odd \ud83d"[: 6 + 2 * (key == "t1")])


def test_first_error_keeps_its_cause_and_cancels_the_others() -> None:
    cause = OSError("no route")

    async def fail() -> None:
        raise AuthorLost("gone") from cause

    with pytest.raises(AuthorLost) as caught:
        asyncio.run(gather_or_cancel(fail(), asyncio.sleep(1000)))
    assert caught.value.__cause__ is cause


def test_tasks_are_kept_or_rejected(tmp_path: Path) -> None:
    why, report, lines = synthesized(tmp_path / "out", even)
    assert why == "" and (report["made"], report["kept"]) == (8, 4)
    assert report["refused"] == {
        "parity": {"tasks": 4, "reasons": {"is odd": 3, "is odd \ud83d": 1}}
    }
    saved = json.loads((tmp_path / "out/report.json").read_text())
    assert lines[-1].startswith("8 of 8: ") and saved["kept"] == report["kept"]
    assert saved["refused"]["parity"]["reasons"] == {"is odd": 3, "is odd ?": 1}


def test_stopped_synthesis_resumes(tmp_path: Path) -> None:
    requests: list[str] = []

    async def make(key: str) -> None:
        requests.append(key)
        await even(key)

    why, report, _ = synthesized(tmp_path, make, stop_at="t5", at_once=1)
    assert (why, report["made"], requests) == ("stopped", 5, KEYS[:5])
    with (tmp_path / "outcomes.jsonl").open("a") as file:
        file.write('{"key": "t5", "outc')  # as a crash leaves it
    why, report, lines = synthesized(tmp_path, make)
    assert (why, report["made"]) == ("", 8) and sorted(requests) == KEYS
    assert lines[0] == "5 of 8 tasks already made"


def test_next_start_retries_a_lost_author(tmp_path: Path) -> None:
    lost = set(KEYS[:2])

    async def make(key: str) -> None:
        if key in lost:
            raise AuthorLost("no reply")

    why, report, lines = synthesized(tmp_path, make)
    assert why == "stopped" and report["made"] == 6 and "t0: no reply" in lines[0]
    lost.clear()
    assert synthesized(tmp_path, make)[1]["made"] == 8


@pytest.mark.e2e
def test_synthesis_needs_a_sandbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **more: None if name == "bwrap" else which(name, **more)
    )
    recipe = tmp_path / "tasks.yaml"
    author = {"base_url": "http://localhost:1/v1", "model": "m"}
    general = {"categories": ["shops"]}
    sections = {"family": "general", "dir": str(tmp_path / "out"), "author": author}
    recipe.write_text(json.dumps({**sections, "general": general}))
    assert main(["synthesize", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert "bwrap is not installed" in error and "i-trust" not in error


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_signal_ends_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, kind: type
) -> None:
    raised: list[BaseException] = []

    def prepare(*_: object) -> None:
        try:
            signal.raise_signal(number)
        except BaseException as error:
            raised.append(error)
            raise

    monkeypatch.setattr("keel.commands.synthesize._pipeline_of", prepare)
    author = {"base_url": "http://localhost:1/v1", "model": "m"}
    recipe = tmp_path / "tasks.yaml"
    recipe.write_text(json.dumps({"family": "code", "dir": str(tmp_path), "author": author}))
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(kind):
            synthesize(load_as(SynthesisConfig, recipe))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert [type(error) for error in raised] == [kind]


def test_recipe_of_the_page_loads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/synthesis.md").read_text()
    recipe = tmp_path / "tasks.yaml"
    recipe.write_text(re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0])
    config = load_as(SynthesisConfig, recipe)
    assert config.family == "general" and len(config.general.categories) == 3


EMPTY = {"type": "object", "properties": {}, "required": []}
LOOK = ToolSpec(name="look", description="", parameters=EMPTY)
ASK = ({"role": "user", "content": "Write a task."},)


def words(text: str, **usage: int) -> Reply:
    return completion({"role": "assistant", "content": text}, "stop", **usage)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Server]:
    with running(lambda _: words("")) as server:
        yield server


def author_of(
    server: Server, limits: CostConfig | None = None, **knobs: Any
) -> tuple[Author, list[CallUsage]]:
    config = AuthorConfig(base_url=server.url, model="m", **{"timeout_s": PATIENCE_S, **knobs})
    kept: list[CallUsage] = []
    return Author(config, SynthesisBudget(limits or CostConfig(), [], kept.append)), kept


def ask(author: Author, times: int = 1, **more: Any) -> list[Parsed | BaseException]:
    async def all_of_them() -> list[Any]:
        try:
            work = (author.ask(ASK, purpose="test", **more) for _ in range(times))
            return await asyncio.gather(*work, return_exceptions=True)
        finally:
            await author.close()

    return asyncio.run(all_of_them())


def test_request_and_reply(endpoint: Server) -> None:
    endpoint.reset()
    calls = [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "look", "arguments": '{"at": '}},
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    endpoint.behave = lambda _: completion(message, prompt_tokens=7, completion_tokens=5)
    author, kept = author_of(
        endpoint, usd_per_million_prompt_tokens=1.0, usd_per_million_completion_tokens=10.0
    )
    (answer,) = ask(author, tools=(LOOK,))
    assert isinstance(answer, Parsed) and answer.content == ""
    good, bad = answer.calls
    assert good == ToolCall(call_id="1", name="look", arguments={"at": 1})
    assert isinstance(bad, Malformed) and bad.call_id == "2"
    (request,) = endpoint.requests
    assert request["messages"] == list(ASK) and request["tools"] == [LOOK.as_json()]
    assert [usage.tokens for usage in kept] == [12] and kept[0].purpose == "test"
    assert kept[0].usd == pytest.approx(57e-6)


def test_calls_in_flight_respect_the_budget(endpoint: Server) -> None:
    endpoint.reset()
    endpoint.behave = lambda _: replace(
        words("x", prompt_tokens=10, completion_tokens=50), delay_s=0.05
    )
    author, kept = author_of(endpoint, CostConfig(tokens=350), max_tokens=100)
    replies = ask(author, times=4)
    spent = [one for one in replies if isinstance(one, BudgetSpent)]
    assert len(endpoint.requests) == len(kept) == 2 and len(spent) == 2
    assert "budget.tokens" in str(spent[0])


def test_cancelled_call_in_flight_is_charged(endpoint: Server) -> None:
    endpoint.reset()
    endpoint.behave = lambda _: replace(words("x"), delay_s=PATIENCE_S)
    author, kept = author_of(endpoint, CostConfig(tokens=10_000), max_concurrent=1, max_tokens=7)

    async def cancelled() -> None:
        asking = [asyncio.ensure_future(author.ask(ASK, purpose="test")) for _ in range(2)]
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await author.close()

    asyncio.run(cancelled())
    assert [usage.completion_tokens for usage in kept] == [7]


@pytest.mark.parametrize(
    ("reply", "billed"),
    [
        (Reply('{"error": {"message": "no such model: s3cret"}}', status=404), False),
        (Reply("", hang_up=True), False),
        (Reply("[]"), True),
        (Reply('{"choices": []}'), True),
        (replace(words("late"), delay_s=1000), True),
    ],
)
def test_lost_author_reports_no_key(
    endpoint: Server, reply: Reply, billed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTHORS_KEY", "s3cret")
    endpoint.behave = lambda _: reply
    timeout_s = 0.05 if reply.delay_s else PATIENCE_S
    author, kept = author_of(endpoint, retries=0, api_key_env="AUTHORS_KEY", timeout_s=timeout_s)
    with pytest.raises(AuthorLost) as caught:
        raise ask(author)[0]  # type: ignore[misc]
    assert "s3cret" not in str(caught.value)
    assert bool(kept) == billed  # late ones may have been computed


@pytest.mark.parametrize("reply", [Reply("no such model", status=404), Reply("<html>")])
def test_misconfigured_server_leaves_its_requests_to_another(
    endpoint: Server, reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.rewards.judge.servers._BACKOFF_S", 0.001)
    endpoint.behave = lambda _: words("a task")
    with running(lambda _: reply) as wrong:
        both = Server(words, url=f"{wrong.url} {endpoint.url}")
        # Enough slots on the other server for every retry.
        author, _ = author_of(both, retries=1, max_concurrent=20)
        assert ask(author, times=20) == [replied("a task")] * 20
        assert author._pool.servers[0].failures == len(wrong.requests) > 0


def test_overlong_conversation_is_truncated(endpoint: Server) -> None:
    error = '{"error": {"message": "This model\'s maximum context length is 2048 tokens."}}'
    endpoint.behave = lambda _: Reply(error, status=400)

    async def both() -> list[Any]:
        author, _ = author_of(endpoint)
        try:
            later = [*ASK, {"role": "assistant", "content": "…"}, *ASK]
            work = (author.ask(prompt, purpose="test") for prompt in (ASK, later))
            return await asyncio.gather(*work, return_exceptions=True)
        finally:
            await author.close()

    first, later = asyncio.run(both())
    assert isinstance(first, AuthorLost) and "author.max_tokens = 8192" in str(first)
    assert later == replied(cut=True)


SCHEMA = {"type": "object", "required": ["a"], "additionalProperties": False}
SCHEMA["properties"] = {"a": {"type": "integer"}}
ADD = ToolSpec(name="add", description="", parameters=SCHEMA)


def worked(*script: Parsed | str, most_turns: int = 5) -> tuple[ToolLoopResult, list[ToolCall]]:
    ran: list[ToolCall] = []

    async def call(one: ToolCall) -> ToolResult:
        ran.append(one)
        a = one.arguments["a"]
        return ToolResult(text=str(a + 1), failed=a == 13, done=a == 99)

    author, how = ScriptedAuthor(list(script)), {"most_turns": most_turns, "purpose": "test"}
    done = run_tool_loop(
        author, [{"role": "user", "content": "Count."}], tools=[ADD], call=call, **how
    )
    return asyncio.run(done), ran


def add(a: object, number: str = "1") -> ToolCall:
    return ToolCall(call_id=number, name="add", arguments={"a": a})


def results(done: ToolLoopResult) -> list[str]:
    return [message["content"] for message in done.messages if message["role"] == "tool"]


def test_it_calls_until_it_has_an_answer() -> None:
    broken = Malformed(call_id="3", text="add(", why="no JSON")
    done, ran = worked(
        replied(calls=(add(1), add("one", "2"), broken)),
        replied(calls=(add(13),)),
        "two",
    )
    assert [one.arguments["a"] for one in ran] == [1, 13]
    first, second, third, fourth = results(done)
    assert first == "2" and "integer" in second and "no JSON" in third and fourth == "error: 14"
    assert (done.ended, done.answer) == ("stop", "two")
    requests = [message for message in done.messages if message.get("tool_calls")]
    assert [one["id"] for one in requests[0]["tool_calls"]] == ["1", "2", "3"]


def test_other_endings() -> None:
    assert worked(replied(calls=(add(99), add(1))))[0].ended == "done"
    cut, ran = worked(replied("I th", calls=(add(1),), cut=True))
    assert cut.ended == "length" and not ran
    forever = [replied(calls=(add(1),))] * 9
    done, ran = worked(*forever, most_turns=3)
    assert (done.ended, done.answer, len(ran)) == ("turns", "", 3)


REPLY = """\
Here is a harder one.

## question
Which is it? A list.

### solve.py
```python
# tools
def solve(tools):
    return [1]
```

## verify:
~~~
def verify(answer, database):
    return answer == [1]
~~~
"""


def test_sections_of_a_reply() -> None:
    parts = _split_sections(replied(REPLY), ("question", "solve", "verify"), ("tools",))
    assert list(parts) == ["question", "solve", "verify"]
    assert parts["question"] == "Which is it? A list.\n"
    assert _number_function(parts["solve"], "solve", 2).startswith("# tools\ndef solve_2(tools):")
    assert parts["verify"].endswith("== [1]\n")
    capitals = REPLY.replace("## verify", "## Verify")
    assert _split_sections(replied(capitals), ("question", "solve", "verify")) == parts
    for cut, text in ((True, REPLY), (False, REPLY.replace("verify:", "proof"))):
        with pytest.raises(Rejected):
            _split_sections(replied(text, cut=cut), ("question", "solve", "verify"))
    with pytest.raises(Rejected):
        _number_function("def solve(tools):\n    pass\ndef solve(tools):\n    pass", "solve", 0)


def test_mutations_reach_every_part() -> None:
    inn, house = {"hotel": "Inn", "price": 3}, {"hotel": "House", "price": 2.5}
    answer: dict[str, Any] = {"days": [inn, house], "ok": True}
    made = _mutate_answer(answer)
    assert answer not in made and len({json.dumps(one) for one in made}) == len(made)
    for days in (
        [{**inn, "hotel": ""}, house],
        [inn, {**house, "price": -3.5}],
        [{"hotel": "Inn"}, house],
        [inn],
        [inn, house, house],
    ):
        assert {**answer, "days": days} in made
    assert {**answer, "ok": False} in made and {"days": answer["days"]} in made
    assert answer["days"][0] == {"hotel": "Inn", "price": 3}  # none of it was changed
    assert len(_mutate_answer({"long": list(range(500))})) == _MAX_MUTATIONS
    others = _draw_wrong_answers(answer, ["Inn", "Park"], 1)
    assert others == _draw_wrong_answers(answer, ["Inn", "Park"], 1) and answer not in others
    assert {one["days"][0]["hotel"] for one in others} == {"Inn", "Park"}
