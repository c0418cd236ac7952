"""Commits to tasks in the sandbox, and a real project of each language."""

import json
import shutil
import stat
from pathlib import Path
from typing import Any, get_args

import pytest

from keel.agents.env_process.client import ProcessEnvironment
from keel.agents.environments.code.languages import LANGUAGES
from keel.agents.types import EnvironmentLost
from keel.configs.synthesis import CodeLanguage
from keel.rl.turns import Parsed, ToolCall
from keel.rl.types import Verdict
from keel.synthesis.code.candidate import GitSource
from tests.synthesis.authors import ScriptedAuthor, replied
from tests.synthesis.code.projects import (
    AFTER,
    BEFORE,
    BROKEN,
    ISSUE,
    NEW_TEST,
    OLD_TEST,
    SETUP,
    TEST,
    config,
    made,
    repository,
    source,
)

pytestmark = pytest.mark.e2e
PASSES_ALREADY = OLD_TEST + "\n\ndef test_more():\n    assert total([2]) == 2\n"
# Tests that passed before the change fail after it.
BREAKS = "def total(numbers):\n    return sum(numbers) if not numbers else 3.5\n"


def refused(report: dict[str, Any]) -> dict[str, list[str]]:
    return {gate: list(details["reasons"]) for gate, details in report["refused"].items()}


def test_history_becomes_tasks(tmp_path: Path) -> None:
    git = repository(
        tmp_path / "git",
        ("Begin", BEFORE),
        (f"A: {ISSUE}", AFTER),
        (f"B: {ISSUE}", {"adding.py": BROKEN, "tests/test_adding.py": PASSES_ALREADY}),
        (f"C: {ISSUE}", {"adding.py": BREAKS, "tests/test_adding.py": NEW_TEST}),
    )
    out = tmp_path / "out"
    report, lines = made(config(source(git)), out)
    assert report["made"] == 3 and report["kept"] == 1, lines
    reasons = refused(report)
    assert reasons["P2F"] == ["1 tests pass before and not after"]
    assert "no test that fails before passes after" in reasons["F2P"][0]
    (line,) = map(json.loads, (out / "tasks.jsonl").read_text().splitlines())
    assert "Totals of an empty list" in line["prompt"] and line["reward"]["kind"] == "environment"
    instance = json.loads((out / "instances" / f"{line['id']}.json").read_text())
    where = "pytest::tests.test_adding::test_"
    assert instance["f2p"] == [f"{where}the_hidden_one"] and instance["p2p"] == [f"{where}some"]
    assert instance["canary"] and "+    return sum(numbers)" in instance["gold_patch"]
    # No file readable in an episode contains the answer.
    for path in (out / "environment").rglob("*"):
        if path.is_file():
            text = path.read_bytes()
            assert b"hidden_one" not in text and b"sum(numbers)" not in text, path
            assert path.stat().st_mode & stat.S_IROTH or "prefixes" in path.parts
    assert [one.name for one in (out / "environment" / "sealed").iterdir()] == [line["id"]]
    again, lines = made(config(source(git)), out)
    assert again == report and lines == ["3 of 3 tasks already made"]


def test_lost_verdict_is_rejected_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> Verdict:
        raise EnvironmentLost("verdict", "ended with SIGSEGV", "last words")

    monkeypatch.setattr(ProcessEnvironment, "verdict", lost)
    git = repository(tmp_path / "git", ("Begin", BEFORE), (ISSUE, AFTER))
    report, _ = made(config(source(git)), tmp_path / "out")
    (reason,) = refused(report)["verdict"]
    assert "ended with SIGSEGV" in reason and "last words" in reason


def test_agent_fixes_a_failing_setup(tmp_path: Path) -> None:
    git = repository(tmp_path / "git", ("Begin", BEFORE), (ISSUE, AFTER))
    prompts: list[str] = []

    def call(name: str, **arguments: Any) -> Parsed:
        one = ToolCall(call_id="c", name=name, arguments=arguments)
        return replied(calls=(one,))

    def writes(messages: Any, tools: Any, purpose: str) -> Parsed:
        prompts.append(messages[-1]["content"])
        assert purpose == "setup" and [tool.name for tool in tools] == ["bash", "submit"]
        return [
            call("bash", command="ls; touch $PREFIX/left"),
            call("submit", setup="true", test="true"),
            call("submit", setup=f"test ! -e $PREFIX/left && {SETUP.strip()}", test=TEST),
        ][len(prompts) - 1]

    settings = source(git, setup="echo it cannot be done; exit 3")
    author = ScriptedAuthor(writes)
    report, lines = made(config(settings, setup_turns=5), tmp_path / "out", author)
    assert report["kept"] == 1, lines
    assert "it cannot be done" in prompts[0] and "adding.py" in prompts[1]
    assert prompts[2].startswith("none of 0 tests passes")
    report, _ = made(config(settings), tmp_path / "alone")
    assert "the set-up failed: it cannot be done" in refused(report)["setup"][0]


MAVEN = Path("/usr/share/maven-repo")
SUREFIRE = MAVEN / "org/apache/maven/plugins/maven-surefire-plugin"
"""Maven's plug-ins and JUnit, installed by Debian's maven-debian-helper and junit4."""
JS_TEST = """
import test from "node:test";
import assert from "node:assert";
import { total } from "../lib/adding.NAME";
test("some", () => { assert.equal(total([1, 2]), 3); });
"""


def node_project(name: str, type_: str = "") -> Any:
    """A project in files named *.name, with a fix and a test of it."""
    function, test = f"export const total = (n{type_}) => n.reduce(", JS_TEST.replace("NAME", name)
    lib, tests = f"lib/adding.{name}", f"test/adding.test.{name}"
    more = 'test("none", () => { assert.equal(total([]), 0); });\n'
    package = json.dumps({"name": "adding", "version": "1.0.0", "type": "module"})
    return (
        {"package.json": package, lib: f"{function}(a, b) => a + b);\n", tests: test},
        {lib: f"{function}(a, b) => a + b, 0);\n", tests: test + more},
        (["test::none"], ["test::some"], True),
    )


PHP_TEST = """<?php
final class AddingTest extends PHPUnit\\Framework\\TestCase {{
    public function testSome(): void {{ $this->assertSame(3, Adding::total([1, 2])); }}
{}}}
"""
PHP = (
    {
        "composer.json": json.dumps({"autoload": {"psr-4": {"": "src/"}}}),
        "src/Adding.php": "<?php\nfinal class Adding {\n"
        "    public static function total(array $n): int { return $n[0] + $n[1]; }\n}\n",
        "tests/AddingTest.php": PHP_TEST.format(""),
    },
    {
        "src/Adding.php": "<?php\nfinal class Adding {\n"
        "    public static function total(array $n): int { return array_sum($n); }\n}\n",
        "tests/AddingTest.php": PHP_TEST.format(
            "    public function testNone(): void { $this->assertSame(0, Adding::total([])); }\n"
        ),
    },
    (
        ["/tmp/repo/tests::AddingTest::AddingTest::testNone"],
        ["/tmp/repo/tests::AddingTest::AddingTest::testSome"],
        True,
    ),
)
CMAKE = """
cmake_minimum_required(VERSION 3.21)
project(adding LANGUAGES CXX)
enable_testing()
add_subdirectory(tests)
"""
CPP_TEST = '#include "../adding.hpp"\nint main() {{ return total({0}, {1}) == {2} ? 0 : 1; }}\n'
ADD_TEST = "add_executable({0} test_{0}.cpp)\nadd_test(NAME {0} COMMAND {0})\n"
CPP = (
    {
        "CMakeLists.txt": CMAKE,
        "adding.hpp": "inline int total(int a, int b) { return a > 0 ? a + b : 0; }\n",
        "tests/CMakeLists.txt": ADD_TEST.format("some"),
        "tests/test_some.cpp": CPP_TEST.format(1, 2, 3),
    },
    {
        "adding.hpp": "inline int total(int a, int b) { return a + b; }\n",
        "tests/CMakeLists.txt": ADD_TEST.format("some") + ADD_TEST.format("none"),
        "tests/test_none.cpp": CPP_TEST.format(0, 2, 2),
    },
    (["none::none"], ["some::some"], False),
)
GO_TEST = """
package adding
import "testing"
func TestSome(t *testing.T) { if Total(1, 2) != 3 { t.Fail() } }
"""
GO = (
    {
        "go.mod": "module a/adding\n\ngo 1.19\n",
        "adding.go": "package adding\n\nfunc Total(a, b int) int { return a * 3 }\n",
        "adding_test.go": GO_TEST,
    },
    {
        "adding.go": "package adding\n\nfunc Total(a, b int) int { return a + b }\n",
        "adding_test.go": GO_TEST
        + "func TestNone(t *testing.T) { if Total(0, 2) != 2 { t.Fail() } }\n",
    },
    (["a/adding::a/adding::TestNone"], ["a/adding::a/adding::TestSome"], False),
)
POM = """
<project><modelVersion>4.0.0</modelVersion>
<groupId>a</groupId><artifactId>adding</artifactId><version>1</version>
<properties><maven.compiler.source>11</maven.compiler.source>
<maven.compiler.target>11</maven.compiler.target></properties>
<dependencies><dependency><groupId>junit</groupId><artifactId>junit</artifactId>
<version>4.x</version><scope>test</scope></dependency></dependencies></project>
"""
JAVA_TEST = """
import org.junit.*;
public class AddingTest {{
    @Test public void some() {{ Assert.assertEquals(3, Adding.total(1, 2)); }}
{}}}
"""
JAVA = (
    {
        "pom.xml": POM,
        "src/main/java/Adding.java": "class Adding { static int total(int a, int b) "
        "{ return a * 3; } }\n",
        "src/test/java/AddingTest.java": JAVA_TEST.format(""),
    },
    {
        "src/main/java/Adding.java": "class Adding { static int total(int a, int b) "
        "{ return a + b; } }\n",
        "src/test/java/AddingTest.java": JAVA_TEST.format(
            "    @Test public void none() { Assert.assertEquals(2, Adding.total(0, 2)); }\n"
        ),
    },
    (["AddingTest::none"], ["AddingTest::some"], False),
)
PROJECTS = {
    "javascript": (node_project("js"), ("node", "npm")),
    "typescript": (node_project("ts", ": number[]"), ("node", "npm", "tsx")),
    "php": (PHP, ("php", "composer", "phpunit")),
    "cpp": (CPP, ("cmake", "ctest", "c++")),
    "go": (GO, ("go", "gotestsum")),
    "java": (JAVA, ("mvn", "javac")),
}
# The default setups of these languages need the network.
SETUPS = {
    "typescript": 'tsx="$(realpath "$(command -v tsx)")"\n'
    'ln -s "${tsx%/tsx/*}" "$PREFIX/node_modules"\n'
    'ln -s "$PREFIX/node_modules" "$REPO/node_modules"',
    "go": 'mkdir "$PREFIX/bin" && ln -s "$(command -v gotestsum)" "$PREFIX/bin/"',
    "java": f'cp -rs {MAVEN} "$PREFIX/m2"',
}


@pytest.mark.parametrize("language", PROJECTS)
def test_project_becomes_a_task(language: str, tmp_path: Path) -> None:
    assert set(get_args(CodeLanguage)) == set(LANGUAGES) == {"python", *PROJECTS}
    (before, after, expected), tools = PROJECTS[language]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if language == "java" and not SUREFIRE.is_dir():
        missing.append(str(SUREFIRE))
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed")
    git = repository(tmp_path / "git", ("Begin", before), (ISSUE, after))
    settings = source(git, language=language, setup=SETUPS.get(language, ""), test="")
    report, lines = made(config(settings, python=""), tmp_path / "out")
    assert report["kept"] == 1, lines
    (path,) = (tmp_path / "out" / "instances").iterdir()
    content: dict[str, Any] = json.loads(path.read_text())
    assert (content["f2p"], content["p2p"], content["canary"]) == expected
    assert content["key"] == GitSource(settings).keys[0]
