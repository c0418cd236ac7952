"""Creates temporary folders with paths that are short enough for unix sockets."""

from __future__ import annotations

import os
import tempfile

_MAX_PATH = 107
"""Maximum length of a unix socket's path in bytes (see unix(7))."""


def socket_folder(prefix: str, socket: str) -> str:
    """Create a temporary folder for a socket. It is in /tmp if the path of `socket` would be too
    long in TMPDIR."""
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(os.path.join(folder, socket))) <= _MAX_PATH:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix=prefix, dir="/tmp")
