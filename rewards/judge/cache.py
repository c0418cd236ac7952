"""Caches for the judge's replies, and a log of its chats that can be used for training."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

_FILE = "judge.sqlite"
_BUSY_TIMEOUT_S = 5.0
"""How long to wait while another process writes to the database."""
_MAX_REPLIES = 250_000
"""Size limit for the cache in memory, about 256 MiB of typical replies."""

log = logging.getLogger(__name__)


class MemoryCache:
    """Keeps replies in memory and drops the oldest ones beyond `_MAX_REPLIES`."""

    def __init__(self) -> None:
        self._replies: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        return self._replies.get(key)

    def put(self, key: str, reply: str) -> None:
        self._replies[key] = reply
        if len(self._replies) > _MAX_REPLIES:
            del self._replies[next(iter(self._replies))]

    def close(self) -> None:
        self._replies.clear()


class SqliteCache:
    """Keeps replies in a SQLite file that several runs may share. The file grows without limit.
    Each entry is one transaction, so a killed run leaves no partial entry. Errors while reading
    or writing are logged and count as cache misses."""

    def __init__(self, folder: str) -> None:
        """Open or create the cache in `folder`, which must be on a local disk. Raises ValueError
        if the folder cannot be used."""
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
        row = self._execute("SELECT reply FROM replies WHERE key = ?", key)
        return str(row[0]) if row else None

    def put(self, key: str, reply: str) -> None:
        self._execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", key, reply)

    def close(self) -> None:
        self._db.close()

    def _execute(self, statement: str, *values: str) -> tuple[str] | None:
        try:
            return self._db.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            log.warning("the judge's cache fails and is bypassed: %s", error)
            return None


class ChatLog:
    """Appends the judge's requests and replies to a JSONL file of chats for `keel sft`. Each
    line is written at once, so several runs may share the file."""

    def __init__(self, path: str) -> None:
        """Open the file, or log nothing if `path` is "". Raises ValueError if that fails."""
        self._file = None
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
            log.warning("rewards.judge.chats cannot be written: %s", error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
