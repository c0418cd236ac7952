"""Runs groups of episodes for the training loop. Thousands of episodes run concurrently on one
event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal, get_args

from keel.agents.endpoint.program import ProgramEpisode
from keel.agents.endpoint.server import Endpoint
from keel.agents.episode import Episode, EpisodeSettings
from keel.agents.types import NodeLost
from keel.rl.futures import LoopThread
from keel.rl.turns import TurnRequest, TurnResult, conversation_of, seed_of
from keel.rl.types import Group, Prompt, Purpose, Trajectory

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_TRIES = 3
"""Maximum number of times that an episode is run if the node of its environment is lost."""
_STARTING = 8
"""Maximum number of programs that start at the same time. More would slow each other down."""
_CLOSE_S = 120.0  # environments are still closing, each within limits of its own


SubmitTurn = Callable[[TurnRequest, Purpose], Future[TurnResult]]
"""Submits a request to an engine and immediately returns a future for the turn."""


class _EngineRefused(RuntimeError):
    """Raised inside an episode when an engine rejects a request. The whole group then fails with
    the original ValueError, whereas a ValueError from the episode itself drops only that
    episode."""


class _Slots(asyncio.Semaphore):
    """Limits the number of open episodes to `most()`, which may change."""

    def __init__(self, most: Callable[[], int]) -> None:
        super().__init__(0)
        self._most, self._size = most, 0

    async def acquire(self) -> Literal[True]:
        self._grow()
        await super().acquire()
        while self._size > self._most():
            self._size -= 1
            await super().acquire()
        return True

    def release(self) -> None:
        self._size -= 1
        self._grow()

    def _grow(self) -> None:
        while self._size < self._most():
            self._size += 1
            super().release()


def environment_seed(seed: int, prompt: Prompt) -> int:
    """Return the environment seed for a prompt. All episodes of the prompt in a run share this
    seed."""
    return seed_of(seed, "environment", prompt.prompt_id)


class EpisodeRunner:
    """Runs groups of episodes in a separate thread. Use it as a context manager."""

    def __init__(
        self,
        settings: Mapping[str, EpisodeSettings],
        *,
        submit_turn: SubmitTurn,
        seed: int,
        most_open: Callable[[], int],
        closing: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """Start the thread, and the endpoint if there are agent programs. `settings` maps the name
        of each data source to the settings of its episodes. Up to `most_open()` episodes run
        concurrently for training, and the same number for evaluation. The number may change as
        nodes join and leave. The functions in `closing` are called at the end to release resources
        shared by the environments."""
        has_programs = any(one.program is not None for one in settings.values())
        episodes_here = len(PURPOSES) * most_open()
        raise_file_limit(episodes_here, programs=has_programs)
        self._settings, self._submit_turn, self._seed = settings, submit_turn, seed
        self._starting = asyncio.Semaphore(_STARTING)
        self._endpoint: Endpoint | None = None
        self._closing = closing
        self._version = 0
        self._gate = threading.Lock()
        self._draws: Counter[str] = Counter()
        """Number of groups started for each prompt since the last weight update. Prompts
        without an environment are counted in `RolloutPool`."""
        self._closed = False
        self._slots = {purpose: _Slots(most_open) for purpose in PURPOSES}
        self._groups: set[asyncio.Task[Group]] = set()
        self._thread = LoopThread("keel-agents")
        if has_programs:
            try:
                most = _connection_limit(episodes_here)
                endpoint = Endpoint(max_connections=most)
                self._endpoint = self._thread.submit(endpoint.__aenter__()).result(_CLOSE_S)
            except BaseException:
                self.close()
                raise

    def submit(self, prompt: Prompt, *, group_size: int, purpose: Purpose) -> Future[Group]:
        """Start `group_size` episodes for a prompt and return a future for the group. Cancelling
        the future cancels the episodes. `Group.dropped` holds the reasons for dropped episodes. If
        an engine fails, the future raises its error."""
        if prompt.environment not in self._settings:
            raise ValueError(f"prompt {prompt.prompt_id}: no environment {prompt.environment!r}")
        with self._gate:
            if self._closed:
                raise RuntimeError("the episode runner is closed")
            version, draw = self._version, self._draws[prompt.prompt_id]
            self._draws[prompt.prompt_id] += 1
        group = self._group(prompt, group_size, purpose, version, draw)
        return self._thread.submit(group)

    def set_version(self, version: int) -> None:
        """Set the weight version. It determines the sampling seeds of later groups."""
        with self._gate:
            if version != self._version:
                self._version = version
                self._draws.clear()

    def close(self) -> None:
        with self._gate:
            if self._closed:
                return
            self._closed = True
        try:
            if not self._thread.stop(self._end(), _CLOSE_S):  # their processes end with this one
                logging.getLogger(__name__).warning(
                    "environments did not close within %g s and are abandoned", _CLOSE_S
                )
        finally:
            if self._endpoint is not None:
                self._endpoint.remove_folder()

    def __enter__(self) -> EpisodeRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The methods below run on the runner's thread.

    async def _end(self) -> None:
        for group in (groups := list(self._groups)):
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        if self._endpoint is not None:
            await self._endpoint.__aexit__()
        # Environments that are still closing have their own deadlines.
        await asyncio.gather(
            *asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True
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
        except BaseExceptionGroup as errors:  # the first error has cancelled the others
            raise errors.exceptions[0] from None
        results = [task.result() for task in tasks]
        return Group(
            prompt=prompt,
            trajectories=tuple(r for r in results if isinstance(r, Trajectory)),
            dropped=tuple(r for r in results if isinstance(r, str)),
        )

    async def _episode(
        self, prompt: Prompt, sibling: int, purpose: Purpose, version: int, draw: int
    ) -> Trajectory | str:
        async def sample(request: TurnRequest) -> TurnResult:
            try:
                return await asyncio.wrap_future(self._submit_turn(request, purpose))
            except ValueError as error:
                raise _EngineRefused from error

        settings = self._settings[prompt.environment]
        make_episode: Callable[..., Episode] = Episode
        if settings.program is not None:
            assert self._endpoint is not None
            make_episode = partial(ProgramEpisode, endpoint=self._endpoint, starting=self._starting)
        reason = ""
        for number in range(1, _TRIES + 1):
            async with self._slots[purpose]:  # there may be fewer without the lost node
                episode = make_episode(
                    settings=settings,
                    task=prompt,
                    sample=sample,
                    name=conversation_of(prompt.prompt_id, purpose, version, draw, sibling),
                    sibling=sibling,
                    seed=seed_of(self._seed, version, draw, sibling, prompt.prompt_id),
                    environment_seed=environment_seed(self._seed, prompt),
                    last_try=number == _TRIES,
                )
                try:
                    return await episode.run()
                except NodeLost as lost:
                    reason = str(lost)
                except _EngineRefused as refused:
                    assert refused.__cause__ is not None
                    raise refused.__cause__ from None
        return reason


_FILES_PER_EPISODE = 3
"""File descriptors per open episode: its channel, its standard error and its pidfd."""
_CONNECTIONS_PER_EPISODE = 5
_SPARE_CONNECTIONS = 256
_SPARE_FILES = 512


def raise_file_limit(episodes: int, *, programs: bool = False) -> None:
    """Raise the limit on open files to allow `episodes` concurrent episodes. Set `programs` if some
    of them are driven by agent programs. Raises ValueError if the hard limit is too low."""
    files = _FILES_PER_EPISODE * episodes + _SPARE_FILES
    if programs:  # each has a process of its own
        files += _FILES_PER_EPISODE * episodes + _connection_limit(episodes)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return
    if hard != resource.RLIM_INFINITY and hard < files:
        need = f"{episodes} episodes at once need {files} open files, and the limit is {hard}"
        raise ValueError(f"{need}. Raise it (`ulimit -Hn`, LimitNOFILE of a service) or open fewer")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def _connection_limit(episodes: int) -> int:
    return _CONNECTIONS_PER_EPISODE * episodes + _SPARE_CONNECTIONS
