"""Replies of the judge by what was asked, so that nothing is asked twice; and as chats to learn
from."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

FILE = "judge.sqlite"
BUSY_S = 5.0
"""Longest wait for another process that is writing."""
MOST_BYTES = 256 << 20
"""Of the replies in memory, a quarter of a million of the usual length."""

log = logging.getLogger(__name__)


class Memory:
    """Text by key, in memory: at most `MOST_BYTES`, then what was read least recently goes."""

    def __init__(self) -> None:
        self._replies = OrderedDict[str, str]()
        self._bytes = 0

    def get(self, key: str) -> str | None:
        """The reply to `key`, if there is one still."""
        if key in self._replies:
            self._replies.move_to_end(key)
        return self._replies.get(key)

    def put(self, key: str, reply: str) -> None:
        """Keep `reply`."""
        self._drop(key)
        self._replies[key] = reply
        self._bytes += _bytes(key, reply)
        while self._bytes > MOST_BYTES:
            self._drop(next(iter(self._replies)))

    def close(self) -> None:
        """Nothing may be asked of it afterwards."""
        self._replies.clear()

    def _drop(self, key: str) -> None:
        if (reply := self._replies.pop(key, None)) is not None:
            self._bytes -= _bytes(key, reply)


def _bytes(key: str, reply: str) -> int:
    return sys.getsizeof(key) + sys.getsizeof(reply)


class Cache:
    """Text by key, in a SQLite file that several runs may share. It grows without bound.

    Every entry is written in one transaction: a killed run leaves no half of one. A cache that
    breaks while in use is no reason to stop: it warns once, and what it would have known is asked
    again.
    """

    def __init__(self, folder: str) -> None:
        """folder: on a local disk. Raises ValueError if it cannot be used."""
        self._warned = False
        try:
            path = Path(folder).expanduser()
            path.mkdir(parents=True, exist_ok=True)
            # Opened by the driver, used by the judge's own thread alone.
            self._db = sqlite3.connect(
                path / FILE, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS replies "
                "(key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"rewards.judge.cache_dir = {folder!r}: cannot be used ({error}); name a folder "
                f"that can be written, or delete {FILE} in it"
            ) from error

    def get(self, key: str) -> str | None:
        """The reply to `key`, if there is one."""
        try:
            row = self._db.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._warn(error)
            return None
        return str(row[0]) if row else None

    def put(self, key: str, reply: str) -> None:
        """Keep `reply`."""
        try:
            self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
        except sqlite3.Error as error:
            self._warn(error)

    def close(self) -> None:
        """Nothing may be asked of it afterwards."""
        self._db.close()

    def _warn(self, error: sqlite3.Error) -> None:
        if not self._warned:
            log.warning("the judge's cache does not work, and is done without: %s", error)
        self._warned = True


class Chats:
    """A file of JSON lines to which each reply is added with what was asked, as a chat that `keel
    sft` learns from (docs/sft.md). Lines are written whole, so several runs may share it; one that
    cannot be written is no reason to stop: it warns once."""

    def __init__(self, path: str) -> None:
        """path: "": no file. Raises ValueError if it cannot be written."""
        self._file = None
        self._warned = False
        try:
            if path:
                place = Path(path).expanduser()
                place.parent.mkdir(parents=True, exist_ok=True)
                self._file = place.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(
                f"rewards.judge.chats = {path!r}: cannot be written ({error}); name another file"
            ) from error

    def add(self, asked: Sequence[Mapping[str, str]], reply: str) -> None:
        """asked: the messages of the request."""
        if self._file is None:
            return
        messages = [*asked, {"role": "assistant", "content": reply}]
        line = json.dumps({"messages": messages}, ensure_ascii=False)
        try:
            self._file.write(f"{line}\n".encode())
        except OSError as error:
            if not self._warned:
                log.warning("replies of the judge are not kept as chats: %s", error)
            self._warned = True

    def close(self) -> None:
        """Nothing may be added afterwards."""
        if self._file is not None:
            self._file.close()
