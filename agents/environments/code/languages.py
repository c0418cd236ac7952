"""Defines how projects in each language are set up and tested, and which files are tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

REPO = "/tmp/repo"
"""Path of the repository. It is the same during setup and in episodes, because installed files may
contain it."""


@dataclass(frozen=True)
class ProjectLanguage:
    """The commands and file patterns of a language. Commands run with bash in $REPO. Only `setup`
    has network access and can write to $PREFIX. $JUNIT is a folder for test results (.xml), and
    $VERSION is the version of the project. A pattern `name/` matches a folder and its contents.
    Other patterns match file names (`*_test.py`), or paths from the root if they contain a slash.
    """

    suffixes: tuple[str, ...]
    tests: tuple[str, ...]
    steers: tuple[str, ...]
    """Patterns for other files that influence the tests. These files are restored before
    grading."""
    manifests: tuple[str, ...]
    setup: str
    test: str
    check: str
    canary: tuple[str, str] = ("", "")
    """The name and the text of a file with one test, which passes if WORTH is true. It is used to
    detect faked results."""
    canary_at_the_end: str = ""
    build_names_sources: bool = False
    """True if each new source file must be listed in one of the `steers` files."""


_PYTHON = ProjectLanguage(
    suffixes=(".py", ".pyi", ".pyx"),
    tests=("tests/", "test/", "test_*.py", "*_test.py", "conftest.py"),
    steers=(
        *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "noxfile.py"),
        *("hatch.toml", "setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py"),
        *("*.pth", "*.dist-info/", "*.egg-info/", ".coveragerc"),
    ),
    manifests=("pyproject.toml", "setup.py", "setup.cfg", "*requirements*.txt", "requirements/*"),
    setup=r"""
export SETUPTOOLS_SCM_PRETEND_VERSION=$VERSION PDM_BUILD_SCM_VERSION=$VERSION
export UV_DYNAMIC_VERSIONING_BYPASS=$VERSION PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
python3 -m venv "$PREFIX" && pip="$PREFIX/bin/python -m pip" && $pip install -q pytest || exit 1
extras=$(python3 - <<'PY'
import pathlib, re, tomllib
path = pathlib.Path("pyproject.toml")
try:
    data = tomllib.loads(path.read_text()) if path.exists() else {}
except tomllib.TOMLDecodeError:
    data = {}
known = set(data.get("project", {}).get("optional-dependencies", {}))
text = "".join(p.read_text() for p in map(pathlib.Path, ("setup.py", "setup.cfg")) if p.exists())
wanted = ("test", "tests", "testing", "dev")
known |= {w for w in wanted if re.search(rf"\b{w}\b.?\s*[=:]\s*[\[\n]", text)}
print(",".join(w for w in wanted if w in known and (w != "dev" or not known & set(wanted[:3]))))
groups = [g for g in ("test", "tests", "dev") if g in data.get("dependency-groups", {})]
names = [d for g in groups[:1] for d in data["dependency-groups"][g] if isinstance(d, str)]
pathlib.Path("/tmp/groups.txt").write_text("\n".join(names))
PY
)
$pip install -q -e ".${extras:+[$extras]}" || $pip install -q -e . || exit 1
$pip install -q -r /tmp/groups.txt || true
for file in *requirements*test*.txt *test*requirements*.txt *requirements*dev*.txt \
    dev-requirements.txt requirements/test*.txt tests/requirements.txt; do
    if [ -f "$file" ]; then $pip install -q -r "$file" || true; fi
done
$pip uninstall -q -y pip setuptools || true
""",
    test=(
        '"$PREFIX/bin/python" -P -m pytest -p no:cacheprovider -o addopts= -q --tb=no '
        '--continue-on-collection-errors --junitxml="$JUNIT/pytest.xml"'
    ),
    check='"$PREFIX/bin/python" -c "import pytest"',
    canary=("test_NONCE.py", "def test_NONCE():\n    assert WORTH\n"),
    canary_at_the_end="\n\n\ndef test_NONCE():\n    assert WORTH\n",
)
_JAVASCRIPT_TESTS = (
    *("test/", "tests/", "__tests__/"),
    *("*.test.*", "*.spec.*", "*-test.*", "*_test.*"),
)
_FIND_JAVASCRIPT_TESTS = " -o ".join(
    f"-path '*/{pattern}*'" if pattern.endswith("/") else f"-name '{pattern}'"
    for pattern in _JAVASCRIPT_TESTS
)
_FIND_JAVASCRIPT = "-name '*.js' -o -name '*.[cm]js'"
_JAVASCRIPT = ProjectLanguage(
    suffixes=(".js", ".mjs", ".cjs", ".ts", ".mts", ".cts", ".jsx", ".tsx"),
    tests=_JAVASCRIPT_TESTS,
    steers=(
        *("package.json", "package-lock.json", ".npmrc", "node_modules/", "tsconfig*.json"),
        *("node.config.json", "jest.*", ".mocharc*", "vitest.*", "babel.config.*", ".babelrc*"),
        *("karma.conf.*", "ava.config.*", ".taprc", ".nycrc*", ".c8rc*", ".swcrc"),
    ),
    manifests=("package.json", "package-lock.json", ".npmrc"),
    setup=r"""
cp package.json "$PREFIX/" && cp package-lock.json .npmrc "$PREFIX/" 2>/dev/null
cd "$PREFIX" && npm install --ignore-scripts --no-audit --no-fund --loglevel=error || exit 1
mkdir -p "$PREFIX/node_modules" && ln -s "$PREFIX/node_modules" "$REPO/node_modules"
""",
    test=(
        f"find . -path ./node_modules -prune -o -type f \\( {_FIND_JAVASCRIPT} \\) "
        f"\\( {_FIND_JAVASCRIPT_TESTS} \\) -print0 | sort -z | "
        "xargs -0 node --test --test-reporter=junit "
        '--test-reporter-destination="$JUNIT/node.xml"'
    ),
    check="node --version",
    canary=(
        "NONCE.test.mjs",
        'import test from "node:test";\nimport assert from "node:assert";\n'
        'test("NONCE", () => { assert(WORTH); });\n',
    ),
)
# tsx runs TypeScript without a build, in every version of Node.js. With the trap handler, its
# WebAssembly would reserve more address space than the sandbox allows.
_TYPESCRIPT = replace(
    _JAVASCRIPT,
    setup=_JAVASCRIPT.setup
    + 'cd "$PREFIX" && npm install --no-save --ignore-scripts --no-audit --no-fund '
    "--loglevel=error tsx\n",
    test="export NODE_OPTIONS=--disable-wasm-trap-handler; "
    + _JAVASCRIPT.test.replace(
        _FIND_JAVASCRIPT, f"{_FIND_JAVASCRIPT} -o -name '*.ts' -o -name '*.[cm]ts' -o -name '*.tsx'"
    ).replace("node --test", "node --import tsx --test"),
    check="node --version && test -d node_modules/tsx",
    canary=("NONCE.test.mts", _JAVASCRIPT.canary[1]),
)
_CPP = ProjectLanguage(
    suffixes=(".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".ipp"),
    tests=("test/", "tests/", "*_test.c*", "test_*.c*", "*_unittest.c*"),
    steers=("CMakeLists.txt", "*.cmake", "CMake*Presets.json", "*Makefile"),
    manifests=(),
    setup="cmake --version && c++ --version",
    test=(
        "cmake -S . -B /tmp/build -DCMAKE_BUILD_TYPE=Release >/dev/null; "
        "cmake --build /tmp/build -j 2 -- -k; "
        'ctest --test-dir /tmp/build --timeout 60 --output-junit "$JUNIT/ctest.xml"'
    ),
    check="cmake --version && c++ --version",
    build_names_sources=True,
)
_GO = ProjectLanguage(
    suffixes=(".go",),
    tests=("*_test.go", "testdata/"),
    steers=("go.mod", "go.sum", "go.work", "vendor/"),
    manifests=("go.mod", "go.sum"),
    setup=(
        'export GOPATH="$PREFIX/go" GOBIN="$PREFIX/bin" GOFLAGS=-modcacherw\n'
        "go mod download && go install gotest.tools/gotestsum@v1.12.0"
    ),
    test=(
        'export GOPATH="$PREFIX/go" GOCACHE=/tmp/go-cache GOFLAGS=-mod=mod GOPROXY=off\n'
        '"$PREFIX/bin/gotestsum" --junitfile "$JUNIT/go.xml" -- ./...'
    ),
    check='go version && test -x "$PREFIX/bin/gotestsum"',
)
# A JVM's reservations must fit into the sandbox's limits of address space and threads.
_JVM = (
    'export JAVA_TOOL_OPTIONS="-Xmx1g -XX:CompressedClassSpaceSize=256m -XX:+UseSerialGC '
    '-XX:ActiveProcessorCount=2"\n'
)
_JAVA = ProjectLanguage(
    suffixes=(".java",),
    tests=("src/test/*", "*/src/test/*", "*Test.java", "*Tests.java", "*IT.java"),
    steers=("pom.xml", ".mvn/", "mvnw", "settings.xml"),
    manifests=("pom.xml", ".mvn/*"),
    setup=_JVM + 'mvn -q -B -Dmaven.repo.local="$PREFIX/m2" -DskipTests verify',
    test=(
        _JVM + 'cp -r "$PREFIX/m2" /tmp/m2; mvn -q -B -o -Dmaven.repo.local=/tmp/m2 '
        "-Dmaven.test.failure.ignore=true -DtrimStackTrace=true verify; "
        "find . -path '*/surefire-reports/*.xml' -exec cp --backup=numbered {} \"$JUNIT/\" \\;"
    ),
    check=_JVM + 'mvn --version && test -d "$PREFIX/m2"',
)
# Autoloading finds the project's classes relative to composer.json, so Composer runs in $REPO.
_PHP = ProjectLanguage(
    suffixes=(".php", ".inc"),
    tests=("tests/", "test/", "*Test.php"),
    steers=("phpunit*.xml*", "composer.json", "composer.lock", "vendor/"),
    manifests=("composer.json", "composer.lock"),
    setup=r"""
export COMPOSER_VENDOR_DIR="$PREFIX/vendor" COMPOSER_HOME=/tmp/composer COMPOSER_ALLOW_SUPERUSER=1
if [ -f composer.json ]; then
    composer install --quiet --no-interaction --no-scripts --no-plugins || exit 1
    ln -s "$PREFIX/vendor" vendor
fi
""",
    test=r"""
set -- --log-junit "$JUNIT/phpunit.xml"
if [ ! -f phpunit.xml ] && [ ! -f phpunit.xml.dist ]; then
    [ -f vendor/autoload.php ] && set -- "$@" --bootstrap vendor/autoload.php
    [ -d tests ] && set -- "$@" tests || set -- "$@" test
fi
if [ -f vendor/bin/phpunit ]; then php vendor/bin/phpunit "$@"; else phpunit "$@"; fi
""",
    check="php --version && { test -f vendor/bin/phpunit || phpunit --version; }",
    canary=(
        "NONCETest.php",
        "<?php\nfinal class NONCETest extends PHPUnit\\Framework\\TestCase {\n"
        "    public function test_NONCE(): void { $this->assertTrue(WORTH); }\n}\n",
    ),
)
LANGUAGES = {
    "python": _PYTHON,
    "javascript": _JAVASCRIPT,
    "typescript": _TYPESCRIPT,
    "php": _PHP,
    "cpp": _CPP,
    "go": _GO,
    "java": _JAVA,
}


def matches_pattern(path: str, patterns: Iterable[str]) -> bool:
    """Check whether a path matches a pattern of `ProjectLanguage`."""
    *folders, name = path.split("/")
    for pattern in patterns:
        if pattern.endswith("/"):
            if any(fnmatchcase(one, pattern[:-1]) for one in folders):
                return True
        elif fnmatchcase(path if "/" in pattern else name, pattern):
            return True
    return False


def affects_grading(language: ProjectLanguage, path: str) -> bool:
    """Check whether a file affects grading. The policy's version of such a file is ignored."""
    # Readers of these files may ignore case: Python finds plugins in X.DIST-INFO.
    steers = [pattern.lower() for pattern in language.steers]
    return matches_pattern(path, language.tests) or matches_pattern(path.lower(), steers)
