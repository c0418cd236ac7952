"""Worker processes of the benchmarks."""

import os
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.common import worker_process
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


def test_workers_have_their_variables_and_log_and_are_killed(tmp_path: Path) -> None:
    log, before = tmp_path / "log.txt", dict(os.environ)
    with worker_process({"BENCHMARK": "1"}, log) as process:
        assert dict(os.environ) == before
        assert process.submit(os.getenv, "BENCHMARK").result(PATIENCE_S) == "1"
        process.submit(os.system, "echo a line").result(PATIENCE_S)
        worker = psutil.Process(process.submit(os.getpid).result(PATIENCE_S))
        process.submit(time.sleep, 10 * PATIENCE_S)
    assert not worker.is_running()
    assert log.read_text() == "a line\n"
