"""Run the `keel` command with this Python: `python -m keel`."""

from __future__ import annotations

import sys

from keel.commands.cli import main

if __name__ == "__main__":  # not in a process that is spawned from it, which reads this file too
    sys.exit(main())
