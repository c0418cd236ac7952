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
"""The description and parameters of each tool by name, and whether it returns `text` or `json`."""
CallAnswerer = Callable[[ToolCall], Awaitable[Mapping[str, str]]]
"""A function that answers a tool call of a solution with {"text" or "failed": …}."""
PROBES = 5
"""Number of generated calls per tool."""
MOST_CALLS = 1000
MOST_REPLAYED = 200
MOST_TEXTS = 400
MOST_SAID = 300
HASH_SEEDS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionResult:
    """What running a solution gave."""

    answer: Any
    results: Results

    @property
    def calls(self) -> list[ToolCall]:
        return [call for call, _ in self.results]


async def typed(rooms: GeneralSandboxes, environment: Path) -> Specs:
    """Check that all tools have type hints, docstrings and valid schemas."""
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
    """Check that tools return the same results in two processes with different hash seeds. The
    calls are those of the solution and generated ones with arguments from the database."""
    texts = await texts_of(rooms, environment)
    draw = random.Random(seed)
    probes = [
        {"name": name, "arguments": _drawn(spec["parameters"], texts, draw)}
        for name, spec in specs.items()
        for _ in range(PROBES)
    ]
    request = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    request = [*request[:MOST_REPLAYED], *probes]
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
            for hash_seed in HASH_SEEDS
        )
    )
    for call, first, second in zip(request, one, two, strict=True):
        if first != second:
            said = f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"
            raise Rejected(
                "deterministic",
                f"{said[:MOST_SAID]} returns {_short(first)} in one process and "
                f"{_short(second)} in another",
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
    """Run the solution in a process that has only the tools. Its calls go through the environment
    like those of a policy."""
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
    entries. The author has seen the database and could have written the answer into the solution. A
    solution that fails on changed results passes, because that proves nothing."""

    async def over(change: Leaf, entries: Leaf = as_it_is) -> str:
        replay = ResultReplay(found.results, change, entries)

        async def request(call: ToolCall) -> Mapping[str, str]:
            return replay(call)

        try:
            answer = await _run_solution(rooms, specs, solution, number, request)
        except Rejected:
            return "fails"
        return "same" if answer == found.answer else "other"

    came_to = await gather_or_cancel(*map(over, CHANGES.values()))
    if "same" not in came_to or "other" in came_to:
        return
    if await over(as_it_is, halve_entries) != "other":
        same = [name for name, what in zip(CHANGES, came_to, strict=True) if what == "same"]
        raise Rejected(
            "grounded",
            f"the solution returns the same answer when the tools return {' or '.join(same)}; it "
            "must derive the answer from the tools",
        )


async def _run_solution(
    rooms: GeneralSandboxes, specs: Specs, solution: str, number: int, request: CallAnswerer
) -> Any:
    """Run a solution, answering its calls with `asked`, and return its answer."""
    given = {
        "source": solution,
        "number": number,
        "returns": {name: spec["returns"] for name, spec in specs.items()},
    }
    said: Mapping[str, Any] = {}
    with lost_to("solution"):
        async with rooms.open("workshop:Solution", reward=given) as (solver, _):
            try:
                async with asyncio.timeout(rooms.config.solve_s):
                    for count in range(MOST_CALLS + 1):
                        go = ToolCall(call_id="s", name="go", arguments={"said": said})
                        result = await solver.call(go, timeout_s=rooms.config.solve_s + SLACK_S)
                        if result.failed:
                            raise Rejected("solution", result.text.removeprefix("Rejected: "))
                        reply: dict[str, Any] = json.loads(result.text)
                        if "call" not in reply:
                            break
                        said = await request(_call(reply, count, specs))
                    else:
                        raise Rejected(
                            "solution", f"solve calls tools more than {MOST_CALLS} times"
                        )
            except TimeoutError as error:
                raise Rejected(
                    "solution", f"solve exceeded general.solve_s = {rooms.config.solve_s:g}"
                ) from error
    if "is" not in reply:
        raise Rejected("solution", str(reply.get("refused") or reply.get("raised"))[:MOST_SAID])
    return reply["is"]


def _call(reply: Mapping[str, Any], count: int, specs: Specs) -> ToolCall:
    """Read a call from a reply. Raises Rejected if the call is invalid."""
    arguments = reply.get("arguments")
    if not isinstance(arguments, dict):
        raise Rejected("solution", "a call has no keyword arguments")
    name, given = str(reply["call"]), cast(dict[str, Any], arguments)
    if name not in specs:
        raise Rejected("solution", f"unknown tool {name!r}")
    return ToolCall(call_id=f"c{count}", name=name, arguments=given)


def general(rooms: GeneralSandboxes, environment: Path, number: int, *, seed: int = 0) -> Any:
    """Open the environment in the same way as for the policy."""
    arguments = {"folder": str(environment), "verify_s": rooms.config.verify_s}
    reward = {"general": {"task": number}}
    return rooms.open("environment:General", reward=reward, arguments=arguments, seed=seed)


async def verified(rooms: GeneralSandboxes, environment: Path, number: int, *answers: Any) -> None:
    """Check that `verify` accepts the solution's answers."""
    found = await verdicts("verified", rooms, environment, number, answers)
    for answer, verdict in zip(answers, found, strict=True):
        if isinstance(verdict, str):
            raise Rejected("verified", f"verify fails on the solution's answer: {verdict}")
        if missed := [name for name, met in verdict.items() if not met]:
            raise Rejected(
                "verified",
                f"verify rejects the solution's answer {_short(answer)}; not met: "
                f"{', '.join(missed)}",
            )


async def not_empty(rooms: GeneralSandboxes, environment: Path, number: int, answer: Any) -> None:
    """Check that `verify` rejects empty answers of any form."""
    empty = [*EMPTY, *(one for one in hollow(answer) if one != answer)]
    await _refused("empty", rooms, environment, number, [(repr(one), one) for one in empty])


async def not_mutated(
    rooms: GeneralSandboxes, environment: Path, number: int, answer: Any, *, seed: int
) -> None:
    """Check that `verify` rejects the answer after any single change, and most random answers of
    the same form."""
    changed = mutations(answer)
    await _refused("mutated", rooms, environment, number, changed)
    others = plausible(answer, await texts_of(rooms, environment), seed)
    found = await verdicts("mutated", rooms, environment, number, others)
    accepted = [one for one, verdict in zip(others, found, strict=True) if passes(verdict)]
    if len(accepted) > len(others) // 2:
        raise Rejected(
            "mutated",
            f"verify accepts {len(accepted)} of {len(others)} answers drawn at random, "
            f"{_short(accepted[0])} among them",
        )


async def not_easier(
    rooms: GeneralSandboxes, environment: Path, number: int, earlier: Sequence[Any]
) -> None:
    """Check that `verify` rejects the answers to earlier tasks."""
    named = [(f"the answer of task {n}", answer) for n, answer in enumerate(earlier)]
    await _refused("easier", rooms, environment, number, named)


def harder(before: int | None, passed: int, attempts: int) -> None:
    """Check that fewer attempts of the reference policy pass than for the previous task."""
    if attempts and before is not None and passed >= before:
        raise Rejected(
            "harder",
            f"{passed} of {attempts} attempts of the reference policy pass, {before} at the task "
            "before",
        )


async def verdicts(
    gate: str, rooms: GeneralSandboxes, environment: Path, number: int, answers: Sequence[Any]
) -> list[dict[str, bool] | str]:
    """Return for each answer which demands it meets, or the error that `verify` raised."""
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


async def texts_of(rooms: GeneralSandboxes, environment: Path) -> list[str]:
    """Return strings from the database."""
    return await rooms.workshop(
        "database",
        environment,
        "strings",
        each_s=rooms.config.call_s,
        arguments={"most": MOST_TEXTS},
    )


async def _refused(
    gate: str,
    rooms: GeneralSandboxes,
    environment: Path,
    number: int,
    answers: Sequence[tuple[str, Any]],
) -> None:
    found = await verdicts(gate, rooms, environment, number, [answer for _, answer in answers])
    for (name, _), verdict in zip(answers, found, strict=True):
        if passes(verdict):
            raise Rejected(gate, f"verify accepts {name[:MOST_SAID]}")


def _drawn(schema: Any, texts: Sequence[str], draw: random.Random) -> Any:
    """Draw a random value for a schema that was made from type hints. Returns None for any other
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


Leaf = Callable[[Any], Any]
"""A function that maps a string, number or boolean to another one of the same kind."""
Results = Sequence[tuple[ToolCall, Mapping[str, str]]]
"""Tool calls with their results, each {"text" or "failed": …}."""


class ResultReplay:
    """Answers the calls of a solution with altered versions of recorded results. If an argument
    repeats an altered value, it is mapped back to the true one."""

    def __init__(self, results: Results, change: Leaf, entries: Leaf) -> None:
        """`entries` alters whole results. After that `change` alters their leaves."""
        self._change, self._entries = change, entries
        self._known = {_key(call.name, call.arguments): said for call, said in results}
        self._true: dict[str, Any] = {}

    def __call__(self, call: ToolCall) -> Mapping[str, str]:
        arguments = dict(call.arguments)
        said = self._known.get(_key(call.name, arguments))
        said = said or self._known.get(_key(call.name, map_leaves(self._meant, arguments)))
        if said is None:
            return {"failed": "not found"}
        if "text" not in said:
            return said
        try:
            value: Any = json.loads(said["text"])
        except ValueError:  # the tool returns text
            return {"text": str(self._changed_leaf(self._entries(said["text"])))}
        value = map_leaves(self._changed_leaf, self._entries(value))
        return {"text": json.dumps(value, ensure_ascii=False)}

    def _changed_leaf(self, value: Any) -> Any:
        changed = self._change(value)
        self._true[json.dumps(changed)] = value
        return changed

    def _meant(self, value: Any) -> Any:
        return self._true.get(json.dumps(value), value)


def map_leaves(change: Leaf, value: Any) -> Any:
    """Return a copy of a value in which every leaf is changed."""
    if isinstance(value, dict):
        return {name: map_leaves(change, one) for name, one in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [map_leaves(change, one) for one in cast(list[Any], value)]
    return change(value)


def as_it_is(value: Any) -> Any:
    return value


def halve_entries(value: Any) -> Any:
    """Drop half of the entries of a list, of the lists in an object, of a flat object, or of the
    lines in a text, so that counts change."""
    if isinstance(value, list):
        each = cast(list[Any], value)
        return each[: len(each) // 2]
    if isinstance(value, dict):
        named = cast(dict[str, Any], value)
        if any(isinstance(one, list) for one in named.values()):
            return {
                k: halve_entries(one) if isinstance(one, list) else one for k, one in named.items()
            }
        return dict(list(named.items())[: len(named) // 2])
    if isinstance(value, str):
        lines = value.splitlines(keepends=True)
        return "".join(lines[: len(lines) // 2])
    return value


def _other_name(value: Any) -> Any:
    return f"{value} II" if isinstance(value, str) else value


def _other_digits(value: Any) -> Any:
    """Change the digits in texts, such as times and prices."""
    if isinstance(value, str):
        return re.sub(r"[0-9]", lambda found: str(9 - int(found[0])), value)
    return value


def _next_number(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else value


def _other_order(value: Any) -> Any:
    """Change numbers so that their order is reversed."""
    return 1000 - value if type(value) in (int, float) else value


CHANGES: Mapping[str, Leaf] = {
    "other names": _other_name,
    "other digits in texts": _other_digits,
    "other numbers": _next_number,
    "numbers in another order": _other_order,
}


def _key(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps([name, dict(arguments)], sort_keys=True)


EMPTY: tuple[Any, ...] = (None, "", [], {}, 0, False, True, "{}", "[]")
MOST = 60
PLAUSIBLE = 24

Place = tuple[str | int, ...]


def mutations(answer: Any) -> list[tuple[str, Any]]:
    """Return (description, answer) pairs in which one value, key or entry is changed. If there are
    more than `MOST`, an evenly spaced selection is returned."""
    found = list(_changed(answer))
    step = max(1.0, len(found) / MOST)
    return [found[int(n * step)] for n in range(min(len(found), MOST))]


def _changed(answer: Any) -> Iterator[tuple[str, Any]]:
    for path, value in _values(answer, ()):
        where = "".join(f"[{key!r}]" for key in path) or "the answer"
        for other in _others(value):
            yield f"{where} = {other!r}", _with(answer, path, other)
        if isinstance(value, dict):
            fields = cast(dict[str, Any], value)
            yield f"{where} with a further key", _with(answer, path, {**fields, "further": 1})
            for key in fields:
                rest = {k: v for k, v in fields.items() if k != key}
                yield f"{where} without {key!r}", _with(answer, path, rest)
        if isinstance(value, list):
            items = cast(list[Any], value)
            for n in range(len(items)):
                yield f"{where} without entry {n}", _with(answer, path, items[:n] + items[n + 1 :])
            if items:
                yield f"{where} with an entry twice", _with(answer, path, [*items, items[-1]])
                _, other = next(_changed(items[-1]), ("", None))
                yield f"{where} with a further entry", _with(answer, path, [*items, other])


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, value - 1, None]
    if isinstance(value, float):
        return [value + max(1.0, abs(value)), -value - 1.0, None]
    if isinstance(value, str):
        return [f"{value} or another", f"another or {value}", ""]
    return []


def hollow(answer: Any) -> list[Any]:
    """Return answers of the same form whose values are empty."""
    return [
        map_leaves(lambda _: None, answer),
        map_leaves(lambda _: "", answer),
        map_leaves(_zero, answer),
    ]


def _zero(value: Any) -> Any:
    return type(value)() if isinstance(value, str | int | float) else value


def plausible(answer: Any, texts: Sequence[str], seed: int) -> list[Any]:
    """Return answers of the same form with strings drawn from `texts` and numbers near the true
    ones."""
    draw = random.Random(seed)
    found: list[Any] = []
    leaves = [
        (path, value) for path, value in _values(answer, ()) if isinstance(value, str | int | float)
    ]
    for _ in range(PLAUSIBLE if leaves else 0):
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


def _values(value: Any, path: Place) -> Iterator[tuple[Place, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, inner in cast(dict[str, Any], value).items():
            yield from _values(inner, (*path, key))
    elif isinstance(value, list):
        for key, inner in enumerate(cast(list[Any], value)):
            yield from _values(inner, (*path, key))


def _with(answer: Any, path: Place, value: Any) -> Any:
    if not path:
        return value
    whole = copy.deepcopy(answer)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole
