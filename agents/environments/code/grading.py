"""Runs the hidden tests in a clean state, after killing the policy's processes and removing its
other files."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from keel.agents.env_runtime import processes
from keel.agents.environments.code.languages import LANGUAGES, REPO, affects_grading
from keel.agents.environments.code.tree import Tree, erase_folder, merge_trees, write_tree

WRITABLE = ("/tmp", "/dev/shm")
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


class Results(NamedTuple):
    tests: dict[str, str]
    canary: str
    """`as wanted` if all canary tests have the expected result, `missing` if one has no result,
    otherwise `faked`."""
    said: str
    inside: bool = True
    """False if a canary test at the end of a hidden test file has an unexpected result."""
    seconds: float = 0.0


def command_environment(prefix: str, extra: Mapping[str, str]) -> dict[str, str]:
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


def build_graded_tree(
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


def run_tests(instance: Mapping[str, Any], tree: Tree, prefix: str) -> Results:
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
    for folder in WRITABLE:
        erase_folder(folder)
    if os.path.lexists(REPO):
        raise OSError(f"{REPO} could not be emptied")
    write_tree(REPO, tree)
    folder = f"/tmp/results-{secrets.token_hex(8)}"
    os.mkdir(folder)
    env = command_environment(prefix, {**instance["env"], "JUNIT": folder})
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
    return Results(others, canary, output, sound, seconds)


def _test_name() -> str:
    return "_".join(secrets.choice(_WORDS.split()) for _ in range(4))


def _canary(text: str, nonce: str, good: bool) -> str:
    one, two = (10 + secrets.randbelow(90) for _ in range(2))
    result = one * two + (0 if good else 1 + secrets.randbelow(9))
    return text.replace("NONCE", nonce).replace("WORTH", f"{one} * {two} == {result}")


def grade(instance: Mapping[str, Any], results: Results) -> tuple[float, dict[str, Any]]:
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
