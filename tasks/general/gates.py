"""What throws an environment or a task of it away. Each gate raises `Refused` by its own name."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from keel.agents.schemas import Arguments
from keel.rl.turns import ToolCall, ToolSpec
from keel.tasks.general.mutations import EMPTY, mutations, plausible
from keel.tasks.general.rooms import SLACK_S, Rooms, lost_to
from keel.tasks.ledger import Refused

Specs = Mapping[str, Mapping[str, Any]]
"""The tools by name: description, parameters, and whether they return `text` or `json`."""
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
    calls: tuple[ToolCall, ...]


async def typed(rooms: Rooms, environment: Path) -> Specs:
    """Every tool has type hints and a docstring, and from them a schema."""
    specs: dict[str, dict[str, Any]] = await rooms.workshop(
        "typed", environment, "describe", each_s=rooms.config.call_s
    )
    try:
        Arguments([spec_of(spec) for spec in specs.values()])
        _ = [spec["returns"] for spec in specs.values()]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise Refused("typed", f"the tools' schemas: {error}") from error
    return specs


def spec_of(given: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(
        name=given["name"], description=given["description"], parameters=given["parameters"]
    )


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
    rooms: Rooms, environment: Path, specs: Specs, solution: str, number: int
) -> Solved:
    """The solution runs where there is nothing but the tools, and those are a policy's: what it
    calls goes through the environment."""
    given = {
        "source": solution,
        "number": number,
        "returns": {name: spec["returns"] for name, spec in specs.items()},
    }
    calls: list[ToolCall] = []
    said: dict[str, Any] = {}
    with lost_to("solution"):
        async with (
            rooms.open("checks:Solution", reward=given) as (solver, _),
            general(rooms, environment, number) as (policy, _),
        ):
            try:
                async with asyncio.timeout(rooms.config.solve_s):
                    while len(calls) <= MOST_CALLS:
                        go = ToolCall(call_id="s", name="go", arguments={"said": said})
                        result = await solver.call(go, timeout_s=rooms.config.solve_s + SLACK_S)
                        if result.failed:
                            raise Refused("solution", result.text.removeprefix("Refused: "))
                        reply: dict[str, Any] = json.loads(result.text)
                        if "call" not in reply:
                            break
                        if not isinstance(reply.get("arguments"), dict):
                            raise Refused("solution", "a call without arguments by name")
                        call = ToolCall(
                            call_id=f"c{len(calls)}",
                            name=str(reply["call"]),
                            arguments=dict(reply["arguments"]),
                        )
                        calls.append(call)
                        if call.name not in specs:
                            raise Refused("solution", f"there is no tool {call.name!r}")
                        done = await policy.call(call, timeout_s=rooms.config.call_s)
                        said = {"failed" if done.failed else "text": done.text}
                    else:
                        raise Refused("solution", f"calls tools more than {MOST_CALLS} times")
            except TimeoutError as error:
                raise Refused(
                    "solution", f"did not end within general.solve_s = {rooms.config.solve_s:g}"
                ) from error
    if "is" not in reply:
        raise Refused("solution", str(reply.get("refused") or reply.get("raised"))[:MOST_SAID])
    if not calls:
        raise Refused("solution", "calls no tool: the answer is not to be had from the database")
    return Solved(answer=reply["is"], calls=tuple(calls))


def general(rooms: Rooms, environment: Path, number: int) -> Any:
    """The environment as a policy has it."""
    arguments = {"folder": str(environment), "verify_s": rooms.config.verify_s}
    reward = {"general": {"task": number}}
    return rooms.open("environment:General", reward=reward, arguments=arguments)


async def verified(rooms: Rooms, environment: Path, number: int, answer: Any) -> None:
    """The verifier passes the solution's answer, each time that it is asked."""
    for verdict in await verdicts("verified", rooms, environment, number, [answer, answer]):
        if isinstance(verdict, str):
            raise Refused("verified", f"verify fails on the solution's answer: {verdict}")
        if missed := [name for name, met in verdict.items() if not met]:
            raise Refused(
                "verified",
                f"verify refuses the solution's answer {_short(answer)}: not met: "
                f"{', '.join(missed)}",
            )


async def not_empty(rooms: Rooms, environment: Path, number: int) -> None:
    """The verifier refuses an answer with nothing in it."""
    await _refused("empty", rooms, environment, number, [(repr(one), one) for one in EMPTY])


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


def _drawn(schema: Mapping[str, Any], texts: Sequence[str], draw: random.Random) -> Any:
    """A value of a schema as type hints make them."""
    if "enum" in schema:
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
