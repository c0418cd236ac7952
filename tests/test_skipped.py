"""The summary of skipped tests at the end of a test run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keel.rewards.sandbox.sandbox import IsolationError, open_sandbox

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="needs a GPU")
@pytest.mark.parametrize("n", range(3))
def test_on_a_gpu(n): ...

def test_in_a_sandbox():
    pytest.skip({isolation!r})

def test_in_a_sandbox_that_is_refused():
    pytest.skip("rewards.code.isolation = 'bubblewrap' does not work here: bwrap: No permissions")

def test_of_a_program():
    pytest.skip("no moon tonight")

def test_itself(): ...
"""
ELSEWHERE = """
import pytest
pytest.importorskip("no_such_module", reason="no GPU, and TRITON_INTERPRET is not 1")
"""


def last_lines(folder: Path, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "tests.conftest", *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout.strip().splitlines()


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> str:
    """Error message on a machine without bubblewrap."""
    open_sandbox.cache_clear()
    monkeypatch.setattr("keel.rewards.sandbox.bubblewrap.shutil.which", lambda *_, **__: None)
    try:
        with pytest.raises(IsolationError) as error:
            open_sandbox("bubblewrap")
    finally:
        open_sandbox.cache_clear()
    return str(error.value)


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["one process", "xdist"])
def test_summary_counts_skips_by_missing_requirement(
    workers: tuple[str, ...], tmp_path: Path, no_bubblewrap: str
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS.format(isolation=no_bubblewrap))
    (tmp_path / "test_elsewhere.py").write_text(ELSEWHERE)
    *_, summary, _ = last_lines(tmp_path, *workers)
    assert summary.startswith("skipped: ")
    parts = summary.removeprefix("skipped: ").split("; ")
    assert parts[0].startswith("4 for want of a GPU (")
    assert parts[1] == "1 because: no moon tonight"  # not in the table: the reason itself
    assert parts[2] == "1 for want of bubblewrap (apt-get install bubblewrap)"
    assert parts[3].startswith("1 for want of user namespaces")


def test_no_summary_without_skips(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_itself(): ...")
    assert not any("skipped" in line for line in last_lines(tmp_path))


def test_deselected_files_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_itself(): ...")
    costly = "import pytest\n\npytestmark = {mark}\nraise RuntimeError\n"
    (tmp_path / "test_costly.py").write_text(costly.format(mark="pytest.mark.e2e"))
    unit = ("-m", "not e2e and not gpu")
    assert last_lines(tmp_path, *unit)[-1].startswith("1 passed")
    assert "1 error" in last_lines(tmp_path)[-1]
    assert "1 error" in last_lines(tmp_path, "-m", "not e2e or gpu")[-1]
    (tmp_path / "test_costly.py").write_text(costly.format(mark="pytest.mark.other"))
    assert "1 error" in last_lines(tmp_path, *unit)[-1]
