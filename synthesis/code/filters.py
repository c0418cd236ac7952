"""What a change must be like before anything is run for it. Each filter is a gate by its name."""

from __future__ import annotations

import re

from keel.agents.environments.code.languages import matches
from keel.configs.synthesis import CodeTasksConfig
from keel.synthesis.code.candidate import Candidate, is_text
from keel.synthesis.ledger import Refused

TELLING = 12
"""Characters of a line that could hardly be there by chance."""
_PATCH = re.compile(r"^(diff --git |@@ -\d+,?\d* \+\d+|--- a/|\+\+\+ b/)", re.MULTILINE)
_LINK = re.compile(r"https?://\S*/(?:commit|pull|compare|merge_requests)/\S*")


def look(candidate: Candidate, limits: CodeTasksConfig) -> None:
    """Raises Refused. The cheapest and the most telling come first."""
    language, gold = candidate.language, candidate.gold
    sources = [path for path in gold if path.endswith(language.suffixes)]
    if not candidate.test_files():
        raise Refused("no tests", "the change touches no test")
    if not any(candidate.after.get(path) for path in candidate.test_files()):
        raise Refused("no tests", "the change only removes tests")
    if not sources:
        raise Refused("tests only", f"the change touches no {candidate.source.language} source")
    size = sum(
        len(entry[1]) for tree in (candidate.base, candidate.after) for entry in tree.values()
    )
    if size > 2 * limits.most_tree_mib << 20:
        raise Refused("tree", f"the repository takes more than {limits.most_tree_mib} MiB")
    for path in {**gold, **candidate.harness}:
        for tree in (candidate.base, candidate.after):
            if not is_text(tree.get(path)):
                raise Refused("binary", "the change touches a file that is no text")
    if len(gold) > limits.most_files:
        raise Refused("files", f"the change touches more than {limits.most_files} files")
    changed = added_and_removed(candidate.patch(sources))
    if not 0 < sum(map(len, changed)) <= limits.most_lines:
        raise Refused("lines", f"the change is not of 1 to {limits.most_lines} lines")
    new = [path for path in sources if path not in candidate.base]
    if (
        language.build_names_sources
        and new
        and any(matches(path, language.steers) for path in candidate.harness)
    ):
        raise Refused("build", "the build names a new file, which nobody could know")
    if len(candidate.issue) < limits.least_issue:
        raise Refused("issue", f"its text has fewer than {limits.least_issue} characters")
    if len(candidate.issue) > limits.most_issue:
        raise Refused("issue", f"its text has more than {limits.most_issue:,} characters")
    reveals(candidate.issue, changed[0], limits.most_revealed)


def reveals(issue: str, added: list[str], most: float) -> None:
    """Raises Refused for an issue that has the change, or the way to it."""
    if _PATCH.search(issue):
        raise Refused("reveals", "the issue has a patch")
    if _LINK.search(issue):
        raise Refused("reveals", "the issue links to a change")
    telling = [line for one in added if len(line := one.strip()) >= TELLING]
    if telling and sum(line in issue for line in telling) / len(telling) > most:
        raise Refused("reveals", f"more than {most:.0%} of the change's lines are in the issue")


def added_and_removed(patch: str) -> tuple[list[str], list[str]]:
    lines = patch.splitlines()
    return (
        [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ ")],
        [line[1:] for line in lines if line.startswith("-") and not line.startswith("--- ")],
    )
