"""A repository as it was before a change, and a policy that is to make the change.

The tests that grade it come out of a sealed file at the verdict, whose key came with the task; the
policy's processes have been ended by then, and all files but those of the repository thrown away.
Runs in bubblewrap alone. Any Python from 3.9, no package.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from keel.agents.environments.code import files, grading, processes
from keel.agents.environments.code.copies import Installed, find_packages, machine, normalize_name
from keel.agents.environments.code.languages import LANGUAGES, REPO
from keel.agents.environments.code.tree import (
    Tree,
    UnreadableTree,
    read_tree,
    tree_from_json,
    unseal,
    write_tree,
)

MOST_MIB = 64
"""Of a repository that is graded."""
CHECK_S = 60.0
COMMAND_S = 600
SLACK_S = 15.0
"""Of a call's seconds: for what a command has started to end, and its output to be read."""
OWN_FOLDERS = (".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")


@lru_cache(maxsize=1)
def on_machine() -> Installed:
    return find_packages(machine())


if "keel.agents.env_runtime.fork_server" in sys.modules:  # episodes are forked from this process
    on_machine()


class Repository:
    """folder: the `environment` folder of what `keel synthesize` made; it must be readable, and the
    one above it must not be."""

    call_s = math.inf
    """Seconds of a call, set before each."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._instance: dict[str, Any] = {}
        self._base: Tree = {}
        self._harness: Tree = {}
        self._prefix = ""

    def opening(self, task: Mapping[str, Any], seed: int) -> None:
        """Raises where the episode would not be a fair one, and says why."""
        reward = task["reward"]
        if not processes.in_sandbox():
            raise RuntimeError("the code environment needs isolation: bubblewrap, with /proc")
        above = os.path.dirname(self._folder)
        if os.path.isdir(os.path.join(above, "instances")):
            raise RuntimeError(
                f"the episode can read {above}/instances, where the answers are: set folder and "
                f"readable in the recipe's environment to {self._folder}"
            )
        processes.adopt()
        with open(os.path.join(self._folder, "sealed", reward["instance"]), "rb") as file:
            self._instance = unseal(file.read(), bytes.fromhex(reward["key"]))
        self._base = tree_from_json(self._instance.pop("base"))
        self._harness = tree_from_json(self._instance.pop("harness"))
        self._prefix = os.path.join(self._folder, "prefixes", self._instance["prefix"])
        self._begin(self._base)

    def _begin(self, tree: Tree) -> None:
        self._look_for_copies()
        write_tree(REPO, tree)
        self._env = grading.environment(self._prefix, self._instance["env"])
        language = LANGUAGES[self._instance["language"]]
        status, said = self._shell(language.check, CHECK_S)
        if status != 0:
            raise RuntimeError(
                f"the tools of {self._instance['language']} do not work here ({said[-500:]}); the "
                "interpreter (environment.python) must be the one that the tasks were made with"
            )
        self._shell("git init -q . && git add -A && " + _COMMIT, CHECK_S)

    def _look_for_copies(self) -> None:
        """In all prefixes: an episode can read the others', too."""
        listed = os.path.join(self._folder, "packages")
        for name in sorted(os.listdir(listed)):
            with open(os.path.join(listed, name), encoding="utf-8") as file:
                self._look_in(json.load(file))
        self._look_in(on_machine())

    def _look_in(self, packages: Installed) -> None:
        for name in map(normalize_name, self._instance["project"]):
            if found := packages.get(name):
                raise RuntimeError(f"the episode can read a copy of the project: {found[0]}")

    def bash(self, command: str, timeout_s: int = 120) -> str:
        """Run a command in bash, in the root of the repository, and return what it prints. There
        is no network. What is started in the background goes on.

        Args:
            command: For example: grep -rn "def parse" src
            timeout_s: Seconds after which it is killed.
        """
        # Killed before the call's own time is up, which would end the episode.
        most_s = self.call_s - min(SLACK_S, self.call_s / 4)
        within_s = max(1, min(timeout_s, COMMAND_S, most_s))
        status, said = self._shell(command, within_s)
        if status is None:
            return f"{said}\n[killed after {within_s:g} s]".lstrip()
        return f"{said}\n[exit status {status}]".lstrip() if status else said

    def view(self, path: str, first_line: int = 1, last_line: int = 0) -> str:
        """A file's lines with their numbers, or a folder's files.

        Args:
            path: From the root of the repository.
            first_line: From 1.
            last_line: 0 is the file's last.
        """
        return self._file_tool({"do": "view", "path": path, "first": first_line, "last": last_line})

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text of a file, which must be there exactly once. An empty `old` makes a new
        file of `new`.

        Args:
            path: From the root of the repository.
            old: With its line breaks and indentation.
            new: What comes in its place.
        """
        return self._file_tool({"do": "edit", "path": path, "old": old, "new": new})

    def verdict(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Whether the hidden tests pass."""
        try:
            processes.stop_all()
            written = read_tree(REPO, most_mib=MOST_MIB, skip=_skipped)
            tree = grading.graded_tree(self._instance, self._base, self._harness, written)
            results = grading.run_tests(self._instance, tree, self._prefix)
        except (
            UnreadableTree,
            OSError,
            subprocess.SubprocessError,
        ) as error:  # the policy's doing: it made the tree
            return {"correct": 0.0}, {"why": str(error)[:500]}
        right, facts = grading.grade(self._instance, results)
        return {"correct": right}, facts

    def _shell(self, command: str, within_s: float) -> tuple[int | None, str]:
        words = ["/bin/bash", "-c", command]
        return processes.run(words, env=self._env, folder=REPO, within_s=within_s)

    def _file_tool(self, request: Mapping[str, Any]) -> str:
        """In a process of its own, which may what a command of the policy's may: links that lead
        into this process's memory would be followed otherwise."""
        words = [sys.executable, "-I", "-S", files.__file__]
        given = files.request_of(request)
        status, said = processes.run(words, env={}, folder=REPO, within_s=CHECK_S, given=given)
        if status == 0:
            return said
        raise ValueError(said.strip()[-1000:] or "it could not be done")


def prepare(
    arguments: Mapping[str, Any], without: Sequence[Path]
) -> tuple[dict[str, Any], list[Path]]:
    """Before a run, outside the sandbox: the arguments with a folder that is the same from
    everywhere (an episode runs in it), and nothing more to read. without: files with answers, which
    it does not see anyway. Raises ValueError."""
    folder = Path(str(arguments.get("folder") or "")).expanduser().absolute()
    if not (folder / "sealed").is_dir():
        raise ValueError(
            f"code: folder = {arguments.get('folder')}: has no folder `sealed`; name the folder "
            "`environment` of what keel synthesize made"
        )
    return {**arguments, "folder": str(folder)}, []


_COMMIT = "git -c user.name=keel -c user.email=keel@localhost commit -q -m 'As it is'"


def _skipped(path: str) -> bool:
    return path.rpartition("/")[2] in OWN_FOLDERS
