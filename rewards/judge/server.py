"""What the judge's client asks of a server that the run started itself."""

from __future__ import annotations

from typing import Protocol


class Server(Protocol):
    """A server of the judge that belongs to this run."""

    @property
    def key(self) -> str:
        """What it wants for an API key."""
        ...

    def url(self) -> str:
        """Of the server as it runs now; it is started, or started again, where it does not.

        Blocks for so long, and may be called in any thread. Raises RuntimeError saying why there
        is none.
        """
        ...
