"""An environment in which the policy changes a repository. The hidden tests are decrypted only for
the verdict. They run in a clean state, after all processes of the policy have been killed and the
files outside the repository removed. This code supports Python 3.9, needs no packages, and runs
only in bubblewrap."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from keel.agents.env_runtime import processes
from keel.agents.environments.code import files
from keel.agents.environments.code.languages import LANGUAGES, REPO, affects_grading
from keel.agents.environments.code.tree import (
    Tree,
    UnreadableTree,
    decrypt,
    erase_folder,
    merge_trees,
    read_tree,
    tree_as_json,
    tree_from_json,
    write_tree,
)

_MAX_MIB = 64
_CHECK_S = 60.0
_MAX_COMMAND_S = 600
_SLACK_S = 15.0
"""Number of seconds of each call that are reserved for killing the command and reading its
output."""
_SKIPPED = (".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")
_COMMIT = "git -c user.name=keel -c user.email=keel@localhost commit -q -m 'As it is'"
_Packages = dict[str, list[str]]
_PACKAGE_FOLDERS = (
    *("site-packages", "dist-packages", "node_modules", "extern", "third_party", "include"),
)
"""Names of folders that contain packages, in addition to all names that contain `vendor`."""
_METADATA = (".whl", ".egg", ".dist-info", ".egg-info")
_SUFFIXES = (".py", ".so", ".js", *_METADATA, ".h", ".hpp")


def find_packages(folders: Iterable[str]) -> _Packages:
    """Find all packages below `folders`, including vendored and archived ones. Links into the
    repository are ignored. A packaged copy of the project would reveal the solution."""
    packages: _Packages = {}

    def add(name: str, place: str) -> None:
        suffix = next((one for one in _SUFFIXES if name.endswith(one)), "")
        name = name[: len(name) - len(suffix)]
        if suffix in _METADATA:
            name = name.partition("-")[0]
        elif suffix == ".so":
            name = name.partition(".")[0]
        packages.setdefault(normalize_name(name), []).append(place)

    for folder in folders:
        for path, subfolders, names in os.walk(folder):
            holds_packages = _holds_packages(os.path.basename(path))
            for name in [*subfolders, *names]:
                place = os.path.join(path, name)
                if (holds_packages or name.endswith(_METADATA)) and not _is_repository(place):
                    add(name, place)
                if name.endswith((".whl", ".egg", ".zip")):
                    for one in _archive_packages(place):
                        add(one, f"{place}:{one}")
    return packages


def normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _holds_packages(folder: str) -> bool:
    return folder in _PACKAGE_FOLDERS or "vendor" in folder


def _is_repository(path: str) -> bool:
    if os.path.islink(path):
        return f"{os.path.realpath(path)}/".startswith(f"{REPO}/")
    if path.endswith(".dist-info"):
        # Metadata of an editable installation, whose code is the repository's.
        with suppress(OSError), open(os.path.join(path, "direct_url.json")) as file:
            return f"file://{REPO}" in file.read()
    return False


def _archive_packages(path: str) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.split("/") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile):
        return set()
    nested = {
        parts[n + 1] for parts in names for n in range(len(parts) - 1) if _holds_packages(parts[n])
    }
    return {parts[0] for parts in names} | nested


@lru_cache(maxsize=1)
def _system_packages() -> _Packages:
    folders = [sys.prefix, sys.base_prefix, "/usr/local", "/usr/include", "/usr/share/nodejs"]
    folders += ["/usr/lib/node_modules", "/usr/share/python-wheels"]
    folders += map(str, Path("/usr/lib").glob("python*"))
    real = dict.fromkeys(map(os.path.realpath, folders))
    return find_packages(one for one in real if one != "/usr" and os.path.isdir(one))


if "keel.agents.env_runtime.fork_server" in sys.modules:  # episodes are forked from this process
    _system_packages()


class Repository:
    """A coding environment for one repository, loaded from a folder that `keel synthesize`
    created."""

    call_s = math.inf

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._instance: dict[str, Any] = {}
        self._base: Tree = {}
        self._harness: Tree = {}
        self._prefix = ""

    def opening(self, task: Mapping[str, Any], seed: int) -> None:
        reward = task["reward"]
        if not processes.in_sandbox():
            raise RuntimeError("the code environment needs isolation: bubblewrap, with /proc")
        above = os.path.dirname(self._folder)
        if os.path.isdir(os.path.join(above, "instances")):
            raise RuntimeError(
                f"the episode can read the answers in {above}/instances: set folder and readable "
                f"in the recipe's environment to {self._folder}"
            )
        processes.adopt_orphans()
        with open(os.path.join(self._folder, "sealed", reward["instance"]), "rb") as file:
            self._instance = decrypt(file.read(), bytes.fromhex(reward["key"]))
        self._base = tree_from_json(self._instance.pop("base"))
        self._harness = tree_from_json(self._instance.pop("harness"))
        self._prefix = os.path.join(self._folder, "prefixes", self._instance["prefix"])
        self._begin(self._base)

    def _begin(self, tree: Tree) -> None:
        if where := self._copy_of_project():
            raise RuntimeError(where)
        write_tree(REPO, tree)
        self._env = _command_environment(self._prefix, self._instance["env"])
        language = LANGUAGES[self._instance["language"]]
        status, output = self._shell(language.check, _CHECK_S)
        if status != 0:
            cure = "Set environment.python to the interpreter that the tasks were made with"
            raise RuntimeError(f"{language.check} fails here ({output[-500:]}). {cure}")
        self._shell("git init -q . && git add -A && " + _COMMIT, _CHECK_S)

    def _copy_of_project(self) -> str:
        listed = sorted(Path(self._folder, "packages").iterdir())
        sources: list[_Packages] = [json.loads(file.read_text("utf-8")) for file in listed]
        for packages in (*sources, _system_packages()):
            for name in map(normalize_name, self._instance["project"]):
                if places := packages.get(name):
                    return f"the episode can read a copy of the project: {places[0]}"
        return ""

    def bash(self, command: str, timeout_s: int = 120) -> str:
        """Run a command in bash, in the root of the repository, and return what it prints. There
        is no network. What is started in the background goes on.

        Args:
            command: For example: grep -rn "def parse" src
            timeout_s: Seconds after which it is killed.
        """
        # Killed before the call's deadline, which would end the episode.
        limit_s = self.call_s - min(_SLACK_S, self.call_s / 4)
        within_s = max(1, min(timeout_s, _MAX_COMMAND_S, limit_s))
        status, output = self._shell(command, within_s)
        if status is None:
            return f"{output}\n[killed after {within_s:g} s]".lstrip()
        return f"{output}\n[exit status {status}]".lstrip() if status else output

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
        try:
            processes.kill_descendants()
            written = read_tree(
                REPO, max_mib=_MAX_MIB, skip=lambda path: os.path.basename(path) in _SKIPPED
            )
            tree = _build_graded_tree(self._instance, self._base, self._harness, written)
            results = _run_tests(self._instance, tree, self._prefix)
        except (UnreadableTree, OSError, subprocess.SubprocessError) as error:
            return {"correct": 0.0}, {"why": str(error)[:500]}  # the policy made the tree
        correct, facts = _grade(self._instance, results)
        return {"correct": correct}, facts

    def _shell(self, command: str, within_s: float) -> tuple[int | None, str]:
        words = ["/bin/bash", "-c", command]
        return processes.run(words, env=self._env, folder=REPO, within_s=within_s)

    def _file_tool(self, request: Mapping[str, Any]) -> str:
        """Run a file tool with the permissions of the policy's commands, so that the policy cannot
        use links to read the memory of this process."""
        words = [sys.executable, "-I", "-S", files.__file__]
        stdin = json.dumps(request).encode()
        status, output = processes.run(words, env={}, folder=REPO, within_s=_CHECK_S, stdin=stdin)
        if status == 0:
            return output
        raise ValueError(output.strip()[-1000:] or "it could not be done")


def prepare(
    arguments: Mapping[str, Any], without: Sequence[Path]
) -> tuple[dict[str, Any], list[Path]]:
    """Validate the arguments before a run, outside the sandbox, and make the path of the folder
    absolute."""
    folder = Path(str(arguments.get("folder") or "")).expanduser().absolute()
    if not (folder / "sealed").is_dir():
        cure = "Name the folder `environment` made by keel synthesize"
        raise ValueError(f"code: folder = {folder} has no folder `sealed`. {cure}")
    return {**arguments, "folder": str(folder)}, []


_MAX_GENERATED_MIB = 4
_LEFTOVERS = (
    *(".git", "__pycache__", "build", "dist", ".pytest_cache", ".eggs", "node_modules", "target"),
)


class RepositoryWorkshop(Repository):
    """A repository with its dependencies installed, opened from a draft task that includes the gold
    patch."""

    def _begin(self, tree: Tree) -> None:
        write_tree(REPO, tree)
        self._gold = tree_from_json(self._instance.pop("gold"))
        self._env = _command_environment(self._prefix, self._instance["env"])

    def tests(self, gold: bool) -> str:
        """Run all tests and return the results as JSON. If `gold` is set, the gold patch is applied
        first."""
        tree = dict(self._base)
        if gold:
            for path in self._instance["gold_gone"]:
                del tree[path]
            tree |= self._gold
        tree = _build_graded_tree(self._instance, self._base, self._harness, tree)
        results = _run_tests(self._instance, tree, self._prefix)
        return json.dumps(results._asdict())

    def set_up(self, script: str, within_s: float) -> str:
        """Run a setup script in the unchanged repository. Returns its outcome and the new files as
        JSON."""
        processes.kill_descendants()
        for folder in (*_WRITABLE, self._prefix):
            erase_folder(folder)
        write_tree(REPO, self._base)
        status, output = self._shell(script, within_s)
        processes.kill_descendants()

        def is_leftover(path: str) -> bool:
            name = os.path.basename(path)
            return name in _LEFTOVERS or name.endswith((".egg-info", ".pyc"))

        tree = read_tree(REPO, max_mib=512, skip=is_leftover)
        new = {path: entry for path, entry in tree.items() if path not in self._base}
        if os.path.islink(f"{REPO}/node_modules"):
            new["node_modules"] = ("l", os.fsencode(os.readlink(f"{REPO}/node_modules")))
        if sum(len(entry[1]) for entry in new.values()) > _MAX_GENERATED_MIB << 20:
            status, new = 1, {}
            output = f"it leaves more than {_MAX_GENERATED_MIB} MiB in the repository"
        outcome = {"status": status, "output": output[-2000:], "generated": tree_as_json(new)}
        return json.dumps(outcome)

    def copies(self) -> str:
        """Return JSON with the path of a copy of the project that the policy could read, or ""
        if no copy was found."""
        return json.dumps({"where": self._copy_of_project()})


_WRITABLE = ("/tmp", "/dev/shm")
_WORDS = (
    "all any args base both call case cast copy date deep each edge empty end equal error extra "
    "false few file first flat float global group head index inner input int items iter join key "
    "kind last left len like line list local long lower many map max merge mixed mode more name "
    "nested next none null odd old only order other outer output pair part path plain raw repr "
    "right same short simple single size some space start step strict text time true type upper"
)
_MAX_BYTES = 32 << 20
_RANK = ("failed", "skipped", "passed")
"""Precedence of results, highest first, for tests that are reported more than once."""


class _TestResults(NamedTuple):
    tests: dict[str, str]
    canary: str
    """`as wanted` if all canary tests have the expected result, `missing` if one has no result,
    otherwise `faked`."""
    output: str
    inside: bool = True
    """False if a canary test at the end of a hidden test file has an unexpected result."""
    seconds: float = 0.0


def _command_environment(prefix: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for all commands in the repository."""
    where = os.path.dirname(sys.executable)
    return {
        "PATH": f"{prefix}/bin:{where}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PREFIX": prefix,
        "REPO": REPO,
        **extra,
    }


def _build_graded_tree(
    instance: Mapping[str, Any], base: Tree, harness: Tree, written: Tree
) -> Tree:
    """Build the source tree to grade from the policy's files. Restore files that affect grading,
    and drop links that the policy added."""
    language = LANGUAGES[instance["language"]]
    policys = {
        path: entry
        for path, entry in written.items()
        if not affects_grading(language, path) and (entry[0] != "l" or base.get(path) == entry)
    }
    removed = set(instance["harness_gone"])
    graders = {
        path: entry
        for path, entry in base.items()
        if affects_grading(language, path) and path not in removed
    }
    return merge_trees(policys, {**graders, **harness})


def _run_tests(instance: Mapping[str, Any], tree: Tree, prefix: str) -> _TestResults:
    """Write the source tree and run its tests. All other processes are killed before and after.

    Canary tests detect faked results. They have random names, and some must pass while others must
    fail. They are in separate files and at the end of hidden test files.
    """
    language = LANGUAGES[instance["language"]]
    canaries = {_test_name(): good for good in (True, False)}
    inside = {_test_name(): good for good in (True, False)}
    added: Tree = {}
    for nonce, good in canaries.items() if language.canary[0] else ():
        name, text = (_canary(part, nonce, good) for part in language.canary)
        added[os.path.join(instance["canary_in"], name)] = ("f", text.encode())
    tree = merge_trees(tree, added)
    ends = [_canary(language.canary_at_the_end, *one) for one in inside.items()]
    for path in instance["canary_at"]:
        if path in tree:
            tree = {**tree, path: ("f", tree[path][1] + "".join(ends).encode())}
    processes.kill_descendants()
    for folder in _WRITABLE:
        erase_folder(folder)
    if os.path.lexists(REPO):
        raise OSError(f"{REPO} could not be emptied")
    write_tree(REPO, tree)
    folder = f"/tmp/results-{secrets.token_hex(8)}"
    os.mkdir(folder)
    env = _command_environment(prefix, {**instance["env"], "JUNIT": folder})
    command = ["/bin/bash", "-c", instance["test"]]
    began = time.monotonic()
    _, output = processes.run(command, env=env, folder=REPO, within_s=instance["tests_s"])
    seconds = round(time.monotonic() - began, 3)
    processes.kill_descendants()
    tests = _read_results(folder)
    separate = {test: nonce for test in tests for nonce in canaries if nonce in test}
    embedded = {test: good for test in tests for nonce, good in inside.items() if nonce in test}
    others = {k: v for k, v in tests.items() if k not in {*separate, *embedded}}
    outcomes = {canaries[nonce]: tests[test] for test, nonce in separate.items()}
    expected = {True: "passed", False: "failed"}
    matches = "as wanted" if outcomes == expected else "faked"
    canary = "missing" if set(outcomes) != {*expected} else matches
    # A file that cannot be imported has no results at all.
    sound = all(tests[test] in (expected[good], "skipped") for test, good in embedded.items())
    return _TestResults(others, canary, output, sound, seconds)


def _test_name() -> str:
    return "_".join(secrets.choice(_WORDS.split()) for _ in range(4))


def _canary(text: str, nonce: str, good: bool) -> str:
    one, two = (10 + secrets.randbelow(90) for _ in range(2))
    result = one * two + (0 if good else 1 + secrets.randbelow(9))
    return text.replace("NONCE", nonce).replace("WORTH", f"{one} * {two} == {result}")


def _grade(instance: Mapping[str, Any], results: _TestResults) -> tuple[float, dict[str, Any]]:
    """Return the score (1 if every required test passes, otherwise 0) and facts about it."""
    facts: dict[str, Any] = {"canary": results.canary}
    for name in ("f2p", "p2p"):
        required = instance[name]
        passed = sum(results.tests.get(test) == "passed" for test in required)
        facts[f"{name}_passed"], facts[name] = passed, len(required)
    passes = facts["f2p_passed"] == facts["f2p"] > 0 and facts["p2p_passed"] == facts["p2p"]
    # Required only if it worked when the instance was made.
    trusted = results.canary == "as wanted" or not instance["canary"]
    if instance["canary_at"] and not results.inside:
        facts["canary"], trusted = "faked", False
    return float(passes and trusted), facts


def _read_results(folder: str) -> dict[str, str]:
    results: dict[str, str] = {}
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return results
    for name in sorted(os.listdir(folder)):
        if name.endswith(".xml"):
            for test, result in _read_junit(os.path.join(folder, name)):
                if test not in results or _RANK.index(result) < _RANK.index(results[test]):
                    results[test] = result
    return results


def _read_junit(path: str) -> list[tuple[str, str]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            return []
        text = file.read(_MAX_BYTES)
    # Entities may expand. UTF-16 and UTF-32, which have zeros, would spell them in other bytes.
    if b"\0" in text or b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        return []
    try:
        return list(_cases(ElementTree.fromstring(text), ()))
    except (ElementTree.ParseError, ValueError, LookupError, RecursionError):
        return []  # malformed, an unknown encoding, or nested too deeply


def _cases(element: ElementTree.Element, suites: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in element:
        if child.tag == "testsuite":
            yield from _cases(child, (*suites, child.get("name", "")))
        elif child.tag == "testcase":
            parts = (*suites, child.get("classname", ""), child.get("name", ""))
            tags = {one.tag for one in child}
            status = child.get("status", "run")  # ctest's form
            if tags & {"failure", "error"} or status == "fail":
                result = "failed"
            elif "skipped" in tags or status in ("notrun", "disabled"):
                result = "skipped"
            else:
                result = "passed"
            yield "::".join(part for part in parts if part), result
