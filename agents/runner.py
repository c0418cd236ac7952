"""Groups of episodes for the training loop: thousands of them open at once, on one event loop.

Episodes wait for engines and tools, and engines for neither: turns of different episodes come and
go in one batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol, get_args

from keel.agents.budget import Budget
from keel.agents.context import ContextManager
from keel.agents.endpoint.driven import DrivenEpisode
from keel.agents.endpoint.program import AgentProgram
from keel.agents.endpoint.server import Endpoint
from keel.agents.env_process.os_limits import connections, make_room
from keel.agents.episode import Episode, lost_to_the_policy
from keel.agents.types import Environment
from keel.rl.seeds import seed_of
from keel.rl.turns import Chat, TurnRequest, TurnResult, conversation_of
from keel.rl.types import Group, Prompt, Purpose, Trajectory

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
MANY_LOST = 0.5
"""Share of a group whose environments are lost over what the policy did: worth a word."""
MOST_SAID = 500
"""Characters of the reason that is said."""
STARTING = 8
"""Programs that are being started at once: more would take each other's time."""
CLOSING_S = 120.0
"""Longest wait for open episodes to end, and for the programs' endpoint to begin."""


class TurnSampler(Protocol):
    """The engines."""

    def __call__(self, request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        """Returns at once; the future has a deadline."""
        ...


class EpisodeLimits(NamedTuple):
    """Of the trajectories in an environment."""

    budget: Budget
    context: ContextManager


def environment_seed(seed: int, prompt: Prompt) -> int:
    """Of a run's episodes of a prompt, the same for all: siblings meet the same task."""
    return seed_of(seed, "environment", prompt.prompt_id)


class EpisodeRunner:
    """Runs groups of episodes on a thread of its own. A context manager."""

    def __init__(
        self,
        environments: Mapping[str, Callable[[], Environment]],
        *,
        programs: Mapping[str, AgentProgram] | None = None,
        chat: Chat,
        turns: TurnSampler,
        limits: Mapping[str, EpisodeLimits],
        seed: int,
        most_open: int,
        crash_is_failure: Mapping[str, Collection[str]] | None = None,
        closing: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """environments: of `Prompt.environment`, makes one for an episode; programs: of the same,
        what drives its episodes, where that is not Keel; limits: of each; seed: of the run;
        most_open: episodes at once, for training and as many for evaluation, which the loop waits
        for; the others wait; crash_is_failure: of an environment, as `Episode` has it; closing: of
        what environments share, at the end. Raises ValueError where the machine does not allow so
        many open files or processes."""
        make_room(len(PURPOSES) * most_open, programs=bool(programs))
        self._environments, self._chat, self._turns = environments, chat, turns
        self._limits, self._seed = limits, seed
        self._programs = programs or {}
        self._starting = asyncio.Semaphore(STARTING)
        self._endpoint: Endpoint | None = None
        self._closing = closing
        self._version = 0
        self._gate = threading.Lock()
        self._draws: Counter[str] = Counter()
        """How often each prompt was asked since the last weights."""
        self._crash_is_failure = crash_is_failure or {}
        self._warned: set[str] = set()
        self.say: Callable[[str], Any] = lambda _: None
        """For people, a line at a time."""
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._room = {purpose: asyncio.Semaphore(most_open) for purpose in PURPOSES}
        self._groups: set[asyncio.Task[Group]] = set()
        self._thread = threading.Thread(target=self._run, name="keel-agents", daemon=True)
        self._thread.start()
        if self._programs:
            try:
                endpoint = Endpoint(most=connections(len(PURPOSES) * most_open))
                begun = asyncio.run_coroutine_threadsafe(endpoint.__aenter__(), self._loop)
                self._endpoint = begun.result(CLOSING_S)
            except BaseException:
                self.close()
                raise

    def submit(self, prompt: Prompt, *, group_size: int, purpose: Purpose) -> Future[Group]:
        """`group_size` episodes of a prompt. Cancelling the future ends them. An episode without a
        trajectory is among the dropped. The future fails with what an engine says."""
        if prompt.environment not in self._environments:
            known = ", ".join(self._environments) or "none"
            raise ValueError(
                f"prompt {prompt.prompt_id}: no environment {prompt.environment!r}; there are: "
                f"{known}"
            )
        with self._gate:
            if self._closed:
                raise RuntimeError("the runner of episodes is closed")
            version, draw = self._version, self._draws[prompt.prompt_id]
            self._draws[prompt.prompt_id] += 1
        group = self._group(prompt, group_size, purpose, version, draw)
        return asyncio.run_coroutine_threadsafe(group, self._loop)

    def updating(self, version: int) -> None:
        """New weights are on their way to the engines; what is submitted now draws anew."""
        with self._gate:
            if version != self._version:
                self._version = version
                self._draws.clear()

    def close(self) -> None:
        """End all episodes and their environments."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            ended.result(timeout=CLOSING_S)
        except TimeoutError:  # their processes end with this one
            logging.getLogger(__name__).warning(
                "environments were still closing after %g s and are left behind", CLOSING_S
            )
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSING_S)
            if self._endpoint is not None:
                self._endpoint.remove_folder()

    def __enter__(self) -> EpisodeRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # From here on: the runner's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self) -> None:
        for group in (groups := list(self._groups)):
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        if self._endpoint is not None:
            await self._endpoint.__aexit__()
        # Environments that are still closing have deadlines of their own.
        await asyncio.gather(
            *asyncio.all_tasks(self._loop) - {asyncio.current_task()}, return_exceptions=True
        )
        await asyncio.gather(*(close() for close in self._closing), return_exceptions=True)

    async def _group(
        self, prompt: Prompt, size: int, purpose: Purpose, version: int, draw: int
    ) -> Group:
        this = asyncio.current_task()
        assert this is not None
        self._groups.add(this)
        this.add_done_callback(self._groups.discard)
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks = [
                    episodes.create_task(self._episode(prompt, sibling, purpose, version, draw))
                    for sibling in range(size)
                ]
        except BaseExceptionGroup as errors:  # what one raised has ended the others
            raise errors.exceptions[0] from None
        results = [task.result() for task in tasks]
        self._warn(prompt, results)
        return Group(
            prompt=prompt,
            trajectories=tuple(r for r in results if isinstance(r, Trajectory)),
            dropped=tuple(r for r in results if isinstance(r, str)),
        )

    async def _episode(
        self, prompt: Prompt, sibling: int, purpose: Purpose, version: int, draw: int
    ) -> Trajectory | str:
        async def sample(request: TurnRequest) -> TurnResult:
            return await asyncio.wrap_future(self._turns(request, purpose))

        limits = self._limits[prompt.environment]
        async with self._room[purpose]:
            episode = self._driver(prompt)(
                environment=self._environments[prompt.environment](),
                task=prompt,
                chat=self._chat,
                sample=sample,
                budget=limits.budget,
                context=limits.context,
                name=conversation_of(prompt.prompt_id, purpose, version, draw, sibling),
                sibling=sibling,
                seed=seed_of(self._seed, version, draw, sibling, prompt.prompt_id),
                environment_seed=environment_seed(self._seed, prompt),
                crash_is_failure=self._crash_is_failure.get(prompt.environment, ()),
            )
            return await episode.run()

    def _driver(self, prompt: Prompt) -> Callable[..., Episode]:
        if (program := self._programs.get(prompt.environment)) is None:
            return Episode
        assert self._endpoint is not None
        return partial(
            DrivenEpisode, program=program, endpoint=self._endpoint, starting=self._starting
        )

    def _warn(self, prompt: Prompt, results: Sequence[Trajectory | str]) -> None:
        """Say once for each source that many of a group's environments or programs failed."""
        name = prompt.environment
        program = self._programs.get(name)
        lost = [reason for result in results if (reason := _lost(result))]
        if name in self._warned or len(lost) < max(2, MANY_LOST * len(results)):
            return
        self._warned.add(name)
        # For a terminal: a policy's text may be in there, and escape sequences in that.
        reason = lost[-1].replace("\n", " ")[:MOST_SAID]
        last = "".join(c if c.isprintable() else "�" for c in reason)
        counted = any(isinstance(result, Trajectory) and _lost(result) for result in results)
        what = (
            "They count as failures (on_failure: zero; on_crash for an environment)"
            if counted and program is not None
            else "They count as failures (on_crash: zero)"
            if counted
            else "They are left out, so a policy may learn to crash rather than to fail: mend the "
            f"environment, or set data.sources[{name}].environment.on_crash: zero"
        )
        self.say(
            f"{len(lost)} of {len(results)} episodes of prompt {prompt.prompt_id} lost their "
            f"environment {'or program ' * (program is not None)}over what the policy did; the "
            f"last: {last}. {what}. This is said once; agents/crashes counts them"
        )


def _lost(result: Trajectory | str) -> str:
    """Return why an episode lost its environment or program over what the policy did, or ""."""
    if isinstance(result, str):
        return result if lost_to_the_policy(result) else ""
    if result.finish_reason == "crash" and result.verdict is not None:
        return str(result.verdict.facts["crash"])
    return ""
