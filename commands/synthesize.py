"""`keel synthesize`: create tasks concurrently within a budget. Repeat the command to resume."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, Self

from keel.configs.schema import ConfigError
from keel.configs.synthesis import AuthorConfig, SynthesisConfig
from keel.synthesis.author import (
    Author,
    AuthorLost,
    BudgetSpent,
    SynthesisBudget,
    gather_or_cancel,
)
from keel.synthesis.ledger import Ledger, Rejected, TaskOutcome
from keel.trainer.run.progress import waiting

_MakeTask = Callable[[str], Awaitable[None]]
"""Create the task for a key and write it to the folder, completely or not at all.

Raises Rejected if a check rejects the task, AuthorLost if a model does not respond, or BudgetSpent
if the next call could exceed the budget.
"""
_MOST_LOST = 5
"""Stop after this many consecutive tasks without a response from the author model."""


class _Pipeline(Protocol):
    """Creates one family of tasks. Used as an async context manager."""

    keys: Sequence[str]
    """Keys of all tasks, in order. The same settings always give the same keys."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def make(self, key: str) -> None: ...


def synthesize(config: SynthesisConfig) -> int:
    """Create the tasks. Returns exit status 0 if all tasks are done, or 1 if the command stopped
    early. Raises ConfigError if the recipe or folder can't be used."""
    return asyncio.run(_synthesize(config))


async def _synthesize(config: SynthesisConfig) -> int:
    folder, stop = Path(config.dir).expanduser(), asyncio.Event()
    with Ledger(folder, _task_settings(config)) as ledger:
        # asyncio's handler needs the loop, which preparing may block for long.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _leave)
        budget = SynthesisBudget(config.budget, ledger.spent, ledger.used)
        async with AsyncExitStack() as stack:

            def author_of(value: AuthorConfig) -> Author:
                author = Author(value, budget)
                stack.push_async_callback(author.close)
                return author

            with waiting("preparing task sources"):
                try:
                    pipeline = _pipeline_of(config, folder, author_of)
                except ValueError as error:
                    raise ConfigError(str(error)) from error
                await stack.enter_async_context(pipeline)
            for name in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(name, stop.set)
            try:
                why = await _make_all(
                    pipeline.keys,
                    pipeline.make,
                    ledger,
                    at_once=config.at_once,
                    say=print,
                    stop=stop,
                )
            finally:
                _print_report(ledger.report())
    if why:
        print(f"keel synthesize: {why}. Run the same command to continue")
    return int(bool(why))


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _task_settings(config: SynthesisConfig) -> dict[str, Any]:
    """Return the settings that affect the tasks: everything except the authors and the budget,
    which can be changed on a rerun."""
    section = asdict(getattr(config, config.family))
    return {"family": config.family, "seed": config.seed, **section}


def _pipeline_of(
    config: SynthesisConfig, folder: Path, author_of: Callable[[AuthorConfig], Author]
) -> _Pipeline:
    author = author_of(config.author)
    if config.family == "general":
        from keel.synthesis.general.pipeline import GeneralPipeline  # noqa: PLC0415

        reference = author_of(config.reference) if config.reference else author
        return GeneralPipeline(
            config.general, folder, author=author, reference=reference, seed=config.seed
        )
    if config.family == "code":
        from keel.synthesis.code.pipeline import CodePipeline  # noqa: PLC0415

        return CodePipeline(config.code, author, folder)
    from keel.synthesis.search.pipeline import SearchPipeline  # noqa: PLC0415

    return SearchPipeline(config.search, author, author.another, folder, seed=config.seed)


async def _make_all(
    keys: Sequence[str],
    make: _MakeTask,
    ledger: Ledger,
    *,
    at_once: int,
    say: Callable[[str], object],
    stop: asyncio.Event,
) -> str:
    """Create all tasks that aren't in the ledger yet. Returns the reason for stopping early, or ""
    if all tasks were processed."""
    queue = [key for key in reversed(keys) if key not in ledger.outcomes]
    if made := len(keys) - len(queue):
        say(f"{made:,} of {len(keys):,} tasks already made")
    why, lost = "", 0

    async def worker() -> None:
        nonlocal why, lost
        while queue and not why:
            key, begun = queue.pop(), time.monotonic()
            gate, reason, reply = "", "", "kept"
            try:
                await make(key)
            except Rejected as refused:
                gate, reason = refused.gate, refused.reason
                reply = f"rejected by {gate}: {reason}"
            except AuthorLost as error:
                lost += 1
                say(f"{key}: {error}. The next start retries it")
                if lost >= _MOST_LOST:
                    why = f"{lost} tasks in a row got no answer from their author: {error}"
                continue
            except BudgetSpent as error:
                why = str(error)
                return
            lost = 0
            ledger.add(
                TaskOutcome(
                    key=key,
                    outcome="refused" if gate else "kept",
                    gate=gate,
                    reason=reason,
                    seconds=round(time.monotonic() - begun, 3),
                )
            )
            shown.done += 1
            say(f"{shown.done:,.0f} of {len(keys):,}: {key} {reply}")

    with waiting("making tasks", total=len(keys), unit="tasks") as shown:
        shown.done = shown.before = made
        workers = [worker() for _ in range(at_once)]
        work = asyncio.create_task(gather_or_cancel(*workers))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work
    return why or ("stopped" if any(key not in ledger.outcomes for key in keys) else "")


def _print_report(report: Mapping[str, Any]) -> None:
    print(f"made {report['made']:,} tasks, kept {report['kept']:,}")
    for gate, refused in report["refused"].items():
        print(f"  rejected by {gate}: {refused['tasks']:,}")
        for reason, count in refused["reasons"].items():
            print(f"    {count:,} × {reason}")
    for purpose, cost in report["cost"].items():
        money = f", {cost['usd']:.2f} USD" if cost["usd"] else ""
        print(f"  {purpose}: {cost['calls']:,} calls, {cost['tokens']:,} tokens{money}")
