"""An author's replies, read: sections under headings, each with a block of code or text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keel.synthesis.author import Said
from keel.synthesis.ledger import Refused

_HEADING = re.compile(
    r"^#+[ \t]*`?([a-z]+)(?:\.py|\.md)?`?[ \t]*:?[ \t]*$", re.MULTILINE | re.IGNORECASE
)
_BLOCK = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
GATE = "form"


def sections(said: Said, wanted: Sequence[str], optional: Sequence[str] = ()) -> dict[str, str]:
    """What stands in the first block below each heading, or, where there is none, below it.

    Raises Refused for a reply that lacks one."""
    if said.cut:
        raise Refused(GATE, "the reply was cut off, by author.max_tokens or the context; be brief")
    text = _outside_blocks(said.content)
    known = {*wanted, *optional}
    heads = [found for found in _HEADING.finditer(text) if found[1].lower() in known]
    found: dict[str, str] = {}
    for n, head in enumerate(heads):
        end = heads[n + 1].start() if n + 1 < len(heads) else len(text)
        body = said.content[head.end() : end]
        block = _BLOCK.search(body)
        found[head[1].lower()] = (block[2] if block else body).strip() + "\n"
    for name in wanted:
        if not found.get(name, "").strip():
            raise Refused(GATE, f"the reply has no section under a heading `## {name}`")
    return {name: body for name, body in found.items() if body.strip()}


def _outside_blocks(text: str) -> str:
    """With what stands in blocks blanked: a comment in code is no heading."""
    return _BLOCK.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def renamed(source: str, name: str, number: int) -> str:
    """Its one function `name` as that of task `number`. Raises Refused."""
    changed, count = re.subn(
        rf"^def {name}(?=\s*\()", f"def {name}_{number}", source, flags=re.MULTILINE
    )
    if count != 1:
        raise Refused(GATE, f"`## {name}` must define one function `def {name}(…)`, has {count}")
    return changed
