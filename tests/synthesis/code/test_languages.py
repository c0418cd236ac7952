"""Supported languages, each with a real project, setup and tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from keel.synthesis.code.candidate import GitSource
from tests.synthesis.code.projects import ISSUE, config, made, repository, source

pytestmark = pytest.mark.e2e
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
PROJECTS = {"javascript": JAVASCRIPT, "cpp": CPP}
TOOLS = {"javascript": ("node", "npm"), "cpp": ("cmake", "ctest", "c++")}


@pytest.mark.parametrize("language", PROJECTS)
def test_project_becomes_a_task(language: str, tmp_path: Path) -> None:
    missing = [tool for tool in TOOLS[language] if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed")
    before, after, expected = PROJECTS[language]
    git = repository(tmp_path / "git", ("Begin", before), (ISSUE, after))
    settings = source(git, language=language, setup="", test="")
    report, lines = made(config(settings, python=""), tmp_path / "out")
    assert report["kept"] == 1, lines
    (path,) = (tmp_path / "out" / "instances").iterdir()
    content: dict[str, Any] = json.loads(path.read_text())
    assert (content["f2p"], content["p2p"], content["canary"]) == expected
    assert content["key"] == GitSource(settings).keys[0]
