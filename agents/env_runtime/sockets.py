"""Folders whose names leave room for a unix socket's."""

from __future__ import annotations

import os
import tempfile

MOST_PATH = 107
"""Bytes of a unix socket's path: unix(7)."""


def socket_folder(prefix: str, socket: str) -> str:
    """A new folder. In /tmp where TMPDIR is so long that no `socket` in it can have its path."""
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(os.path.join(folder, socket))) <= MOST_PATH:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix=prefix, dir="/tmp")
