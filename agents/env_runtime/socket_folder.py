"""Temporary folders whose paths leave room for a unix socket's name."""

from __future__ import annotations

import os
import tempfile

_MAX_PATH = 107
"""Maximum length of a unix socket's path in bytes; see unix(7)."""


def socket_folder(prefix: str, socket: str) -> str:
    """Create a folder, in /tmp if TMPDIR is too long for the path of `socket` in it."""
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(os.path.join(folder, socket))) <= _MAX_PATH:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix=prefix, dir="/tmp")
