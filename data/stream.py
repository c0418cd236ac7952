"""Order training prompts: shuffled, mixed by weight, and resumable."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from keel.data.items import digest


class _Streamed(Protocol):
    @property
    def prompt_id(self) -> str: ...


_T = TypeVar("_T", bound=_Streamed)


class Stream(Generic[_T]):
    """An endless stream of prompts or conversations from weighted sources.

    Each source yields every prompt once per epoch, in a new order each time. Sources are
    interleaved so that the number of prompts taken from a source never differs from its share by
    more than one (slightly more with three or more sources). The position consists of one count per
    source. A batch that spans two epochs can contain the same prompt twice.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[_T]],
        *,
        weights: Mapping[str, float],
        seed: int,
        content: Callable[[_T], str],
    ) -> None:
        """Start at the beginning of the stream, ignoring sources with weight 0. `content` returns a
        prompt's text, which must still be the same when a run resumes."""
        self._content = content
        self._sources = {name: tuple(sources[name]) for name in sources if weights[name] > 0}
        total = sum(weights[name] for name in self._sources)
        self._shares = {name: weights[name] / total for name in self._sources}
        self._seed = seed
        self._drawn = dict.fromkeys(self._sources, 0)
        self._requeued: deque[_T] = deque()
        self._orders: dict[str, tuple[int, tuple[_T, ...]]] = {}
        self._identity: dict[str, Any] | None = None

    @property
    def sources(self) -> Mapping[str, Sequence[_T]]:
        return self._sources

    def take(self, n: int) -> list[_T]:
        return [self._requeued.popleft() if self._requeued else self._next() for _ in range(n)]

    def position(self, unfinished: Sequence[_T] = ()) -> dict[str, Any]:
        """Return the position in the stream as JSON data. The `unfinished` prompts have already
        been taken, and come first after a restore."""
        return {
            "drawn": dict(self._drawn),
            "unfinished": [prompt.prompt_id for prompt in (*unfinished, *self._requeued)],
            "dataset": self._current_identity(),
        }

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises ValueError if the data, weights or seed have
        changed."""
        current, saved = self._current_identity(), dict(position["dataset"])
        if changed := [key for key in current | saved if current.get(key) != saved.get(key)]:
            differences = "; ".join(
                f"{key}: {saved.get(key)} then, {current.get(key)} now" for key in changed
            )
            raise ValueError(
                f"the saved state belongs to other data ({differences}). Restore the data and "
                "seed, or start another run (run.dir) from this one's model (model.path)"
            )
        self._drawn = {name: int(position["drawn"][name]) for name in self._sources}
        known = {p.prompt_id: p for prompts in self._sources.values() for p in prompts}
        self._requeued = deque(known[prompt_id] for prompt_id in position["unfinished"])

    def _current_identity(self) -> dict[str, Any]:
        if self._identity is None:
            self._identity = {"seed": self._seed}
            for name, prompts in self._sources.items():
                self._identity[f"source {name}"] = {
                    "prompts": len(prompts),
                    "share": round(self._shares[name], 9),
                    "digest": digest("\n".join(map(self._content, prompts))),
                }
        return self._identity

    def _next(self) -> _T:
        step = sum(self._drawn.values()) + 1
        # The source furthest behind its share; ties go to the first.
        name = max(self._shares, key=lambda name: self._shares[name] * step - self._drawn[name])
        epoch, position = divmod(self._drawn[name], len(self._sources[name]))
        self._drawn[name] += 1
        return self._order(name, epoch)[position]

    def _order(self, name: str, epoch: int) -> tuple[_T, ...]:
        """Return a source's prompts in the order for `epoch`. The order is based on a seeded hash,
        so it doesn't depend on the Python or numpy version."""
        cached = self._orders.get(name)
        if cached is None or cached[0] != epoch:
            key = f"{self._seed}/{name}/{epoch}/"
            order = sorted(self._sources[name], key=lambda prompt: digest(key + prompt.prompt_id))
            cached = self._orders[name] = (epoch, tuple(order))
        return cached[1]
