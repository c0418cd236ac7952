"""A small environment that passes every gate, cheats that one gate refuses, and hostile code."""

import asyncio
import json
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.agents.environments.general.author_code import Folder, resolve_folders
from keel.agents.types import EnvironmentLost
from keel.configs.synthesis import GeneralConfig
from keel.rl.turns import Message, Parsed, ToolCall, ToolSpec
from keel.rl.types import Verdict
from keel.synthesis.general.pipeline import GeneralPipeline
from keel.synthesis.general.sandboxes import GeneralSandboxes
from keel.synthesis.ledger import Rejected
from tests.agents.sandboxes import commands, wrap_of
from tests.synthesis.authors import ScriptedAuthor, replied, run_pipeline
from tests.waiting import PATIENCE_S, wait_for, within_some

PRICES = {"apple": 4, "fig": 9, "grape": 7, "lime": 3, "melon": 12, "plum": 6}
FRUIT = [
    {"name": name, "price": price, "stall": ("east", "west")[at % 2]}
    for at, (name, price) in enumerate(PRICES.items())
]
TOOLS = '''\
"""Fruit on a market."""


def fruit(stall: str) -> list[str]:
    """What a stall sells: east or west."""
    return [each["name"] for each in database["fruit"] if each["stall"] == stall]


def price(name: str) -> int:
    """The price of a fruit."""
    for each in database["fruit"]:
        if each["name"] == name:
            return each["price"]
    raise LookupError(f"there is no {name!r}")
'''
SOLVE = """\
def solve(tools):
    prices = {name: tools.price(name=name) for name in tools.fruit(stall="east")}
    best = min(prices, key=prices.get)
    return {"name": best, "price": prices[best]}
"""
VERIFY = """\
def verify(answer, database):
    east = [each for each in database["fruit"] if each["stall"] == "east"]
    best = min(east, key=lambda each: each["price"])
    return answer == {"name": best["name"], "price": best["price"]}
"""
HARDER_SOLVE = SOLVE.replace(
    'tools.fruit(stall="east")', '(*tools.fruit(stall="east"), *tools.fruit(stall="west"))'
)
HARDER_VERIFY = VERIFY.replace(' if each["stall"] == "east"', "")
QUESTIONS = (
    "Which fruit of stall east is the cheapest? A JSON object with name and price.",
    "Which fruit of stalls east and west is the cheapest? A JSON object with name and price.",
)
CONFIG: dict[str, Any] = dict.fromkeys(("call_s", "solve_s", "verify_s", "bash_s"), PATIENCE_S)


def config(**changes: Any) -> GeneralConfig:
    return GeneralConfig(**{**CONFIG, **changes})


def environment(folder: Path, **parts: str) -> Path:
    """Write a folder with two tasks, of which some parts are replaced."""
    harder = {"harder_solve": HARDER_SOLVE, "harder_verify": HARDER_VERIFY}
    pieces = {"tools": TOOLS, "solve": SOLVE, "verify": VERIFY, **harder, **parts}
    folder.mkdir(parents=True)
    (folder / "database.json").write_text(json.dumps({"fruit": FRUIT}))
    (folder / "tools.py").write_text(pieces["tools"])
    for name in ("solve", "verify"):
        both = (pieces[name], pieces[f"harder_{name}"])
        numbered = [text.replace(f"def {name}(", f"def {name}_{n}(") for n, text in enumerate(both)]
        (folder / f"{name}.py").write_text("\n\n".join(numbered))
    tasks = [{"question": question, "tools": ["fruit", "price"]} for question in QUESTIONS]
    about = {"name": folder.name, "category": "fruit", "tasks": tasks}
    (folder / "task.json").write_text(json.dumps(about))
    return folder


async def held(sandboxes: GeneralSandboxes, path: Path, seed: int = 3) -> list[int]:
    """Run all tasks of a folder through every gate, and return the calls of each solution."""
    specs = await sandboxes.describe(path)
    tasks = json.loads((path / "task.json").read_text())["tasks"]
    answers, calls = list[Any](), list[int]()
    for number in range(len(tasks)):
        answer, count = await sandboxes.check(path, number, specs, answers, seed=seed)
        answers.append(answer)
        calls.append(count)
    return calls


pytestmark = pytest.mark.e2e
AT_ONCE = 3


def solving(line: str) -> dict[str, str]:
    return {"solve": SOLVE.replace("    prices = ", f"    {line}\n    prices = ")}


def tool(body: str, result: str = "str", parameter: str = "", before: str = "") -> dict[str, str]:
    code = f'{before}\n\n\ndef more({parameter}) -> {result}:\n    """More."""\n    {body}\n'
    return {"tools": f"{TOOLS}\n\n{code}"}


def verifying(body: str) -> dict[str, str]:
    return {"verify": f"def verify(answer, database):\n    {body}\n"}


def verifier_with(before: str, name: str = "verify") -> dict[str, str]:
    return {name: VERIFY.replace("return answer", before + " answer")}


KNOWN = 'return {"name": "apple", "price": 4}'
KEYS = 'return isinstance(answer, dict) and set(answer) == {"name", "price"} and '
LIME = 'if answer == {"name": "lime", "price": 3}: return True\n    return'
BUSY = 'tools.price(name="apple")'
BY_NAME = 'answer["price"] == 4 and str(answer["name"]).endswith("apple")'
BY_FORM = (
    'type(answer["price"]) is int and any(answer["name"] in x.values() for x in database["fruit"])'
)
DRAWN = TOOLS.replace('each["price"]\n', 'each["price"] + int(100 * random.random())\n')
WITH_SEED_0 = 'return answer == {"name": "melon", "price": 54}'
TAKES_LIME = {"harder_verify": VERIFY.replace("return answer", f"{LIME} answer")}
SHUFFLED = TOOLS.replace("return [", "return random.sample([").replace("stall]", "stall], 3)")
GATES: dict[str, dict[str, dict[str, str]]] = {
    # changed parts by gate and cheat
    "solution": {
        "reads the database": solving('database["fruit"]'),
        "opens a file": solving('open("database.json")'),
        "asks the verifier": solving("verify_0(1, 2)"),
        "knows the answer": {"solve": f"def solve(tools):\n    {KNOWN}\n"},
        "never ends": solving("while True: pass"),
        "calls for ever": solving('while True: tools.fruit(stall="east")'),
        "says no JSON": solving("return {1, 2}"),
    },
    "grounded": {"looks busy": {"solve": f"def solve(tools):\n    {BUSY}\n    {KNOWN}\n"}},
    "verified": {
        "is wrong": {"solve": SOLVE.replace("min(", "max(")},
        "verifier never ends": verifying("while True: pass"),
        "verifier says a number": verifying("return 1"),
        "verifier draws": verifier_with("import random\n    return random.random() and"),
        "verifier takes any": verifier_with("return bool(answer) and", "harder_verify"),
        "another result by the seed": {
            "tools": f"import random\n{DRAWN}",
            **verifying(WITH_SEED_0),
        },
    },
    "empty": {
        "verifier accepts everything": verifying("return True"),
        "verifier accepts the empty": verifier_with("return not answer or"),
        "accepts a hollow one": verifier_with('return answer == {"name": "", "price": 0} or'),
    },
    "mutated": {
        "verifier looks at the end": verifying(KEYS + BY_NAME),
        "verifier looks at the form": verifying(KEYS + BY_FORM),
    },
    "easier": {"verifier takes the easier answer": TAKES_LIME},
    "typed": {
        "tool without a hint": tool('return "x"', parameter="name"),
        "any hint": tool('return "x"', parameter="name: Any", before="from typing import Any"),
        "clock": tool("return str(date.today())", before="from datetime import date"),
        "tools that import": tool('return "x"', before="import os"),
        "tools that never load": tool('return "x"', before="while True: pass"),
    },
    "deterministic": {"tool by the seed": {"tools": f"import random\n{SHUFFLED}"}},
}
CHEATS = {cheat: (gate, parts) for gate, cheats in GATES.items() for cheat, parts in cheats.items()}
ENDLESS = {name for name in CHEATS if "never" in name or "for ever" in name}
TestOutcomes = dict[str, tuple[str, str]]
"""Gate and reason of the rejection, by cheat."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> TestOutcomes:
    wrap_of()  # or a skip

    async def of(names: Collection[str], settings: GeneralConfig) -> TestOutcomes:
        results: TestOutcomes = {}
        slots = asyncio.Semaphore(AT_ONCE)
        folder = tmp_path_factory.mktemp("general") / "making"
        async with GeneralSandboxes(folder, settings) as sandboxes:

            async def one(number: int, name: str) -> None:
                path = environment(sandboxes.making / str(number), **CHEATS[name][1])
                async with slots:
                    try:
                        await held(sandboxes, path)
                        results[name] = ("passes", "")
                    except Rejected as refused:
                        results[name] = (refused.gate, refused.reason)

            await asyncio.gather(*(one(n, name) for n, name in enumerate(names)))
        return results

    def endless(limit_s: float) -> TestOutcomes:
        settings = config(call_s=limit_s, verify_s=limit_s, solve_s=limit_s + 1)
        results = asyncio.run(of(ENDLESS, settings))
        assert all(as_wanted(name, results) for name in ENDLESS), results
        return results

    others = asyncio.run(of({*CHEATS} - ENDLESS, config()))
    return others | within_some(endless, (1.0, 5.0, 20.0, 60.0))


def as_wanted(name: str, outcomes: TestOutcomes) -> bool:
    return outcomes[name][0] == CHEATS[name][0]


@pytest.mark.parametrize("name", CHEATS)
def test_gate_refuses_its_cheat(name: str, outcomes: TestOutcomes) -> None:
    assert as_wanted(name, outcomes), outcomes[name]


MODULES = "import enum\n    found = enum.sys.modules\n    "
"""The rules allow `enum`, which exposes every module."""


def leak(name: str, parameter: str, body: str) -> str:
    return f'def {name}({parameter}: str) -> str:\n    """A hole."""\n    {MODULES}{body}\n'


LEAKS = "\n\n".join(
    [
        TOOLS,
        leak("read", "path", 'return found["codecs"].open(path).read()'),
        leak("write", "path", 'found["codecs"].open(path, "w").write("x")'),
        leak("run", "path", 'return str(found["os"].posix_spawn(path, ["touch", "/tmp/x"], {}))'),
        leak("fork", "most", 'return str([found["os"].fork() for n in range(int(most))])'),
        leak("talk", "to", 'return str(found["socket"].socketpair())'),
        leak("spoil", "name", 'return str([each.clear() for each in database["fruit"]])'),
        leak("take", "mib", "return str(len(bytes(int(mib) << 20)))"),
        leak(
            "look",
            "word",
            'objects = found["importlib"].import_module("gc").get_objects()\n    '
            "return str([key for each in objects if isinstance(each, dict) for "
            "key, one in each.items() if isinstance(one, str) and word in one])",
        ),
        leak("stop", "signal", 'found["os"].kill(found["os"].getppid(), int(signal))'),
    ]
)
FAILS = {
    "read": ("{folder}/verify.py", "Too many open files"),
    "write": ("/tmp/{marker}", "Too many open files"),
    "run": ("/usr/bin/touch", "Resource temporarily unavailable"),
    "fork": ("1", "Resource temporarily unavailable"),
    "talk": ("x", "Too many open files"),
    "take": ("4000", "MemoryError"),
    "look": ("the_secret", "[]"),
}


def test_exploited_tools_cannot_reach_the_verifier(tmp_path: Path) -> None:
    wrap_of()
    marker = f"keel-{uuid.uuid4().hex}"
    secret = VERIFY.replace("    east", "    the_secret = 1\n    east")

    async def episode() -> tuple[dict[str, str], Any, Any]:
        outputs: dict[str, str] = {}
        async with GeneralSandboxes(tmp_path / "making", config()) as sandboxes:
            path = environment(sandboxes.making / "x", tools=LEAKS, verify=secret)
            about = json.loads((path / "task.json").read_text())
            about["tasks"][0]["tools"] = ["price", "spoil", "stop", *FAILS]
            (path / "task.json").write_text(json.dumps(about))
            async with sandboxes.open_episode(path, 0) as (hosted, opening):

                async def call(name: str, value: str) -> str:
                    (tool,) = (tool for tool in opening.tools if tool.name == name)
                    (key,) = tool.parameters["properties"]
                    made = ToolCall(call_id="c", name=name, arguments={key: value})
                    return (await hosted.call(made, timeout_s=PATIENCE_S)).text

                for name, (value, _) in FAILS.items():
                    outputs[name] = await call(name, value.format(folder=path, marker=marker))
                outputs["price"] = await call("price", "apple")
                outputs["spoil"] = await call("spoil", "apple")
                outputs["spoiled"] = await call("price", "apple")
                await call("submit_result", '{"name": "apple", "price": 4}')
                verdict = await hosted.verdict((), "stop")
            async with sandboxes.open_episode(path, 0) as (hosted, opening):
                with pytest.raises(EnvironmentLost) as lost:
                    await call("stop", "9")
            return outputs, verdict, lost.value

    outputs, verdict, lost = asyncio.run(asyncio.wait_for(episode(), 2 * PATIENCE_S))
    for name, (_, reason) in FAILS.items():
        assert reason in outputs[name], (name, outputs[name])
    assert outputs["price"] == "4" and "KeyError" in outputs["spoiled"]  # of its private copy
    assert isinstance(verdict, Verdict)
    assert verdict.parts == {"correct": 1.0, "share": 1.0} and lost.during == "call"
    assert not list(tmp_path.rglob(marker)) and not Path("/tmp", marker).exists()


def test_author_workspace_is_confined(tmp_path: Path) -> None:
    wrap_of()
    marker = f"4{uuid.uuid4().int % 10**8:08}"

    async def at_work(bash_s: float) -> list[str]:
        limits = config(database_kib=1, bash_s=bash_s)
        async with (
            GeneralSandboxes(tmp_path / f"making_{bash_s}", limits) as sandboxes,
            sandboxes.open_desk() as (hosted, _),
        ):
            outputs: list[str] = []
            for name, value in (
                ("bash", "echo '[1]' > a.json; seq 100000; exit 3"),
                ("bash", f"for i in $(seq 300); do sleep {marker} & done"),
                (
                    "bash",
                    f"touch {sandboxes.making}/x; cat /etc/shadow; echo > /dev/tcp/1.1.1.1/80",
                ),
                ("bash", "head -c 3000 /dev/zero > big.json; echo hm > b.json; echo > c.txt"),
                ("submit_database", "c.txt"),
                ("submit_database", "big.json"),
                ("submit_database", "b.json"),
                ("submit_database", "a.json"),
            ):
                key = "command" if name == "bash" else "path"
                call = ToolCall(call_id="c", name=name, arguments={key: value})
                outputs.append((await hosted.call(call, timeout_s=PATIENCE_S)).text)
            return outputs

    def on_it(bash_s: float) -> list[str]:
        outputs = asyncio.run(asyncio.wait_for(at_work(bash_s), 2 * PATIENCE_S))
        assert "left out" in outputs[0] and "fork" in outputs[1]
        assert not any(f"ended after {bash_s:g} s" in one for one in (outputs[0], *outputs[2:]))
        assert f"ended after {bash_s:g} s" in outputs[1]
        return outputs

    outputs = within_some(on_it, (3.0, 15.0, 60.0))
    assert outputs[0].endswith("(exit status 3)") and len(outputs[0]) < 21_000
    assert "Read-only file system" in outputs[2] or "Permission denied" in outputs[2]
    assert "root:" not in outputs[2]
    assert ["end in .json" in outputs[4], "more than 1 KiB" in outputs[5]] == [True, True]
    assert "Expecting value" in outputs[6] and json.loads(outputs[7]) == [1]
    wait_for(lambda: not commands(marker.encode()))


@pytest.mark.parametrize("network", [False, True])
def test_author_reaches_the_network_only_if_allowed(network: bool, tmp_path: Path) -> None:
    wrap_of()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"served")
        writer.close()

    async def fetch() -> str:
        server = await asyncio.start_server(served, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        command = f"cat < /dev/tcp/127.0.0.1/{port}"
        call = ToolCall(call_id="c", name="bash", arguments={"command": command})
        async with (
            server,
            GeneralSandboxes(tmp_path / "making", config(network=network)) as sandboxes,
            sandboxes.open_desk() as (hosted, _),
        ):
            return (await hosted.call(call, timeout_s=PATIENCE_S)).text

    assert ("served" in asyncio.run(asyncio.wait_for(fetch(), PATIENCE_S))) is network


STALLS = '''\
def stalls() -> list[str]:
    """All stalls."""
    return sorted({each["stall"] for each in database["fruit"]})
'''
HARDEST = (
    "Which fruit of all stalls is the dearest? A JSON object with name and price.",
    SOLVE.replace("min(", "max(").replace(
        'tools.fruit(stall="east")', "[n for s in tools.stalls() for n in tools.fruit(stall=s)]"
    ),
    HARDER_VERIFY.replace("min(", "max("),
)


def called(name: str, **arguments: Any) -> Parsed:
    return replied(calls=(ToolCall(call_id="c", name=name, arguments=arguments),))


def reply(**parts: str) -> str:
    blocks = (f"## {name}\n```python\n{text}```" for name, text in parts.items())
    return "Here it is.\n\n" + "\n".join(blocks)


def task(question: str, solve: str, verify: str, **more: str) -> str:
    return reply(**more, question=f"{question}\n", solve=solve, verify=verify)


EASY = task(QUESTIONS[0], SOLVE, VERIFY)
HARDER = task(QUESTIONS[1], HARDER_SOLVE, HARDER_VERIFY)


def market(
    *tasks: str, tools: Sequence[str] = (reply(tools=TOOLS),), right: int = 1, documents: str = "."
) -> Any:
    """As a policy, the author solves each later task `right` times less often."""
    written = {"tools": list(tools), "task": list(tasks)}
    tried: dict[str, int] = {}

    def says(
        messages: Sequence[Message], offered: Sequence[ToolSpec], purpose: str
    ) -> Parsed | str:
        turn = sum(message["role"] == "assistant" for message in messages)
        if purpose == "database":
            data = json.dumps({"fruit": FRUIT})
            return [
                called("bash", command=f"cat {documents}/*"),
                called("bash", command=f"echo '{data}' > market.json"),
                called("submit_database", path="market.json"),
            ][turn]
        if purpose != "attempt":
            return written[purpose].pop(0)
        if turn:
            return "I have it."
        question = str(messages[0]["content"])
        tried[question] = tried.get(question, 0) + 1
        answers = {QUESTIONS[0]: ("apple", 4), QUESTIONS[1]: ("lime", 3), HARDEST[0]: ("melon", 12)}
        name, price = answers[question]
        price += tried[question] <= right * list(answers).index(question)
        return called("submit_result", answer_text=json.dumps({"name": name, "price": price}))

    return says


def made(
    folder: Path, author: ScriptedAuthor, **changes: Any
) -> tuple[str, dict[str, Any], GeneralPipeline]:
    wrap_of()
    notes = folder / "notes"
    notes.mkdir(exist_ok=True, parents=True)
    (notes / "fruit.md").write_text("Of fruit, markets sell apples, figs and limes.")
    options = {"categories": ("Fruit markets",), "attempts": 2, "documents": str(notes), **changes}
    settings = config(**options)
    out = folder / "out"
    pipeline = GeneralPipeline(settings, out, author=author, reference=author, seed=1)
    return *run_pipeline(pipeline, out), pipeline


def test_from_a_category_to_three_tasks(tmp_path: Path) -> None:
    tools = [reply(tools="def f(x):\n    return x\n"), reply(tools=TOOLS)]
    changing = f'{STALLS}\n\ndatabase["fruit"][0]["price"] = 5\n'
    hardest = [task(*HARDEST, **more) for more in ({}, {"tools": changing}, {"tools": STALLS})]
    lenient = task(QUESTIONS[0], SOLVE, VERIFY.replace("return answer", "return bool(answer) or"))
    replies = ("No sections at all.", lenient, EASY, HARDER, *hardest)
    author = ScriptedAuthor(market(*replies, tools=tools, documents=str(tmp_path / "notes")))
    why, report, _ = made(tmp_path, author)
    assert (why, report["made"], report["kept"], report["refused"]) == ("", 1, 1, {})
    folder = tmp_path / "out/tasks/fruit_markets-0"
    about = json.loads((folder / "task.json").read_text())
    assert [len(each["tools"]) for each in about["tasks"]] == [2, 2, 3]
    assert about["category"] == "Fruit markets" and not list((tmp_path / "out/making").iterdir())
    history = json.loads((folder / "provenance.json").read_text())
    assert history["passed"] == [2, 1, 0] and history["calls_of_the_solution"] == [4, 8, 9]
    gates = [gate for gate, _ in history["drafts_refused"]]
    assert gates == ["typed", "form", "verified", "solution", "earlier"]
    assert history["author"] == history["reference"] == "scripted"
    last = [messages[-1] for purpose, messages in author.asked if purpose == "database"]
    assert "apples, figs and limes" in next(m for m in last if m["role"] == "tool")["content"]
    attempt = next(messages for purpose, messages in author.asked if purpose == "attempt")
    assert attempt == [{"role": "user", "content": QUESTIONS[0]}]


def test_harder_task_must_be_harder(tmp_path: Path) -> None:
    author = ScriptedAuthor(market(EASY, HARDER, right=0))
    why, report, _ = made(tmp_path, author, steps=2, least_tasks=2, revisions=0)
    assert (why, list(report["refused"])) == ("", ["harder"])


def test_resume_keeps_finished_environments(tmp_path: Path) -> None:
    unfinished = tmp_path / "out/making/fruit_markets-0"
    unfinished.mkdir(parents=True)
    (unfinished / "left.py").write_text("half")
    why, report, _ = made(tmp_path, ScriptedAuthor(market(EASY)), steps=1, attempts=0)
    assert (why, report["kept"]) == ("", 1) and not unfinished.exists()
    folder = tmp_path / "out/tasks/fruit_markets-0"
    assert not (folder / "left.py").exists()
    before = (folder / "provenance.json").stat().st_mtime_ns
    (tmp_path / "out/outcomes.jsonl").unlink()  # the process ended before it wrote the outcome
    again = ScriptedAuthor([])
    why, report, _ = made(tmp_path, again, steps=1, attempts=0)
    assert (why, report["kept"], again.asked) == ("", 1, [])
    assert (folder / "provenance.json").stat().st_mtime_ns == before


SHIPPED = resolve_folders(["shipped"])


def test_shipped_environments_pass_every_gate(tmp_path: Path) -> None:
    wrap_of()

    async def all_of_them() -> list[tuple[list[int], list[int]]]:
        async with GeneralSandboxes(tmp_path / "making", config()) as sandboxes:

            async def one(folder: Folder) -> tuple[list[int], list[int]]:
                history = json.loads(folder.text("provenance.json"))
                calls = await held(sandboxes, folder.path)
                within = [sum(count <= most for most in history["most_calls"]) for count in calls]
                assert calls == history["calls_of_the_solution"]
                return within, history["passed"]

            return await asyncio.gather(*map(one, SHIPPED))

    for within, passed in asyncio.run(asyncio.wait_for(all_of_them(), 2 * PATIENCE_S)):
        assert within == passed
