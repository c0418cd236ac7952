"""What throws an environment or a task of it away. Each gate raises `Refused` by its own name."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from keel.agents.schemas import Arguments
from keel.rl.turns import ToolCall
from keel.synthesis.general.grounding import CHANGES, Leaf, Replay, Results, as_it_is, fewer
from keel.synthesis.general.mutations import EMPTY, hollow, mutations, plausible
from keel.synthesis.general.rooms import SLACK_S, Rooms, lost_to
from keel.synthesis.ledger import Refused
from keel.synthesis.work import spec_of, together

Specs = Mapping[str, Mapping[str, Any]]
"""The tools by name: description, parameters, and whether they return `text` or `json`."""
Asked = Callable[[ToolCall], Awaitable[Mapping[str, str]]]
"""What a solution's call comes to: {"text" or "failed": …}."""
PROBES = 5
"""Calls of each tool that nobody wrote."""
MOST_CALLS = 1000
MOST_REPLAYED = 200
MOST_TEXTS = 400
MOST_SAID = 300
HASH_SEEDS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What a solution came to."""

    answer: Any
    results: Results

    @property
    def calls(self) -> list[ToolCall]:
        return [call for call, _ in self.results]


async def typed(rooms: Rooms, environment: Path) -> Specs:
    """Every tool has type hints and a docstring, and from them a schema."""
    specs: dict[str, dict[str, Any]] = await rooms.workshop(
        "typed", environment, "describe", each_s=rooms.config.call_s
    )
    try:
        Arguments([spec_of(spec) for spec in specs.values()])
        _ = [spec["returns"] for spec in specs.values()]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Refused("typed", f"the tools' schemas: {error}") from error
    return specs


async def deterministic(
    rooms: Rooms, environment: Path, specs: Specs, calls: Sequence[ToolCall], *, seed: int
) -> None:
    """The same calls come to the same in two processes that hash differently: those of a solution,
    and others with arguments from the database."""
    texts = await texts_of(rooms, environment)
    draw = random.Random(seed)
    probes = [
        {"name": name, "arguments": _drawn(spec["parameters"], texts, draw)}
        for name, spec in specs.items()
        for _ in range(PROBES)
    ]
    asked = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    asked = [*asked[:MOST_REPLAYED], *probes]
    one, two = await asyncio.gather(
        *(
            rooms.workshop(
                "deterministic",
                environment,
                "results",
                each_s=rooms.config.call_s,
                times=len(asked),
                arguments={"calls": asked},
                hash_seed=hash_seed,
                seed=seed,
            )
            for hash_seed in HASH_SEEDS
        )
    )
    for call, first, second in zip(asked, one, two, strict=True):
        if first != second:
            said = f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"
            raise Refused(
                "deterministic",
                f"{said[:MOST_SAID]} comes to {_short(first)} in one process and to "
                f"{_short(second)} in another",
            )


async def solved(
    rooms: Rooms, environment: Path, specs: Specs, solution: str, number: int, *, seed: int = 0
) -> Solved:
    """The solution runs where there is nothing but the tools, and those are a policy's: what it
    calls goes through the environment."""
    results: list[tuple[ToolCall, Mapping[str, str]]] = []
    with lost_to("solution"):
        async with general(rooms, environment, number, seed=seed) as (policy, _):

            async def asked(call: ToolCall) -> Mapping[str, str]:
                done = await policy.call(call, timeout_s=rooms.config.call_s)
                results.append((call, {"failed" if done.failed else "text": done.text}))
                return results[-1][1]

            answer = await _driven(rooms, specs, solution, number, asked)
    if not results:
        raise Refused("solution", "calls no tool: the answer is not to be had from the database")
    return Solved(answer=answer, results=tuple(results))


async def grounded(rooms: Rooms, specs: Specs, solution: str, number: int, found: Solved) -> None:
    """The answer comes from what the tools return: where they return other names or other numbers,
    it is another one; or, if it counts, where they return fewer things. Where the solution fails
    over those, nothing is known."""

    async def over(change: Leaf, entries: Leaf = as_it_is) -> str:
        replay = Replay(found.results, change, entries)

        async def asked(call: ToolCall) -> Mapping[str, str]:
            return replay(call)

        try:
            answer = await _driven(rooms, specs, solution, number, asked)
        except Refused:
            return "fails"
        return "same" if answer == found.answer else "other"

    came_to = await together(*map(over, CHANGES.values()))
    if "same" not in came_to or "other" in came_to:
        return
    if await over(as_it_is, fewer) != "other":
        same = [name for name, what in zip(CHANGES, came_to, strict=True) if what == "same"]
        raise Refused(
            "grounded",
            f"the solution returns the same answer where the tools return {' or '.join(same)}: it "
            "has to find the answer, not to know it",
        )


async def _driven(rooms: Rooms, specs: Specs, solution: str, number: int, asked: Asked) -> Any:
    """What a solution returns whose calls `asked` answers, with {"text" or "failed": …}."""
    given = {
        "source": solution,
        "number": number,
        "returns": {name: spec["returns"] for name, spec in specs.items()},
    }
    said: Mapping[str, Any] = {}
    with lost_to("solution"):
        async with rooms.open("checks:Solution", reward=given) as (solver, _):
            try:
                async with asyncio.timeout(rooms.config.solve_s):
                    for count in range(MOST_CALLS + 1):
                        go = ToolCall(call_id="s", name="go", arguments={"said": said})
                        result = await solver.call(go, timeout_s=rooms.config.solve_s + SLACK_S)
                        if result.failed:
                            raise Refused("solution", result.text.removeprefix("Refused: "))
                        reply: dict[str, Any] = json.loads(result.text)
                        if "call" not in reply:
                            break
                        said = await asked(_call(reply, count, specs))
                    else:
                        raise Refused("solution", f"calls tools more than {MOST_CALLS} times")
            except TimeoutError as error:
                raise Refused(
                    "solution", f"did not end within general.solve_s = {rooms.config.solve_s:g}"
                ) from error
    if "is" not in reply:
        raise Refused("solution", str(reply.get("refused") or reply.get("raised"))[:MOST_SAID])
    return reply["is"]


def _call(reply: Mapping[str, Any], count: int, specs: Specs) -> ToolCall:
    """Raises Refused for what is none."""
    arguments = reply.get("arguments")
    if not isinstance(arguments, dict):
        raise Refused("solution", "a call without arguments by name")
    name, given = str(reply["call"]), cast(dict[str, Any], arguments)
    if name not in specs:
        raise Refused("solution", f"there is no tool {name!r}")
    return ToolCall(call_id=f"c{count}", name=name, arguments=given)


def general(rooms: Rooms, environment: Path, number: int, *, seed: int = 0) -> Any:
    """The environment as a policy has it."""
    arguments = {"folder": str(environment), "verify_s": rooms.config.verify_s}
    reward = {"general": {"task": number}}
    return rooms.open("environment:General", reward=reward, arguments=arguments, seed=seed)


async def verified(rooms: Rooms, environment: Path, number: int, *answers: Any) -> None:
    """The verifier passes the solution's answers, whatever seed the tools had."""
    found = await verdicts("verified", rooms, environment, number, answers)
    for answer, verdict in zip(answers, found, strict=True):
        if isinstance(verdict, str):
            raise Refused("verified", f"verify fails on the solution's answer: {verdict}")
        if missed := [name for name, met in verdict.items() if not met]:
            raise Refused(
                "verified",
                f"verify refuses the solution's answer {_short(answer)}: not met: "
                f"{', '.join(missed)}",
            )


async def not_empty(rooms: Rooms, environment: Path, number: int, answer: Any) -> None:
    """The verifier refuses an answer with nothing in it, of whatever form."""
    empty = [*EMPTY, *(one for one in hollow(answer) if one != answer)]
    await _refused("empty", rooms, environment, number, [(repr(one), one) for one in empty])


async def not_mutated(
    rooms: Rooms, environment: Path, number: int, answer: Any, *, seed: int
) -> None:
    """The verifier refuses the right answer with any one thing in it changed, and most answers of
    the same form."""
    changed = mutations(answer)
    await _refused("mutated", rooms, environment, number, changed)
    others = plausible(answer, await texts_of(rooms, environment), seed)
    found = await verdicts("mutated", rooms, environment, number, others)
    accepted = [one for one, verdict in zip(others, found, strict=True) if passes(verdict)]
    if len(accepted) > len(others) // 2:
        raise Refused(
            "mutated",
            f"verify accepts {len(accepted)} of {len(others)} answers drawn at random, "
            f"{_short(accepted[0])} among them",
        )


async def not_easier(rooms: Rooms, environment: Path, number: int, earlier: Sequence[Any]) -> None:
    """The verifier refuses the answers of the tasks before."""
    named = [(f"the answer of task {n}", answer) for n, answer in enumerate(earlier)]
    await _refused("easier", rooms, environment, number, named)


def harder(before: int | None, passed: int, attempts: int) -> None:
    """Fewer of the reference policy's attempts pass than at the task before (None: none is)."""
    if attempts and before is not None and passed >= before:
        raise Refused(
            "harder",
            f"{passed} of {attempts} attempts of the reference policy pass, at the task before "
            f"{before}",
        )


async def verdicts(
    gate: str, rooms: Rooms, environment: Path, number: int, answers: Sequence[Any]
) -> list[dict[str, bool] | str]:
    """Of each answer, in processes of their own: what is demanded, or why nothing is known."""
    if not answers:
        return []
    return await rooms.workshop(
        gate,
        environment,
        "verdicts",
        each_s=rooms.config.verify_s,
        times=len(answers),
        arguments={"number": number, "answers": list(answers)},
    )


def passes(verdict: dict[str, bool] | str) -> bool:
    return not isinstance(verdict, str) and all(verdict.values())


async def texts_of(rooms: Rooms, environment: Path) -> list[str]:
    """Strings of the database."""
    return await rooms.workshop(
        "database",
        environment,
        "strings",
        each_s=rooms.config.call_s,
        arguments={"most": MOST_TEXTS},
    )


async def _refused(
    gate: str, rooms: Rooms, environment: Path, number: int, answers: Sequence[tuple[str, Any]]
) -> None:
    found = await verdicts(gate, rooms, environment, number, [answer for _, answer in answers])
    for (name, _), verdict in zip(answers, found, strict=True):
        if passes(verdict):
            raise Refused(gate, f"verify accepts {name[:MOST_SAID]}")


def _drawn(schema: Any, texts: Sequence[str], draw: random.Random) -> Any:
    """A value of a schema as type hints make them; None of any other: `true` is a schema, too, and
    an enum may have no member."""
    if not isinstance(schema, dict):
        return None
    schema = cast(Mapping[str, Any], schema)
    if schema.get("enum"):
        return draw.choice(schema["enum"])
    if "anyOf" in schema:
        return _drawn(draw.choice(schema["anyOf"]), texts, draw)
    match schema.get("type"):
        case "string":
            return draw.choice(texts) if texts else "x"
        case "integer":
            return draw.randrange(20)
        case "number":
            return draw.randrange(200) / 2
        case "boolean":
            return draw.random() < 0.5
        case "array":
            if "prefixItems" in schema:
                return [_drawn(one, texts, draw) for one in schema["prefixItems"]]
            return [_drawn(schema.get("items", {}), texts, draw) for _ in range(2)]
        case "object":
            properties = cast(Mapping[str, Mapping[str, Any]], schema.get("properties", {}))
            return {name: _drawn(one, texts, draw) for name, one in properties.items()}
        case _:
            return None


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:MOST_SAID]
