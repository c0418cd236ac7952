"""Supported languages, each with a real project, setup and tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from keel.agents.environments.code.languages import LANGUAGES
from keel.configs.synthesis import CodeLanguage
from keel.synthesis.code.candidate import GitSource
from tests.synthesis.code.projects import ISSUE, config, made, repository, source

pytestmark = pytest.mark.e2e
MAVEN = Path("/usr/share/maven-repo")
"""Maven's plug-ins and JUnit, installed by Debian's maven-debian-helper and junit4."""
PACKAGE = {"name": "adding", "version": "1.0.0", "type": "module"}
OLD_JS = """
import test from "node:test";
import assert from "node:assert";
import { total } from "../lib/adding.js";
test("some", () => { assert.equal(total([1, 2]), 3); });
"""
JAVASCRIPT = (
    {
        "package.json": json.dumps(PACKAGE),
        "lib/adding.js": "export const total = (n) => n.reduce((a, b) => a + b);\n",
        "test/adding.test.js": OLD_JS,
    },
    {
        "lib/adding.js": "export const total = (n) => n.reduce((a, b) => a + b, 0);\n",
        "test/adding.test.js": OLD_JS + 'test("none", () => { assert.equal(total([]), 0); });\n',
    },
    (["test::none"], ["test::some"], True),
)
TYPED = 'test("some", () => { assert.equal(total([1, 2] as number[]), 3); });\n'
OLD_TS = OLD_JS.partition("test(")[0].replace("adding.js", "adding.ts") + TYPED
TYPESCRIPT = (
    {
        "package.json": json.dumps(PACKAGE),
        "lib/adding.ts": "export const total = (n: number[]) => n.reduce((a, b) => a + b);\n",
        "test/adding.test.ts": OLD_TS,
    },
    {
        "lib/adding.ts": "export const total = (n: number[]) => n.reduce((a, b) => a + b, 0);\n",
        "test/adding.test.ts": OLD_TS + 'test("none", () => { assert.equal(total([]), 0); });\n',
    },
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
RUST_TEST = "use adding::total;\n#[test]\nfn some() { assert_eq!(total(1, 2), 3); }\n"
RUST = (
    {
        "Cargo.toml": '[package]\nname = "adding"\nversion = "1.0.0"\nedition = "2021"\n',
        "src/lib.rs": "pub fn total(a: i32, _b: i32) -> i32 { a * 3 }\n",
        "tests/adding.rs": RUST_TEST,
    },
    {
        "src/lib.rs": "pub fn total(a: i32, b: i32) -> i32 { a + b }\n",
        "tests/adding.rs": RUST_TEST + "#[test]\nfn none() { assert_eq!(total(0, 2), 2); }\n",
    },
    (["adding::adding::none"], ["adding::adding::some"], False),
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
    "javascript": JAVASCRIPT,
    "typescript": TYPESCRIPT,
    "php": PHP,
    "cpp": CPP,
    "go": GO,
    "rust": RUST,
    "java": JAVA,
}
TOOLS = {
    "javascript": ("node", "npm"),
    "typescript": ("node", "npm", "tsx"),
    "php": ("php", "composer", "phpunit"),
    "cpp": ("cmake", "ctest", "c++"),
    "go": ("go", "gotestsum"),
    "rust": ("cargo", "cargo-nextest"),
    "java": ("mvn", "javac"),
}
# The default setups of these languages need the network.
SETUPS = {
    "typescript": 'tsx="$(realpath "$(command -v tsx)")"\n'
    'ln -s "${tsx%/tsx/*}" "$PREFIX/node_modules"\n'
    'ln -s "$PREFIX/node_modules" "$REPO/node_modules"',
    "go": 'mkdir "$PREFIX/bin" && ln -s "$(command -v gotestsum)" "$PREFIX/bin/"',
    "rust": 'mkdir -p "$PREFIX/bin" "$PREFIX/cargo/registry" && cp "$(command -v cargo-nextest)" '
    '"$PREFIX/bin/"',
    "java": f'cp -rs {MAVEN} "$PREFIX/m2"',
}


def test_every_language_can_be_named() -> None:
    assert set(get_args(CodeLanguage)) == set(LANGUAGES) == {"python", *PROJECTS}


@pytest.mark.parametrize("language", PROJECTS)
def test_project_becomes_a_task(language: str, tmp_path: Path) -> None:
    missing = [tool for tool in TOOLS[language] if shutil.which(tool) is None]
    if language == "java" and not MAVEN.is_dir():
        missing.append(str(MAVEN))
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed")
    before, after, expected = PROJECTS[language]
    git = repository(tmp_path / "git", ("Begin", before), (ISSUE, after))
    settings = source(git, language=language, setup=SETUPS.get(language, ""), test="")
    report, lines = made(config(settings, python=""), tmp_path / "out")
    assert report["kept"] == 1, lines
    (path,) = (tmp_path / "out" / "instances").iterdir()
    content: dict[str, Any] = json.loads(path.read_text())
    assert (content["f2p"], content["p2p"], content["canary"]) == expected
    assert content["key"] == GitSource(settings).keys[0]
