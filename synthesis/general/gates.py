"""Gates that environments and tasks have to pass, and the sandboxes that run the author's code. A
gate raises `Rejected` with its own name."""

import asyncio
import json
import random
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from keel.agents.env_process.client import ForkServer, Hosted
from keel.agents.env_process.process import Deadlines, EnvSandbox, Program
from keel.agents.schemas import ArgumentValidator
from keel.agents.types import EnvironmentLost, Opening
from keel.configs.schema import ConfigError
from keel.configs.synthesis import GeneralConfig
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import Network, environment_wrap
from keel.rl.turns import ToolCall
from keel.rl.types import Prompt
from keel.synthesis.author import gather_or_cancel, tool_spec_of
from keel.synthesis.ledger import Rejected

_PACKAGE = "keel.agents.environments.general"
_MEMORY_MIB = 2048
_STARTING = 8
SLACK_S = 30.0
"""Seconds added to the time limits inside the sandbox."""


def _sandbox(network: Network) -> EnvSandbox:
    try:
        wrap = environment_wrap(
            "bubblewrap", memory_mib=_MEMORY_MIB, processes=64, network=network, knob=""
        )
    except IsolationError as error:
        raise ConfigError(f"family = general needs a sandbox: {error}") from error
    assert wrap is not None
    return wrap


class GeneralSandboxes:
    """Opens sandboxes that can only read the folder `making`. Use it as an async context
    manager."""

    def __init__(self, making: Path, config: GeneralConfig) -> None:
        self.making, self.config = making, config
        making.mkdir(parents=True, exist_ok=True)
        making.chmod(0o755)  # as root, Keel runs the sandbox as another user
        self._wraps = {False: _sandbox("none")}
        if config.network:
            self._wraps[True] = _sandbox("host")
        self._starting = asyncio.Semaphore(_STARTING)
        self._parent = ForkServer(self._program("environment:General", {}))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parent.close()

    def _program(
        self,
        target: str,
        arguments: Mapping[str, Any],
        hash_seed: int | None = None,
        network: bool = False,
    ) -> Program:
        return Program(
            target=f"{_PACKAGE}.{target}",
            arguments=arguments,
            folder=self.making,
            env={} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)},
            memory_mib=_MEMORY_MIB,
            deadlines=Deadlines(
                open_s=self.config.call_s + SLACK_S, verdict_s=self.config.verify_s + SLACK_S
            ),
            wrap=self._wraps[network],
        )

    @asynccontextmanager
    async def open(
        self,
        target: str,
        *,
        reward: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        hash_seed: int | None = None,
        network: bool = False,
        seed: int = 0,
    ) -> AsyncGenerator[tuple[Hosted, Opening]]:
        """Open the environment `target` from `keel.agents.environments.general`, and yield it along
        with its first messages and tools. `hash_seed` is the Python hash seed of its process.
        Raises EnvironmentLost if the environment crashes or hangs."""
        program = self._program(target, arguments or {}, hash_seed, network)
        parent = self._parent if hash_seed is None and not network else None
        hosted = Hosted(program, starting=self._starting, fork_server=parent)
        task = Prompt(
            prompt_id="task/0",
            domain="general",
            messages=({"role": "user", "content": "?"},),
            reward=dict(reward or {}),
        )
        try:
            yield hosted, await hosted.open(task, seed=seed)
        finally:
            await hosted.close()

    async def workshop(
        self,
        gate: str,
        environment: Path,
        name: str,
        *,
        each_s: float,
        times: int = 1,
        arguments: Mapping[str, Any] | None = None,
        hash_seed: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Call a method of `AuthorWorkshop` in a sandbox and return its result. The method runs the
        author's code `times` times, with a timeout of `each_s` per run. Raises Rejected with the
        name `gate` if the code fails."""
        called = ToolCall(call_id="c", name=name, arguments=dict(arguments or {}))
        reward = {"environment": str(environment), "within_s": each_s}
        with reject_crashes(gate):
            async with self.open(
                "environment:AuthorWorkshop", reward=reward, hash_seed=hash_seed, seed=seed
            ) as (hosted, _):
                result = await hosted.call(called, timeout_s=times * each_s + SLACK_S)
        if result.failed:
            raise Rejected(gate, result.text.removeprefix("Rejected: "))
        return json.loads(result.text)


@contextmanager
def reject_crashes(gate: str) -> Generator[None]:
    """Raise Rejected with the name `gate` if code in a sandbox crashes or hangs."""
    try:
        yield
    except EnvironmentLost as error:
        if error.during == "parent":
            raise
        raise Rejected(gate, error.detail) from error


Specs = Mapping[str, Mapping[str, Any]]
"""Maps each tool's name to its description, its parameters, and whether it returns `text` or
`json`."""
_Reference = Callable[[GeneralSandboxes, Path, int], Awaitable[int]]
"""Attempts a task in a folder `config.attempts` times and returns how many attempts pass."""
_Results = Sequence[tuple[ToolCall, Mapping[str, str]]]
"""A solution's tool calls with their results, {"text" or "failed": …}."""
_CallAnswerer = Callable[[ToolCall], Awaitable[Mapping[str, str]]]
_Leaf = Callable[[Any], Any]
"""Maps a string, number or boolean to another value of the same type."""
_EMPTY: tuple[Any, ...] = (None, "", [], {}, 0, False, True, "{}", "[]")
_MAX_MUTATIONS = 60
_PLAUSIBLE = 24
"""Number of random answers with the same structure as the true one."""
_PROBES = 5
_MAX_CALLS, _MAX_REPLAYED, _MAX_TEXTS, _MAX_MESSAGE = 1000, 200, 400, 300
_HASH_SEEDS = (1, 2)


async def check_types(sandboxes: GeneralSandboxes, environment: Path) -> Specs:
    """Check that all tools have type hints, docstrings and valid schemas, and return their
    specs."""
    specs: dict[str, dict[str, Any]] = await sandboxes.workshop(
        "typed", environment, "describe", each_s=sandboxes.config.call_s
    )
    try:
        ArgumentValidator([tool_spec_of(spec) for spec in specs.values()])
        _ = [spec["returns"] for spec in specs.values()]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Rejected("typed", f"the tools' schemas: {error}") from error
    return specs


def open_episode(
    sandboxes: GeneralSandboxes, environment: Path, number: int, *, seed: int = 0
) -> Any:
    """Open the environment the same way as for an episode of the policy."""
    arguments = {"folder": str(environment), "verify_s": sandboxes.config.verify_s}
    reward = {"general": {"task": number}}
    return sandboxes.open("environment:General", reward=reward, arguments=arguments, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDraft:
    """A new task in an environment's folder that hasn't passed the gates yet."""

    sandboxes: GeneralSandboxes
    path: Path
    number: int
    specs: Specs
    solution: str
    seed: int = 0

    async def check(
        self, earlier: Sequence[Any], before: int | None, reference: _Reference
    ) -> tuple[Any, int, int]:
        """Run all gates on the task. Returns the solution's answer, its number of tool calls, and
        how many reference attempts passed. `earlier` holds the answers to earlier tasks, and
        `before` is the number of attempts at the previous task that passed. Raises Rejected if a
        gate rejects the task, and RecursionError if values are nested too deeply."""
        answer, results = await self.solve()
        again, _ = await self.solve(self.seed + 1)
        await self._check_verified([answer, again])
        await self._check_grounded(answer, results)

        async def refuses(gate: str, answers: Sequence[tuple[str, Any]]) -> None:
            if accepted := await self._accepted(gate, answers):
                raise Rejected(gate, f"verify accepts {accepted[0][:_MAX_MESSAGE]}")

        hollow = [_map_leaves(change, answer) for change in _HOLLOW]
        empty = [*_EMPTY, *(one for one in hollow if one != answer)]
        await refuses("empty", [(repr(one), one) for one in empty])
        await refuses("mutated", _mutate_answer(answer))
        others = _draw_wrong_answers(answer, await self._texts(), self.seed)
        accepted = await self._accepted("mutated", [(_short(one), one) for one in others])
        if len(accepted) > len(others) // 2:
            raise Rejected(
                "mutated",
                f"verify accepts {len(accepted)} of {len(others)} answers drawn at random, "
                f"{accepted[0]} among them",
            )
        await refuses("easier", [(f"the answer of task {n}", one) for n, one in enumerate(earlier)])
        await self._check_deterministic([call for call, _ in results])
        passed, attempts = 0, self.sandboxes.config.attempts
        if attempts:
            passed = await reference(self.sandboxes, self.path, self.number)
            if before is not None and passed >= before:
                raise Rejected(
                    "harder",
                    f"{passed} of {attempts} attempts of the reference policy pass, {before} at "
                    "the task before",
                )
        return answer, len(results), passed

    async def solve(self, seed: int = 0) -> tuple[Any, _Results]:
        """Run the solution in a process that has access only to the tools. Returns its answer,
        along with its tool calls and their results. The calls go through the environment, just like
        a policy's."""
        results: list[tuple[ToolCall, Mapping[str, str]]] = []
        with reject_crashes("solution"):
            async with open_episode(self.sandboxes, self.path, self.number, seed=seed) as (
                policy,
                _,
            ):

                async def request(call: ToolCall) -> Mapping[str, str]:
                    done = await policy.call(call, timeout_s=self.sandboxes.config.call_s)
                    results.append((call, {"failed" if done.failed else "text": done.text}))
                    return results[-1][1]

                answer = await self._run_solution(request)
        if not results:
            raise Rejected("solution", "solve calls no tool")
        return answer, results

    async def _run_solution(self, request: _CallAnswerer) -> Any:
        reward = {
            "source": self.solution,
            "number": self.number,
            "returns": {name: spec["returns"] for name, spec in self.specs.items()},
        }
        within_s = self.sandboxes.config.solve_s
        tool_result: Mapping[str, Any] = {}
        reply: dict[str, Any] = {}
        with reject_crashes("solution"):
            async with self.sandboxes.open("environment:Solution", reward=reward) as (solver, _):
                try:
                    async with asyncio.timeout(within_s):
                        for count in range(_MAX_CALLS + 1):
                            go = ToolCall(
                                call_id="s", name="go", arguments={"tool_result": tool_result}
                            )
                            result = await solver.call(go, timeout_s=within_s + SLACK_S)
                            if result.failed:
                                raise Rejected("solution", result.text.removeprefix("Rejected: "))
                            reply = json.loads(result.text)
                            if "call" not in reply:
                                break
                            tool_result = await request(self._call_of(reply, count))
                        else:
                            raise Rejected("solution", f"solve makes more than {_MAX_CALLS} calls")
                except TimeoutError as error:
                    reason = f"solve exceeded general.solve_s = {within_s:g}"
                    raise Rejected("solution", reason) from error
        if "is" not in reply:
            message = str(reply.get("refused") or reply.get("raised"))
            raise Rejected("solution", message[:_MAX_MESSAGE])
        return reply["is"]

    def _call_of(self, reply: Mapping[str, Any], count: int) -> ToolCall:
        name, arguments = str(reply["call"]), reply.get("arguments")
        if name not in self.specs or not isinstance(arguments, dict):
            raise Rejected("solution", f"invalid call of {name!r}")
        return ToolCall(call_id=f"c{count}", name=name, arguments=cast(dict[str, Any], arguments))

    async def _check_verified(self, answers: Sequence[Any]) -> None:
        verdicts = await self._verdicts("verified", answers)
        for answer, verdict in zip(answers, verdicts, strict=True):
            if isinstance(verdict, str):
                raise Rejected("verified", f"verify fails on the solution's answer: {verdict}")
            if missed := [name for name, met in verdict.items() if not met]:
                raise Rejected(
                    "verified",
                    f"verify rejects the solution's answer {_short(answer)}; not met: "
                    f"{', '.join(missed)}",
                )

    async def _check_grounded(self, answer: Any, results: _Results) -> None:
        """Check that the answer depends on the tool results: it must change if they contain other
        names, other numbers or fewer entries. The author has seen the database and could have
        hard-coded the answer. A solution that fails on the altered results passes too."""

        async def outcome(change: _Leaf, entries: _Leaf = lambda value: value) -> str:
            try:
                other = await self._run_solution(_replay(results, change, entries))
            except Rejected:
                return "fails"
            return "same" if other == answer else "other"

        outcomes = await gather_or_cancel(*map(outcome, _CHANGES.values()))
        if "same" not in outcomes or "other" in outcomes:
            return
        if await outcome(lambda value: value, _halve_entries) != "other":
            same = [name for name, what in zip(_CHANGES, outcomes, strict=True) if what == "same"]
            raise Rejected(
                "grounded",
                f"the solution returns the same answer when the tools return {' or '.join(same)}; "
                "it must derive the answer from the tools",
            )

    async def _check_deterministic(self, calls: Sequence[ToolCall]) -> None:
        """Check that tools return the same results in two processes with different hash seeds, both
        for the solution's calls and for random calls with arguments from the database."""
        texts, draw = await self._texts(), random.Random(self.seed)
        request = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        request = request[:_MAX_REPLAYED]
        for name, spec in self.specs.items():
            for _ in range(_PROBES):
                arguments = _drawn(spec["parameters"], texts, draw)
                request.append({"name": name, "arguments": arguments})
        one, two = await asyncio.gather(
            *(
                self.sandboxes.workshop(
                    "deterministic",
                    self.path,
                    "results",
                    each_s=self.sandboxes.config.call_s,
                    times=len(request),
                    arguments={"calls": request},
                    hash_seed=hash_seed,
                    seed=self.seed,
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

    async def _verdicts(self, gate: str, answers: Sequence[Any]) -> list[dict[str, bool] | str]:
        return await self.sandboxes.workshop(
            gate,
            self.path,
            "verdicts",
            each_s=self.sandboxes.config.verify_s,
            times=len(answers),
            arguments={"number": self.number, "answers": list(answers)},
        )

    async def _accepted(self, gate: str, answers: Sequence[tuple[str, Any]]) -> list[str]:
        if not answers:
            return []
        verdicts = await self._verdicts(gate, [answer for _, answer in answers])
        return [
            name
            for (name, _), verdict in zip(answers, verdicts, strict=True)
            if not isinstance(verdict, str) and all(verdict.values())
        ]

    async def _texts(self) -> list[str]:
        call_s = self.sandboxes.config.call_s
        return await self.sandboxes.workshop(
            "database", self.path, "strings", each_s=call_s, arguments={"most": _MAX_TEXTS}
        )


def _drawn(schema: Any, texts: Sequence[str], draw: random.Random) -> Any:
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


def _replay(results: _Results, change: _Leaf, entries: _Leaf) -> _CallAnswerer:
    """Return a function that answers a solution's tool calls with altered copies of the recorded
    results. `entries` alters whole results, and `change` alters the values in them. If a call's
    arguments contain altered values, they are mapped back to the true ones."""

    def key(name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps([name, dict(arguments)], sort_keys=True)

    known = {key(call.name, call.arguments): result for call, result in results}
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
    if isinstance(value, dict):
        return {name: _map_leaves(change, one) for name, one in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_map_leaves(change, one) for one in cast(list[Any], value)]
    return change(value)


def _halve_entries(value: Any) -> Any:
    if isinstance(value, list):
        each = cast(list[Any], value)
        return each[: len(each) // 2]
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        if any(isinstance(one, list) for one in fields.values()):
            halved = {k: _halve_entries(one) for k, one in fields.items() if isinstance(one, list)}
            return {**fields, **halved}
        return dict(list(fields.items())[: len(fields) // 2])
    if isinstance(value, str):
        lines = value.splitlines(keepends=True)
        return "".join(lines[: len(lines) // 2])
    return value


def _next_number(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else value


_OTHER_DIGITS = str.maketrans("0123456789", "9876543210")
_CHANGES: Mapping[str, _Leaf] = {
    "other names": lambda value: f"{value} II" if isinstance(value, str) else value,
    "other digits in texts": lambda v: v.translate(_OTHER_DIGITS) if isinstance(v, str) else v,
    "other numbers": _next_number,
    "numbers in another order": lambda v: 1000 - v if type(v) in (int, float) else v,
}
_HOLLOW: Sequence[_Leaf] = (
    lambda value: None,
    lambda value: "",
    lambda value: type(value)() if isinstance(value, str | int | float) else value,
)


def _mutate_answer(answer: Any) -> list[tuple[str, Any]]:
    """Return up to `_MAX_MUTATIONS` wrong answers that differ from the true one in a single value,
    key or entry, each with a description."""
    every = [
        (place if place.startswith("[") else f"the answer{place}", other)
        for place, other in _changed(answer)
    ]
    step = max(1.0, len(every) / _MAX_MUTATIONS)
    return [every[int(n * step)] for n in range(min(len(every), _MAX_MUTATIONS))]


def _changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all variants of a value with a single value, key or entry changed, each with a
    description of where it differs."""
    match value:
        case dict():
            fields = cast(dict[str, Any], value)
            yield " with a further key", {**fields, "further": 1}
            for key in fields:
                yield f" without {key!r}", {k: v for k, v in fields.items() if k != key}
            for key, inner in fields.items():
                for place, other in _changed(inner):
                    yield f"[{key!r}]{place}", {**fields, key: other}
        case list():
            items = cast(list[Any], value)
            for n in range(len(items)):
                yield f" without entry {n}", items[:n] + items[n + 1 :]
            if items:
                _, other = next(_changed(items[-1]), ("", None))
                yield " with an entry twice", [*items, items[-1]]
                yield " with a further entry", [*items, other]
            for n, inner in enumerate(items):
                for place, other in _changed(inner):
                    yield f"[{n}]{place}", [*items[:n], other, *items[n + 1 :]]
        case _:
            yield from ((f" = {other!r}", other) for other in _other_leaves(value))


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


def _draw_wrong_answers(answer: Any, texts: Sequence[str], seed: int) -> list[Any]:
    """Draw wrong answers with the same structure as the true one. Strings are taken from `texts`,
    and numbers are close to the true ones."""
    draw = random.Random(seed)

    def other_leaf(value: Any) -> Any:
        if isinstance(value, str):
            return draw.choice(texts) if texts else f"{value}?"
        if isinstance(value, bool):
            return draw.random() < 0.5
        if isinstance(value, int | float):
            return value + draw.choice((-3, -2, -1, 1, 2, 3))
        return value

    others = [_map_leaves(other_leaf, answer) for _ in range(_PLAUSIBLE)]
    return [other for other in others if other != answer]
