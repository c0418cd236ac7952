"""Writes the pages of knobs, metrics and others' words: `python -m keel.commands.reference
docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from keel.commands.reference.markdown import pages


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"{__doc__} The folder has to be there.")
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
