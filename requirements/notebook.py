"""MkDocs hooks that render the notebook as a page of text and code cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOK, PAGE = "python.ipynb", "python.md"


def on_config(config: MkDocsConfig) -> None:
    """Replace the notebook by its page in the navigation."""
    config.nav = json.loads(json.dumps(config.nav).replace(NOTEBOOK, PAGE))


def on_files(files: Files, config: MkDocsConfig) -> None:
    cells = json.loads(Path(config.docs_dir, NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    note = f"This page is a notebook: [{NOTEBOOK}]({NOTEBOOK})."
    parts = [_text(cell) for cell in cells]
    text = "\n\n".join([parts[0], note, *parts[1:]])
    files.append(File.generated(config, PAGE, content=text))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to the notebook at its page."""
    of_it = page.file.src_uri == PAGE
    return markdown if of_it else markdown.replace(f"({NOTEBOOK})", f"({PAGE})")


def _text(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
