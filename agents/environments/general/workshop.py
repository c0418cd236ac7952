"""Environments for the synthesis of general tasks. An author model builds a database in
`DatabaseDesk`, and `Workshop` runs the code that it writes and checks its tasks. Both run only in a
sandbox."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from keel.agents.env_runtime import processes
from keel.agents.env_runtime.tool_objects import InvalidEnvironment
from keel.agents.environments.general.author_code import (
    ChildEnded,
    Folder,
    run_verifier,
    start_solution,
    start_tools,
)

_SHOWN = 3
_MAX_CALLS, _MAX_TEXTS, _MAX_MESSAGE = 1000, 400, 300
_MAX_MUTATIONS = 60
_PLAUSIBLE = 24
"""Number of random answers with the same structure as the true one."""
MAX_VERDICTS = 100
"""Upper limit for the number of answers that `Workshop.check` verifies, besides earlier ones."""
MAX_SOLUTIONS = 5
"""Upper limit for the number of times that `Workshop.check` runs the task's solution."""
_EMPTY: tuple[Any, ...] = (None, "", [], {}, 0, False, True, "{}", "[]")
_Leaf = Callable[[Any], Any]
"""Maps a value to another one of the same type."""
_HOLLOW: Sequence[_Leaf] = (
    lambda value: None,
    lambda value: "",
    lambda value: type(value)() if isinstance(value, str | int | float) else value,
)
_Reply = Mapping[str, str]
"""The result of a tool call, as {"text": …} or {"failed": …}."""
_Results = list[tuple[str, dict[str, Any], _Reply]]
"""The tool calls of a solution with their results, as (name, arguments, reply)."""


class _Refused(Exception):
    """Raised when a gate refuses a task."""

    def __init__(self, gate: str, reason: str) -> None:
        super().__init__(gate, reason)
        self.gate, self.reason = gate, reason


class Workshop:
    """Runs the tools, solutions and verifiers that an author model wrote. The task's reward names
    their folder as `environment`, and the time limits `call_s`, `solve_s` and `verify_s` of a tool
    call, a solution and a verification."""

    def opening(self, task: Mapping[str, Any], seed: int) -> None:
        reward = task["reward"]
        self._folder, self._seed = Folder(Path(reward["environment"])), seed
        self._call_s, self._solve_s = reward["call_s"], reward["solve_s"]
        self._verify_s = reward["verify_s"]

    def shown(self, most: int) -> list[str]:
        """Return example entries from each top-level key of the database, with at most `most`
        characters in total."""
        value: Any = self._folder.database()
        kinds = cast(dict[str, Any], value if isinstance(value, dict) else {"": value})
        parts: list[str] = []
        for name, kind in kinds.items():
            first, count = kind, 0
            if isinstance(kind, dict | list):
                entries = cast(Any, kind)
                count = len(entries)
                is_list = isinstance(kind, list)
                first = entries[:_SHOWN] if is_list else dict(list(entries.items())[:_SHOWN])
            more = f" … {count} in all" if count > _SHOWN else ""
            text = json.dumps(first, ensure_ascii=False)
            parts.append(f"{name}: {text}{more}")
        return ["\n".join(parts)[:most]]

    def describe(self) -> Any:
        """Return the tool descriptions by name."""
        child = start_tools(self._folder, self._seed)
        try:
            return child.ask({"do": "describe"}, self._call_s)
        except ChildEnded as error:
            raise InvalidEnvironment(f"tools.py: {error}") from error
        finally:
            child.end()

    def check(self, number: int, specs: dict[str, Any], earlier: list[Any], again: bool) -> Any:
        """Check task `number`. `earlier` holds the answers to the tasks before it, and `again` is
        true if their solutions have to be run again because the tools changed. Returns the
        solution's answer and its number of tool calls or, if a gate refuses the task, the gate and
        the reason."""
        self._specs = specs
        try:
            for one, known in enumerate(earlier if again else ()):
                if self._solve(one)[0] != known:
                    reason = f"the new tools change the solution of task {one}"
                    raise _Refused("earlier", reason)
            answer, results = self._solve(number)
            other, others = self._solve(number, seed=self._seed + 1)
            self._check_verified(number, [answer, other])
            for (name, arguments, one), (*_, two) in zip(results, others, strict=False):
                if one != two:
                    call = f"{name}({_short(arguments)})"
                    reason = (
                        f"{call} returns {_short(one)} in one process and {_short(two)} in another"
                    )
                    raise _Refused("deterministic", reason)
            self._check_grounded(number, answer, results)
            self._check_verifier(number, answer, earlier)
        except _Refused as refused:
            return {"gate": refused.gate, "reason": refused.reason}
        except RecursionError:
            reason = "an answer or result is nested too deeply"
            return {"gate": "solution", "reason": reason}
        return {"answer": answer, "calls": len(results)}

    def _solve(
        self,
        number: int,
        *,
        seed: int = 0,
        replies: Callable[[str, dict[str, Any]], _Reply] | None = None,
    ) -> tuple[Any, _Results]:
        """Run a solution in a process that has access only to the tools, or to `replies` instead of
        them. Returns its answer, along with its tool calls and their results."""
        returns = {name: spec["returns"] for name, spec in self._specs.items()}
        tools = None if replies else start_tools(self._folder, seed)
        solution = start_solution(self._folder.text("solve.py"), number, returns)
        until, results = time.monotonic() + self._solve_s, _Results()
        try:
            while True:
                remaining_s = until - time.monotonic()
                if remaining_s <= 0:
                    raise _Refused("solution", f"solve exceeded general.solve_s = {self._solve_s}")
                reply = solution.receive(remaining_s)
                if "call" not in reply:
                    break
                name, arguments = str(reply["call"]), reply.get("arguments")
                if name not in returns or not isinstance(arguments, dict):
                    raise _Refused("solution", f"invalid call of {name!r}")
                if len(results) == _MAX_CALLS:
                    raise _Refused("solution", f"solve makes more than {_MAX_CALLS} calls")
                arguments = cast(dict[str, Any], arguments)
                if tools is None:
                    assert replies is not None
                    result = replies(name, arguments)
                else:
                    tools.send({"do": "call", "name": name, "arguments": arguments})
                    done = tools.receive(self._call_s)
                    failed = str(done.get("raised") or done.get("refused"))
                    result = {"text": str(done["is"])} if "is" in done else {"failed": failed}
                results.append((name, arguments, result))
                solution.send(dict(result))
        except ChildEnded as error:
            raise _Refused("solution", f"the solution or a tool: {error}") from error
        finally:
            solution.end()
            if tools is not None:
                tools.end()
        if "is" not in reply:
            message = str(reply.get("refused") or reply.get("raised"))
            raise _Refused("solution", message[:_MAX_MESSAGE])
        if not results:
            raise _Refused("solution", "solve calls no tool")
        return reply["is"], results

    def _check_verified(self, number: int, answers: Sequence[Any]) -> None:
        for answer in answers:
            try:
                verdict = run_verifier(self._folder, number, answer, self._verify_s)
            except InvalidEnvironment as error:
                raise _Refused("verified", str(error)) from error
            if isinstance(verdict, str):
                reason = f"verify fails on the solution's answer: {verdict}"
                raise _Refused("verified", reason)
            if missed := [name for name, met in verdict.items() if not met]:
                reason = f"verify rejects the solution's answer {_short(answer)}; not met: "
                raise _Refused("verified", reason + ", ".join(missed))

    def _check_grounded(self, number: int, answer: Any, results: _Results) -> None:
        """Check that the answer depends on the tool results: it must change if they contain other
        names, other numbers or fewer entries. The author has seen the database and could have
        hard-coded the answer. A solution that fails on all altered results passes too."""
        same: list[str] = []
        for what, (change, entries) in _ALTERATIONS.items():
            try:
                other, _ = self._solve(number, replies=_replay(results, change, entries))
            except _Refused:
                continue
            if other != answer:
                return
            same.append(what)
        if same:
            reason = f"the solution returns the same answer when the tools return {same[0]}; "
            raise _Refused("grounded", reason + "it must derive the answer from the tools")

    def _check_verifier(self, number: int, answer: Any, earlier: Sequence[Any]) -> None:
        """Check that the verifier refuses empty answers, variants of the true answer, and the
        answers to earlier tasks."""
        hollow = [_map_leaves(change, answer) for change in _HOLLOW]
        self._refuse("empty", number, [*_EMPTY, *(one for one in hollow if one != answer)])
        self._refuse("mutated", number, _mutate_answer(answer))
        texts = list(dict.fromkeys(_strings_in(self._folder.database())))[:_MAX_TEXTS]
        others = _draw_wrong_answers(answer, texts, self._seed)
        accepted = [one for one in others if self._accepts(number, one)]
        if len(accepted) > len(others) // 2:
            reason = f"verify accepts {len(accepted)} of {len(others)} answers drawn at random"
            raise _Refused("mutated", f"{reason}, {_short(accepted[0])} among them")
        self._refuse("easier", number, earlier)

    def _refuse(self, gate: str, number: int, answers: Sequence[Any]) -> None:
        for answer in answers:
            if self._accepts(number, answer):
                raise _Refused(gate, f"verify accepts the wrong answer {_short(answer)}")

    def _accepts(self, number: int, answer: Any) -> bool:
        verdict = run_verifier(self._folder, number, answer, self._verify_s)
        return not isinstance(verdict, str) and all(verdict.values())


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from cast(dict[str, Any], value)
        value = list(cast(dict[str, Any], value).values())
    for item in cast(list[Any], value) if isinstance(value, list) else ():
        yield from _strings_in(item)


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:_MAX_MESSAGE]


def _replay(
    results: _Results, change: _Leaf, entries: _Leaf
) -> Callable[[str, dict[str, Any]], _Reply]:
    """Return a function that answers a solution's tool calls with altered copies of the recorded
    results. `entries` alters whole results, and `change` alters the values in them. If a call's
    arguments contain altered values, they are mapped back to the true ones."""

    def key(name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps([name, arguments], sort_keys=True)

    known = {key(name, arguments): result for name, arguments, result in results}
    true: dict[str, Any] = {}

    def changed(value: Any) -> Any:
        other = change(value)
        true[json.dumps(other)] = value
        return other

    def reply(name: str, arguments: dict[str, Any]) -> _Reply:
        meant = _map_leaves(lambda value: true.get(json.dumps(value), value), arguments)
        result = known.get(key(name, arguments)) or known.get(key(name, meant))
        if result is None:
            return {"failed": "not found"}
        if "text" not in result:
            return result
        try:
            value: Any = json.loads(result["text"])
        except ValueError:  # the tool returns text
            return {"text": str(changed(entries(result["text"])))}
        return {"text": json.dumps(_map_leaves(changed, entries(value)), ensure_ascii=False)}

    return reply


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
        return {
            k: _halve_entries(one) if isinstance(one, list) else one for k, one in fields.items()
        }
    if isinstance(value, str):
        lines = value.splitlines(keepends=True)
        return "".join(lines[: len(lines) // 2])
    return value


_OTHER_DIGITS = str.maketrans("0123456789", "9876543210")


def _other_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    other = value.translate(_OTHER_DIGITS)
    return other if other != value else f"{value} II"


def _other_number(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return 1000 - value if isinstance(value, int | float) else value


_ALTERATIONS: Mapping[str, tuple[_Leaf, _Leaf]] = {
    "other names": (_other_text, lambda value: value),
    "other numbers": (_other_number, lambda value: value),
    "fewer entries": (lambda value: value, _halve_entries),
}
"""Maps descriptions of altered tool results to the change of each value and of whole results."""


def _mutate_answer(answer: Any) -> list[Any]:
    """Return up to `_MAX_MUTATIONS` wrong answers that differ from the true one in a single value,
    key or entry."""
    every = list(_changed(answer))
    step = max(1.0, len(every) / _MAX_MUTATIONS)
    return [every[int(n * step)] for n in range(min(len(every), _MAX_MUTATIONS))]


def _changed(value: Any) -> Iterator[Any]:
    """Yield all variants of a value with a single value, key or entry changed."""
    match value:
        case dict():
            fields = cast(dict[str, Any], value)
            yield {**fields, "further": 1}
            for key, inner in fields.items():
                yield {k: v for k, v in fields.items() if k != key}
                yield from ({**fields, key: other} for other in _changed(inner))
        case list():
            items = cast(list[Any], value)
            if items:
                yield [*items, items[-1]]
                yield [*items, next(_changed(items[-1]), None)]
            for n, inner in enumerate(items):
                yield items[:n] + items[n + 1 :]
                yield from ([*items[:n], other, *items[n + 1 :]] for other in _changed(inner))
        case bool():
            yield from (not value, None)
        case int():
            yield from (value + 1, value - 1, None)
        case float():
            yield from (value + max(1.0, abs(value)), -value - 1.0, None)
        case str():
            yield from (f"{value} or another", f"another or {value}", "")
        case _:
            pass


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


class DatabaseDesk:
    """An environment in which an author model builds a database. Only the submitted database is
    kept."""

    def __init__(self, most_kib: int, bash_s: float) -> None:
        self._most, self._bash_s = most_kib << 10, bash_s
        self._folder = os.environ.get("TMPDIR", "/tmp")
        self.done = False

    def bash(self, command: str) -> str:
        """Run a command in bash, in a folder of your own. There is Python.

        Args:
            command: For example: python3 make.py && head -c 500 database.json
        """
        status, text = processes.run(
            ["bash", "-c", command], env=os.environ, folder=self._folder, within_s=self._bash_s
        )
        if status is None:
            return f"{text}\n(ended after {self._bash_s:g} s)"
        return f"{text}\n(exit status {status})" if status else text

    def submit_database(self, path: str) -> str:
        """Hand the finished database over: a file that ends in .json.

        Args:
            path: For example: database.json
        """
        if not path.endswith(".json"):
            raise ValueError("the database's file must end in .json")
        with open(os.path.join(self._folder, path), "rb") as file:
            data = file.read(self._most + 1)
        if len(data) > self._most:
            raise ValueError(f"{path} has more than {self._most >> 10} KiB; make it smaller")
        if not isinstance(json.loads(data), dict | list):
            raise ValueError(f"{path} must hold an object or a list")
        self.done = True
        return data.decode()
