"""Runs `scheduler_checks.py`, which imports vLLM."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.remote_engine import DEADLINE_S, vllm_process

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with vllm_process() as process:
        yield process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def run_check(folder: Path, check: str, arguments: tuple[Any, ...]) -> None:
    from tests.rollout.vllm_fast import scheduler_checks  # noqa: PLC0415  (keeps vLLM out of pytest)

    getattr(scheduler_checks, check)(scheduler_checks.make_config(folder), *arguments)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        # Asynchronous scheduling, number of blocks, weight updates, deadlines.
        ("outputs_equal_vllms", (True, 400, False, False)),
        ("outputs_equal_vllms", (True, 400, True, True)),
        ("outputs_equal_vllms", (True, 30, False, True)),
        ("outputs_equal_vllms", (True, 30, True, False)),
        ("outputs_equal_vllms", (False, 400, True, False)),
        ("outputs_equal_vllms", (False, 30, False, True)),
        ("routes_belong_to_the_sampling_weights", (True, 18)),
        ("routes_belong_to_the_sampling_weights", (False, 30)),
        ("non_finite_completions_skip_route_checks", ()),
    ],
)
def test_scheduler(
    process: ProcessPoolExecutor, folder: Path, check: str, arguments: tuple[Any, ...]
) -> None:
    process.submit(run_check, folder, check, arguments).result(timeout=DEADLINE_S)
