"""Runs the tests of a tree afresh: nothing that was there before is left, no process and no file.

Any Python from 3.9, no package.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from keel.agents.environments.code import processes
from keel.agents.environments.code.junit import results_in
from keel.agents.environments.code.languages import LANGUAGES, REPO, is_grading
from keel.agents.environments.code.tree import Tree, erase, overlay, write_tree

LIVELY = ("/tmp", "/dev/shm")
"""All that can be written to."""
WORDS = (
    "all any args base both call case cast copy date deep each edge empty end equal error extra "
    "false few file first flat float global group head index inner input int items iter join key "
    "kind last left len like line list local long lower many map max merge mixed mode more name "
    "nested next none null odd old only order other outer output pair part path plain raw repr "
    "right same short simple single size some space start step strict text time true type upper"
)
"""Of names that tests might have."""


class Results(NamedTuple):
    tests: dict[str, str]
    """Name → passed, failed or skipped."""
    canary: str
    """as wanted; missing, where its results are not among them; faked, where one is another than it
    must be."""
    said: str
    """The command's last words."""
    inside: bool = True
    """Whether none of those at the end of hidden test files is another than it must be."""
    seconds: float = 0.0
    """The tests alone."""


def environment(prefix: str, more: Mapping[str, str]) -> dict[str, str]:
    """Variables of every command. None has anything to hide."""
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
        **more,
    }


def graded_tree(instance: Mapping[str, Any], base: Tree, harness: Tree, written: Tree) -> Tree:
    """What was written, with the grader's files as the instance has them and no others. Links that
    were not there before are left out: what is written next would go where they lead."""
    language = LANGUAGES[instance["language"]]
    own = {
        path: entry
        for path, entry in written.items()
        if not is_grading(language, path) and (entry[0] != "l" or base.get(path) == entry)
    }
    gone = set(instance["harness_gone"])
    kept = {
        path: entry
        for path, entry in base.items()
        if is_grading(language, path) and path not in gone
    }
    return overlay(own, {**kept, **harness})


def run_tests(instance: Mapping[str, Any], tree: Tree, prefix: str) -> Results:
    """Of a whole tree. Every process below this one is ended, before and after."""
    language = LANGUAGES[instance["language"]]
    canaries = {_name(): good for good in (True, False)}
    inside = {_name(): good for good in (True, False)}
    tree = overlay(tree, _files(language.canary, instance["canary_in"], canaries))
    tree = overlay(tree, _longer(language.canary_at_the_end, tree, _at(instance), inside))
    processes.stop_all()
    for folder in LIVELY:
        erase(folder)
    if os.path.lexists(REPO):
        raise OSError(f"{REPO} could not be emptied")
    write_tree(REPO, tree)
    results = f"/tmp/results-{secrets.token_hex(8)}"
    os.mkdir(results)
    env = environment(prefix, {**instance["env"], "JUNIT": results})
    command = ["/bin/bash", "-c", instance["test"]]
    begun = time.monotonic()
    _, said = processes.run(command, env=env, folder=REPO, within_s=instance["tests_s"])
    seconds = round(time.monotonic() - begun, 3)
    processes.stop_all()
    tests = results_in(results)
    told = {test: nonce for test in tests for nonce in canaries if nonce in test}
    more = {test: good for test in tests for nonce, good in inside.items() if nonce in test}
    others = {test: result for test, result in tests.items() if test not in {*told, *more}}
    seen = {canaries[nonce]: tests[test] for test, nonce in told.items()}
    must = {True: "passed", False: "failed"}
    canary = "missing" if set(seen) != {*must} else "as wanted" if seen == must else "faked"
    # A file that cannot be imported has none of its tests.
    ends = all(tests[test] in (must[good], "skipped") for test, good in more.items())
    return Results(others, canary, said, ends, seconds)


def _name() -> str:
    return "_".join(secrets.choice(WORDS.split()) for _ in range(4))


def _files(canary: tuple[str, str], folder: str, canaries: Mapping[str, bool]) -> Tree:
    """One that holds and one that does not; by its text alone, neither can be told from a test."""
    found: Tree = {}
    for nonce, good in canaries.items() if canary[0] else ():
        name, text = (part.replace("NONCE", nonce) for part in canary)
        found[os.path.join(folder, name)] = ("f", text.replace("WORTH", _worth(good)).encode())
    return found


def _longer(end: str, tree: Tree, paths: Sequence[str], canaries: Mapping[str, bool]) -> Tree:
    """These files with both at their ends."""
    ends = [end.replace("NONCE", n).replace("WORTH", _worth(good)) for n, good in canaries.items()]
    return {path: ("f", tree[path][1] + "".join(ends).encode()) for path in paths if path in tree}


def _at(instance: Mapping[str, Any]) -> Sequence[str]:
    return instance.get("canary_at", ())  # instances of earlier versions have none


def _worth(good: bool) -> str:
    one, two = (10 + secrets.randbelow(90) for _ in range(2))
    return f"{one} * {two} == {one * two + (0 if good else 1 + secrets.randbelow(9))}"


def grade(instance: Mapping[str, Any], results: Results) -> tuple[float, dict[str, Any]]:
    """1 only if every test that has to pass does, and what was found."""
    facts: dict[str, Any] = {"canary": results.canary}
    for name in ("f2p", "p2p"):
        wanted = instance[name]
        passed = sum(results.tests.get(test) == "passed" for test in wanted)
        facts[f"{name}_passed"], facts[name] = passed, len(wanted)
    right = facts["f2p_passed"] == facts["f2p"] > 0 and facts["p2p_passed"] == facts["p2p"]
    # Where it was there when the instance was made, it must be there now.
    trusted = results.canary == "as wanted" or not instance["canary"]
    if _at(instance) and not results.inside:
        facts["canary"], trusted = "faked", False
    return float(right and trusted), facts
