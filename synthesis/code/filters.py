"""Gates for changes that need no test run: static filters, a search for leaked copies, and a judge
model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from keel.agents.environments.code.languages import matches
from keel.configs.synthesis import CodeTasksConfig
from keel.synthesis.author import Author
from keel.synthesis.code.candidate import Candidate, is_text
from keel.synthesis.code.sandboxes import Prefix
from keel.synthesis.ledger import Rejected

TELLING = 12
"""Minimum number of characters for a line to identify the change."""
_PATCH = re.compile(r"^(diff --git |@@ -\d+,?\d* \+\d+|--- a/|\+\+\+ b/)", re.MULTILINE)
_LINK = re.compile(r"https?://\S*/(?:commit|pull|compare|merge_requests)/\S*")


def check_change(candidate: Candidate, limits: CodeTasksConfig) -> None:
    """Check a change and its issue, cheapest checks first. Raises Rejected if a check fails."""
    language, gold = candidate.language, candidate.gold
    sources = [path for path in gold if path.endswith(language.suffixes)]
    if not candidate.test_files():
        raise Rejected("no tests", "the change touches no test")
    if not any(candidate.after.get(path) for path in candidate.test_files()):
        raise Rejected("no tests", "the change only removes tests")
    if not sources:
        raise Rejected("tests only", f"the change touches no {candidate.source.language} source")
    size = sum(
        len(entry[1]) for tree in (candidate.base, candidate.after) for entry in tree.values()
    )
    if size > 2 * limits.most_tree_mib << 20:
        raise Rejected("tree", f"the repository is larger than {limits.most_tree_mib} MiB")
    for path in {**gold, **candidate.harness}:
        for tree in (candidate.base, candidate.after):
            if not is_text(tree.get(path)):
                raise Rejected("binary", "the change touches a binary file")
    if len(gold) > limits.most_files:
        raise Rejected("files", f"the change touches more than {limits.most_files} files")
    changed = added_and_removed(candidate.patch(sources))
    if not 0 < sum(map(len, changed)) <= limits.most_lines:
        raise Rejected("lines", f"the change does not have 1 to {limits.most_lines} lines")
    new = [path for path in sources if path not in candidate.base]
    if (
        language.build_names_sources
        and new
        and any(matches(path, language.steers) for path in candidate.harness)
    ):
        raise Rejected("build", "a build file names a new source file")
    if len(candidate.issue) < limits.least_issue:
        raise Rejected("issue", f"the text has fewer than {limits.least_issue} characters")
    if len(candidate.issue) > limits.most_issue:
        raise Rejected("issue", f"the text has more than {limits.most_issue:,} characters")
    reveals(candidate.issue, changed[0], limits.most_revealed)


def reveals(issue: str, added: list[str], most: float) -> None:
    """Check that the issue contains neither the change nor a link to it. Raises Rejected if it
    does."""
    if _PATCH.search(issue):
        raise Rejected("reveals", "the issue contains a patch")
    if _LINK.search(issue):
        raise Rejected("reveals", "the issue links to a change")
    telling = [line for one in added if len(line := one.strip()) >= TELLING]
    if telling and sum(line in issue for line in telling) / len(telling) > most:
        raise Rejected("reveals", f"more than {most:.0%} of the change's lines are in the issue")


def added_and_removed(patch: str) -> tuple[list[str], list[str]]:
    lines = patch.splitlines()
    return (
        [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ ")],
        [line[1:] for line in lines if line.startswith("-") and not line.startswith("--- ")],
    )


LEAST = 3
"""Minimum number of matching lines for a file to count as a copy."""
MOST_BYTES = 8 << 20
"""Maximum size in bytes of a file to search."""


def check_leaks(candidate: Candidate, built: Prefix, prefix: Path, most: float) -> None:
    """Check that the changed lines are not in installed packages or in files left by the set-up. A
    prefix is built from one commit and is also used for earlier commits with the same manifests, so
    it may contain the solution. `most` is the largest fraction of the lines that one file may
    contain. Raises Rejected if a file contains more."""
    lines = _telling_lines(candidate)
    if len(lines) < LEAST:
        return
    for path, (kind, data) in built.generated.items():
        if kind != "l" and _has(data, lines, most):
            raise Rejected(
                "future", f"the set-up left {path} in the repository, which has the change"
            )
    for folder, _, names in os.walk(prefix):
        for name in names:
            path = Path(folder, name)
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
                continue
            if _has(path.read_bytes(), lines, most):
                name = path.relative_to(prefix)
                raise Rejected("future", f"the installed file {name} has the change")


def _telling_lines(candidate: Candidate) -> Sequence[bytes]:
    """Return the added lines that appear nowhere in the repository before the change."""
    added, _ = added_and_removed(candidate.patch(list(candidate.gold)))
    result = {line.strip().encode() for line in added if len(line.strip()) >= TELLING}
    before = [entry[1] for entry in candidate.base.values()]
    return [line for line in sorted(result) if not any(line in data for data in before)]


def _has(data: bytes, lines: Sequence[bytes], most: float) -> bool:
    count = sum(line in data for line in lines)
    return count >= LEAST and count > most * len(lines)


TRIES = 2
MOST_CHARACTERS = 20_000
"""Maximum number of characters of each patch to show the judge."""
QUESTION = """\
A programmer gets a repository and the issue below, and changes the code. Hidden tests then \
decide. Judge whether that is a fair task, from 1 (not at all) to 5 (entirely):

- clear: does the issue say what is wrong or wanted, so that one knows what to do?
- solvable: does the issue, with the repository as it is, fix what the tests check (names, \
messages, formats), so that a right solution passes them?

Say in a few words why, then end with a line of JSON: {{"clear": 3, "solvable": 3}}

# Issue

{issue}

# The change that was made (the programmer does not see it)

{gold}

# The tests that decide (the programmer does not see them)

{tests}
"""


async def judge(candidate: Candidate, author: Author, least: int) -> dict[str, int]:
    """Ask the judge and return its marks. Raises Rejected if a mark is below `least` or if the
    reply contains no marks."""
    text = QUESTION.format(
        issue=candidate.issue,
        gold=candidate.patch(list(candidate.gold))[:MOST_CHARACTERS],
        tests=candidate.patch(list(candidate.harness))[:MOST_CHARACTERS],
    )
    for _ in range(TRIES):
        reply = await author.ask([{"role": "user", "content": text}], purpose="judge")
        marks = marks_of(reply.content)
        if marks is None:
            continue
        for name, mark in marks.items():
            if mark < least:
                raise Rejected("judge", f"{name}: {mark} of 5")
        return marks
    raise Rejected("judge", "the judge gave no marks")


def marks_of(text: str) -> dict[str, int] | None:
    """Return the marks in the last JSON object of a reply, or None if there are none."""
    for result in reversed(re.findall(r"\{[^{}]*\}", text)):
        try:
            value = json.loads(result)
            marks = {name: value[name] for name in ("clear", "solvable")}
        except (ValueError, KeyError, TypeError):
            continue
        if all(type(mark) is int and 1 <= mark <= 5 for mark in marks.values()):
            return marks
    return None
