"""Gates for changes that need no test run: static filters, a search for leaked solutions, and a
judge model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from keel.agents.environments.code.languages import matches
from keel.configs.synthesis import CodeTasksConfig
from keel.synthesis.author import Author
from keel.synthesis.code.candidate import Candidate, is_text
from keel.synthesis.code.sandboxes import Prefix
from keel.synthesis.ledger import Rejected

_MIN_LINE = 12
"""Minimum number of characters of a line that can identify the change."""
_MIN_COPIED = 3
"""Minimum number of matching lines for a file to count as a copy."""
_MAX_FILE = 8 << 20
"""Maximum size of a searched file in bytes."""
_PATCH = re.compile(r"^(diff --git |@@ -\d+,?\d* \+\d+|--- a/|\+\+\+ b/)", re.MULTILINE)
_LINK = re.compile(r"https?://\S*/(?:commit|pull|compare|merge_requests)/\S*")
_TRIES = 2
_MAX_PATCH = 20_000
"""Maximum number of characters of each patch that the judge sees."""
_QUESTION = """\
A programmer gets a repository and the issue below, and changes the code. Hidden tests then \
decide. Judge whether that is a fair task, from 1 (not at all) to 5 (entirely):

- clear: does the issue describe the problem or the request, so that the goal is known?
- solvable: do the issue and the repository determine everything that the tests check (names, \
messages, formats), so that a right solution passes them?

Give your reasons in a few words, then end with a line of JSON: {{"clear": 3, "solvable": 3}}

# Issue

{issue}

# The change that was made (the programmer does not see it)

{gold}

# The tests that decide (the programmer does not see them)

{tests}
"""


def check_change(candidate: Candidate, limits: CodeTasksConfig) -> None:
    """Check a change and its issue. Raises Rejected if a check fails."""
    language, gold, issue = candidate.language, candidate.gold, candidate.issue
    trees = (candidate.base, candidate.after)
    sources = [path for path in gold if path.endswith(language.suffixes)]
    added, removed = _added_and_removed(candidate.patch(sources))
    tested = any(candidate.after.get(path) for path in candidate.test_files())
    new_sources = any(path not in candidate.base for path in sources)
    build_files = any(matches(path, language.steers) for path in candidate.harness)
    mib = sum(len(entry[1]) for tree in trees for entry in tree.values()) / 2**20
    changed = (*gold, *candidate.harness)
    text = all(is_text(tree.get(path)) for path in changed for tree in trees)
    lines, names = len(added) + len(removed), language.build_names_sources
    least, most = limits.least_issue, limits.most_issue
    telling = [line for one in added if len(line := one.strip()) >= _MIN_LINE]
    revealed = sum(line in issue for line in telling) / (len(telling) or 1)
    for gate, passes, reason in (
        ("no tests", tested, "the change adds or changes no test"),
        ("tests only", sources, f"the change touches no {candidate.source.language} source"),
        ("tree", mib <= 2 * limits.most_tree_mib, f"larger than {limits.most_tree_mib} MiB"),
        ("binary", text, "the change touches a binary file"),
        ("files", len(gold) <= limits.most_files, f"more than {limits.most_files} files change"),
        ("lines", 0 < lines <= limits.most_lines, f"not 1 to {limits.most_lines} lines change"),
        ("build", not (names and new_sources and build_files), "a build file names a new source"),
        ("issue", least <= len(issue) <= most, f"it has not {least:,} to {most:,} characters"),
        ("reveals", not _PATCH.search(issue), "the issue contains a patch"),
        ("reveals", not _LINK.search(issue), "the issue links to a change"),
        ("reveals", revealed <= limits.most_revealed, "the issue contains the change's lines"),
    ):
        if not passes:
            raise Rejected(gate, reason)


def _added_and_removed(patch: str) -> tuple[list[str], list[str]]:
    lines = patch.splitlines()
    return (
        [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ ")],
        [line[1:] for line in lines if line.startswith("-") and not line.startswith("--- ")],
    )


def check_leaks(candidate: Candidate, built: Prefix, prefix: Path, most: float) -> None:
    """Check that installed packages and files left by the set-up do not contain the changed lines.
    A prefix is built from one commit and reused for earlier commits with the same manifests, so it
    may contain the solution. `most` is the largest fraction of the lines that one file may contain.
    Raises Rejected if a file contains more."""
    added, _ = _added_and_removed(candidate.patch(list(candidate.gold)))
    every = {line.strip().encode() for line in added if len(line.strip()) >= _MIN_LINE}
    before = [entry[1] for entry in candidate.base.values()]
    lines = [line for line in sorted(every) if not any(line in data for data in before)]

    def is_copy(data: bytes) -> bool:
        count = sum(line in data for line in lines)
        return count >= _MIN_COPIED and count > most * len(lines)

    if len(lines) < _MIN_COPIED:
        return
    for name, (kind, data) in built.generated.items():
        if kind != "l" and is_copy(data):
            raise Rejected("future", f"the set-up left {name} in the repository with the change")
    for path in prefix.rglob("*"):
        small = not path.is_symlink() and path.is_file() and path.stat().st_size <= _MAX_FILE
        if small and is_copy(path.read_bytes()):
            name = path.relative_to(prefix)
            raise Rejected("future", f"the installed file {name} has the change")


async def judge(candidate: Candidate, author: Author, least: int) -> dict[str, int]:
    """Ask the judge model about a change and return its scores. Raises Rejected if a score is below
    `least` or if the replies contain no scores."""
    text = _QUESTION.format(
        issue=candidate.issue,
        gold=candidate.patch(list(candidate.gold))[:_MAX_PATCH],
        tests=candidate.patch(list(candidate.harness))[:_MAX_PATCH],
    )
    for _ in range(_TRIES):
        reply = await author.ask([{"role": "user", "content": text}], purpose="judge")
        marks = _marks_of(reply.content)
        for name, mark in marks.items():
            if mark < least:
                raise Rejected("judge", f"{name}: {mark} of 5")
        if marks:
            return marks
    raise Rejected("judge", "the judge gave no marks")


def _marks_of(text: str) -> dict[str, int]:
    """Return the scores in the last valid JSON object of a reply, or {} if there is none."""
    objects: Sequence[str] = re.findall(r"\{[^{}]*\}", text)
    for value in reversed(objects):
        try:
            parsed = json.loads(value)
            marks = {name: parsed[name] for name in ("clear", "solvable")}
        except (ValueError, KeyError, TypeError):
            continue
        if all(type(mark) is int and 1 <= mark <= 5 for mark in marks.values()):
            return marks
    return {}
