"""What was said in a trajectory, each message once."""

from __future__ import annotations

from collections.abc import Sequence

from keel.agents.endpoint.matching import link
from keel.rl.turns import Message
from keel.rl.types import PROGRAM


class Transcript:
    """The messages of all forks, in the order of the turns."""

    def __init__(self) -> None:
        self.opening: tuple[Message, ...] = ()
        """The messages of the first turn's request."""
        self._all: list[Message] = []
        self._told: set[str] = set()
        """Keys of those that stand there."""

    @property
    def after_opening(self) -> tuple[Message, ...]:
        return tuple(self._all[len(self.opening) :])

    def tell(self, messages: Sequence[Message], keys: Sequence[str], said: Message) -> None:
        """Add what is new of a request, and the turn that answers it. What the program says for
        the policy, or makes of its words, nobody sampled. keys: of the messages' prefixes."""
        if not self.opening:
            self.opening = tuple(messages)
        for message, key in zip(messages, keys[1:], strict=True):
            if key not in self._told:
                self._told.add(key)
                own = {"name": PROGRAM} if message["role"] == "assistant" else {}
                self._all.append({**message, **own})
        self._told.add(link(keys[-1], said))
        self._all.append(said)
