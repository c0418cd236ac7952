"""The order in which prompts train: shuffled, mixed by weight, and resumable to the prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Generic, Protocol, TypeVar

from keel.data.items import digest
from keel.rl.types import Prompt

STATE_FORMAT = 1


class Streamed(Protocol):
    @property
    def prompt_id(self) -> str:
        """Unique among all sources."""
        ...


T = TypeVar("T", bound=Streamed)


class Stream(Generic[T]):
    """An endless stream of prompts, or conversations, from weighted sources.

    Each source goes through its prompts once an epoch, in an order of that epoch. Sources are
    interleaved so that after any number of prompts each has given its share, to within one (of
    three or more sources, a little more). The
    whole position is therefore one count a source, which is what `state` saves.

    A batch larger than what is left of an epoch reaches into the next, so it may hold a prompt
    twice.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[T]],
        *,
        weights: Mapping[str, float],
        seed: int,
        content: Callable[[T], str],
    ) -> None:
        """`weights` are relative; sources of weight 0 are left out. `content`: what a resumed run
        must find unchanged."""
        self._content = content
        self._sources = {name: tuple(sources[name]) for name in sources if weights[name] > 0}
        if not self._sources:
            raise ValueError("prompt stream: no source has a weight above 0")
        for name, prompts in self._sources.items():
            if not prompts:
                raise ValueError(f"prompt stream: source {name!r} has no prompts to train on")
        total = sum(weights[name] for name in self._sources)
        self._shares = {name: weights[name] / total for name in self._sources}
        self._seed = seed
        self._drawn = dict.fromkeys(self._sources, 0)
        self._again: deque[T] = deque()
        self._orders: dict[str, tuple[int, tuple[T, ...]]] = {}
        self._identity_of_data: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Distinct prompts."""
        return sum(map(len, self._sources.values()))

    @property
    def sources(self) -> Mapping[str, Sequence[T]]:
        """Source name → its prompts, of all sources that train."""
        return self._sources

    @property
    def drawn(self) -> Mapping[str, int]:
        """Prompts taken so far from each source."""
        return dict(self._drawn)

    def take(self, n: int) -> list[T]:
        """The next `n` prompts."""
        return [self._again.popleft() if self._again else self._next() for _ in range(n)]

    def draws(self, since: Mapping[str, int], until: Mapping[str, int]) -> list[T]:
        """What is drawn from the sources between two positions (as in `drawn`), whatever has become
        of it. Stays where it is."""
        other = copy(self)
        other._drawn, other._again, other._orders = dict(since), deque(), dict(self._orders)
        return other.take(sum(until.values()) - sum(since.values()))

    def state(self, unfinished: Sequence[T] = ()) -> dict[str, Any]:
        """The position, in terms of JSON; `unfinished` prompts, taken already, come first again."""
        return {
            "format": STATE_FORMAT,
            "drawn": dict(self._drawn),
            "unfinished": [prompt.prompt_id for prompt in (*unfinished, *self._again)],
            "dataset": self._identity(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken.

        Raises ValueError saying what differs if it was taken from other prompts, weights or seed.
        """
        if state.get("format") != STATE_FORMAT:
            raise ValueError(
                f"prompt stream: its saved state has format {state.get('format')!r}, this version "
                f"reads {STATE_FORMAT}"
            )
        mine = self._identity()
        theirs: Mapping[str, Any] = state["dataset"]
        both = mine | dict(theirs)
        if changed := [key for key in both if mine.get(key) != theirs.get(key)]:
            said = "; ".join(
                f"{key}: {_count(theirs, key)} then, {_count(mine, key)} now" for key in changed
            )
            raise ValueError(
                f"the saved state belongs to other data ({said}), so its position means nothing "
                "here. Bring the data and seed back, or begin another run (run.dir) from the model "
                "of this one (model.path)"
            )
        self._drawn = {name: int(state["drawn"][name]) for name in self._sources}
        known = {p.prompt_id: p for prompts in self._sources.values() for p in prompts}
        self._again = deque(known[prompt_id] for prompt_id in state["unfinished"])

    def _identity(self) -> dict[str, Any]:
        """What the position refers to. One entry a source, so that a refusal can name it."""
        if self._identity_of_data is not None:
            return self._identity_of_data
        identity: dict[str, Any] = {"seed": self._seed}
        for name, prompts in self._sources.items():
            content = "\n".join(map(self._content, prompts))
            identity[f"source {name}"] = {
                "prompts": len(prompts),
                "share": round(self._shares[name], 9),
                "digest": digest(content),
            }
        self._identity_of_data = identity
        return identity

    def _next(self) -> T:
        step = sum(self._drawn.values()) + 1
        # The source furthest behind its share; ties go to the first.
        name = max(self._shares, key=lambda name: self._shares[name] * step - self._drawn[name])
        epoch, position = divmod(self._drawn[name], len(self._sources[name]))
        self._drawn[name] += 1
        return self._order(name, epoch)[position]

    def _order(self, name: str, epoch: int) -> tuple[T, ...]:
        """Sorting by a hash shuffles alike in every Python and numpy version."""
        cached = self._orders.get(name)
        if cached is None or cached[0] != epoch:
            key = f"{self._seed}/{name}/{epoch}/"
            order = sorted(self._sources[name], key=lambda prompt: digest(key + prompt.prompt_id))
            cached = self._orders[name] = (epoch, tuple(order))
        return cached[1]


def _count(identity: Mapping[str, Any], key: str) -> str:
    """What a part of it says, for people."""
    part = identity.get(key, "none")
    return f"{part['prompts']} prompts" if isinstance(part, dict) else str(part)


class PromptStream(Stream[Prompt]):
    """Of prompts to sample from."""

    def __init__(
        self,
        sources: Mapping[str, Sequence[Prompt]],
        *,
        weights: Mapping[str, float],
        seed: int,
    ) -> None:
        super().__init__(sources, weights=weights, seed=seed, content=content_of)


def content_of(prompt: Prompt) -> str:
    return f"{prompt.prompt_id} {prompt.messages} {prompt.reward}"
