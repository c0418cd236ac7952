"""Sets up a repository in the sandbox and runs its tests, with and without the change."""

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

_MAX_GENERATED_MIB = 4
_LEFTOVERS = (
    *(".git", "__pycache__", "build", "dist", ".pytest_cache", ".eggs", "node_modules", "target"),
)


class RepositoryWorkshop(Repository):
    """A repository with its installed files. It is opened from a draft that includes the gold
    patch."""

    def _begin(self, tree: Tree) -> None:
        write_tree(REPO, tree)
        self._gold = tree_from_json(self._instance.pop("gold"))
        self._env = grading.environment(self._prefix, self._instance["env"])

    def tests(self, gold: bool) -> str:
        """Run all tests and return the results as JSON. If `gold` is set, the gold patch is applied
        first."""
        tree = self._base
        if gold:
            for path in self._instance["gold_gone"]:
                tree = {one: entry for one, entry in tree.items() if one != path}
            tree = {**tree, **self._gold}
        tree = grading.graded_tree(self._instance, self._base, self._harness, tree)
        results = grading.run_tests(self._instance, tree, self._prefix)
        return json.dumps(results._asdict())

    def set_up(self, script: str, within_s: float) -> str:
        """Run a setup script in the unchanged repository. Returns its outcome and the new files as
        JSON."""
        processes.stop_all()
        for folder in (*grading.WRITABLE, self._prefix):
            grading.erase(folder)
        write_tree(REPO, self._base)
        status, output = self._shell(script, within_s)
        processes.stop_all()
        tree = read_tree(REPO, max_mib=512, skip=_is_leftover)
        new = {path: entry for path, entry in tree.items() if path not in self._base}
        if os.path.islink(f"{REPO}/node_modules"):
            new["node_modules"] = ("l", os.fsencode(os.readlink(f"{REPO}/node_modules")))
        if sum(len(entry[1]) for entry in new.values()) > _MAX_GENERATED_MIB << 20:
            status, new = 1, {}
            output = f"it leaves more than {_MAX_GENERATED_MIB} MiB in the repository"
        return json.dumps(
            {"status": status, "said": output[-2000:], "generated": tree_as_json(new)}
        )

    def copies(self) -> str:
        """Return JSON with the path of a copy of the project that the policy could read, or ""
        if no copy was found."""
        where = ""
        try:
            self._refuse_copies()
        except RuntimeError as error:
            where = str(error)
        return json.dumps({"where": where})


def _is_leftover(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name in _LEFTOVERS or name.endswith((".egg-info", ".pyc"))
