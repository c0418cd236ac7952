"""Caches the judge's replies, and logs its chats so that they can be used for training."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

_FILE = "judge.sqlite"
_BUSY_TIMEOUT_S = 5.0
"""How long to wait if another process is writing to the database."""
_MAX_REPLIES = 250_000
"""The maximum number of replies to keep in memory. Typical replies take about 256 MiB in total."""

log = logging.getLogger(__name__)


class MemoryCache:
    """Keeps up to `_MAX_REPLIES` replies in memory. If there are more, it drops the oldest ones."""

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
    """Keeps replies in a SQLite file, which several runs can share. The file grows without limit.

    Each entry is written in one transaction, so a killed run cannot leave a partial entry. Read and
    write errors are logged and count as cache misses.
    """

    def __init__(self, folder: str) -> None:
        """Open the cache in `folder`, or create it. The folder must be on a local disk. Raises
        ValueError if it cannot be used."""
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
    """Appends the judge's requests and replies as chats to a JSONL file for `keel sft`.

    Each line is written in a single call, so several runs can share the file.
    """

    def __init__(self, path: str) -> None:
        """Open the log file. If `path` is "", nothing is logged. Raises ValueError if the file
        cannot be opened."""
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
