"""Caches for the judge's replies, and a log of its chats that can be used for training."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

_FILE = "judge.sqlite"
_BUSY_TIMEOUT_S = 5.0
"""How long to wait while another process writes to the database."""
_MAX_BYTES = 256 << 20
"""Size limit for the memory cache, enough for about 250,000 typical replies."""

log = logging.getLogger(__name__)


class MemoryCache:
    """Keeps replies in memory and drops the least recently used ones beyond `_MAX_BYTES`."""

    def __init__(self) -> None:
        self._replies = OrderedDict[str, str]()
        self._bytes = 0

    def get(self, key: str) -> str | None:
        if key in self._replies:
            self._replies.move_to_end(key)
        return self._replies.get(key)

    def put(self, key: str, reply: str) -> None:
        self._drop(key)
        self._replies[key] = reply
        self._bytes += sys.getsizeof(key) + sys.getsizeof(reply)
        while self._bytes > _MAX_BYTES:
            self._drop(next(iter(self._replies)))

    def close(self) -> None:
        self._replies.clear()

    def _drop(self, key: str) -> None:
        if (reply := self._replies.pop(key, None)) is not None:
            self._bytes -= sys.getsizeof(key) + sys.getsizeof(reply)


class SqliteCache:
    """Keeps replies in a SQLite file that several runs may share. The file grows without limit.

    Each entry is written in one transaction, so a killed run leaves no partial entry. The first
    error while reading or writing is logged, and every error counts as a cache miss.
    """

    def __init__(self, folder: str) -> None:
        """Open or create the cache in `folder`, which must be on a local disk.

        Raises ValueError if the folder cannot be used.
        """
        self._warned = False
        try:
            path = Path(folder).expanduser()
            path.mkdir(parents=True, exist_ok=True)
            # Opened by the driver, then used by the judge's thread alone.
            self._db = sqlite3.connect(
                path / _FILE, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS replies "
                "(key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"rewards.judge.cache_dir = {folder!r} cannot be used ({error}); name a writable "
                f"folder, or delete {_FILE} in it"
            ) from error

    def get(self, key: str) -> str | None:
        try:
            row = self._db.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._warn(error)
            return None
        return str(row[0]) if row else None

    def put(self, key: str, reply: str) -> None:
        try:
            self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
        except sqlite3.Error as error:
            self._warn(error)

    def close(self) -> None:
        self._db.close()

    def _warn(self, error: sqlite3.Error) -> None:
        if not self._warned:
            log.warning("the judge's cache fails and is bypassed: %s", error)
        self._warned = True


class ChatLog:
    """Appends the judge's requests and replies to a JSONL file of chats for `keel sft`.

    See docs/sft.md. Each line is written at once, so several runs may share the file. Only the
    first write error is logged.
    """

    def __init__(self, path: str) -> None:
        """Open the file at `path`, or log nothing if it is "".

        Raises ValueError if the file cannot be opened.
        """
        self._file = None
        self._warned = False
        if not path:
            return
        try:
            file = Path(path).expanduser()
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(
                f"rewards.judge.chats = {path!r} cannot be written ({error}); name another file"
            ) from error

    def add(self, messages: Sequence[Mapping[str, str]], reply: str) -> None:
        if self._file is None:
            return
        chat = {"messages": [*messages, {"role": "assistant", "content": reply}]}
        try:
            self._file.write(f"{json.dumps(chat, ensure_ascii=False)}\n".encode())
        except OSError as error:
            if not self._warned:
                log.warning("rewards.judge.chats cannot be written: %s", error)
            self._warned = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
