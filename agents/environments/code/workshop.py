"""What the pipeline does in the sandbox: the set-up of a repository, and its tests run before and
after the change.

Any Python from 3.9, no package.
"""

from __future__ import annotations

import json
import os

from keel.agents.environments.code import grading, processes
from keel.agents.environments.code.environment import Repository
from keel.agents.environments.code.languages import REPO
from keel.agents.environments.code.tree import (
    Tree,
    read_tree,
    tree_as_json,
    tree_from_json,
    write_tree,
)

MOST_GENERATED_MIB = 4
LEFT_OVERS = (
    ".git",
    "__pycache__",
    "build",
    "dist",
    ".pytest_cache",
    ".eggs",
    "node_modules",
    "target",
)


class RepositoryWorkshop(Repository):
    """A repository and its prefix; `bash` is inherited. The draft that it opens has the gold
    patch."""

    def _begin(self, tree: Tree) -> None:
        write_tree(REPO, tree)
        self._gold = tree_from_json(self._instance.pop("gold"))
        self._env = grading.environment(self._prefix, self._instance["env"])

    def tests(self, gold: bool) -> str:
        """The results of all tests, with the change or without it, as JSON."""
        tree = self._base
        if gold:
            for path in self._instance["gold_gone"]:
                tree = {one: entry for one, entry in tree.items() if one != path}
            tree = {**tree, **self._gold}
        tree = grading.graded_tree(self._instance, self._base, self._harness, tree)
        results = grading.run_tests(self._instance, tree, self._prefix)
        return json.dumps(results._asdict())

    def set_up(self, script: str, within_s: float) -> str:
        """Run it in the untouched repository: its status, its last words and the files that it left
        in the repository, as JSON."""
        processes.stop_all()
        for folder in grading.LIVELY:
            grading.erase(folder)
        grading.erase(self._prefix)
        write_tree(REPO, self._base)
        status, said = self._shell(script, within_s)
        processes.stop_all()
        left = read_tree(REPO, most_mib=512, skip=_left_over)
        new = {path: entry for path, entry in left.items() if path not in self._base}
        if os.path.islink(f"{REPO}/node_modules"):
            new["node_modules"] = ("l", os.fsencode(os.readlink(f"{REPO}/node_modules")))
        if sum(len(entry[1]) for entry in new.values()) > MOST_GENERATED_MIB << 20:
            status, said = 1, f"it leaves more than {MOST_GENERATED_MIB} MiB in the repository"
            new = {}
        return json.dumps({"status": status, "said": said[-2000:], "generated": tree_as_json(new)})

    def copies(self) -> str:
        """Where there is a copy of the project; "" where there is none."""
        try:
            self._look_for_copies()
        except RuntimeError as error:
            return json.dumps({"where": str(error)})
        return json.dumps({"where": ""})


def _left_over(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name in LEFT_OVERS or name.endswith((".egg-info", ".pyc"))
