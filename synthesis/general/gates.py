"""Gates for environments and tasks. Each gate raises `Rejected` with its own name."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from keel.agents.schemas import Arguments
from keel.rl.turns import ToolCall
from keel.synthesis.general.sandboxes import SLACK_S, GeneralSandboxes, lost_to
from keel.synthesis.ledger import Rejected
from keel.synthesis.tool_loop import gather_or_cancel, tool_spec_of

Specs = Mapping[str, Mapping[str, Any]]
"""Maps each tool's name to its description, its parameters, and whether it returns `text` or
`json`."""
Reference = Callable[[GeneralSandboxes, Path, int], Awaitable[int]]
"""Attempts a task in a folder `config.attempts` times and returns how many attempts pass."""
_CallAnswerer = Callable[[ToolCall], Awaitable[Mapping[str, str]]]
"""Answers a solution's tool call with {"text" or "failed": …}."""
_Leaf = Callable[[Any], Any]
"""Maps a string, number or boolean to another value of the same type."""
_Place = tuple[str | int, ...]
EMPTY: tuple[Any, ...] = (None, "", [], {}, 0, False, True, "{}", "[]")
MAX_MUTATIONS = 60
_PLAUSIBLE = 24
"""Number of random answers with the same structure as the right one."""
_PROBES = 5
"""Number of generated calls for each tool."""
_MAX_CALLS = 1000
_MAX_REPLAYED = 200
_MAX_TEXTS = 400
_MAX_MESSAGE = 300
_HASH_SEEDS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionResult:
    """A solution's answer, and its tool calls with their results."""

    answer: Any
    results: Sequence[tuple[ToolCall, Mapping[str, str]]]


async def check_task(
    rooms: GeneralSandboxes,
    path: Path,
    number: int,
    *,
    specs: Specs,
    solution: str,
    earlier: Sequence[Any],
    before: int | None,
    reference: Reference,
    seed: int,
) -> tuple[Any, int, int]:
    """Check a task with every gate.

    Returns the solution's answer, the number of its calls, and how many attempts passed. `number`
    is the task's number in the folder. `earlier` contains the answers to earlier tasks. `before`
    says how many attempts at the previous task passed. Raises Rejected if a gate rejects the task,
    or RecursionError if values are nested too deeply.
    """
    result = await solved(rooms, path, specs, solution, number)
    answer = result.answer
    again = await solved(rooms, path, specs, solution, number, seed=seed + 1)
    await _verified(rooms, path, number, [answer, again.answer])
    await grounded(rooms, specs, solution, number, result)

    async def refuses(gate: str, answers: Sequence[tuple[str, Any]]) -> None:
        if accepted := await _accepted(gate, rooms, path, number, answers):
            raise Rejected(gate, f"verify accepts {accepted[0][:_MAX_MESSAGE]}")

    hollow = [_map_leaves(empty, answer) for empty in (_null, _blank, _zero)]
    empty = [*EMPTY, *(one for one in hollow if one != answer)]
    await refuses("empty", [(repr(one), one) for one in empty])
    await refuses("mutated", mutations(answer))
    others = plausible(answer, await _texts_of(rooms, path), seed)
    accepted = await _accepted("mutated", rooms, path, number, [(_short(o), o) for o in others])
    if len(accepted) > len(others) // 2:
        raise Rejected(
            "mutated",
            f"verify accepts {len(accepted)} of {len(others)} answers drawn at random, "
            f"{accepted[0]} among them",
        )
    await refuses("easier", [(f"the answer of task {n}", one) for n, one in enumerate(earlier)])
    calls = [call for call, _ in result.results]
    await deterministic(rooms, path, specs, calls, seed=seed)
    passed, attempts = 0, rooms.config.attempts
    if attempts:
        passed = await reference(rooms, path, number)
        if before is not None and passed >= before:
            raise Rejected(
                "harder",
                f"{passed} of {attempts} attempts of the reference policy pass, {before} at the "
                "task before",
            )
    return answer, len(calls), passed


async def typed(rooms: GeneralSandboxes, environment: Path) -> Specs:
    """Check that all tools have type hints, docstrings and valid schemas. Returns their specs."""
    specs: dict[str, dict[str, Any]] = await rooms.workshop(
        "typed", environment, "describe", each_s=rooms.config.call_s
    )
    try:
        Arguments([tool_spec_of(spec) for spec in specs.values()])
        _ = [spec["returns"] for spec in specs.values()]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Rejected("typed", f"the tools' schemas: {error}") from error
    return specs


async def deterministic(
    rooms: GeneralSandboxes,
    environment: Path,
    specs: Specs,
    calls: Sequence[ToolCall],
    *,
    seed: int,
) -> None:
    """Check that tools return the same results in two processes with different hash seeds.

    The gate repeats the solution's calls, and makes further calls with arguments drawn from the
    database.
    """
    texts = await _texts_of(rooms, environment)
    draw = random.Random(seed)
    probes = [
        {"name": name, "arguments": _drawn(spec["parameters"], texts, draw)}
        for name, spec in specs.items()
        for _ in range(_PROBES)
    ]
    request = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    request = [*request[:_MAX_REPLAYED], *probes]
    one, two = await asyncio.gather(
        *(
            rooms.workshop(
                "deterministic",
                environment,
                "results",
                each_s=rooms.config.call_s,
                times=len(request),
                arguments={"calls": request},
                hash_seed=hash_seed,
                seed=seed,
            )
            for hash_seed in _HASH_SEEDS
        )
    )
    for call, first, second in zip(request, one, two, strict=True):
        if first != second:
            raise Rejected(
                "deterministic",
                f"{call['name']}({_short(call['arguments'])}) returns {_short(first)} in one "
                f"process and {_short(second)} in another",
            )


async def solved(
    rooms: GeneralSandboxes,
    environment: Path,
    specs: Specs,
    solution: str,
    number: int,
    *,
    seed: int = 0,
) -> SolutionResult:
    """Run the solution in a process that has only the tools and return its result.

    Its calls go through the environment like a policy's calls.
    """
    results: list[tuple[ToolCall, Mapping[str, str]]] = []
    with lost_to("solution"):
        async with general(rooms, environment, number, seed=seed) as (policy, _):

            async def request(call: ToolCall) -> Mapping[str, str]:
                done = await policy.call(call, timeout_s=rooms.config.call_s)
                results.append((call, {"failed" if done.failed else "text": done.text}))
                return results[-1][1]

            answer = await _run_solution(rooms, specs, solution, number, request)
    if not results:
        raise Rejected("solution", "solve calls no tool")
    return SolutionResult(answer=answer, results=tuple(results))


async def grounded(
    rooms: GeneralSandboxes, specs: Specs, solution: str, number: int, found: SolutionResult
) -> None:
    """Check that the answer changes if the tools return other names, other numbers or fewer
    entries.

    The author has seen the database and could have hard-coded the answer in the solution. A
    solution that fails on changed results passes this gate, because the failure proves nothing.
    """

    async def outcome(change: _Leaf, entries: _Leaf = lambda value: value) -> str:
        request = _replay(found, change, entries)
        try:
            answer = await _run_solution(rooms, specs, solution, number, request)
        except Rejected:
            return "fails"
        return "same" if answer == found.answer else "other"

    outcomes = await gather_or_cancel(*map(outcome, _CHANGES.values()))
    if "same" not in outcomes or "other" in outcomes:
        return
    if await outcome(lambda value: value, _halve_entries) != "other":
        same = [name for name, what in zip(_CHANGES, outcomes, strict=True) if what == "same"]
        raise Rejected(
            "grounded",
            f"the solution returns the same answer when the tools return {' or '.join(same)}; it "
            "must derive the answer from the tools",
        )


async def _run_solution(
    rooms: GeneralSandboxes, specs: Specs, solution: str, number: int, request: _CallAnswerer
) -> Any:
    """Run a solution and return its answer. `request` answers its tool calls."""
    reward = {
        "source": solution,
        "number": number,
        "returns": {name: spec["returns"] for name, spec in specs.items()},
    }
    said: Mapping[str, Any] = {}
    reply: dict[str, Any] = {}
    with lost_to("solution"):
        async with rooms.open("workshop:Solution", reward=reward) as (solver, _):
            try:
                async with asyncio.timeout(rooms.config.solve_s):
                    for count in range(_MAX_CALLS + 1):
                        go = ToolCall(call_id="s", name="go", arguments={"said": said})
                        result = await solver.call(go, timeout_s=rooms.config.solve_s + SLACK_S)
                        if result.failed:
                            raise Rejected("solution", result.text.removeprefix("Rejected: "))
                        reply = json.loads(result.text)
                        if "call" not in reply:
                            break
                        name, arguments = str(reply["call"]), reply.get("arguments")
                        if name not in specs or not isinstance(arguments, dict):
                            raise Rejected("solution", f"invalid call of {name!r}")
                        given = cast(dict[str, Any], arguments)
                        call = ToolCall(call_id=f"c{count}", name=name, arguments=given)
                        said = await request(call)
                    else:
                        raise Rejected("solution", f"solve makes more than {_MAX_CALLS} calls")
            except TimeoutError as error:
                raise Rejected(
                    "solution", f"solve exceeded general.solve_s = {rooms.config.solve_s:g}"
                ) from error
    if "is" not in reply:
        message = str(reply.get("refused") or reply.get("raised"))
        raise Rejected("solution", message[:_MAX_MESSAGE])
    return reply["is"]


def general(rooms: GeneralSandboxes, environment: Path, number: int, *, seed: int = 0) -> Any:
    """Open the environment in the same way as it is opened for the policy."""
    arguments = {"folder": str(environment), "verify_s": rooms.config.verify_s}
    reward = {"general": {"task": number}}
    return rooms.open("environment:General", reward=reward, arguments=arguments, seed=seed)


async def _verified(
    rooms: GeneralSandboxes, environment: Path, number: int, answers: Sequence[Any]
) -> None:
    """Check that `verify` accepts the solution's answers. Raises Rejected if it does not."""
    found = await _verdicts("verified", rooms, environment, number, answers)
    for answer, verdict in zip(answers, found, strict=True):
        if isinstance(verdict, str):
            raise Rejected("verified", f"verify fails on the solution's answer: {verdict}")
        if missed := [name for name, met in verdict.items() if not met]:
            raise Rejected(
                "verified",
                f"verify rejects the solution's answer {_short(answer)}; not met: "
                f"{', '.join(missed)}",
            )


async def _verdicts(
    gate: str, rooms: GeneralSandboxes, environment: Path, number: int, answers: Sequence[Any]
) -> list[dict[str, bool] | str]:
    """Return, for each answer, which requirements it meets, or the error that `verify` raised."""
    return await rooms.workshop(
        gate,
        environment,
        "verdicts",
        each_s=rooms.config.verify_s,
        times=len(answers),
        arguments={"number": number, "answers": list(answers)},
    )


async def _accepted(
    gate: str,
    rooms: GeneralSandboxes,
    environment: Path,
    number: int,
    answers: Sequence[tuple[str, Any]],
) -> list[str]:
    """Return the names of the answers that `verify` accepts. `answers` contains (name, answer)
    pairs."""
    if not answers:
        return []
    found = await _verdicts(gate, rooms, environment, number, [answer for _, answer in answers])
    return [
        name
        for (name, _), verdict in zip(answers, found, strict=True)
        if not isinstance(verdict, str) and all(verdict.values())
    ]


async def _texts_of(rooms: GeneralSandboxes, environment: Path) -> list[str]:
    arguments = {"most": _MAX_TEXTS}
    return await rooms.workshop(
        "database", environment, "strings", each_s=rooms.config.call_s, arguments=arguments
    )


def _drawn(schema: Any, texts: Sequence[str], draw: random.Random) -> Any:
    """Return a random value for a schema generated from type hints, or None for any other
    schema."""
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
            items = schema.get("prefixItems") or [schema.get("items", {})] * 2
            return [_drawn(one, texts, draw) for one in items]
        case "object":
            properties = cast(Mapping[str, Mapping[str, Any]], schema.get("properties", {}))
            return {name: _drawn(one, texts, draw) for name, one in properties.items()}
        case _:
            return None


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:_MAX_MESSAGE]


def _replay(found: SolutionResult, change: _Leaf, entries: _Leaf) -> _CallAnswerer:
    """Answer a solution's calls with altered versions of the recorded results.

    `entries` alters whole results. `change` then alters their leaves. If an argument repeats an
    altered value, it is mapped back to the true value.
    """

    def key(name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps([name, dict(arguments)], sort_keys=True)

    known = {key(call.name, call.arguments): result for call, result in found.results}
    true: dict[str, Any] = {}

    def changed(value: Any) -> Any:
        other = change(value)
        true[json.dumps(other)] = value
        return other

    async def request(call: ToolCall) -> Mapping[str, str]:
        meant = _map_leaves(lambda value: true.get(json.dumps(value), value), dict(call.arguments))
        result = known.get(key(call.name, call.arguments)) or known.get(key(call.name, meant))
        if result is None:
            return {"failed": "not found"}
        if "text" not in result:
            return result
        try:
            value: Any = json.loads(result["text"])
        except ValueError:  # the tool returns text
            return {"text": str(changed(entries(result["text"])))}
        return {"text": json.dumps(_map_leaves(changed, entries(value)), ensure_ascii=False)}

    return request


def _map_leaves(change: _Leaf, value: Any) -> Any:
    """Return a copy of a value with `change` applied to every leaf."""
    if isinstance(value, dict):
        return {name: _map_leaves(change, one) for name, one in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_map_leaves(change, one) for one in cast(list[Any], value)]
    return change(value)


def _halve_entries(value: Any) -> Any:
    """Drop half of the entries so that counts change.

    The entries are those of a list, of the lists in an object, of a flat object, or the lines of a
    text.
    """
    if isinstance(value, list):
        each = cast(list[Any], value)
        return each[: len(each) // 2]
    if isinstance(value, dict):
        named = cast(dict[str, Any], value)
        if any(isinstance(one, list) for one in named.values()):
            return {
                k: _halve_entries(one) if isinstance(one, list) else one for k, one in named.items()
            }
        return dict(list(named.items())[: len(named) // 2])
    if isinstance(value, str):
        lines = value.splitlines(keepends=True)
        return "".join(lines[: len(lines) // 2])
    return value


def _other_name(value: Any) -> Any:
    return f"{value} II" if isinstance(value, str) else value


def _other_digits(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"[0-9]", lambda found: str(9 - int(found[0])), value)
    return value


def _next_number(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else value


def _other_order(value: Any) -> Any:
    return 1000 - value if type(value) in (int, float) else value


_CHANGES: Mapping[str, _Leaf] = {
    "other names": _other_name,
    "other digits in texts": _other_digits,
    "other numbers": _next_number,
    "numbers in another order": _other_order,
}


def mutations(answer: Any) -> list[tuple[str, Any]]:
    """Return (description, answer) pairs that each change one value, key or entry of the answer.

    If there are more than `MAX_MUTATIONS`, an evenly spaced selection is returned.
    """
    found = list(_changed(answer))
    step = max(1.0, len(found) / MAX_MUTATIONS)
    return [found[int(n * step)] for n in range(min(len(found), MAX_MUTATIONS))]


def _changed(answer: Any) -> Iterator[tuple[str, Any]]:
    for path, value in _values(answer, ()):
        where = "".join(f"[{key!r}]" for key in path) or "the answer"
        others = [(f"{where} = {other!r}", other) for other in _other_leaves(value)]
        match value:
            case dict():
                fields = cast(dict[str, Any], value)
                others.append((f"{where} with a further key", {**fields, "further": 1}))
                for key in fields:
                    rest = {k: v for k, v in fields.items() if k != key}
                    others.append((f"{where} without {key!r}", rest))
            case list():
                items = cast(list[Any], value)
                for n in range(len(items)):
                    others.append((f"{where} without entry {n}", items[:n] + items[n + 1 :]))
                if items:
                    _, other = next(_changed(items[-1]), ("", None))
                    others.append((f"{where} with an entry twice", [*items, items[-1]]))
                    others.append((f"{where} with a further entry", [*items, other]))
            case _:
                pass
        for name, other in others:
            yield name, _with(answer, path, other)


def _other_leaves(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value, None]
        case int():
            return [value + 1, value - 1, None]
        case float():
            return [value + max(1.0, abs(value)), -value - 1.0, None]
        case str():
            return [f"{value} or another", f"another or {value}", ""]
        case _:
            return []


def _null(value: Any) -> None: ...


def _blank(value: Any) -> str:
    return ""


def _zero(value: Any) -> Any:
    return type(value)() if isinstance(value, str | int | float) else value


def plausible(answer: Any, texts: Sequence[str], seed: int) -> list[Any]:
    """Return answers with the same structure as the true answer.

    Their strings are drawn from `texts`, and their numbers are near the true ones.
    """
    draw = random.Random(seed)
    found: list[Any] = []
    leaves = [(p, v) for p, v in _values(answer, ()) if isinstance(v, str | int | float)]
    for _ in range(_PLAUSIBLE if leaves else 0):
        other = answer
        for path, value in leaves:
            if isinstance(value, str):
                other = _with(other, path, draw.choice(texts) if texts else f"{value}?")
            elif isinstance(value, bool):
                other = _with(other, path, draw.random() < 0.5)
            else:
                other = _with(other, path, value + draw.choice((-3, -2, -1, 1, 2, 3)))
        if other != answer:
            found.append(other)
    return found


def _values(value: Any, path: _Place) -> Iterator[tuple[_Place, Any]]:
    yield path, value
    inner: Any = ()
    if isinstance(value, dict):
        inner = cast(dict[str, Any], value).items()
    elif isinstance(value, list):
        inner = enumerate(cast(list[Any], value))
    for key, one in inner:
        yield from _values(one, (*path, key))


def _with(answer: Any, path: _Place, value: Any) -> Any:
    if not path:
        return value
    whole = copy.deepcopy(answer)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole
