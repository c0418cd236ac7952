"""Candidates from repositories, the gates before any execution, trees and grades."""

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.environments.code import tree as trees
from keel.agents.environments.code.environment import (
    _build_graded_tree,
    _grade,
    _read_results,
    _TestResults,
)
from keel.agents.environments.code.tree import Tree, UnreadableTree, read_tree
from keel.configs.schema import ConfigError
from keel.synthesis.code.candidate import GitSource, PairSource
from keel.synthesis.code.pipeline import _check_change, _check_leaks, _group_tests, _judge
from keel.synthesis.code.sandboxes import Prefix
from keel.synthesis.ledger import Rejected
from tests.synthesis.authors import ScriptedAuthor
from tests.synthesis.code.projects import (
    AFTER,
    BEFORE,
    BROKEN,
    FIXED,
    ISSUE,
    NEW_TEST,
    candidate,
    config,
    repository,
    source,
)


@pytest.mark.e2e
def test_commits_that_name_an_issue_become_candidates(tmp_path: Path) -> None:
    git = repository(
        tmp_path / "git",
        ("Begin", BEFORE),
        ("Nothing is named here", {"README.md": "Adds up.\n"}),
        (ISSUE, {**AFTER, ".gitattributes": "tests export-ignore\n"}),
    )
    mirror = GitSource(source(git))
    (key,) = mirror.keys
    loaded = mirror.load(key)
    assert key.startswith("adding-") and loaded.origin["refers"] == [7]
    assert loaded.base["tests/test_adding.py"][1].decode() in NEW_TEST
    assert list(loaded.gold) == [".gitattributes", "adding.py"]
    assert list(loaded.harness) == loaded.test_files() == ["tests/test_adding.py"]
    assert "-    result = numbers[0]\n" in loaded.patch(["adding.py"])
    assert loaded.issue.startswith("Totals of an empty list raise an error.\n")
    assert "#7" not in loaded.issue and "Signed-off" not in loaded.issue
    assert "adding" in loaded.project and "tests" not in loaded.project
    _check_change(loaded, config())
    issues = tmp_path / "issues.jsonl"
    issue = {"number": 7, "title": "It raises", "body": "With\u2028[].\n"}
    issues.write_text(json.dumps(issue, ensure_ascii=False) + "\n")
    given = GitSource(source(git, issues=str(issues), refers=False))
    assert len(given.keys) == 2 and given.load(given.keys[0]).issue == "It raises\n\nWith\u2028[]."
    issues.write_text('{"number": 7}\n')
    with pytest.raises(ConfigError, match=r"issues\.jsonl"):
        GitSource(source(git, issues=str(issues)))
    for settings in ({"git": str(tmp_path / "no")}, {"ref": "nowhere"}):
        with pytest.raises(ConfigError, match=r"code\.sources\[adding\]\.git"):
            GitSource(source(git, **settings))


@pytest.mark.e2e
def test_pairs_of_issues_and_pull_requests_become_candidates(tmp_path: Path) -> None:
    git = repository(tmp_path / "git", ("Begin", BEFORE), (ISSUE, AFTER))
    mirror = GitSource(source(git, refers=False))
    whole = mirror.load(mirror.keys[0])
    pair = {
        "repo": "owner/adding",
        "instance_id": "owner__adding-7",
        "base_commit": whole.origin["parent"],
        "problem_statement": "Totals of an empty list raise.\n",
        "patch": whole.patch(["adding.py"]),
        "test_patch": whole.patch(["tests/test_adding.py"]),
    }
    late = {**pair, "patch": whole.patch(["adding.py"]).replace("numbers[0]", "numbers[9]")}
    rows = [pair, late, {"repo": "owner/other"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = sorted((git / ".git").rglob("*"))
    pairs = PairSource(source(git, pairs=str(path)))
    first, second = pairs.keys
    loaded = pairs.load(first)
    assert (loaded.base, loaded.after) == (whole.base, whole.after)
    assert loaded.issue == "Totals of an empty list raise."
    with pytest.raises(Rejected) as refusal:
        pairs.load(second)
    assert refusal.value.gate == "tree"
    assert sorted((git / ".git").rglob("*")) == files  # nothing was written to the repository
    with pytest.raises(ConfigError, match="pairs"):
        PairSource(source(git, pairs=str(path), name="more"))


@pytest.mark.e2e
def test_repository_config_runs_no_program(tmp_path: Path) -> None:
    git = repository(tmp_path / "git", ("Begin", BEFORE), (ISSUE, AFTER))
    ran, evil = tmp_path / "ran", tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {ran}\n")
    evil.chmod(0o755)

    def told_git(*words: str, given: str = "") -> str:
        command = ["git", "-C", str(git), *words]
        ran = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
        return ran.stdout

    for knob, value in (("log.showSignature", "true"), ("gpg.program", str(evil))):
        told_git("config", knob, value)
    head, empty, message = told_git("cat-file", "commit", "HEAD").partition("\n\n")
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n -----END PGP SIGNATURE-----"
    signed = f"{head}\n{signature}{empty}{message}"
    commit = told_git("hash-object", "-t", "commit", "-w", "--stdin", given=signed).strip()
    told_git("update-ref", "refs/heads/main", commit)
    mirror = GitSource(source(git))
    (key,) = mirror.keys
    assert mirror.load(key).origin["commit"] == commit
    assert not ran.exists()
    told_git("log", "-1")
    assert ran.exists()


LONG = "\n".join(f"x{n} = {n}" for n in range(500))
TESTS = {"tests/test_adding.py": NEW_TEST}
NAMED = {"CMakeLists.txt": "add_library(a new.cpp)", "new.cpp": "int a;", "tests/a.cpp": "int b;"}
CHEATS: list[tuple[str, dict[str, Any]]] = [
    ("no tests", {"after": {"adding.py": FIXED}}),
    ("tests only", {"after": {**TESTS, "README.md": "Adds!\n"}}),
    ("binary", {"after": {**AFTER, "logo.png": b"\x89PNG\0"}}),
    ("files", {"after": {**AFTER, **{f"f{n}.txt": "f" for n in range(10)}}}),
    ("lines", {"after": {**TESTS, "adding.py": LONG}}),
    ("issue", {"issue": "Fix it. (#7)"}),
    ("reveals", {"issue": f"{ISSUE}\n@@ -1,3 +1,2 @@\n-a\n+b"}),
    ("reveals", {"issue": f"{ISSUE} https://git.example.org/a/b/pull/8"}),
    ("reveals", {"issue": f"{ISSUE} Just write return sum(numbers)"}),
    ("build", {"before": {"a.txt": ""}, "after": NAMED, "source": source(language="cpp")}),
]


@pytest.mark.parametrize(("gate", "given"), CHEATS)
def test_filters_refuse_candidates(gate: str, given: dict[str, Any]) -> None:
    _check_change(candidate(), config())
    with pytest.raises(Rejected) as refused:
        _check_change(candidate(**given), config())
    assert refused.value.gate == gate


def test_judge_refuses_low_marks() -> None:
    good = 'Fine: {"clear": 1}\n{"clear": 4, "solvable": 5}'

    def judged(*replies: str) -> Any:
        author = ScriptedAuthor(list(replies))
        marks = asyncio.run(_judge(candidate(), author, 3))
        question = author.asked[0][1][0]["content"]
        assert "test_the_hidden_one" in question and "return sum(numbers)" in question
        return marks

    assert judged(good) == judged("I like it.", good) == {"clear": 4, "solvable": 5}
    for replies in (['{"clear": 5, "solvable": 2}'], ["no", '{"clear": 5, "solvable": 9}']):
        with pytest.raises(Rejected):
            judged(*replies)


def test_flaky_test_is_excluded() -> None:
    verdicts = {"+": "passed", "-": "failed", "s": "skipped"}

    def run(marks: str) -> dict[str, Any]:
        """Outcomes of tests a to e."""
        tests = {name: verdicts[m] for name, m in zip("abcde", marks, strict=True) if m != " "}
        return {"tests": tests}

    groups = _group_tests([run("-+++-"), run(" ++--")], [run("++s++"), run("++ +-")])
    assert groups == {"f2p": ["a"], "p2p": ["b"], "p2f": ["c"], "flaky": ["d", "e"]}


def test_change_installed_by_setup_is_detected(tmp_path: Path) -> None:
    fixed = BROKEN + "\n\ndef total_of_all(numbers):\n    if not numbers:\n"
    fixed += "        return 0\n    return total(numbers)\n\n\ndef most(numbers, least=0):\n"
    one = candidate(after={"adding.py": fixed, "tests/test_adding.py": NEW_TEST})
    place = tmp_path / "lib/kept"
    place.mkdir(parents=True)
    (place / "before.txt").write_text(BROKEN)
    (place / "link").symlink_to(tmp_path / "nothing")
    built = Prefix(name="p", setup="", test="")
    _check_leaks(one, built, tmp_path, 0.5)
    with pytest.raises(Rejected, match="future"):
        leftover = replace(built, generated={"lib/a.js": ("f", fixed.encode())})
        _check_leaks(one, leftover, tmp_path, 0.5)
    (place / "notes.txt").write_text(f"All of it:\n{fixed}")
    with pytest.raises(Rejected, match="future"):
        _check_leaks(one, built, tmp_path, 0.5)
    _check_leaks(candidate(), built, tmp_path, 0.5)  # one line is not enough evidence


TREE: Tree = {
    "a.py": ("f", b"a"),
    "bin/run": ("x", b"\xff\0"),
    "bin/link": ("l", b"../a.py"),
    "tests/test_a.py": ("f", b"old"),
}


@pytest.mark.e2e
def test_tree_round_trips_through_folder_and_seal(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    trees.write_tree(root, TREE)
    os.mkfifo(f"{root}/pipe")
    assert read_tree(root, max_mib=1, skip=lambda path: path == "x") == TREE
    key = bytes(range(32))
    sealed = trees.encrypt({"tree": trees.tree_as_json(TREE)}, key)
    assert (
        trees.tree_from_json(trees.decrypt(sealed, key)["tree"]) == TREE and b"tests" not in sealed
    )
    for data, other in ((sealed, bytes(32)), (sealed[:-1] + b"x", key)):
        with pytest.raises(ValueError):
            trees.decrypt(data, other)
    with (tmp_path / "root" / "hole").open("wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(UnreadableTree):
        read_tree(root, max_mib=1, skip=lambda path: False)
    os.chmod(f"{root}/bin", 0)
    trees.erase_folder(str(tmp_path))
    assert os.listdir(tmp_path) == []
    (tmp_path / "link").symlink_to("/usr")
    with pytest.raises(UnreadableTree):
        read_tree(str(tmp_path / "link"), max_mib=1, skip=lambda path: False)


def test_tree_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    tree = {"a": ("l", os.fsencode(tmp_path / "outside")), "a/b": ("f", b"x")}
    with pytest.raises(UnreadableTree):
        trees.write_tree(str(tmp_path / "tree"), tree)
    assert os.listdir(tmp_path / "outside") == []


def test_graders_files_replace_the_policys() -> None:
    instance = {"language": "python", "harness_gone": ["tests/test_gone.py"]}
    base: Tree = {**TREE, "tests/test_gone.py": ("f", b"gone")}
    harness: Tree = {"tests/test_b.py": ("f", b"new")}
    written: Tree = {
        "a.py": ("f", b"better"),
        "bin/link": ("l", b"../a.py"),
        "new": ("l", b"/etc"),
        "conftest.py": ("f", b"cheats"),
        "tests": ("f", b"in the way"),
        "setup.cfg": ("f", b"[tool:pytest]"),
    }
    assert _build_graded_tree(instance, base, harness, written) == {
        "a.py": ("f", b"better"),
        "bin/link": ("l", b"../a.py"),
        "tests/test_a.py": ("f", b"old"),
        "tests/test_b.py": ("f", b"new"),
    }
    assert trees.merge_trees({"a/b": ("f", b"")}, {"a": ("f", b"1")}) == {"a": ("f", b"1")}


def test_grade_needs_all_tests_and_the_canary() -> None:
    instance = {"f2p": ["a"], "p2p": ["b"], "canary": True, "canary_at": ["tests/test_a.py"]}

    def worth(canary: str = "as wanted", **tests: str) -> float:
        return _grade(instance, _TestResults(tests, canary, ""))[0]

    assert worth(a="passed", b="passed", c="failed") == 1.0
    assert worth(a="passed") == worth(a="passed", b="skipped") == worth() == 0.0
    assert worth("faked", a="passed", b="passed") == worth("missing", a="passed", b="passed") == 0.0
    lies = _TestResults({"a": "passed", "b": "passed"}, "as wanted", "", inside=False)
    assert _grade(instance, lies) == (0.0, {**_grade(instance, lies)[1], "canary": "faked"})
    assert _grade({**instance, "canary_at": []}, lies)[0] == 1.0
    nothing = {**instance, "f2p": [], "p2p": []}
    assert _grade(nothing, _TestResults({}, "as wanted", ""))[0] == 0.0


JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite name="s">
  <testcase classname="c" name="good"/><testcase classname="c" name="twice"/>
  <testcase classname="c" name="twice"><failure/></testcase>
  <testcase classname="c" name="error"><error/></testcase>
  <testsuite name="inner"><testcase name="skip"><skipped/></testcase></testsuite>
</testsuite><testcase name="ctest" status="fail"/></testsuites>
"""


def test_junit_of_several_runners(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(JUNIT)
    (tmp_path / "b.xml").write_text("<testsuites><testcase name='cut'")
    (tmp_path / "c.xml").symlink_to("a.xml")
    grows = "<!DOCTYPE a [<!ENTITY b 'c'>]><a><testcase name='e'/></a>"
    (tmp_path / "d.xml").write_text(grows)
    (tmp_path / "d16.xml").write_text(f"<?xml version='1.0' encoding='utf-16'?>{grows}", "utf-16")
    os.mkfifo(tmp_path / "e.xml")
    # Files with which a policy could make the verdict raise, so it would not count.
    for name in ("foo", "shift_jis", "idna"):
        (tmp_path / f"{name}.xml").write_text(f'<?xml version="1.0" encoding="{name}"?><a>b</a>')
    (tmp_path / "deep.xml").write_text("<testsuite>" * 3000 + "</testsuite>" * 3000)
    assert _read_results(str(tmp_path)) == {
        "s::c::good": "passed",
        "s::c::twice": "failed",
        "s::c::error": "failed",
        "s::inner::skip": "skipped",
        "ctest": "failed",
    }
