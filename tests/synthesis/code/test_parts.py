"""Parts that run inside the sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keel.agents.environments.code.grading import Results, _read_results, grade, graded_tree
from keel.agents.environments.code.tree import (
    Tree,
    UnreadableTree,
    erase,
    overlay,
    read_tree,
    seal,
    tree_as_json,
    tree_from_json,
    unseal,
    write_tree,
)

TREE: Tree = {
    "a.py": ("f", b"a"),
    "bin/run": ("x", b"\xff\0"),
    "bin/link": ("l", b"../a.py"),
    "tests/test_a.py": ("f", b"old"),
}


@pytest.mark.e2e
def test_tree_round_trips_through_folder_and_seal(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    write_tree(root, TREE)
    os.mkfifo(f"{root}/pipe")
    assert read_tree(root, max_mib=1, skip=lambda path: path == "x") == TREE
    key = bytes(range(32))
    sealed = seal({"tree": tree_as_json(TREE)}, key)
    assert tree_from_json(unseal(sealed, key)["tree"]) == TREE and b"tests" not in sealed
    for data, other in ((sealed, bytes(32)), (sealed[:-1] + b"x", key)):
        with pytest.raises(ValueError):
            unseal(data, other)
    with (tmp_path / "root" / "hole").open("wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(UnreadableTree):
        read_tree(root, max_mib=1, skip=lambda path: False)
    os.chmod(f"{root}/bin", 0)
    erase(str(tmp_path))
    assert os.listdir(tmp_path) == []
    (tmp_path / "link").symlink_to("/usr")
    with pytest.raises(UnreadableTree):
        read_tree(str(tmp_path / "link"), max_mib=1, skip=lambda path: False)


def test_tree_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    tree = {"a": ("l", os.fsencode(tmp_path / "outside")), "a/b": ("f", b"x")}
    with pytest.raises(UnreadableTree):
        write_tree(str(tmp_path / "tree"), tree)
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
    assert graded_tree(instance, base, harness, written) == {
        "a.py": ("f", b"better"),
        "bin/link": ("l", b"../a.py"),
        "tests/test_a.py": ("f", b"old"),
        "tests/test_b.py": ("f", b"new"),
    }
    assert overlay({"a/b": ("f", b"")}, {"a": ("f", b"1")}) == {"a": ("f", b"1")}


def test_grade_needs_all_tests_and_the_canary() -> None:
    instance = {"f2p": ["a"], "p2p": ["b"], "canary": True, "canary_at": ["tests/test_a.py"]}

    def worth(canary: str = "as wanted", **tests: str) -> float:
        return grade(instance, Results(tests, canary, ""))[0]

    assert worth(a="passed", b="passed", c="failed") == 1.0
    assert worth(a="passed") == worth(a="passed", b="skipped") == worth() == 0.0
    assert worth("faked", a="passed", b="passed") == worth("missing", a="passed", b="passed") == 0.0
    lies = Results({"a": "passed", "b": "passed"}, "as wanted", "", inside=False)
    assert grade(instance, lies) == (0.0, {**grade(instance, lies)[1], "canary": "faked"})
    assert grade({**instance, "canary_at": []}, lies)[0] == 1.0
    nothing = {**instance, "f2p": [], "p2p": []}
    assert grade(nothing, Results({}, "as wanted", ""))[0] == 0.0


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
